"""Programs in real sandboxes reach one service of the host: OpenAI's client, attackers,
and programs that end during a call.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from packages.sandbox.tests.service import Spy, output_of, run, spied
from rollweave.sandbox.base import MIB, Limits, Reply, Sandbox, SandboxSpec
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.tools import Bash
from rollweave.schema.errors import SandboxLostError, SandboxRefusedError
from rollweave_sandbox.inside.http1 import BODY_BYTES
from rollweave_sandbox.tunnel import MAX_IN_FLIGHT, tunnel
from tests.support.sandboxes import ISOLATING, NAMES, opened
from tests.support.scripted_gateway import Script, gateway

pytestmark = pytest.mark.variants

OPENAI = """
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0, timeout=100)
def talk(text, **more):
    return client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}], **more)
"""
TALK = """
def talk(text):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]})
    head = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
    status, _, answer = ask(sys.argv[1], "/chat/completions", "POST", body, head)
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["message"]["content"]
"""
"""The same as `OPENAI`, without the second of CPU in which OpenAI's client is imported.
"""


WITH_CLIENT = SandboxSpec(packages=("openai",))


@contextlib.asynccontextmanager
async def sandboxed(name: str, spec: SandboxSpec = WITH_CLIENT) -> AsyncIterator[Sandbox]:
    """Start a sandbox. When it is stopped, no task of a tunnel is left."""
    async with opened(name) as backend:
        sandbox = await backend.start(spec)
        yield sandbox
        await sandbox.stop(grace_s=0.0)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("tunnel")] == []


@pytest_asyncio.fixture(params=NAMES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandboxed(request.param) as opened_sandbox:
        yield opened_sandbox


@pytest_asyncio.fixture(params=ISOLATING)
async def isolated(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandboxed(request.param) as opened_sandbox:
        yield opened_sandbox


async def test_openais_client_reaches_the_gateway(sandbox: Sandbox) -> None:
    async with (
        gateway(Script(["one", "two three"])) as (server, client),
        tunnel(sandbox, client.base_url) as url,
    ):
        source = """
whole = talk("a")
pieces = [chunk.choices[0].delta.content or "" for chunk in talk("b", stream=True)]
try:
    talk("c", n=2)
except openai.BadRequestError as error:
    wrong = error.param
print(json.dumps([[m.id for m in client.models.list()], whole.choices[0].message.content, "".join(pieces), wrong]))
"""
        answer = json.loads(await output_of(sandbox, OPENAI + source, url, client.access.token))
        assert answer == [["tiny"], "one", "two three", "n"]
        assert len(server.close("s").sequences) == 2


async def test_a_stream_begins_before_its_response_is_complete(sandbox: Sandbox) -> None:
    script = Script(hold=True)
    async with (
        gateway(script, keep_alive_s=0.05) as (_, client),
        tunnel(sandbox, client.base_url) as url,
    ):
        source = """
talk = http.client.HTTPConnection("127.0.0.1", door(sys.argv[1]))
body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
path = urllib.parse.urlsplit(sys.argv[1]).path
headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
talk.request("POST", path + "/chat/completions", body, headers)
answer = talk.getresponse()
first = answer.readline()
open(sys.argv[3], "w").close()
print(first.decode().strip(), b"[DONE]" in answer.read())
"""
        home = (await sandbox.exec(["pwd"])).stdout.decode().strip()
        asking = asyncio.create_task(
            output_of(sandbox, source, url, client.access.token, f"{home}/alive")
        )
        await sandbox.exec(["sh", "-c", "until cat alive 2> alive.not; do sleep 0.01; done"])
        script.free.set()
        assert await asking == ": the turn is in progress True"


async def test_tools_work_while_more_programs_wait_than_are_served(sandbox: Sandbox) -> None:
    script = Script(hold=True)
    many = 3 * MAX_IN_FLIGHT
    source = f"""
