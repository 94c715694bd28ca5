"""What the documents refer to exists."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollweave.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]


def test_papers_name_modules_that_exist() -> None:
    text = (ROOT / "docs/papers.md").read_text()
    modules = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(modules) > 40
    assert [name for name in sorted(modules) if not (ROOT / "src/rollweave" / name).exists()] == []


def test_every_cited_paper_is_listed() -> None:
    """A name that is followed by a section, figure, table or algorithm is a citation."""
    listed = (ROOT / "docs/papers.md").read_text()
    cited = set()
    for path in ROOT.glob("src/rollweave/**/*.py"):
        text = path.read_text()
        cited |= set(re.findall(r"\b([A-Z][A-Za-z]+)(?: Agent)?\s+(?:§|Alg\.|Fig\.|App\.)", text))
    assert cited >= {"RollArt", "Heddle", "Laminar", "ROSE"}
    assert [name for name in sorted(cited) if name not in listed] == []


def test_the_glossary_is_short_and_in_order() -> None:
    rows = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 40
    assert rows == sorted(rows, key=str.lower)


def test_the_ray_job_has_the_fields_that_kuberay_documents() -> None:
    """Of https://ray-project.github.io/kuberay/reference/api, those that it uses. Its
    operator ignores a field that it does not know.
    """
    manifest = yaml.safe_load((ROOT / "examples/kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = manifest["spec"]
    assert spec.keys() == {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head.keys() == {"rayStartParams", "template"}
    for group in workers:
        sizes = {"groupName", "replicas", "minReplicas", "maxReplicas"}
        assert group.keys() == head.keys() | sizes
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod.keys() == {"containers", "volumes"}
        (container,) = pod["containers"]
        assert container.keys() == {"name", "image", "resources", "volumeMounts"}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    options = re.findall(r"--[a-z]+", spec["entrypoint"])
    assert options == ["--cluster"]
    assert (
        "--cluster" in CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_have_targets(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (path.parent / link).exists()] == []
