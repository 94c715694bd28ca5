"""The search tool, and web searches with a key, against a test server that can fail in
every way.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.errors import ConfigError, EnvError
from rollweave_envs import search
from rollweave_envs.corpus import Bm25, Document
from rollweave_envs.search import NOTHING, Web, search_tool, web_search

KEY = "secret-key-3141"
KEY_ENV = "ROLLWEAVE_TEST_SEARCH_KEY"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


class Server:
    """Answers with each of `responses` in turn, then repeats the last: a status, or the
    results.
    """

    def __init__(self, *responses: Any) -> None:
        self.responses = list(responses)
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.waits: list[float] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((dict(request.headers), await request.json()))
        response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        if response == "hang":
            await asyncio.Event().wait()
        if response == "leave":
            assert request.transport is not None
            request.transport.abort()
        if isinstance(response, int):
            return web.Response(
                status=response, text=f"wrong: {KEY}", headers={"Location": "/elsewhere"}
            )
        return web.Response(text=response if isinstance(response, str) else json.dumps(response))


@asynccontextmanager
async def served(
    *responses: Any, service: str = "tavily", timeout_s: float = 20
) -> AsyncIterator[tuple[Server, Web]]:
    async def sleep(seconds: float) -> None:
        server.waits.append(seconds)

    server, app = Server(*responses), web.Application()
    app.router.add_post("/search", server.answer)
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1) as url:
        yield (
            server,
            Web(
                service=service,
                key_env=KEY_ENV,
                url=f"{url}/search",
                timeout_s=timeout_s,
                sleep=sleep,
            ),
        )


def results(*texts: str) -> dict[str, Any]:
    return {
        "results": [{"title": f"T{place}", "content": text} for place, text in enumerate(texts)]
    }


async def test_tavily() -> None:
    async with served(results("one", "two", "three")) as (server, search):
        hits = await search.find("a query", 2)
        assert [(hit.title, hit.text) for hit in hits] == [("T0", "one"), ("T1", "two")]
        headers, body = server.requests[0]
        assert (headers["Authorization"], body) == (
            f"Bearer {KEY}",
            {"query": "a query", "max_results": 2},
        )


async def test_serper() -> None:
    answer = {"organic": [{"title": "T", "link": "x", "snippet": "one"}], "searchParameters": {}}
    async with served(answer, service="serper") as (server, search):
        assert await search.find("a query", 3) == [Document(title="T", text="one")]
        headers, body = server.requests[0]
        assert (headers["X-API-KEY"], body) == (KEY, {"q": "a query", "num": 3})


async def test_removes_the_key_from_responses() -> None:
    async with served({"results": [{"title": KEY, "content": f"your key is {KEY}!"}]}) as (
        _,
        search,
    ):
        answer = await search_tool(search).call({"query": "key"})
        assert answer == "[1] [key]\nyour key is [key]!"
        assert KEY not in repr(search)


@pytest.mark.parametrize("trouble", [429, 500, 503, "leave"])
async def test_retries_transient_failures(trouble: Any) -> None:
    async with served(trouble, trouble, results("one")) as (server, search_):
        assert [hit.text for hit in await search_.find("q", 5)] == ["one"]
        assert len(server.requests) == 3
        assert server.waits == [search.BACKOFF_S, 2 * search.BACKOFF_S]


@pytest.mark.parametrize(
    ("trouble", "attempts", "message"),
    [
        (429, 3, "status 429"),
        (500, 3, "status 500"),
        ("leave", 3, "ServerDisconnectedError"),
        (401, 1, "status 401"),
        (302, 1, "status 302"),
        ("<html>", 1, "another shape: JSONDecodeError"),
        ("[" * 100_000, 1, "another shape"),
        ([1], 1, "another shape: AttributeError"),
        ({"results": 3}, 1, "another shape: TypeError"),
        ("x" * (search.WEB_BYTES + 1), 1, "more than"),
    ],
)
async def test_reports_permanent_failures(trouble: Any, attempts: int, message: str) -> None:
    async with served(trouble) as (server, search_):
        with pytest.raises(EnvError, match=message) as raised:
            await search_.find("q", 5)
        assert len(server.requests) == attempts
        assert KEY not in str(raised.value)


async def test_a_search_times_out() -> None:
    async with served("hang", timeout_s=0.1) as (_, search):
        with pytest.raises(EnvError, match="TimeoutError"):
            await search.find("q", 5)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_rejected_query_finds_nothing(status: int) -> None:
    async with served(status) as (_, search):
        assert await search_tool(search).call({"query": "?"}) == NOTHING


@pytest.mark.parametrize("search", [{}, {"results": []}])
async def test_no_results(search: Any) -> None:
    async with served(search) as (_, of):
        assert await search_tool(of).call({"query": "?"}) == NOTHING


async def test_reads_malformed_results_as_far_as_possible() -> None:
    odd: Sequence[Any] = [3, None, {"title": 4, "content": None}, {"content": "word " * 1000}]
    async with served({"results": odd}) as (_, search_):
        first, second = await search_.find("q", 5)
        assert first == Document(title="", text="")
        assert len(second.text.split()) == search.PASSAGE_WORDS + 1


async def test_the_tool() -> None:
    tool = search_tool(
        Bm25([Document(title=f"Cat {place}", text="It purrs.") for place in range(20)])
    )
    assert (await tool.call({"query": "purrs"})).count("It purrs.") == search.COUNT
    assert (
        await tool.call({"query": "purrs", "count": 2})
    ) == "[1] Cat 0\nIt purrs.\n\n[2] Cat 1\nIt purrs."
    assert await tool.call({"query": "dog"}) == NOTHING
    assert (await tool.call({"query": "purrs " * 10_000})).count("It purrs.") == search.COUNT


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"service": "bing", "key_env": KEY_ENV},
            r"options\.web\.service must be one of tavily, serper, got 'bing'",
        ),
        (
            {"service": "tavily", "key_env": "NOT_SET"},
            r"options\.web\.key_env must name an environment variable that is set",
        ),
        (
            {"service": "tavily", "key_env": KEY_ENV, "url": "ftp://x"},
            r"options\.web\.url must be http\(s\)://…, got 'ftp://x'",
        ),
        (
            {"service": "tavily"},
            r"options\.web must have service, key_env and perhaps url, got service",
        ),
        (
            {"service": "tavily", "key_env": KEY_ENV, "key": "x"},
            r"options\.web must have .*got key, key_env, service",
        ),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        web_search(options)
    assert KEY not in str(raised.value)