answers = []
threads = [threading.Thread(target=lambda: answers.append(talk("hi"))) for _ in range({many})]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(answers.count("hello"))
"""
    async with gateway(script) as (_, client), tunnel(sandbox, client.base_url) as url:
        first = asyncio.create_task(run(sandbox, TALK + "talk('first')", url, client.access.token))
        await script.started.get()
        asking = asyncio.create_task(output_of(sandbox, TALK + source, url, client.access.token))
        for _ in range(MAX_IN_FLIGHT - 1):
            await script.started.get()
        bash = Bash(sandbox)
        assert (await bash.run("echo $((6 * 7))")).output == "42\n"
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        assert (
            len(script.requests) == MAX_IN_FLIGHT
        )  # the gateway refuses no call for being one too many
        first.cancel()
        await asyncio.wait_for(script.cancelled.get(), 60)
        script.free.set()
        assert await asking == str(many)


async def test_a_program_that_is_killed_ends_its_generation(sandbox: Sandbox) -> None:
    script = Script(hold=True)
    async with gateway(script) as (server, client), tunnel(sandbox, client.base_url) as url:
        for _ in range(2):
            asking = asyncio.create_task(
                run(sandbox, TALK + "talk('hi')", url, client.access.token)
            )
            await script.started.get()
            asking.cancel()
            await asyncio.wait_for(script.cancelled.get(), 60)
        assert server.close("s").sequences == ()


async def test_killing_a_sandbox_ends_its_generations_and_the_tunnel(sandbox: Sandbox) -> None:
    script = Script(hold=True)
    async with gateway(script) as (_, client), tunnel(sandbox, client.base_url) as url:
        asking = [
            asyncio.create_task(run(sandbox, TALK + "talk('hi')", url, client.access.token))
            for _ in range(2)
        ]
        for _ in asking:
            await script.started.get()
        sandbox.kill()
        for _ in asking:
            await asyncio.wait_for(script.cancelled.get(), 60)
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in ended] == [SandboxLostError] * 2


async def test_closing_a_tunnel_disconnects_clients_and_another_may_open(sandbox: Sandbox) -> None:
    script = Script(hold=True)
    source = """
try:
    talk("hi")
except (OSError, http.client.HTTPException):
    print("left")
"""
    async with gateway(script) as (_, client):
        for _ in range(2):
            async with tunnel(sandbox, client.base_url) as url:
                asking = asyncio.create_task(
                    output_of(sandbox, TALK + source, url, client.access.token)
                )
                await script.started.get()
                with pytest.raises(SandboxRefusedError, match="one tunnel at a time"):
                    async with tunnel(sandbox, client.base_url):
                        pass
            assert await asking == "left"
            assert script.cancelled.get_nowait() is None
        error = await run(sandbox, TALK + source, url, client.access.token)
        assert error.stdout == b"left\n"


@pytest.mark.extended
async def test_a_snapshot_during_a_call_and_a_tunnel_into_the_branch() -> None:
    script = Script(hold=True)
    source = TALK + "print(talk('hi'))"
    for name in ISOLATING:
        async with opened(name) as backend, gateway(script) as (_, client):
            pool = Pool(backend, SandboxSpec(), size=1)
            sandbox = await pool.take()
            await pool.close()
            async with tunnel(sandbox, client.base_url) as url:
                asking = asyncio.create_task(output_of(sandbox, source, url, client.access.token))
                await script.started.get()
                branch = await backend.branch(await sandbox.snapshot())
                script.free.set()
                assert await asking == "hello"
                async with tunnel(branch, client.base_url) as other:
                    assert await output_of(branch, source, other, client.access.token) == "hello"


# What must not get through.

ELSEWHERE = [
    b"GET /s/other/v1/models HTTP/1.1",
    b"GET /s/mine/v1/../../other/v1/models HTTP/1.1",
    b"GET /s/mine/v1/./models HTTP/1.1",
    b"GET /s/mine/v1/%2e%2e/%2e%2e/other HTTP/1.1",
    b"GET /s/mine/v1//models HTTP/1.1",
    b"GET /s/mine/v1/ HTTP/1.1",
    b"GET /s/mine/v1x/models HTTP/1.1",
    b"GET /s/mine/v1\\..\\other HTTP/1.1",
    b"GET /S/MINE/V1/models HTTP/1.1",
    b"GET //evil.example/s/mine/v1/models HTTP/1.1",
    b"GET http://evil.example/s/mine/v1/models HTTP/1.1",
    b"GET http://169.254.169.254/latest HTTP/1.1",
    b"GET @evil.example/s/mine/v1 HTTP/1.1",
    b"GET / HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"CONNECT evil.example:443 HTTP/1.1",
    b"DELETE /s/mine/v1/models HTTP/1.1",
    b"GET /s/mine/v1/models\x00 HTTP/1.1",
    b"GET /s/mine/v1/models HTTP/1.1\nX: y",
    b"GET /s/mine/v1/models HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
    b"GET /s/mine/v1/models HTTP/1.1\r\nX: a\r\n b",
    b"GET /s/mine/v1/models HTTP/0.9",
    b"\x16\x03\x01\x02\x00\x01",
]


async def test_no_other_path_host_or_header_gets_through(isolated: Sandbox) -> None:
    spy = Spy()
    async with spied(spy) as service, tunnel(isolated, service) as url:
        source = """
