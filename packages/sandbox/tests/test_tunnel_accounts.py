"""A tunnel between a scripted sandbox and a scripted service, in virtual time: the
bytes that it has accepted, the requests that it has taken, and what each of them gets.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema.errors import SandboxLostError, SandboxRefusedError
from rollweave_sandbox import tunnel as module
from rollweave_sandbox.channel import Reply
from rollweave_sandbox.tunnel import MAX_IN_FLIGHT, tunnel
from tests.support.properties import examples
from tests.support.virtual_time import run_virtually

PENDING, BODY = 100, 60
"""The bounds of these tests, in bytes."""

LIMITS_S = {"tunnel_open": 10.0, "tunnel_next": 30.0, "tunnel_answer": 10.0, "tunnel_close": 10.0}

How = str
"""What becomes of a request: the service answers with two parts, a second apart, fails
before the first or instead of the second one, or the program disconnects.
"""

ANSWERED, BEFORE, AFTER, UPLOADING, WAITING = "answered", "before", "after", "uploading", "waiting"


class Service:
    """Stands for the session of aiohttp and the server behind it. `answers` has how
    requests are answered, and after how many seconds.
    """

    def __init__(self, answers: Mapping[int, tuple[How, float]]) -> None:
        self.answers = answers
        self.seen: dict[int, bytes] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.cancelled: dict[int, float] = {}
        self.open = 0

    async def __aenter__(self) -> "Service":
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self.open, "no request outlives its tunnel"

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: Any, *, headers: dict[str, str], data: Any, allow_redirects: bool
    ) -> AsyncIterator["Response"]:
        assert not allow_redirects
        number = int(url.name)
        self.seen[number] = data.read() if data is not None else b""
        self.headers[number] = headers
        how, seconds = self.answers.get(number, (ANSWERED, 0.25))
        self.open += 1
        try:
            await asyncio.sleep(seconds)
            if how == BEFORE:
                raise aiohttp.ServerDisconnectedError
            yield Response(how)
        except asyncio.CancelledError:
            self.cancelled[number] = asyncio.get_running_loop().time()
            raise
        finally:
            self.open -= 1


class Response:
    status = 200

    def __init__(self, how: How) -> None:
        self._how, self._count, self.content = how, 0, self
        self.headers = {"content-type": "text/x", "set-cookie": "a=b", "retry-after": "x" * 8193}

    async def readany(self) -> bytes:
        self._count += 1
        if self._count == 2:
            await asyncio.sleep(1)
            if self._how == AFTER:
                raise aiohttp.ClientPayloadError
        return b"ab"[self._count - 1 : self._count]

    def at_eof(self) -> bool:
        return self._count == 2


@dataclass
class Box:
    """A sandbox whose server reports these events: the second, the header, and a part
    of a body. Until `full_until` it has no capacity for answers, each of which then
    takes `answer_s` seconds.
    """

    events: list[tuple[float, dict[str, Any], bytes]]
    full_until: float = 0.0
    answer_s: float = 0.0
    id: str = "box"
    got: dict[int, list[tuple[dict[str, Any], bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    taken: int = 0
    killed_at: float = -1.0
    spoiled: str = ""

    async def call(
        self, action: str, body: bytes = b"", *, timeout_s: float, slack_s: float, **args: Any
    ) -> Reply:
        assert (timeout_s, slack_s) == (LIMITS_S[action], 60.0)
        loop = asyncio.get_running_loop()
        if self.killed_at >= 0:
            raise SandboxLostError("killed")
        if action == "tunnel_open":
            assert args == {"max_in_flight": MAX_IN_FLIGHT}
            return Reply(header={"port": 1234}, body=b"")
        if action == "tunnel_answer":
            if loop.time() < self.full_until:
                raise SandboxRefusedError("no capacity")
            await asyncio.sleep(self.answer_s)
            self.got[args.pop("number")].append((args, body))
        if action == "tunnel_next":
            pause_s = self.events[0][0] - loop.time() if self.events else timeout_s
            await asyncio.sleep(max(0.0, min(timeout_s, pause_s)))
            if self.events and self.events[0][0] <= loop.time():
                _, header, part = self.events.pop(0)
                self.taken += 1
                return Reply(header=header, body=part)
            return Reply(header={"disconnected": []}, body=b"")
        return Reply(header={}, body=b"")

    def kill(self, *, spoiled: str = "") -> None:
        self.killed_at, self.spoiled = asyncio.get_running_loop().time(), spoiled


def part(number: int, *, first: bool = True, more: bool = False, **fields: Any) -> dict[str, Any]:
    return {
        "disconnected": [],
        "number": number,
        "method": "POST" if first else "",
        "target": f"/v1/{number}",
        "more": more,
        **fields,
    }


def tunnelled(box: Box, service: Service, seconds: float) -> None:
    """Let a tunnel serve for so many seconds."""

    async def serve() -> None:
        async with tunnel(box, "http://host:1/v1") as url:  # type: ignore[arg-type]
            assert url == "http://127.0.0.1:1234/v1"
            await asyncio.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PENDING_BYTES", PENDING)
        patch.setattr(module, "BODY_BYTES", BODY)
        patch.setattr(module.aiohttp, "ClientSession", lambda **_: service)
        patch.setattr(module.aiohttp, "TCPConnector", lambda **_: None)
        patch.setattr(module.aiohttp, "DummyCookieJar", lambda: None)
        run_virtually(serve())


UPLOADS = st.tuples(
    st.lists(st.integers(10, 20), min_size=1, max_size=3),
    st.sampled_from([ANSWERED, ANSWERED, BEFORE, AFTER, UPLOADING, WAITING]),
    st.sampled_from([0.25, 9.25, 30.25]),
)
"""The sizes of a request's parts, and what becomes of it after how many seconds."""

