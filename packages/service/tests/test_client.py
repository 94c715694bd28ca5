"""The decisions of a client, in virtual time, by what it sends to scripted services."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import aiohttp.test_utils
import aiohttp.web
import pytest

from rollweave.schema.base import TrajectoryId
from rollweave_service import client as client_module
from rollweave_service.client import (
    ClientClosedError,
    NoServiceError,
    RolloutClient,
    ServiceError,
    _unopened_files,
)
from rollweave_service.messages import (
    Completion,
    Completions,
    EngineRequest,
    EngineStatus,
    EngineStatuses,
    MemberStatus,
    RolloutPage,
    RolloutRequest,
    RolloutStatus,
)
from tests.support.virtual_time import run_virtually

A, B = "http://a:1", "http://b:1"
SILENT = aiohttp.ClientConnectionError("refused")
UNKNOWN = ServiceError(404, "unknown", "no rollout")
FULL, CLOSED = ServiceError(429, "full", "busy"), ServiceError(503, "closed", "it ends")
ONE = RolloutRequest(handler="game", index=1, id="x")

Answer = Callable[[str, str, str], Any]
"""Returns the answer to a call by its address, method and path, or the error that is to
be raised; a number is seconds until the rollout is known to be running.
"""


def status(state: str, *done: int, members: int = 2) -> RolloutStatus:
    own = tuple(
        MemberStatus(id=TrajectoryId(f"x.{i}"), stage="done" if i in done else "run", attempt=0)
        for i in range(members)
    )
    return RolloutStatus(id="x", handler="game", state=state, members=own)


def page(next: int, *members: int) -> Completions:
    found = tuple(
        Completion(number=i, rollout="x", member=TrajectoryId(f"x.{i}"), stop_reason="finished")
        for i in members
    )
    return Completions(completions=found, next=next)


class Scripted:
    """Runs a client whose calls have the answers that `answer` returns, or lists in
    order; `calls` has each call with its time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer | list[Any]) -> None:
        self.calls: list[tuple[float, str, str, str]] = []
        self._answer = answer
        monkeypatch.setattr(client_module.secrets, "randbelow", lambda most: most // 2)
        monkeypatch.setattr(RolloutClient, "_send", lambda _, *given: self.send(*given))

    async def send(self, server: Any, call: Any) -> Any:
        now = round(asyncio.get_running_loop().time(), 6)
        self.calls.append((now, server.address, call.method, call.path))
        if isinstance(self._answer, list):
            answer = self._answer.pop(0)
        else:
            answer = self._answer(server.address, call.method, call.path)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return status("running")
        return answer

    def run(self, do: Callable[[RolloutClient], Any], *addresses: str) -> Any:
        async def main() -> Any:
            async with RolloutClient(list(addresses) or [A]) as client:
                return await do(client)

        return run_virtually(main())

    @property
    def sent(self) -> list[str]:
        return [f"{method} {path}" for _, _, method, path in self.calls]


Script = Callable[[Answer | list[Any]], Scripted]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return functools.partial(Scripted, monkeypatch)


async def collected(members: AsyncIterator[MemberStatus]) -> list[str]:
    return [member.id async for member in members]


def test_a_stream_has_each_member_once_and_ends_with_the_rollout(script: Script) -> None:
    answers = [
        status("running", 1, members=3),
        page(4, 1),
        page(7, 1, 0),
        status("running", 0, 1, members=3),
        page(9, 2),
        status("done", 0, 1, 2, members=3),
    ]
    services = script(answers)
    assert services.run(lambda client: collected(client.stream("x/y"))) == ["x.1", "x.0", "x.2"]
    pages = [
        f"GET /v1/completions?after={after}&rollout=x%2Fy&limit=1000&wait=20" for after in (0, 4, 7)
    ]
    now = "GET /v1/rollouts/x%2Fy?wait=0"
    assert services.sent == [now, *pages[:2], now, pages[2], now]


@pytest.mark.parametrize(
    ("answers", "waits"),
    [
        ([status("running"), 20.0, 20.0, 10.0], [0, 20, 20, 10]),
        ([status("running"), 20.0, status("done")], [0, 20, 20]),
        ([status("done")], [0]),
    ],
)
def test_a_status_is_awaited_until_its_deadline(
    script: Script, answers: list[Any], waits: list[int]
) -> None:
    services = script(answers)
    services.run(lambda client: client.get("x", wait_s=50.0))
    assert services.sent == [f"GET /v1/rollouts/x?wait={seconds}" for seconds in waits]


def test_a_rollout_is_cancelled_at_the_service_that_knows_it(script: Script) -> None:
    services = script([UNKNOWN, status("running"), status("done")])
    assert services.run(lambda client: client.cancel("x"), A, B).state == "done"
    assert [call[1:] for call in services.calls] == [
        (A, "GET", "/v1/rollouts/x?wait=0"),
        (B, "GET", "/v1/rollouts/x?wait=0"),
        (B, "DELETE", "/v1/rollouts/x"),
    ]


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        ({A: UNKNOWN, B: UNKNOWN}, ServiceError, "^no rollout$"),
        ({A: SILENT, B: UNKNOWN}, NoServiceError, rf"these do not answer: {A} \(refused\)$"),
        ({A: ServiceError(410, "gone", "lost"), B: status("done")}, ServiceError, "^lost$"),
    ],
)
def test_a_rollout_that_is_not_found_names_the_reason(
    script: Script, at: Any, error: type[Exception], words: str
) -> None:
    services = script(lambda address, *_: at[address])
    with pytest.raises(error, match=words):
        services.run(lambda client: client.get("x"), A, B)