for wire in eval(sys.argv[2]):
    print(raw(sys.argv[1], wire + b"\\r\\nConnection: close\\r\\n\\r\\n").split(b" ")[1].decode())
"""
        refused = await output_of(isolated, source, url, repr(ELSEWHERE))
        assert set(refused.split()) <= {"400", "404", "405"}
        assert len(refused.split()) == len(ELSEWHERE)
        assert spy.seen == []
        headers = {
            "Host": "evil.example",
            "X-Forwarded-For": "1.2.3.4",
            "Cookie": "a=b",
            "Authorization": "Bearer t",
            "X-Stainless-Retry-Count": "1",
            "Idempotency-Key": "\xe9",
            "Upgrade": "websocket",
            "Connection": "Upgrade, Keep-Alive",
        }
        source = (
            "print(json.dumps([ask(sys.argv[1], p, h, b, eval(sys.argv[2]))[:2] for p, h, b in "
            "eval(sys.argv[3])]))"
        )
        requests = [("/x/y-z?a=/../b", "POST", b"body"), ("/away", "GET", None)]
        answers = json.loads(await output_of(isolated, source, url, repr(headers), repr(requests)))
        host = service.removeprefix("http://").partition("/")[0]
        passed = {"host": host, "authorization": "Bearer t", "x-stainless-retry-count": "1"}
        wanted = ("POST", "/s/mine/v1/x/y-z", {**passed, "content-length": "4"}, b"body")
        assert spy.seen[0] == wanted
        assert spy.seen[1][:3] == ("GET", "/s/mine/v1/away", passed)
        assert [status for status, _ in answers] == [200, 302]
        expected = {"retry-after", "content-type", "content-length"}
        assert {name.lower() for _, head in answers for name in head} == expected


async def test_requests_in_every_form_that_clients_send(isolated: Sandbox) -> None:
    spy = Spy()
    async with spied(spy) as service, tunnel(isolated, service) as url:
        source = """
path = urllib.parse.urlsplit(sys.argv[1]).path.encode()
get, post = b"GET %b/a HTTP/1.1\\r\\n\\r\\n" % path, b"POST %b/b HTTP/1.1\\r\\n" % path
chunked = post + b"Transfer-Encoding: chunked\\r\\nConnection: close\\r\\n\\r\\n"
print(raw(sys.argv[1], get + post + b"Content-Length: 2\\r\\nConnection: close\\r\\n\\r\\nhi").count(b"yes"))
print(raw(sys.argv[1], chunked + b"2\\r\\nhi\\r\\n0\\r\\n\\r\\n").count(b"yes"))
print(raw(sys.argv[1], b"GET %b/a HTTP/1.0\\r\\n\\r\\n" % path).count(b"yes"))
with socket.create_connection(("127.0.0.1", door(sys.argv[1]))) as sock:
    sock.sendall(post + b"Expect: 100-continue\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n")
    print(sock.recv(25).split()[1].decode())
    sock.sendall(b"hi")
    print(b"".join(iter(lambda: sock.recv(65536), b"")).count(b"yes"))
