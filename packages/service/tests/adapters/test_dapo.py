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
from msgspec.structs import replace

from packages.service.tests.adapters.accounts import balances
from packages.service.tests.api import get, wait_until
from packages.service.tests.results import done, result
from packages.service.tests.rollout_service import Program, Serving, service_config, serving
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import SegmentKind, StopReason
from rollweave_service import rollouts
from rollweave_service.adapters import dapo
from rollweave_service.adapters.dapo_policy import DapoRule
from rollweave_service.client import NoServiceError, RolloutClient, ServiceError
from rollweave_service.messages import RolloutRequest, RolloutStatus
from tests.support.virtual_time import run_virtually

GOOD, SAME = [0.0, 1.0], [1.0, 1.0]


def config(directory: Path, **sections: Any) -> RunConfig:
    return service_config(
        directory, task={"env": "packages.service.tests.lottery:Lottery"}, **sections
    )


def draw(name: str, rewards: list[Any], **fields: Any) -> RolloutRequest:
    return RolloutRequest(handler="game", payload={"name": name, "rewards": rewards, **fields})


def endless(prefix: str, *kinds: list[Any]) -> Iterator[RolloutRequest]:
    """Return tasks whose rewards cycle through `kinds`."""
    return (draw(f"{prefix}{number}", kinds[number % len(kinds)]) for number in itertools.count())


def names(batch: dapo.DapoBatch) -> list[str]:
    return [group.request.payload["name"] for group in batch.groups if group.request.payload]


def is_idle(health: Any) -> bool:
    return not any(health[stage] for stage in ("queued", "init", "run", "eval", "closing"))


RULE = DapoRule(groups=2, group_size=2, under_way=4, staleness=1)