HEAD = {"status": 200, "headers": {"content-type": "text/x"}}


@settings(max_examples=examples(150))
@given(uploads=st.lists(UPLOADS, min_size=3, max_size=9), answer_s=st.sampled_from([0.0, 3.5]))
def test_bytes_are_accepted_while_there_is_room_and_given_back(
    uploads: list[tuple[list[int], How, float]], answer_s: float
) -> None:
    """Parts arrive each second. The last two requests need all the room that there ever
    was.
    """
    requests = dict(enumerate([*uploads, ([60], ANSWERED, 9.25), ([40], ANSWERED, 9.25)], 1))
    events: list[tuple[float, dict[str, Any], bytes]] = []
    accepted, released_at = dict.fromkeys(requests, 0), dict.fromkeys(requests, 1e9)
    expected: dict[int, list[Any]] = {number: [] for number in requests}
    cancelled, refusals = dict[int, float](), set[int]()
    now = 0.0
    for number, (sizes, how, seconds) in requests.items():
        if number == len(uploads) + 1:
            now += 50.0  # the former ones are over
        refused = False
        for index, size in enumerate(sizes):
            now += 1.0
            more = index < len(sizes) - 1 or how == UPLOADING
            header = part(number, first=not index, more=more, disconnected=[number + 99] * index)
            events.append((now, header, bytes([number]) * size))
            held = sum(accepted[one] for one, at in released_at.items() if at > now)
            refused = refused or held + size > PENDING
            accepted[number] += 0 if refused else size
        if how in (UPLOADING, WAITING):
            now += 1.0
            events.append((now, {"disconnected": [number]}, b""))
        if refused and how != UPLOADING:
            left_at = now if how == WAITING else 1e9
            released_at[number] = min(left_at, now - (how == WAITING) + answer_s)
            expected[number] = [503] if released_at[number] < left_at else []
            refusals.add(number)
            continue
        released_at[number] = {
            ANSWERED: now + seconds + 1 + 2 * answer_s,
            BEFORE: now + seconds + answer_s,
            AFTER: now + seconds + 1 + 2 * answer_s,
        }.get(how, now)
        expected[number] = {
            ANSWERED: [({**HEAD, "last": False}, b"a"), ({"last": True}, b"b")],
            BEFORE: [502],
            AFTER: [({**HEAD, "last": False}, b"a"), ({"abort": True}, b"")],
        }.get(how, [])
        if how == WAITING:
            cancelled[number] = now
    box = Box(events, answer_s=answer_s)
    service = Service(
        {
            number: (how, 99.0 if how == WAITING else seconds)
            for number, (_, how, seconds) in requests.items()
        }
    )
    tunnelled(box, service, now + 50.0)
    assert box.killed_at < 0
    for number, (sizes, *_) in requests.items():
        got = [
            args["status"] if args.get("status", 200) >= 500 else (args, body)
            for args, body in box.got.get(number, [])
        ]
        assert got == expected[number], number
        if number in service.seen:
            assert service.seen[number] == bytes([number]) * sum(sizes)
    assert service.cancelled == cancelled
    unfinished = {number for number, (_, how, _) in requests.items() if how == UPLOADING}
    assert set(service.seen) == set(requests) - refusals - unfinished


