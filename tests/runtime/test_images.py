"""Whole runs whose sandboxes have images: built, fetched from another host, and
failed.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.policy import waiting
from rollweave.record.store import TrajectoryReader
from rollweave.runtime.preflight.environments import examine_domain
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import BLAME_OF, Blame, StopReason
from tests.support.fake_runs import lines, make_config, replay, run, run_dir
from tests.support.host_agents import Agents, agents, secret
from tests.support.sandboxes import image, needs

__all__ = ["agents", "secret"]  # fixtures

RECIPE = """
name = "r"
base = "{base}"
run = ['''{command}''']
[[copy]]
source = "word"
target = "/etc/word"
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    needs("bubblewrap")
    return image(tmp_path_factory.mktemp("base"))


def recipe(folder: Path, base: str, command: str) -> str:
    """Write a recipe, which adds a line to the file that it copies."""
    folder.mkdir(exist_ok=True)
    (folder / "word").write_text("from the recipe\n")
    (folder / "image.toml").write_text(RECIPE.format(base=base, command=command))
    return str(folder / "image.toml")


def imaged(
    directory: Path, image: str, *, task: Mapping[str, Any] | None = None, **sections: Any
) -> RunConfig:
    directory.mkdir()
    task = {"env": "tests.runtime.agents:Imaged", "step_s": 20.0, **(task or {})}
    return make_config(directory, steps=1, options={"image": image}, task=task, **sections)


def words(config: RunConfig) -> set[str]:
    """Return what the sandboxes of all attempts found."""
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    results = [reader.load(entry).result for entry in reader.entries]
    return {json.loads(result)["word"] for result in results if result}


def stops(config: RunConfig) -> Counter[StopReason]:
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    return Counter(reader.load(entry).stop_reason for entry in reader.entries)


def prepared(config: RunConfig) -> str:
    """Return what a dry run says of its first task."""
    _, checks = examine_domain(config, 0, deep=True)
    (detail,) = [one.detail for one in checks if one.name == "tasks.0 task"] or [str(checks)]
    return detail


def roots(cache: Path) -> list[str]:
    return sorted(os.listdir(cache / "roots"))


SLOW = "python3 -c 'import time; time.sleep(5.5)'; echo built >> /etc/word"
RANDOM = "cat /proc/sys/kernel/random/uuid >> /etc/word"


@pytest.mark.extended
def test_a_run_builds_its_image_and_the_next_one_gets_it_from_the_mirror(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build takes longer than a step may, and is named while it lasts."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.2)
    monkeypatch.setattr("rollweave.runtime.tasks.CHECK_S", 0.1)
    cache = tmp_path / "rollweave" / "images"
    named = recipe(tmp_path / "given", base, SLOW)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    sandbox = {"mirror": str(mirror)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = imaged(tmp_path / "first", named, sandbox=sandbox, task={"step_s": 5.0})
    assert prepared(first).startswith(f"not tried: image {named} is not in the cache")
    assert run(first).error == ""
    assert words(first) == {"from the recipe\nbuilt\n"}
    assert set(stops(first)) == {StopReason.FINISHED}
    named_waits = [line["message"] for line in lines(first, "waiting")]
    assert any(f"s for image {named}: building it" in line for line in named_waits), named_waits
    assert replay(first).differing == 0
    (digest,) = roots(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = imaged(tmp_path / "second", f"sha256:{digest}", sandbox=sandbox, workers={"count": 2})
    assert run(second).error == ""
    assert words(second) == words(first)
    assert prepared(second).startswith("begins with 'go'")


@pytest.mark.slow
def test_one_host_builds_and_the_others_fetch_from_it(
    tmp_path: Path, base: str, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each build would give another image; both hosts have the same one."""
    named = recipe(tmp_path / "given", base, RANDOM)
    caches = {name: tmp_path / f"cache {name}" for name in ("a", "b")}
    for name, cache in caches.items():
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        agents.start(name)
    monkeypatch.delenv("XDG_CACHE_HOME")
    cluster = {"address": f"127.0.0.1:{agents.port}", "hosts": 2}
    config = imaged(tmp_path / "run", named, cluster=cluster, workers={"count": 2})
    assert run(config).error == ""
    (word,) = words(config)
    assert word.startswith("from the recipe\n")
    first, second = (roots(cache / "rollweave" / "images") for cache in caches.values())
    assert first == second
    assert len(first) == 1
    assert agents.statuses() == {"a": 0, "b": 0}


@pytest.mark.extended
def test_a_missing_image_is_blamed_on_the_infrastructure(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = recipe(tmp_path / "given", base, "echo the reason; exit 3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = imaged(tmp_path / "run", named)
    summary = run(config)
    assert "ended with status 3:\nthe reason" in summary.error
    assert set(stops(config)) == {StopReason.IMAGE_ERROR}
    assert BLAME_OF[StopReason.IMAGE_ERROR] is Blame.INFRASTRUCTURE
    assert summary.account.balanced
    assert summary.account.trained == 0
    assert roots(tmp_path / "cache" / "rollweave" / "images") == []
