"""Launchers of agents and the platform of serverless functions are found by their entry
points.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave import Cluster, ConfigError, Worker
from rollweave.runtime.hosts import launchers, serverless
from rollweave.runtime.hosts.launchers import DISTRIBUTION, LocalLauncher, kind_of
from rollweave.runtime.hosts.serverless import DEFAULT, platform
from rollweave.runtime.roles.worker import register_serverless
from rollweave.schema.config.engines import ClusterConfig
from tests.support.commands import CONFIG, invoke

MISSING = "needs the package rollweave-ray, which is not installed (pip install"
RAY = '\n[cluster]\nlauncher = "ray"\n'
SERVERLESS = '\n[[rewards]]\nname = "r"\nfunction = "math:sqrt"\nrun = "serverless"\n'

Announce = Callable[..., None]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Announce:
    """Let only these distributions announce launchers and platforms."""

    def announced(*distributions: str) -> None:
        def entry_points(group: str, name: str) -> list[Any]:
            assert (group, name) in ((launchers.GROUP, "ray"), (serverless.GROUP, DEFAULT))
            return [
                SimpleNamespace(dist=SimpleNamespace(name=one), load=lambda: Given)
                for one in distributions
            ]

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)

    return announced


class Given:
    """A launcher of another distribution."""


def test_the_distribution_has_a_launcher_and_a_platform() -> None:
    kind, deploy = kind_of(ClusterConfig(launcher="ray:a:1")), platform("a function")
    names = [(found.__module__, found.__name__) for found in (kind, deploy)]  # type: ignore[attr-defined]
    assert names == [
        ("rollweave_ray.launcher", "RayLauncher"),
        ("rollweave_ray.platform", "on_ray_serve"),
    ]


def test_this_machine_and_the_user_need_no_distribution(announce: Announce) -> None:
    announce()
    assert kind_of(ClusterConfig(launcher="local", hosts=1)) is LocalLauncher
    assert kind_of(ClusterConfig(address="a:1", hosts=1)) is None
    announce("another")
    assert kind_of(ClusterConfig(launcher="ray:a:1")) is Given


def test_two_packages_must_not_announce_the_same(announce: Announce) -> None:
    announce(DISTRIBUTION, "another")
    rule = "must be announced by one package, got another and rollweave-ray"
    with pytest.raises(ConfigError, match=f"^cluster.launcher ray {rule}"):
        kind_of(ClusterConfig(launcher="ray"))
    with pytest.raises(ConfigError, match=f"^serverless platform default {rule}"):
        platform("a function")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("section", "what"),
    [(RAY, "cluster.launcher ray"), (SERVERLESS, "rewards.0.run serverless of a function")],
    ids=["agents", "a function"],
)
def test_a_run_is_refused_in_one_line(
    announce: Announce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    what: str,
    options: tuple[str, ...],
) -> None:
    announce()
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG + section)
    exit_code, output, (line,) = invoke("train", "run.toml", *options)
    assert (exit_code, output) == (2, "")
    assert f"{what} {MISSING}" in line
    assert not Path("runs").exists()


def test_a_dry_run_on_described_hosts_needs_no_launcher(
    announce: Announce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce()
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG + RAY)
    Path("hosts.toml").write_text('[[hosts]]\nname = "a"\ncpus = 4\nmemory_gib = 64\n')
    exit_code, output, _ = invoke("train", "run.toml", "--dry-run", "--hosts", "hosts.toml")
    assert (exit_code, "of launcher ray" in output) == (0, True)


class Judge(Worker):
    """Has a serverless method."""

    @register_serverless()
    def score(self) -> float:
        return 1.0


def test_a_role_with_a_serverless_method_is_refused(announce: Announce) -> None:
    announce()
    with pytest.raises(
        ConfigError, match=re.escape(f"Judge.score with register_serverless {MISSING}")
    ):
        Cluster(Judge)