@contextlib.asynccontextmanager
async def batches_of(
    service: Serving | Program, tasks: Iterator[RolloutRequest], rule: DapoRule
) -> AsyncIterator[dapo.DapoBatches]:
    async with (
        RolloutClient(service.address) as client,
        dapo.DapoBatches(client, tasks, rule) as batches,
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
            assert batches.account.used == 12
            assert batches.account.filtered > 0
            assert batches.account.failed == 0
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
                dapo.TasksOverError, match="only 1 of the 2 groups of a batch are informative"
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
                with pytest.raises(dapo.DapoError, match=message):
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


async def test_raises_the_error_of_a_wrong_task(tmp_path: Path) -> None:
    def broken() -> Iterator[RolloutRequest]:
        yield draw("k", GOOD)
        raise LookupError("no tasks here")

    with serving(config(tmp_path)) as service:
        async with RolloutClient(service.address) as client:
            wrong = itertools.repeat(RolloutRequest(handler="nobody", index=0))
            async with dapo.DapoBatches(client, wrong, RULE) as batches:
                with pytest.raises(ServiceError, match="handler must be one of game"):
                    await batches.next(version=0)
            async with dapo.DapoBatches(client, broken(), RULE) as batches:
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
                batches = dapo.DapoBatches(client, tasks, rule)
                waiting = asyncio.create_task(batches.next(version=0))
                for _ in range(pauses * pauses):
                    await asyncio.sleep(0)
                await batches.close()
                with pytest.raises(dapo.DapoError, match="closed"):
                    await waiting
                await wait_until(service, "/health", is_idle)
                assert (batches.account.carried, balances(batches.account)) == (0, True)


def test_batches_without_an_event_loop(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as service:
        with dapo.DapoRollouts(service.address, endless("m", SAME, GOOD), RULE) as batches:
            for version in range(3):
                assert len(batches.next(version=version).groups) == 2
            assert balances(batches.account)
        assert batches.account.carried == 0


def test_leaving_closes_the_client_although_closing_the_batches_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    left: list[RolloutClient] = []
    leave = RolloutClient.__aexit__

    async def interrupted(_: dapo.DapoBatches) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.Event().wait()

    async def recorded(client: RolloutClient, *_: object) -> None:
        await leave(client)
        left.append(client)

    monkeypatch.setattr(dapo.DapoBatches, "close", interrupted)
    monkeypatch.setattr(RolloutClient, "__aexit__", recorded)
    with (
        pytest.raises(KeyboardInterrupt),
        dapo.DapoRollouts(f"http://127.0.0.1:{unused_tcp_port}", iter(()), RULE),
    ):
        pass
    assert len(left) == 1


# A client in place of services.


class Scripted:
    """Returns, or raises, what `answers` has for each request, and notes its time."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.requests = list(answers), list[RolloutRequest]()
        self.times = list[float]()

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if self.answers else asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return await answer if asyncio.iscoroutine(answer) else answer


def ended(*rewards: float | None) -> RolloutStatus:
    """Return a rollout whose members have these rewards, or failed, or never began."""
    lost = {number: StopReason.ENV_ERROR for number, one in enumerate(rewards) if one is None}
    results = [
        result(lost.get(number, StopReason.FINISHED), reward=reward, error=f"lost {number}")
        for number, reward in enumerate(rewards)
    ]
    members = (*map(done, results), done(None))
    return RolloutStatus(id="x", handler="game", state="done", members=members)


def scripted(
    tasks: Any, *answers: Any, patience_s: float = 10.0, under_way: int = 1
) -> tuple[dapo.DapoBatches, Scripted]:
    rule = DapoRule(groups=1, group_size=2, under_way=under_way, staleness=1)
    client: Any = Scripted(*answers)
    return dapo.DapoBatches(client, tasks, rule, patience_s=patience_s), client


def refused(status: int) -> ServiceError:
    return ServiceError(status, "", f"status {status}")


def test_a_rollout_that_the_service_lost_fails_alone() -> None:
    async def run() -> None:
        batches, client = scripted(
            iter([draw("a", []), draw("b", []), replace(draw("c", []), id="own", members=9)]),
            refused(410),
            refused(500),
            ended(1.0, None, 0.0),
        )
        batch = await batches.next(version=4)
        assert [group.rewards for group in batch.groups] == [[1.0, 0.0]]
        assert (batch.version, batch.groups[0].version, batches.account.failed) == (4, 4, 2)
        assert batches._last_failure == "env_error: lost 1"
        assert [request.members for request in client.requests] == [2, 2, 2]
        ids = [request.id for request in client.requests]
        assert ids == [f"{batches._name}/0", f"{batches._name}/1", "own"]
        with pytest.raises(
            dapo.TasksOverError, match="only 0 of the 1 groups of a batch are inform"
        ):
            await batches.next(version=5)

    run_virtually(run())


@pytest.mark.parametrize("status", [400, 404, 409, 413])
def test_a_refusal_ends_the_batches_once_and_for_all(status: int) -> None:
    async def run() -> None:
        batches, client = scripted(endless("a", GOOD), refused(status))
        for _ in range(2):
            with pytest.raises(ServiceError, match=f"status {status}"):
                await batches.next(version=0)
        assert len(client.requests) == 1

    run_virtually(run())


@pytest.mark.parametrize(("patience_s", "attempts"), [(0.0, 1), (3.0, 4), (3.5, 5)])
def test_a_silent_service_is_tried_every_second_until_patience_ends(
    patience_s: float, attempts: int
) -> None:
    async def run() -> list[float]:
        await asyncio.sleep(5.0)
        silent = [NoServiceError("none answers")] * 9
        batches, client = scripted(endless("a", GOOD), *silent, patience_s=patience_s)
        with pytest.raises(NoServiceError, match="none answers"):
            await batches.next(version=0)
        return client.times

    assert run_virtually(run()) == [5.0 + number for number in range(attempts)]


def test_only_one_batch_may_be_awaited_and_closing_ends_the_wait() -> None:
    async def run() -> None:
        batches, client = scripted(endless("a", GOOD), under_way=3)
        pending = asyncio.create_task(batches.next(version=0))
        await asyncio.sleep(1.0)
        with pytest.raises(RuntimeError, match="only one call of next may be pending"):
            await batches.next(version=0)
        assert (len(client.requests), len(batches._rollouts)) == (3, 3)
        await batches.close()
        with pytest.raises(dapo.DapoError, match=r"^the batches are closed$"):
            await pending
        assert (batches._rollouts, batches._stopping, len(asyncio.all_tasks())) == ({}, set(), 1)

    run_virtually(run())


@pytest.mark.parametrize("under_way", [1, 2])
def test_what_is_no_request_ends_the_batches(under_way: int) -> None:
    """With one group at a time, it is drawn when that is done, while `next` waits."""

    async def run() -> None:
        tasks = iter([draw("a", []), "a task"])
        batches, _ = scripted(tasks, ended(1.0, 1.0), under_way=under_way)
        with pytest.raises(TypeError, match=r"tasks must be of RolloutRequest, got 'a task'"):
            await batches.next(version=0)
        assert balances(batches.account)
        assert not batches._rollouts

    run_virtually(run())
