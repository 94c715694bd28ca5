"""Calls of a service in virtual time: what is asked again, when, and until when; who
waits, and since when; which answers of a server are taken.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.clients.responses import ResponseError
from rollweave.rollout import http_service
from rollweave.rollout.http_service import (
    HttpService,
    RefusedError,
    RetryableError,
    ServiceError,
)
from tests.support.judge_server import FakeServer
from tests.support.properties import examples
from tests.support.virtual_time import run_virtually

Exchange = tuple[float, str, float | None, float]
"""Seconds, outcome, the pause that the service asks for, and the factor of jitter."""

TIMEOUT_S = 40.0

SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from([0.25, 0.25, 1.25, 13.25]),
        st.sampled_from(["busy", "unreadable"]),
        st.sampled_from([None, 0.0, 3.0, 600.0]),
        st.sampled_from([0.5, 0.9, 1.5]),
    ),
    max_size=7,
)
ENDS = st.sampled_from(["busy", "refused", "fine"]).map(lambda end: (0.25, end, None, 1.0))


def service_of(clock: Callable[[], float], *, url: str = "http://h", **options: Any) -> HttpService:
    settings = {"answer": "grade", "token": "", "timeout_s": TIMEOUT_S, **options}
    return HttpService("judge", url, clock=clock, **settings)


def asking(
    script: list[Exchange], service: HttpService, asked: list[tuple[float, str]]
) -> Callable[[], Awaitable[str]]:
    """Return the exchanges of a script, one by one; afterwards the service is busy.
    `asked` gets the time of each, and what is waited for then.
    """
    left = itertools.chain(script, itertools.repeat((0.25, "busy", None, 1.0)))

    async def ask() -> str:
        wait = service.wait()
        asked.append((asyncio.get_running_loop().time(), wait.what))
        seconds, outcome, after_s, _ = next(left)
        await asyncio.sleep(seconds)
        match outcome:
            case "busy":
                raise RetryableError("busy", after_s)
            case "unreadable":
                raise ResponseError("unreadable")
            case "refused":
                raise RefusedError("refused")
        return "fine"

    return ask


def by_definition(script: list[Exchange]) -> tuple[list[tuple[float, str]], float, str]:
    """Return the times of the requests and the waits then, and the time and text of the
    end.
    """
    now, pause_s, unreadable, last = 0.0, 0.5, 0, ""
    asked: list[tuple[float, str]] = []
    for seconds, outcome, after_s, factor in (*script, *[(0.25, "busy", None, 1.0)] * 99):
        if now >= TIMEOUT_S:
            break
        asked.append((now, "1 trajectory waits" + (f"; {last}" if last else "")))
        now += seconds
        if now >= TIMEOUT_S:
            break
        unreadable += outcome == "unreadable"
        if outcome == "fine":
            return asked, now, "fine"
        if outcome == "refused" or unreadable == 3:
            return asked, now, f"judge http://h: {outcome}"
        last = outcome
        asked_s = after_s if after_s is not None and outcome == "busy" else 0.0
        now += max(min(asked_s, 8.0), pause_s * factor)
        pause_s = min(8.0, 2 * pause_s)
    why = f": {last}" if last else ""
    return asked, TIMEOUT_S, f"judge http://h gave no grade within 40 s{why}"


@settings(max_examples=examples(250))
@given(script=st.builds(lambda script, end: [*script, end], SCRIPTS, ENDS))
def test_a_call_is_repeated_with_growing_pauses_until_its_deadline(script: list[Exchange]) -> None:
    factors = [factor for *_, factor in script]

    def drawn(low: float, high: float) -> float:
        assert (low, high) == (0.5, 1.5)
        return factors.pop(0) if factors else 1.0

    async def called() -> tuple[list[tuple[float, str]], float, str]:
        loop, asked = asyncio.get_running_loop(), list[tuple[float, str]]()
        service = service_of(loop.time)
        try:
            text = await service.call(asking(script, service, asked))
        except ServiceError as error:
            text = str(error)
        return asked, loop.time(), text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_service.random, "uniform", drawn)  # type: ignore[attr-defined]
        asked, ended_at, text = run_virtually(called())
    expected_asked, expected_end, expected = by_definition(script)
    assert [at for at, _ in asked] == pytest.approx([at for at, _ in expected_asked])
    assert [what for _, what in asked] == [what for _, what in expected_asked]
    assert (ended_at, text) == (pytest.approx(expected_end), expected)


async def refused() -> str:
    raise RetryableError("not there", starting=True)


def test_a_service_that_starts_is_asked_for_longer_until_it_has_answered() -> None:
    """It starts in 100 s; afterwards, a call takes at most 40 s."""

    async def called() -> None:
        clock = asyncio.get_running_loop().time
        service, waits = service_of(clock, start_s=300.0), set[str]()

        async def ask() -> str:
            if clock() >= 100:
                return "fine"
            wait = service.wait()
            waits.add(wait.what)
            return await refused()

        assert await service.call(ask) == "fine"
        starting = "1 trajectory waits; it has not answered yet, and may be starting for 300 s"
        assert waits == {starting, f"{starting}; not there"}
        with pytest.raises(ServiceError, match="gave no grade within 40 s: not there"):
            await service.call(refused)

    run_virtually(called())


SLOTS = 2

Call = tuple[int, int, str]
"""The second at which a call begins, its duration, and how it ends."""


def ends_of(calls: list[Call]) -> list[float]:
    """Return when each call ends; a call begins as soon as one of the slots is free."""
    free = [0.0] * SLOTS
    ends = []
    for number, (begin, seconds, how) in enumerate(calls):
        began = max(heapq.heappop(free), begin + number / 100)
        ends.append(began + (TIMEOUT_S if how == "busy" else seconds))
        heapq.heappush(free, ends[-1])
    return ends


@settings(max_examples=examples(150))
@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from([1, 4, 30]),
            st.sampled_from(["fine", "refused", "raises", "cancelled", "busy"]),
        ),
        min_size=1,
        max_size=7,
    ).map(sorted)
)
def test_calls_share_the_slots_and_all_of_them_wait(calls: list[Call]) -> None:
    """However a call ends, its slot is free afterwards."""
    ends = ends_of(calls)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        service = service_of(loop.time)
        under_way: dict[int, float] = {}

        def check_wait() -> None:
            wait, count = service.wait(), len(under_way)
            if wait is None:
                assert count == 0
            else:
                noun = "trajectory waits" if count == 1 else "trajectories wait"
                assert wait.service == "judge http://h"
                assert wait.what.split(";")[0] == f"{count} {noun}"
                assert wait.since == min(under_way.values())

        async def called(number: int) -> None:
            begin, seconds, how = calls[number]
            await asyncio.sleep(begin + number / 100)
            under_way[number] = loop.time()

            async def ask() -> str:
                await asyncio.sleep(seconds if how != "busy" else TIMEOUT_S / 2)
                raise {
                    "refused": RefusedError(how),
                    "raises": KeyError(how),
                    "cancelled": asyncio.CancelledError(),
                    "busy": RetryableError(how),
                }[how]

            with contextlib.suppress(ServiceError, KeyError, asyncio.CancelledError):
                await service.call(ask if how != "fine" else lambda: asyncio.sleep(seconds))
            del under_way[number]
            assert loop.time() == pytest.approx(ends[number])
            check_wait()

        async with asyncio.TaskGroup() as tasks:
            for number in range(len(calls)):
                tasks.create_task(called(number))
            for _ in range(9):
                await asyncio.sleep(1)
                check_wait()
        again = asyncio.create_task(service.call(lambda: asyncio.sleep(1)))
        await asyncio.sleep(0.5)
        wait = service.wait()
        assert wait.what == "1 trajectory waits", "the trouble of former calls is over"
        await again

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_service, "SERVICE_CALLS", SLOTS)
        run_virtually(run())


ANSWERS = {
    "answer": [200],
    "retry": [409, 429, 500, 501, 502, 503, 504, 599],
    "refused": [201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 408, 410, 413, 422, 499],
}


async def test_which_answers_are_taken_and_which_are_asked_for_again() -> None:
    server = FakeServer()
    await server.start()
    service = service_of(lambda: 0.0, url=server.url, payload_bytes=99, token="secret")
    try:
        for kind, statuses in ANSWERS.items():
            for status in statuses:
                answer = web.Response(status=status, headers={"Retry-After": "7"}, text="é" * 400)
                server.answer = lambda _, answer=answer: answer  # type: ignore[misc]
                try:
                    got: Any = (await service.exchange("POST", "/score", {"a": 1})).decode()
                except (RetryableError, ResponseError) as error:
                    got = error
                if kind == "answer":
                    assert got == "é" * 400
                    continue
                assert type(got) is {"retry": RetryableError, "refused": RefusedError}[kind], status
                body = "" if status in (204, 304) else "é" * 300
                assert str(got) == f"status {status} of /score: {body}"
                assert getattr(got, "after_s", 7.0) == 7.0
        count = len(server.requests)
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert server.headers[0]["Content-Type"] == "application/json"
        server.answer = lambda _: {}
        await service.exchange("POST", "/score", b"9" * 99, headers={"X": "y"})
        assert server.requests[count:] == [int("9" * 99)], "bytes are sent as they are"
        assert server.headers[count]["X"] == "y"
        with pytest.raises(RefusedError, match="must have at most 99 bytes, got 100"):
            await service.exchange("POST", "/score", b"9" * 100)
        assert len(server.requests) == count + 1
        await service.close()
        await service.exchange("POST", "/score", b"1")  # it may be opened again
    finally:
        await service.close()
        await server.stop()