def test_lists_the_pages_of_all_services(script: Script) -> None:
    def answer(address: str, _: str, path: str) -> Any:
        after = int(path.partition("after=")[2].partition("&")[0])
        return RolloutPage(rollouts=(status("done"),) * (after < 2), next=after + 1)

    services = script(answer)
    assert len(services.run(lambda client: client.list_rollouts(unfinished=True), A, B)) == 4
    expected = [f"GET /v1/rollouts?after={after}&limit=1000&unfinished=true" for after in (0, 1, 2)]
    assert services.sent == expected * 2
    services = script(lambda *_: SILENT)
    with pytest.raises(NoServiceError, match=rf"a service does not answer: {A} \(refused\)$"):
        services.run(lambda client: client.list_rollouts())


def test_every_service_is_told_of_an_engine_and_asked_for_its_health(script: Script) -> None:
    engine = EngineRequest(address="http://e:1", dialect="vllm")
    services = script(lambda *_: None)
    services.run(lambda client: client.register(engine), A, B)
    assert [call[1] for call in services.calls] == [A, B]
    for error in (SILENT, FULL, TimeoutError()):
        at = {A: error, B: {"run": 1}}
        services = script(lambda address, *_, at=at: at[address])
        assert services.run(lambda client: client.health(), A, B) == {B: {"run": 1}}


@pytest.mark.parametrize("error", [FULL, CLOSED, SILENT])
def test_a_call_is_repeated_eight_times(script: Script, error: Exception) -> None:
    services = script(lambda *_: error)
    with pytest.raises((ServiceError, NoServiceError)):
        services.run(lambda client: client.submit(ONE))
    assert [call[0] for call in services.calls] == [0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3]


@pytest.mark.parametrize("refusal", [400, 404, 409, 413, 500])
def test_a_refusal_is_not_repeated(script: Script, refusal: int) -> None:
    services = script([ServiceError(refusal, "no", "refused for good")])
    with pytest.raises(ServiceError, match="for good"):
        services.run(lambda client: client.rollout(ONE), A, B)


def test_a_rollout_waits_without_an_end_for_a_busy_service(script: Script) -> None:
    services = script([*[FULL] * 30, status("running"), 20.0, status("done")])
    assert services.run(lambda client: client.rollout(ONE), A, B).state == "done"
    assert {call[1] for call in services.calls} == {A}
    assert services.sent[-2:] == ["GET /v1/rollouts/x?wait=20"] * 2


@pytest.mark.parametrize(("failure", "words"), [(SILENT, "refused"), (CLOSED, "shutting down")])
def test_a_rollout_moves_and_is_cancelled_where_it_was(
    script: Script, failure: Exception, words: str
) -> None:
    """The service is not tried for fifteen seconds; then it is told, once."""

    def answer(address: str, *_: str) -> Any:
        now = asyncio.get_running_loop().time()
        return failure if address == A and now < 20.0 else status("done")

    async def do(client: RolloutClient) -> None:
        await client.rollout(ONE)
        assert words in client._servers[0].failure
        await asyncio.sleep(14.0)  # the last attempt was after 11.3 seconds
        assert (await client.rollout(again)).state == "done"
        await asyncio.sleep(2.0)
        await client.rollout(again)
        await client.rollout(again)

    again = RolloutRequest(handler="game", index=2, id="y")
    services = script(answer)
    services.run(do, A, B)
    moved = [call for call in services.calls if call[2] == "DELETE"]
    assert [call[1:] for call in moved] == [(A, "DELETE", "/v1/rollouts/x")]
    at = {"x": [], "y": []}  # type: dict[str, list[str]]
    for number, address, method, path in services.calls:
        if method == "GET":
            at[path[13]].append(address if number < 26.5 else address.upper())
    assert at == {"x": [B], "y": [B, A.upper(), A.upper()]}


