"""Roles of a run: calls in every mode from the event loop and from threads, workers
that are lost, hang or cannot start, and workers that are there only while they are
called.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollweave import ConfigError, RollweaveError, WorkerError, role
from rollweave.core.mechanisms.membership.bindings import one_machine
from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts.cluster import GatheredHosts
from rollweave.runtime.supervisors import roles as supervisor
from rollweave.runtime.supervisors.roles import RunRoles, bind_roles, opened_roles
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import Warn
from rollweave.schema.hosts import HostSlot
from rollweave.schema.roles import WorkerLostError
from tests.support.processes import alive
from tests.support.real_runs import lake

JUDGES = "tests.runtime.roles.judges"
LIMIT_S = 60.0


class Roles:
    """The roles of a run in this process, with the warnings about them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.warned: list[str] = []

    @contextlib.asynccontextmanager
    async def open(self, **sections: Any) -> AsyncIterator[RunRoles]:
        config = lake(self._directory, eval={"every": 0}, **sections)
        run = RunDir(self._directory / "run")
        async with asyncio.timeout(LIMIT_S), Tasks() as tasks:
            cluster = GatheredHosts(None, {}, run, tasks, on_status=print)

            def warn(command: Warn) -> None:
                self.warned.append(f"{command.component}: {command.message}")

            async with opened_roles(
                config,
                run,
                cluster,
                tasks,
                machine=one_machine(0),
                warn=warn,
                on_status=print,
            ) as roles:
                yield roles
            tasks.cancel_all()


@pytest.fixture
def roles(tmp_path: Path) -> Roles:
    return Roles(tmp_path)


def judges(**settings: Any) -> dict[str, Any]:
    return {"judge": {"cls": f"{JUDGES}:Judge", **settings}}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 (a process has no event)
            await asyncio.sleep(0.01)


def test_calls_in_every_mode(roles: Roles) -> None:
    async def run() -> None:
        async with roles.open(roles=judges(count=2, arguments={"word": "red"})):
            judge = role("judge")
            assert await judge.score(["red", "blue"]) == [1.0, 0.0]
            assert await asyncio.to_thread(judge.score, answers=["red"]) == [1.0]
            places = await judge.place()
            assert [place[:2] for place in places] == [[0, 2], [1, 2]]
            doubled = await judge.doubled([np.arange(3), [7]])
            assert [list(part) for part in doubled] == [[0, 2, 4], [7, 7]]
            many = await asyncio.gather(*(judge.score([f"{n} red"]) for n in range(50)))
            assert many == [[1.0]] * 50
            with pytest.raises(WorkerError, match=r"rank [01]: ValueError: answers must not be"):
                await judge.score([""])
            with pytest.raises(WorkerError, match=r"TypeError: Judge\.score: argument 0: Expected"):
                await judge.score(["red", 3])
            with pytest.raises(
                TypeError, match=r"judge\.score: argument 0 must consist of numbers"
            ):
                await judge.score([object()])
            with pytest.raises(ConfigError, match=r"got 'scor' \(did you mean score\?\)"):
                await judge.scor(["red"])
            with pytest.raises(ConfigError, match=r"got 'judges' \(did you mean judge\?\)"):
                await role("judges").score(["red"])
            with pytest.raises(ConfigError, match="one element in each argument for each of 2"):
                await judge.doubled([1, 2, 3])
            with pytest.raises(WorkerError, match="cannot join_ranks"):
                await judge.joined()
            with pytest.raises(TypeError, match=r"at most 67108864 bytes in a role .*, got 67108"):
                await judge.score([bytes(64 << 20)])
            with pytest.raises(
                ConfigError, match=r"name of a role must consist of .* got 'a/../b'"
            ):
                role("a/../b")
            within = r"role\('judge'\) must not be called from a worker of a role"
            with pytest.raises(WorkerError, match=within):
                await judge.asks()
            os.kill(places[0][2], signal.SIGKILL)
            await until(lambda: len(roles.warned) == 1)
            await judge.place()  # when both are there
            for _ in range(2):
                with pytest.raises(WorkerError, match=within):
                    await judge.asks()
        assert not any(alive(pid) for _, _, pid in places)

    asyncio.run(run())
    with pytest.raises(ConfigError, match=r"must be called in a run with \[roles\.judge\]"):
        role("judge").score(["red"])