"""
        assert (await output_of(isolated, source, url)).split() == ["2", "1", "1", "100", "1"]
        expected = [("GET", b""), ("POST", b"hi"), ("POST", b"hi"), ("GET", b""), ("POST", b"hi")]
        assert [(seen[0], seen[3]) for seen in spy.seen] == expected


async def test_a_body_of_the_largest_size_passes_and_a_larger_one_does_not(
    isolated: Sandbox,
) -> None:
    spy = Spy(answer=b"x" * (20 * MIB))
    async with spied(spy) as service, tunnel(isolated, service) as url:
        source = (
            "print([(s, len(b)) for s, _, b in [ask(sys.argv[1], '/a', 'POST', b'x' * "
            "int(sys.argv[2]))]])"
        )
        assert await output_of(isolated, source, url, str(BODY_BYTES)) == str([(200, 20 * MIB)])
        assert len(spy.seen[0][3]) == BODY_BYTES
        source = (
            "print(raw(sys.argv[1], b'POST /a HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n' % "
            "int(sys.argv[2])).split()[1])"
        )
        assert await output_of(isolated, source, url, str(BODY_BYTES + 1)) == "b'413'"
        assert len(spy.seen) == 1


@pytest.mark.extended
async def test_requests_beyond_the_pending_bound_are_refused(isolated: Sandbox) -> None:
    spy = Spy(hold=True)
    source = """
found = []
def one():
    found.append(ask(sys.argv[1], "/a", "POST", b"x" * (15 << 20))[0])
threads = [threading.Thread(target=one) for _ in range(7)]
[thread.start() for thread in threads]
while 503 not in found:
    time.sleep(0.01)
open("full", "w").close()
[thread.join() for thread in threads]
print(sorted(set(found)))
"""
    async with spied(spy) as service, tunnel(isolated, service) as url:
        asking = asyncio.create_task(output_of(isolated, source, url))
        await isolated.exec(["sh", "-c", "until test -e full; do sleep 0.01; done"])
        spy.free.set()
        assert await asking == "[200, 503]"


FLOOD = """
held = []
for _ in range(int(sys.argv[2])):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", door(sys.argv[1])))
    held.append(sock)
    if len(held) > 900:
        held.pop(0).close()
    if len(sys.argv) > 3:
        try:
            sock.send(sys.argv[3].encode())
        except OSError:
            pass
open("flooded", "w").close()
time.sleep(1000)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "wire",
    [[], ["POST /s/mine/v1/a HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf"]],
    ids=["silent", "half"],
)
async def test_ten_thousand_connections_do_not_block_requests(
    isolated: Sandbox, wire: list[str]
) -> None:
    spy = Spy()
    async with spied(spy) as service, tunnel(isolated, service) as url:
        flood = asyncio.create_task(run(isolated, FLOOD, url, "10000", *wire, timeout_s=200.0))
        await isolated.exec(["sh", "-c", "until test -e flooded; do sleep 0.01; done"])
        assert await output_of(isolated, "print(ask(sys.argv[1], '/a')[0])", url) == "200"
        assert (await isolated.exec(["echo", "on"])).stdout == b"on\n"
    flood.cancel()
    assert len(spy.seen) == 1


@pytest.mark.extended
async def test_a_client_that_does_not_read_delays_no_other(isolated: Sandbox) -> None:
    spy = Spy(answer=b"x" * (8 * MIB))
    async with spied(spy) as service, tunnel(isolated, service) as url:
        source = """
path = urllib.parse.urlsplit(sys.argv[1]).path.encode()
lazy = [socket.create_connection(("127.0.0.1", door(sys.argv[1]))) for _ in range(20)]
for sock in lazy:
    sock.sendall(b"GET %b/a HTTP/1.1\\r\\n\\r\\n" % path)
print(len(ask(sys.argv[1], "/a")[2]))
"""
        assert await output_of(isolated, source, url) == str(8 * MIB)


