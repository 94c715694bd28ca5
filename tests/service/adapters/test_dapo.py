"""Batches for an external trainer from real services: their content, cancelled and
carried-over groups, and failures.
"""

import asyncio
import contextlib
import itertools
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.policy.dapo import DapoRule
from rollweave.schema.config.root import RunConfig
from rollweave.schema.service import RolloutRequest
from rollweave.schema.work import SegmentKind
from rollweave.service import rollouts
from rollweave.service.adapters.dapo import (
    DapoBatch,
    DapoBatches,
    DapoError,
    DapoRollouts,
    TasksOverError,
)
from rollweave.service.client import NoServiceError, RolloutClient, ServiceError
from tests.service.api import get, wait_until
from tests.support.accounts import balances
from tests.support.rollout_service import Program, Serving, service_config, serving

GOOD, SAME = [0.0, 1.0], [1.0, 1.0]


def config(directory: Path, **sections: Any) -> RunConfig:
    return service_config(directory, task={"env": "tests.service.lottery:Lottery"}, **sections)


def draw(name: str, rewards: list[Any], **fields: Any) -> RolloutRequest:
    return RolloutRequest(handler="game", payload={"name": name, "rewards": rewards, **fields})


def endless(prefix: str, *kinds: list[Any]) -> Iterator[RolloutRequest]:
    """Return tasks whose rewards cycle through `kinds`."""
    return (draw(f"{prefix}{number}", kinds[number % len(kinds)]) for number in itertools.count())


def names(batch: DapoBatch) -> list[str]:
    return [group.request.payload["name"] for group in batch.groups if group.request.payload]


def is_idle(health: Any) -> bool:
    return not any(health[stage] for stage in ("queued", "init", "run", "eval", "closing"))


RULE = DapoRule(groups=2, group_size=2, under_way=4, staleness=1)


@contextlib.asynccontextmanager
async def batches_of(
    service: Serving | Program, tasks: Iterator[RolloutRequest], rule: DapoRule
) -> AsyncIterator[DapoBatches]:
    async with (
        RolloutClient(service.address) as client,
        DapoBatches(client, tasks, rule) as batches,
    ):
        yield batches