def test_a_method_at_a_url(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_TOKEN", "sesame")

    async def score(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer sesame"
        answers = (await request.json())["arguments"]["answers"]
        return web.json_response({"result": [float(len(answer)) for answer in answers]})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/score", score)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setenv("ELSEWHERE", f"http://127.0.0.1:{runner.addresses[0][1]}/score")
        async with roles.open(roles={"judge": {"cls": f"{JUDGES}:Elsewhere"}}):
            judge = role("judge")
            many = await asyncio.gather(*(judge.score(["a" * n]) for n in range(10)))
            assert many == [[float(n)] for n in range(10)]
            with pytest.raises(WorkerError, match=r"TypeError: Elsewhere\.score: argument 0"):
                await judge.score([1])
        await runner.cleanup()

    asyncio.run(run())


def test_a_worker_that_is_lost_or_hangs_is_restarted_alone(roles: Roles) -> None:
    async def run() -> None:
        async with roles.open(roles=judges(count=2)):
            judge = role("judge")
            (_, _, first), (_, _, second) = await judge.place()
            os.kill(second, signal.SIGKILL)
            await until(lambda: len(roles.warned) == 1)
            places = await judge.place()
            assert places[0][2] == first
            assert places[1][2] != second
            with pytest.raises(WorkerLostError, match=r"did not answer hang\(\) within 0.3 s"):
                await judge.hang()
            assert len(await judge.place()) == 2
            with pytest.raises(WorkerLostError, match=r"judge rank 0: ended \(exit status 3"):
                await judge.die()
            assert await judge.score(["blue"]) == [1.0]

    asyncio.run(run())
    assert roles.warned[0].startswith("role judge 1: is lost, and restarted (1 of 3): judge rank 1")
    assert len(roles.warned) == 3


def test_a_process_that_a_worker_has_forked_does_not_hide_its_end(
    roles: Roles, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def run() -> None:
        async with roles.open(roles=judges()):
            try:
                with pytest.raises(WorkerLostError, match="exit status 4"):
                    await role("judge").forks(str(fifo))
            finally:
                await asyncio.to_thread(fifo.write_bytes, b"")

    asyncio.run(run())


def test_a_role_without_workers_ends_the_run(roles: Roles) -> None:
    async def run() -> None:
        async with roles.open(roles=judges(), watchdog={"restarts": 1}):
            for _ in range(3):
                with contextlib.suppress(WorkerLostError):
                    await role("judge").die()
            await asyncio.sleep(LIMIT_S)

    with pytest.raises(RollweaveError, match="role judge 0 is given up after 1 restarts: judge"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"cls": "nowhere:Judge"},
            "roles.judge.cls must be importable on this host, got 'nowhere:",
        ),
        ({"cls": f"{JUDGES}:Jugde"}, "has no Jugde (did you mean Judge?)"),
        ({"cls": f"{JUDGES}:moves"}, "judge.cls must be a class of workers on this host, got "),
        (
            {"cls": f"{JUDGES}:Routed"},
            "judge.cls must register routed by `register`, or by `register_serverless` with a url, got ",
        ),
        (
            {"arguments": {"words": "x"}},
            "with arguments {'words': 'x'}: TypeError: Judge.__init__()",
        ),
        ({"arguments": {"word": "bad"}}, "LookupError: no such word"),
        (
            {"cls": f"{JUDGES}:Plain"},
            f"roles.judge.cls must have a method with @register, got '{JUDGES}:Plain'",
        ),
        (
            {"cls": f"{JUDGES}:Picky"},
            f"be constructed on this host, got '{JUDGES}:Picky': ConfigError: no weights in the",
        ),
        ({"gpus": 1}, "roles.judge must have a place for each worker, got worker 0: no host"),
    ],
)
def test_a_role_that_cannot_start_is_one_line(
    roles: Roles, settings: dict[str, Any], error: str
) -> None:
    async def run() -> None:
        async with roles.open(roles=judges(**settings)):
            raise AssertionError("it must not open")

    with pytest.raises(ConfigError) as raised:
        asyncio.run(run())
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_workers_that_are_there_only_while_they_are_called(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = supervisor.roles_of
    brief = functools.partial(dataclasses.replace, idle_s=0.2)
    monkeypatch.setattr(supervisor, "roles_of", lambda config: [brief(one) for one in made(config)])

    async def run() -> None:
        async with roles.open(roles=judges()):
            pids = []
            for _ in range(2):
                ((_, _, pid),) = await role("judge").place()
                await until(lambda pid=pid: not alive(pid))  # type: ignore[misc]
                pids.append(pid)
            assert pids[0] != pids[1]

    asyncio.run(run())
    assert roles.warned == []


def test_gpus_of_roles_are_those_of_no_other_process(tmp_path: Path) -> None:
    config = lake(tmp_path, roles=judges(count=2, gpus=2))
    hosts = [HostSlot(number=0, devices=(0, 1, 2)), HostSlot(number=1, devices=(4, 5, 6, 7))]
    places, unbound, left = bind_roles(config, hosts)
    assert [(place.host, place.devices) for place in places] == [(0, (0, 1)), (1, (4, 5))] or [
        (place.host, place.devices) for place in places
    ] == [(1, (4, 5)), (1, (6, 7))]
    assert unbound == []
    taken = {(place.host, device) for place in places for device in place.devices}
    assert not taken & {(host.number, device) for host in left for device in host.devices}
    _, unbound, _ = bind_roles(config, hosts[:1])
    assert [one.process for one in unbound] == ["judge 1"]