async def test_a_service_that_disconnects_or_is_unreachable(isolated: Sandbox) -> None:
    spy = Spy()
    async with spied(spy) as service, tunnel(isolated, service) as url:
        source = """
try:
    ask(sys.argv[1], "/torn")
except (http.client.IncompleteRead, ConnectionError):
    print("torn")
print(ask(sys.argv[1], "/a")[2].decode())
"""
        assert (await output_of(isolated, source, url)).split() == ["torn", "yes"]
    async with tunnel(isolated, service) as url:
        status, body = json.loads(
            await output_of(
                isolated,
                "s, h, b = ask(sys.argv[1], '/a'); print(json.dumps([s, b.decode()]))",
                url,
            )
        )
        assert (status, json.loads(body)["error"]["type"]) == (502, "server_error")


async def test_a_small_sandbox_can_have_a_tunnel() -> None:
    spy = Spy()
    limits = Limits(processes=8, memory_bytes=128 * MIB, files=32)
    async with (
        sandboxed("bubblewrap", SandboxSpec(limits=limits)) as small,
        spied(spy) as service,
        tunnel(small, service) as url,
    ):
        assert await output_of(small, "print(ask(sys.argv[1], '/a')[0])", url) == "200"


class Liar:
    """A sandbox whose server sends arbitrary messages of a test."""

    id, ready_s, ended = "liar", 0.0, ""

    def __init__(self, notices: list[tuple[dict[str, Any], bytes]]) -> None:
        self.killed = asyncio.Event()
        self.replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._notices = notices

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        if action == "tunnel_open":
            return Reply(header={"port": 1234}, body=b"")
        if action == "tunnel_next":
            if not self._notices:
                await asyncio.Event().wait()
            header, part = self._notices.pop(0)
            return Reply(header=header, body=part)
        if action == "tunnel_answer":
            self.replies.put_nowait(args)
        return Reply(header={}, body=b"")

    def kill(self, *, spoiled: str = "") -> None:
        self.killed.set()


def part(
    number: Any, *, method: str = "POST", more: Any = False, disconnected: Any = (), **fields: Any
) -> dict[str, Any]:
    return {
        "disconnected": list(disconnected),
        "number": number,
        "method": method,
        "target": "/s/mine/v1/a",
        "headers": {},
        "more": more,
        **fields,
    }


async def test_the_host_filters_requests_of_a_sandbox() -> None:
    spy = Spy()
    headers = {
        "authorization": "a\r\nX-Evil: b",
        "host": "evil",
        "accept": "x\0",
        "content-type": "application/json",
    }
    notices = [
        (part(1, headers=headers), b"body"),
        (part(2, target="http://evil/s/mine/v1/a"), b""),
        (part(3, target="/s/mine/v1/\r\nHost: evil"), b""),
        (part(4, target="/s/mine/v1/../x"), b""),
        (part(5, method="PUT"), b""),
        ({"disconnected": [1 << 70, -1, 77]}, b""),
        (part(6, more=True), b"x"),
        (part(7, disconnected=[6]), b""),
    ]
    liar = Liar(notices)
    async with spied(spy) as service, tunnel(liar, service):  # type: ignore[arg-type]
        replies = [await asyncio.wait_for(liar.replies.get(), 60) for _ in range(6)]
    statuses = {args["number"]: args["status"] for args in replies}
    assert statuses == {1: 200, 2: 404, 3: 404, 4: 404, 5: 405, 7: 200}
    (first, second) = sorted(spy.seen, key=lambda seen: -len(seen[3]))
    expected = {"host": first[2]["host"], "content-type": "application/json", "content-length": "4"}
    assert first[2] == expected
    assert (first[1], second[1]) == ("/s/mine/v1/a",) * 2
    assert not liar.killed.is_set()
