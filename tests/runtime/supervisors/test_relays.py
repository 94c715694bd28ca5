"""Relays of whole runs, as processes without bytes; and where engines find their
weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.record.journal import Replay
from rollweave.runtime.supervisors.engines import Manifests
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event
from rollweave.schema.weights import WeightManifest
from tests.support import fake_runs

E0, E1, E3 = EngineId("e0"), EngineId("e1"), EngineId("e3")


def with_relays(
    directory: Path, *, relays: int = 2, engines: int = 2, **sections: Any
) -> RunConfig:
    return fake_runs.make_config(
        directory, engines={"count": engines}, weights={"relays": relays}, **sections
    )


def history(config: RunConfig) -> tuple[list[Event], list[Command]]:
    history_ = list(Replay(fake_runs.run_dir(config) / "journal.bin", config))
    return [event for _, event, _ in history_], [
        command for _, _, commands in history_ for command in commands
    ]


def takes(commands: Sequence[Command], publication_id: int) -> list[tuple[str, str | None]]:
    fetches = [
        one
        for one in commands
        if isinstance(one, c.FetchWeights) and one.publication_id == publication_id
    ]
    return [(one.relay_id, one.source) for one in fetches]


@pytest.mark.variants
@pytest.mark.parametrize("mode", ["sync", "bounded", "decoupled"])
def test_weights_reach_every_engine_through_its_relay(tmp_path: Path, mode: str) -> None:
    config = with_relays(tmp_path, relays=2, engines=3, rollout={"mode": mode})
    summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    events, commands = history(config)
    versions = {
        (event.relay_id, event.publication_id)
        for event in events
        if isinstance(event, e.WeightsFetched)
    }
    loads = [command for command in commands if isinstance(command, c.LoadWeights)]
    assert loads
    assert {(f"r{int(load.engine_id[1:]) % 2}", load.publication_id) for load in loads} <= versions
    assert '"take 0 from the trainer"' in (fake_runs.run_dir(config) / "trace.json").read_text()
    fake_runs.assert_no_processes(config)


@pytest.mark.variants
@pytest.mark.parametrize("lost", ["r0", "r1", "r2"])
def test_a_relay_that_dies_during_a_fetch_delays_no_other(tmp_path: Path, lost: str) -> None:
    config = with_relays(tmp_path, relays=3, engines=3, rollout={"mode": "sync"})
    (tmp_path / "model").mkdir(exist_ok=True)
    fake_runs.fault(config, f"kill-{lost}-1")
    assert fake_runs.run(config).error == ""
    events, commands = history(config)
    losses = [event for event in events if isinstance(event, e.RelayLost)]
    assert [event.relay_id for event in losses] == [lost]
    assert "SIGKILL" in losses[0].error
    assert [command.relay_id for command in commands if isinstance(command, c.RestartRelay)] == [
        lost
    ]
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)


def test_a_refused_delta_is_followed_by_a_full_fetch(tmp_path: Path) -> None:
    config = with_relays(tmp_path, rollout={"mode": "sync"})
    fake_runs.fault(config, "base-r1-1")
    fake_runs.fault(config, "base-r0-1")  # only the one that is not the master fetches a delta
    assert fake_runs.run(config).error == ""
    events, commands = history(config)
    refused = next(event for event in events if isinstance(event, e.FetchFailed))
    fetches = [
        command
        for command in commands
        if isinstance(command, c.FetchWeights)
        and (command.relay_id, command.publication_id) == (refused.relay_id, 1)
    ]
    assert [command.base_id for command in fetches] == [0, None]
    fake_runs.assert_trained_once(config)


def test_a_relay_that_never_starts_removes_its_host(tmp_path: Path) -> None:
    config = with_relays(tmp_path, rollout={"mode": "sync"}, watchdog={"restarts": 1})
    fake_runs.fault(config, "kill-r1-0")
    fake_runs.fault(config, "kill-r1-1")
    assert fake_runs.run(config).error == ""
    _, commands = history(config)
    # it may have been restarted too late for weights 1
    if [command for command in commands if isinstance(command, c.RemoveRelay)]:
        assert [
            command.engine_id for command in commands if isinstance(command, c.RemoveEngine)
        ] == ["e1"]
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)


@pytest.mark.extended
def test_a_resumed_run_restarts_its_relays(tmp_path: Path) -> None:
    config = with_relays(tmp_path, steps=2, rollout={"mode": "sync"})
    assert fake_runs.run(config).error == ""
    longer = with_relays(tmp_path, steps=4, rollout={"mode": "sync"})
    assert fake_runs.run(longer, resume=True).steps == 4
    events, commands = history(longer)
    assert isinstance(events[0], e.WorldLost)
    assert {event.relay_id for event in events if isinstance(event, e.RelayJoined)} == {"r0", "r1"}
    assert {command.engine_id for command in commands if isinstance(command, c.LoadWeights)} == {
        E0,
        E1,
    }
    fake_runs.assert_trained_once(longer)
    fake_runs.assert_no_processes(longer)


def manifest(publication_id: int, location: str) -> WeightManifest:
    return WeightManifest(
        version=publication_id,
        publication_id=publication_id,
        location=location,
        tensors=(),
        nbytes=0,
        digest="",
    )


def test_without_relays_engines_read_the_trainers_memory() -> None:
    manifests = Manifests()
    manifests.published(manifest(0, "a"), ())
    manifests.published(manifest(1, "b"), (0,))
    assert manifests.on_host(0, 0) == manifest(0, "a")
    manifests.published(manifest(2, "c"), (1,))
    assert manifests.on_host(0, 0) is None
    assert manifests.on_host(1, 2) == manifest(2, "c")


def test_with_relays_engines_read_their_hosts_memory() -> None:
    manifests = Manifests(relayed=True)
    manifests.published(manifest(0, "trainer"), ())
    assert manifests.on_host(0, 0) is None
    manifests.add(1, manifest(0, "r1"))
    assert manifests.on_host(0, 0) is None
    assert manifests.on_host(1, 0) == manifest(0, "r1")
    manifests.published(manifest(1, "trainer"), ())
    assert (manifests.of_trainer(0), manifests.anywhere(0)) == (None, manifest(0, "r1"))
    manifests.keep(1, ())
    assert (manifests.on_host(1, 0), manifests.anywhere(0)) == (None, None)
