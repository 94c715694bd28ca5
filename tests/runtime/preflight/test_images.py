"""Images that no run can have are found before it starts."""

import json
import tarfile
from pathlib import Path

import pytest

from rollweave.runtime.preflight.checks import Status
from rollweave.runtime.preflight.environments import examine_domain
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave_sandbox.blobs import ROUTE, digest_of
from tests.support.commands import invoke

CONFIG = """
[run]
name = "dry"
steps = 1
[model.scratch]
hidden = 32
layers = 1
[[tasks]]
env = "program"
[tasks.options]
command = ["true"]
score = "math:sqrt"
[sandbox]
backend = "bubblewrap"
"""
REMOTE = ["cluster={launcher='local',hosts=2}", "workers.count=2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with tarfile.open("good.tar", "w"):
        pass
    Path("noise.tar").write_bytes(b"noise")
    Path("folder").mkdir()
    recipes = {
        "good": 'name = "a"\nbase = "good.tar"\n',
        "baseless": 'name = "a"\nbase = "missing.tar"\n',
        "noisy": 'name = "a"\nbase = "noise.tar"\n',
        "lost": 'name = "a"\nbase = "good.tar"\n[[copy]]\nsource = "b"\ntarget = "/b"\n',
        "outside": 'name = "a"\nbase = "good.tar"\n[[copy]]\nsource = "b"\ntarget = "../b"\n',
        "wrong": 'name = "a"\nbass = "good.tar"\n',
        "torn": "name =",
        "unpacked": 'name = "a"\nbase = "folder"\n',
    }
    for name, text in recipes.items():
        Path(f"{name}.toml").write_text(text)
    return tmp_path


def config(*overrides: str) -> RunConfig:
    return loads(CONFIG, overrides)


def checked(*overrides: str) -> list[tuple[str, str]]:
    """Return name and detail of the checks of images, those that failed in capitals."""
    _, checks = examine_domain(config(*overrides), 0, deep=False)
    names = ("tasks.0 image", "sandbox.backend", "tasks.0")
    return [
        (check.name.upper() if check.status is Status.FAIL else check.name, check.detail)
        for check in checks
        if check.name in names
    ]


MISSING = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("image", "rule"),
    [
        ("good.toml", ""),
        ("good.tar", ""),
        ("missing.toml", "must be a readable recipe, got {here}/missing.toml: "),
        ("missing.tar", "missing.tar must have all its files, {here}/missing.tar is missing"),
        ("noise.tar", "must be a tar archive, perhaps compressed, got {here}/noise.tar"),
        ("baseless.toml", "must have all its files, {here}/missing.tar is missing"),
        ("noisy.toml", "must be a tar archive, perhaps compressed, got {here}/noise.tar"),
        ("lost.toml", "must have all its files, {here}/b is missing"),
        ("outside.toml", "copy.target must be an absolute path without '..', got '../b'"),
        ("wrong.toml", "got 'bass' (did you mean base?)"),
        ("torn.toml", "must be a readable recipe, got {here}/torn.toml: Invalid value"),
        ("/nowhere", "must exist, got '/nowhere'"),
        ("ubuntu:latest", "must be host, an absolute path, sha256:DIGEST, or the path of an"),
        ("sha256:12", "must have 64 hexadecimal digits after sha256:, got 'sha256:12'"),
        (
            MISSING,
            f"must be in {{here}}/caches/rollweave/images, or in a sandbox.mirror, got {MISSING}",
        ),
    ],
)
def test_a_wrong_image_is_one_line_with_its_rule(here: Path, image: str, rule: str) -> None:
    ((name, detail),) = checked(f"tasks.0.options.image='{image}'")
    assert name == ("TASKS.0 IMAGE" if rule else "tasks.0 image")
    assert rule.replace("{here}", str(here)) in detail


def test_a_digest_must_be_in_the_mirror(here: Path) -> None:
    with Path("good.tar").open("rb") as file:
        digest = digest_of(file)
    (here / ROUTE[1:]).mkdir(parents=True)
    Path(here / ROUTE[1:] / digest).write_bytes(Path("good.tar").read_bytes())
    mirror = f"sandbox.mirror='{here}'"
    ((name, detail),) = checked(mirror, f"tasks.0.options.image='sha256:{digest}'")
    assert (name, detail) == ("tasks.0 image", f"sha256:{digest} from {here}")
    ((name, detail),) = checked(mirror, f"tasks.0.options.image='{MISSING}'")
    assert (name, detail) == ("TASKS.0 IMAGE", f"must be in the mirror {here}, got {MISSING}")
    ((name, detail),) = checked(
        "sandbox.mirror='http://127.0.0.1:1/a'", f"tasks.0.options.image='{MISSING}'"
    )
    assert name == "TASKS.0 IMAGE"
    assert "sandbox.mirror http://127.0.0.1:1/a must be reachable" in detail


def test_the_images_of_all_tasks_of_a_file_are_checked() -> None:
    rows = [{"picture": f"{name}.toml", "n": name} for name in ("good", "wrong", "good", "torn")]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"n": 1}] * 8))
    named = ["tasks.0.options.tasks='rows.jsonl'", "tasks.0.options.image_field='picture'"]
    expected = ["tasks.0 image", "TASKS.0 IMAGE", "TASKS.0 IMAGE"]
    assert [name for name, _ in checked(*named)] == expected
    Path("others.jsonl").write_text('{"picture": 5}\n')
    ((name, detail),) = checked("tasks.0.options.tasks='others.jsonl'", named[1])
    assert name == "TASKS.0"
    assert detail == "options.image_field: picture of a task: image must be text, got 5"


def test_only_some_back_ends_have_images() -> None:
    ((name, detail),) = checked("sandbox.backend='zygote'", "tasks.0.options.image='good.toml'")
    assert name == "SANDBOX.BACKEND"
    assert detail == "must be bubblewrap or apptainer for the image good.toml, got zygote"


def test_files_of_images_must_reach_the_hosts(here: Path) -> None:
    ((name, _),) = checked("tasks.0.options.image='unpacked.toml'")
    assert name == "tasks.0 image"
    ((name, detail),) = checked("tasks.0.options.image='unpacked.toml'", *REMOTE)
    assert name == "TASKS.0 IMAGE"
    assert "base must be an archive, sha256:DIGEST or an absolute path with [cluster]" in detail
    ((name, detail),) = checked("tasks.0.options.image='../other.tar'", *REMOTE)
    assert name == "TASKS.0 IMAGE"
    assert "must have its files below the working directory with [cluster]" in detail
    ((name, detail),) = checked("tasks.0.options.image='/nowhere.tar'", *REMOTE)
    assert name == "tasks.0 image"
    assert "not checked, since it need not be on this machine" in detail


def test_a_dry_run_ends_with_code_2(here: Path) -> None:
    Path("run.toml").write_text(
        CONFIG.replace("[tasks.options]", "[tasks.options]\nimage='torn.toml'")
    )
    code, text, _ = invoke("train", "run.toml", "--dry-run")
    assert code == 2
    assert "must be a readable recipe" in " ".join(text.split())