def test_a_rollout_that_returns_to_a_service_is_not_cancelled_there(script: Script) -> None:
    services = script(lambda *_: SILENT)

    async def do(client: RolloutClient) -> None:
        with pytest.raises(NoServiceError, match=rf"no service answers: {A} \(.*, {B} \(refused"):
            await client.rollout(ONE)
        services._answer = lambda *_: status("done")
        await asyncio.sleep(15.0)
        await client.rollout(ONE)

    services.run(do, A, B)
    assert [call[1:3] for call in services.calls[-3:]] == [(A, "POST"), (A, "GET"), (B, "DELETE")]


def test_rollouts_go_where_the_fewest_members_are(script: Script) -> None:
    services = script(lambda _, method, path: 20.0 if method == "GET" else None)

    async def do(client: RolloutClient) -> list[int]:
        client._connections = 2
        tasks = []
        for number, members in enumerate((3, 1, 1, 1, 1)):
            request = RolloutRequest(handler="game", index=1, id=f"n{number}", members=members)
            tasks.append(asyncio.create_task(client.rollout(request)))
            await asyncio.sleep(0.01)
        outstanding = [server.outstanding for server in client._servers]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [*outstanding, *(server.outstanding for server in client._servers), client._polled]

    assert services.run(do, A, B) == [4, 3, 0, 0, 0]
    assert [call[1] for call in services.calls if call[2] == "POST"] == [A, B, B, B, A]
    waits = [path.partition("=")[2] for path in services.sent if "wait" in path]
    assert waits == ["20", "20", "13.3333", "10", "8"], "two connections for five rollouts"


def test_a_rollout_that_the_service_forgot_is_submitted_again(script: Script) -> None:
    services = script([status("queued"), UNKNOWN, status("queued"), status("done")])
    assert services.run(lambda client: client.rollout(ONE)).state == "done"
    wanted = [(0, "POST"), (0, "GET"), (0.1, "POST"), (0.1, "GET")]
    assert [(call[0], call[2]) for call in services.calls] == wanted