@pytest.mark.parametrize(
    ("full_until", "killed_at"), [(1.0, None), (50.0, None), (59.8, None), (63.0, 60.9)]
)
def test_a_sandbox_without_capacity_is_waited_for_within_the_slack(
    full_until: float, killed_at: float | None
) -> None:
    """Its answer is there after 1.25 seconds."""
    box = Box([(1.0, part(1), b"x")], full_until=full_until)
    service = Service({})
    tunnelled(box, service, 200.0)
    if killed_at is None:
        assert box.killed_at < 0
        assert [body for _, body in box.got[1]] == [b"a", b"b"]
    else:
        assert box.killed_at == pytest.approx(killed_at, abs=0.5)


def test_no_more_requests_are_taken_than_can_be_answered() -> None:
    """A sandbox that is slow to accept responses gets no further ones."""
    many = 3 * MAX_IN_FLIGHT
    box = Box([(0.0, part(number), b"") for number in range(1, many + 1)])
    service = Service({number: (ANSWERED, 5.0 + number) for number in range(1, many + 1)})
    tunnelled(box, service, 5.9)
    assert box.taken == 2 * MAX_IN_FLIGHT
    box = Box([(0.0, part(number), b"") for number in range(1, many + 1)])
    service = Service({number: (ANSWERED, 5.0 + number) for number in range(1, many + 1)})
    tunnelled(box, service, 7.5)
    assert box.taken == 2 * MAX_IN_FLIGHT + 1


@pytest.mark.parametrize(
    ("value", "passes"),
    [("a b\t\x7e", True), ("x" * 8192, True), ("x" * 8193, False), ("", False), ("é", False)],
)
def test_which_values_of_headers_pass(value: str, passes: bool) -> None:
    box = Box([(0.0, part(1, headers={"accept": value, "cookie": "a"}), b"x")])
    service = Service({})
    tunnelled(box, service, 9.0)
    assert service.headers == {1: {"accept": value} if passes else {}}


@pytest.mark.parametrize(("sizes", "killed"), [([BODY], False), ([BODY - 1, 1, 1], True)])
def test_a_request_has_a_maximum_size(sizes: list[int], killed: bool) -> None:
    box = Box(
        [
            (float(index), part(1, first=not index, more=index < len(sizes) - 1), b"x" * size)
            for index, size in enumerate(sizes)
        ]
    )
    tunnelled(box, Service({}), 9.0)
    assert (box.killed_at >= 0) is killed is bool(box.spoiled)


@pytest.mark.parametrize(
    "headers",
    [
        [{}],
        [{"disconnected": ["1"]}],
        [part("1")],  # type: ignore[arg-type]
        [part(1, more=1)],  # type: ignore[arg-type]
        *([part(1, headers={"authorization": 3})], [part(1, first=False)], [part(-1)]),
        *([part(1), part(1)], [part(2), part(1)]),
        [part(2, more=True), {"disconnected": [2]}, part(2)],
        *([part(2, more=True), {"disconnected": [2]}, part(1)], [part(1, more=True), part(2)]),
        *([part(1, more=True), part(1)], [part(1, more=True), part(2, first=False)]),
        [part(1, more=True), part(1, first=False), part(1, first=False)],
    ],
)
def test_a_sandbox_that_breaks_the_protocol_is_killed(headers: list[dict[str, Any]]) -> None:
    box = Box([(float(second), header, b"") for second, header in enumerate(headers)])
    tunnelled(box, Service({}), 20.0)
    assert box.killed_at == len(headers) - 1
    assert box.spoiled, "the agent is to blame"


@pytest.mark.parametrize(
    "url",
    [
        *("https://127.0.0.1:1/v1", "127.0.0.1:1/v1", "http:///v1", "http://user@127.0.0.1:1/v1"),
        *("http://127.0.0.1:1/v1?a=b", "http://127.0.0.1:1/v1#a", "http://127.0.0.1:1/a/../v1"),
        *("http://127.0.0.1:1/./v1", "http://127.0.0.1:1/a%2fb"),
    ],
)
async def test_refuses_invalid_urls(url: str) -> None:
    with pytest.raises(ValueError, match="url must be http://HOST:PORT/PATH"):
        async with tunnel(Box([]), url):  # type: ignore[arg-type]
            pass
