"""The implementation of sandboxes is found by its entry points."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.cli.doctor import _sandbox_limits
from rollweave.envs.base import Split
from rollweave.envs.handlers.program import Program
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.runtime.preflight.checks import Status
from rollweave.sandbox.base import SandboxSpec
from rollweave.sandbox.provider import GROUP, provider
from rollweave.schema.errors import ConfigError
from tests.support.commands import invoke

MISSING = r"a sandbox needs the package rollweave-sandbox, which is not installed \(pip install"
OTHER = object()

Announce = Callable[..., None]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Iterator[Announce]:
    """Let only these packages announce back ends, each `distribution=name`."""

    def announced(*entries: tuple[str, str]) -> None:
        def entry_points(group: str, name: str) -> list[Any]:
            assert group == GROUP
            return [
                SimpleNamespace(dist=SimpleNamespace(name=distribution), load=lambda: OTHER)
                for distribution, backend in entries
                if backend == name
            ]

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
        provider.cache_clear()

    yield announced
    provider.cache_clear()


def test_the_distribution_announces_all_its_back_ends() -> None:
    names = ("bubblewrap", "zygote", "apptainer", "plain")
    assert {provider(name) for name in names} == {provider()}
    assert set(provider().image_backends) < set(names)


@pytest.mark.parametrize("name", [None, "plain", "other"])
def test_without_an_implementation_the_error_says_what_to_install(
    announce: Announce, name: str | None
) -> None:
    announce()
    with pytest.raises(ConfigError, match=MISSING):
        provider(name)


def test_two_packages_must_not_announce_the_same_back_end(announce: Announce) -> None:
    announce(("rollweave-sandbox", "bubblewrap"), ("another", "bubblewrap"))
    rule = "sandbox back end bubblewrap must be announced by one package, got another and rollweave"
    with pytest.raises(ConfigError, match=rule):
        provider()


def test_another_package_may_announce_back_ends_of_its_own(
    announce: Announce, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(("another", "remote"))
    assert provider("remote") is OTHER
    with pytest.raises(ConfigError, match=MISSING):
        provider()
    provider.cache_clear()
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    with pytest.raises(ConfigError, match=r"sandbox back end must be built in .* got 'remote'"):
        provider("remote")


def test_an_unknown_back_end_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"must be one of bubblewrap, zygote, .* got 'docker'"):
        provider("docker").backend("docker")


async def test_what_needs_a_sandbox_is_refused_without_an_implementation(
    announce: Announce, tmp_path: Path
) -> None:
    announce()
    sandboxes = Sandboxes("plain")
    with pytest.raises(ConfigError, match=MISSING):
        await sandboxes.start(SandboxSpec())
    await sandboxes.close()
    options: dict[str, Any] = {"command": ["x"], "score": "math:sqrt"}
    assert Program.make_task(index=0, seed=3, split=Split.TRAIN, options=options).seed
    options["folder"] = str(tmp_path)
    with pytest.raises(ConfigError, match=f"^{MISSING}"):
        Program.make_task(index=0, seed=3, split=Split.TRAIN, options=options)


def test_doctor_warns_without_an_implementation(announce: Announce) -> None:
    announce()
    check = _sandbox_limits()
    assert (check.name, check.status) == ("sandboxes", Status.WARN)
    assert check.detail.startswith("a sandbox needs the package rollweave-sandbox")


CONFIG = """
[run]
name = "boxes"
steps = 1
[model.scratch]
hidden = 32
layers = 1
[[tasks]]
"""
OURS = """
env = "program"
options = { command = ["true"], score = "math:sqrt" }
"""
CONFIGURED = """
env = "tests.runtime.agents:Boxed"
[sandbox]
backend = "plain"
"""


@pytest.mark.parametrize("tasks", [OURS, CONFIGURED], ids=["a handler of ours", "settings"])
def test_a_run_with_sandboxes_is_refused_in_one_line(
    announce: Announce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    announce()
    monkeypatch.chdir(tmp_path)
    Path("boxes.toml").write_text(CONFIG + tasks)
    exit_code, _, (line,) = invoke("train", "boxes.toml")
    assert exit_code == 2
    assert re.search(MISSING, line)
    assert not Path("runs").exists()