@pytest.mark.parametrize(
    ("answer", "left"), [(status("done"), []), (UNKNOWN, []), (SILENT, ["x"]), (9.0, ["x"])]
)
def test_a_cancelled_call_cancels_the_rollout_or_remembers_it(
    script: Script, answer: Any, left: list[str]
) -> None:
    services = script(lambda _, method, path: answer if method == "DELETE" else 20.0)

    async def do(client: RolloutClient) -> tuple[list[str], float]:
        call = asyncio.create_task(client.rollout(ONE))
        await asyncio.sleep(30.0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        return client._servers[0].to_cancel, asyncio.get_running_loop().time()

    assert services.run(do) == (left, 35.0 if answer == 9.0 else 30.0)


def test_leaving_ends_calls_and_their_rollouts(script: Script) -> None:
    services = script(lambda _, method, path: 20.0)

    async def do(client: RolloutClient) -> Any:
        call = asyncio.create_task(client.rollout(ONE))
        await asyncio.sleep(1.0)
        return client, call

    async def main() -> None:
        async with RolloutClient(A) as client:
            client, call = await do(client)
        with pytest.raises(ClientClosedError, match="which must not end before its calls"):
            await call
        with pytest.raises(ClientClosedError):
            await client.rollout(ONE)
        assert (client._session, client._calls) == (None, set())

    run_virtually(main())
    assert services.sent[-1] == "DELETE /v1/rollouts/x"


ENGINES = [EngineRequest(address=f"http://{name}", dialect="vllm") for name in ("a:2", "b:2")]


class Registries:
    """The engines of two services, which answer unless they are `down`."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, EngineStatus]] = {A: {}, B: {}}
        self.down: set[str] = set()

    def put(self, service: str, engine: str, address: str, **fields: Any) -> None:
        status = {"status": "serving", **fields}
        self.at[service][engine] = EngineStatus(id=engine, address=address, **status)

    def send(self, server: Any, call: Any) -> Any:
        own = self.at[server.address]
        if server.address in self.down:
            raise SILENT
        if call.method == "POST":
            self.put(server.address, f"x{len(own)}", call.body.address)
        elif call.method == "DELETE":
            name, _, query = call.path.rpartition("/")[2].partition("?")
            assert query == "force=true"
            del own[name]
        else:
            assert (call.method, call.path) == ("GET", "/v1/engines")
        return EngineStatuses(engines=tuple(own.values()))

    def addresses(self) -> list[set[str]]:
        return [{engine.address for engine in own.values()} for own in self.at.values()]


def test_engines_move_while_a_service_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three failed checks, two seconds apart, count as an end, and two good ones as a
    return. Engines that were registered in another way stay.
    """
    registries, near = Registries(), [engine.address for engine in ENGINES]
    registries.put(A, "own", "http://own:1")
    registries.put(A, "local", "")
    for state in ({"draining": True}, {"status": "removed"}):
        registries.put(B, f"old {state}", near[1], **state)

    async def send(_: RolloutClient, server: Any, call: Any) -> Any:
        return registries.send(server, call)

    async def do(client: RolloutClient) -> None:
        await client.register_engines(ENGINES)
        others = {"http://own:1", ""}
        assert registries.addresses() == [others | {near[0]}, {near[1]}]
        registries.down = {B}
        for seconds, engines in ((5.0, {near[0]}), (2.0, {*near})):
            await asyncio.sleep(seconds)
            assert registries.addresses()[0] == others | engines
        registries.down = set()
        for seconds, engines in ((2.0, {*near}), (2.0, {near[0]})):
            await asyncio.sleep(seconds)
            assert registries.addresses()[0] == others | engines
        await client.register_engines(ENGINES[1:])
        assert registries.addresses() == [others | {near[1]}, {near[1]}], "both use what is left"
        registries.down = {A, B}
        await asyncio.sleep(8.0)
        with pytest.raises(NoServiceError, match=f"none of {A}, {B} answers"):
            await client.register_engines(ENGINES)

    monkeypatch.setattr(RolloutClient, "_send", send)

    async def main() -> None:
        async with RolloutClient([A, B]) as client:
            await do(client)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no check outlives the client"

    run_virtually(main())


def test_a_client_needs_an_address_and_a_spare_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="at least one, got none"):
        RolloutClient([])
    with pytest.raises(ValueError, match="directory of a running service, got"):
        RolloutClient(tmp_path)
    (tmp_path / "address").write_text(f"{B}\n")
    client = RolloutClient([A, tmp_path], token="given")
    assert [(one.address, one.token) for one in client._servers] == [(A, "given"), (B, "given")]
    (tmp_path / "token").write_text("own" * 6)
    (tmp_path / "token").chmod(0o600)
    assert RolloutClient(tmp_path, token="given")._servers[0].token == "own" * 6
    monkeypatch.setattr(client_module.os, "listdir", lambda _: ["0"] * 10)
    limits = {"RLIMIT_NOFILE": 7, "RLIM_INFINITY": -1}
    for soft, files, connections in ((-1, 65526, 32763), (30, 20, 10), (11, 1, 1)):
        known = SimpleNamespace(**limits, getrlimit=lambda _, soft=soft: (soft, 99))
        monkeypatch.setattr(client_module, "resource", known)
        assert (_unopened_files(), RolloutClient(A)._connections) == (files, connections)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"error": {"type": "invalid", "message": "no index"}}', "invalid", "no index"),
        (502, b"\xffbad gateway" + b"x" * 300, "", "\ufffdbad gateway" + "x" * 188),
    ],
)
async def test_a_refusal_has_the_words_of_the_service(
    status: int, body: bytes, kind: str, words: str
) -> None:
    async def refuse(request: aiohttp.web.Request) -> aiohttp.web.Response:
        assert request.headers["Authorization"] == "Bearer mine"
        return aiohttp.web.Response(status=status, body=body)

    app = aiohttp.web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with aiohttp.test_utils.TestServer(app) as server:
        address = f"http://127.0.0.1:{server.port}"
        async with RolloutClient(address, token="mine") as client:
            with pytest.raises(ServiceError) as caught:
                await client.get("x")
    error = caught.value
    assert (error.status, error.kind, str(error)) == (status, kind, f"{address}: {words}")