async def test_batches_are_full_informative_fresh_and_disjoint(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as service:
        async with batches_of(service, endless("a", GOOD, SAME), RULE) as batches:
            used: set[str] = set()
            for version in range(6):
                batch = await batches.next(version=version)
                assert (batch.version, len(batch.groups)) == (version, 2)
                for group in batch.groups:
                    assert version - group.version in (0, 1)
                    assert sorted(group.rewards) == [0.0, 1.0]
                    for trajectory in group.trajectories:
                        (sequence,) = trajectory.sequences
                        kinds = {segment.kind for segment in sequence.segments}
                        assert kinds >= {SegmentKind.PROMPT, SegmentKind.OUTPUT}
                        assert len(sequence.tokens) == len(sequence.logprobs)
                assert not used & set(names(batch))
                used |= set(names(batch))
                assert balances(batches.account)
            assert all(int(name[1:]) % 2 == 0 for name in used)
            assert (batches.account.used, batches.account.filtered > 0, batches.account.failed) == (
                12,
                True,
                0,
            )
        assert (batches.account.carried, balances(batches.account)) == (0, True)
        await wait_until(service, "/health", is_idle)


async def test_a_full_batch_is_returned_at_once_and_cancels_stale_groups(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = draw("slow", GOOD, gate=str(gate))
    with serving(config(tmp_path)) as service:
        rule = DapoRule(groups=2, group_size=2, under_way=3, staleness=0)
        tasks = itertools.chain([slow], endless("b", GOOD))
        async with batches_of(service, tasks, rule) as batches:
            first, second = names(await batches.next(version=0))
            assert (first[0], second[0]) == ("b", "b")  # whichever were done first
            # the slow group is cancelled, because its gate never opened
            await wait_until(service, "/health", is_idle)
            reasons = delivered(await get(service, "/metrics"))
            assert reasons >= {"cancelled", "finished"}
            assert (batches.account.cancelled > 0, batches.account.carried) == (True, 0)
            assert len((await batches.next(version=1)).groups) == 2


def delivered(metrics: bytes) -> set[str]:
    return {*re.findall(r'rollweave_delivered_total{stop_reason="(\w+)"}', metrics.decode())}


async def test_groups_under_way_are_carried_over_to_the_next_batch(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = draw("slow", GOOD, gate=str(gate))
    with serving(config(tmp_path)) as service:
        tasks = itertools.chain([slow], (draw(f"c{n}", GOOD) for n in range(2)))
        async with batches_of(service, tasks, RULE) as batches:
            assert sorted(names(await batches.next(version=0))) == ["c0", "c1"]
            assert batches.account.carried == 1
            waiting = asyncio.create_task(batches.next(version=1))
            gate.touch()
            with pytest.raises(
                TasksOverError, match="only 1 of the 2 groups of a batch are informative"
            ):
                await waiting
            assert (batches.account.carried, batches.account.used) == (1, 2)


async def test_rollouts_continue_while_the_trainer_trains(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as service:
        async with batches_of(service, endless("d", GOOD), RULE) as batches:
            await batches.next(version=0)
            # all groups for the next batch are done
            await wait_until(service, "/health", is_idle)
            started = batches.account.started
            assert batches.account.carried >= 2
            batch = await batches.next(version=1)
            assert {group.version for group in batch.groups} == {0}
            assert all(int(name[1:]) < started for name in names(batch))


async def test_cancelling_next_loses_nothing(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    tasks = (draw(f"e{n}", GOOD, gate=str(gate)) for n in range(2))
    with serving(config(tmp_path)) as service:
        async with batches_of(service, tasks, RULE) as batches:
            waiting = asyncio.create_task(batches.next(version=0))
            await wait_until(service, "/health", lambda health: health["run"] == 4)
            with pytest.raises(RuntimeError, match="only one call of next may be pending"):
                await batches.next(version=0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.touch()
            assert sorted(names(await batches.next(version=0))) == ["e0", "e1"]


async def test_replaces_failed_members_and_groups(tmp_path: Path) -> None:
    with serving(config(tmp_path, rollout={"retries": 0})) as service:
        rule = DapoRule(groups=2, group_size=3, under_way=4, staleness=1)
        tasks = endless("f", ["broken", 0.0, 1.0], ["broken"])
        async with batches_of(service, tasks, rule) as batches:
            batch = await batches.next(version=0)
            assert [sorted(group.rewards) for group in batch.groups] == [[0.0, 1.0]] * 2
            assert batches.account.failed > 0


@pytest.mark.variants
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (["broken"], "4 groups in a row failed.*broken on purpose"),
        (SAME, "100 groups in a row had equal"),
    ],
)
async def test_fails_if_a_batch_can_never_be_full(
    tmp_path: Path, kind: list[Any], message: str
) -> None:
    with serving(config(tmp_path, rollout={"retries": 0})) as service:
        rule = DapoRule(groups=1, group_size=2, under_way=2, staleness=1)
        async with batches_of(service, endless("g", kind), rule) as batches:
            for _ in range(2):
                with pytest.raises(DapoError, match=message):
                    await batches.next(version=0)
            await wait_until(service, "/health", is_idle)


async def test_retries_while_the_service_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "QUEUE", 3)
    with serving(config(tmp_path, rollout={"max_running": 2})) as service:
        rule = DapoRule(groups=4, group_size=2, under_way=8, staleness=1)
        async with batches_of(service, endless("h", GOOD), rule) as batches:
            for version in range(2):
                assert len((await batches.next(version=version)).groups) == 4
            assert batches.account.failed == 0


@pytest.mark.extended
async def test_a_restarted_service_loses_no_group(tmp_path: Path, unused_tcp_port: int) -> None:
    """The service restarts at the same address, with its directory."""
    gate = tmp_path / "gate"
    run_config = config(tmp_path)
    tasks = (draw(f"i{n}", GOOD, gate=str(gate)) for n in range(2))
    program = Program(run_config, port=unused_tcp_port)
    try:
        async with batches_of(program, tasks, RULE) as batches:
            waiting = asyncio.create_task(batches.next(version=0))
            await wait_until(program, "/health", lambda health: health["run"] == 4)
            program.kill()
            gate.touch()
            program = await asyncio.to_thread(Program, run_config, port=unused_tcp_port)
            assert sorted(names(await waiting)) == ["i0", "i1"]
            assert batches.account.failed == 0
    finally:
        program.terminate()


async def test_fails_if_no_service_answers_within_patience(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.service.client.MAX_BACKOFF_S", 0.2)
    address = f"http://127.0.0.1:{unused_tcp_port}"
    async with (
        RolloutClient(address) as client,
        DapoBatches(client, endless("j", GOOD), RULE, patience_s=0.0) as batches,
    ):
        with pytest.raises(NoServiceError, match="answers"):
            await batches.next(version=0)


async def test_raises_the_error_of_a_wrong_task(tmp_path: Path) -> None:
    def broken() -> Iterator[RolloutRequest]:
        yield draw("k", GOOD)
        raise LookupError("no tasks here")

    with serving(config(tmp_path)) as service:
        async with RolloutClient(service.address) as client:
            wrong = itertools.repeat(RolloutRequest(handler="nobody", index=0))
            async with DapoBatches(client, wrong, RULE) as batches:
                with pytest.raises(ServiceError, match="handler must be one of game"):
                    await batches.next(version=0)
            async with DapoBatches(client, broken(), RULE) as batches:
                with pytest.raises(LookupError, match="no tasks here"):
                    await batches.next(version=0)
        await wait_until(service, "/health", is_idle)


async def test_closing_leaves_nothing_running_at_any_time(tmp_path: Path) -> None:
    """Requests may still be under way."""
    tasks = (draw(f"l{n}", GOOD, gate=str(tmp_path / "gate")) for n in itertools.count())
    rule = DapoRule(groups=8, group_size=2, under_way=8, staleness=1)
    with serving(config(tmp_path)) as service:
        for pauses in range(8):
            async with RolloutClient(service.address) as client:
                batches = DapoBatches(client, tasks, rule)
                waiting = asyncio.create_task(batches.next(version=0))
                for _ in range(pauses * pauses):
                    await asyncio.sleep(0)
                await batches.close()
                with pytest.raises(DapoError, match="closed"):
                    await waiting
                await wait_until(service, "/health", is_idle)
                assert (batches.account.carried, balances(batches.account)) == (0, True)


def test_batches_without_an_event_loop(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as service:
        with DapoRollouts(service.address, endless("m", SAME, GOOD), RULE) as batches:
            for version in range(3):
                assert len(batches.next(version=version).groups) == 2
            assert balances(batches.account)
        assert batches.account.carried == 0


def test_leaving_closes_the_client_although_closing_the_batches_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    left: list[RolloutClient] = []
    leave = RolloutClient.__aexit__

    async def interrupted(_: DapoBatches) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.Event().wait()

    async def recorded(client: RolloutClient, *_: object) -> None:
        await leave(client)
        left.append(client)

    monkeypatch.setattr(DapoBatches, "close", interrupted)
    monkeypatch.setattr(RolloutClient, "__aexit__", recorded)
    with (
        pytest.raises(KeyboardInterrupt),
        DapoRollouts(f"http://127.0.0.1:{unused_tcp_port}", iter(()), RULE),
    ):
        pass
    assert len(left) == 1


async def test_an_invalid_task_ends_a_pending_next(tmp_path: Path) -> None:
    """The task is drawn when another group is done, while `next` is pending."""
    tasks: Any = iter([*(draw(f"e{number}", SAME) for number in range(4)), {"handler": "game"}])
    with serving(config(tmp_path)) as service:
        async with batches_of(service, tasks, RULE) as batches:
            with pytest.raises(TypeError, match="tasks must be of RolloutRequest"):
                await batches.next(version=0)
            assert balances(batches.account)
