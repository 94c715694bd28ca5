"""Search for agents: over documents (`corpus.Bm25`), or on the web with the user's key.

Invariants: an answer is at most about `COUNT_MOST` passages long; the key is read from
the environment, is sent to the search service's address only, and is removed from every
response.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from rollweave.envs.handlers.base import Tool
from rollweave.schema.errors import ConfigError, EnvError
from rollweave_envs.corpus import PASSAGE_WORDS, Document

COUNT, COUNT_MOST = 5, 10
"""Number of passages in an answer: the default, and the maximum."""

QUERY_CHARS = 400
"""Maximum length of a query; a longer one is cut."""

WEB_S = 15.0
"""Time limit in seconds of a web search: three tries take less than the default step_s
of a domain.
"""

TRIES, BACKOFF_S = 3, 0.5
"""Number of tries of a web search that fails or is rate-limited, and the first wait
between them, which doubles.
"""

WEB_BYTES = 4 * 2**20
"""Maximum bytes of a web search's response."""

NOTHING = "Nothing was found. Try other words."


class Search(Protocol):
    """A search backend."""

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """Return at most `count` passages, the best first.

        Raises EnvError if the search fails.
        """


@dataclass(frozen=True, kw_only=True)
class Service:
    """The HTTP interface of a web search: POST of JSON, with the key in a header, and
    the location of its results.
    """

    url: str
    header: str
    value: str
    query: str
    count: str
    results: str
    text: str


SERVICES = {
    "tavily": Service(
        url="https://api.tavily.com/search",
        header="Authorization",
        value="Bearer {}",
        query="query",
        count="max_results",
        results="results",
        text="content",
    ),
    "serper": Service(
        url="https://google.serper.dev/search",
        header="X-API-KEY",
        value="{}",
        query="q",
        count="num",
        results="organic",
        text="snippet",
    ),
}


class Web:
    """A web search: `service` is one of `SERVICES`, or its protocol at `url`; `key_env`
    names the variable with the key.
    """

    def __init__(
        self,
        *,
        service: str,
        key_env: str,
        url: str = "",
        timeout_s: float = WEB_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if service not in SERVICES:
            raise ConfigError(
                f"options.web.service must be one of {', '.join(SERVICES)}, got {service!r}"
            )
        key = os.environ.get(str(key_env), "").strip()
        if not key:
            raise ConfigError(
                "options.web.key_env must name an environment variable that is "
                f"set, got {key_env!r}"
            )
        self._service, self._key, self._url = SERVICES[service], key, url or SERVICES[service].url
        self._timeout_s, self._sleep = timeout_s, sleep
        if not self._url.startswith(("https://", "http://")):
            raise ConfigError(f"options.web.url must be http(s)://…, got {url!r}")

    async def find(self, query: str, count: int) -> Sequence[Document]:
        raw, how = b"", ""
        for attempt in range(TRIES):
            if attempt:
                await self._sleep(BACKOFF_S * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, raw = await self._request(query, count)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                how = type(error).__name__
                continue
            if status in (400, 422):
                return ()  # the service rejects this query
            if status == 200:
                return self._read(raw, count)
            how = f"status {status}"
            if status != 429 and status < 500:
                break
        raise EnvError(f"the search at {self._url} failed: {how}")

    async def _request(self, query: str, count: int) -> tuple[int, bytes]:
        service = self._service
        headers, body = (
            {service.header: service.value.format(self._key)},
            {service.query: query, service.count: count},
        )
        async with (
            aiohttp.ClientSession() as http,
            # A redirect would take the key elsewhere.
            http.post(self._url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            raw = bytearray()
            async for part in answer.content.iter_chunked(2**16):
                raw += part
                if len(raw) > WEB_BYTES:
                    raise EnvError(
                        f"the search at {self._url} answered with more than {WEB_BYTES} bytes"
                    )
            return answer.status, bytes(raw)

    def _read(self, raw: bytes, count: int) -> Sequence[Document]:
        try:
            answer = json.loads(raw)
            results = [
                result
                for result in answer.get(self._service.results, [])
                if isinstance(result, dict)
            ]
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise EnvError(
                f"the search at {self._url} answered with another shape: {type(error).__name__}"
            ) from None
        return [
            Document(
                title=_cut(self._clean(result.get("title"))),
                text=_cut(self._clean(result.get(self._service.text))),
            )
            for result in results[:count]
        ]

    def _clean(self, value: object) -> str:
        return (value if isinstance(value, str) else "").replace(self._key, "[key]")


def search_tool(search: Search) -> Tool:
    """Return the tool `search` for an agent."""

    async def call(arguments: dict[str, Any]) -> str:
        hits = await search.find(
            arguments["query"][:QUERY_CHARS], int(arguments.get("count", COUNT))
        )
        return (
            "\n\n".join(
                f"[{place}] {hit.title}\n{hit.text}" for place, hit in enumerate(hits, start=1)
            )
            or NOTHING
        )

    fields = {
        "query": {"type": "string", "description": "A few words."},
        "count": {
            "type": "integer",
            "minimum": 1,
            "maximum": COUNT_MOST,
            "description": f"Of passages; {COUNT} by default.",
        },
    }
    parameters = {
        "type": "object",
        "properties": fields,
        "required": ["query"],
        "additionalProperties": False,
    }
    return Tool(
        name="search",
        description="Find passages of documents by their words.",
        parameters=parameters,
        call=call,
    )


def web_search(options: Mapping[str, Any]) -> Web:
    """Return the web search of these options. Raises ConfigError if they are
    invalid.
    """
    unknown, missing = (
        options.keys() - {"service", "key_env", "url"},
        {"service", "key_env"} - options.keys(),
    )
    if unknown or missing:
        raise ConfigError(
            "options.web must have service, key_env and perhaps url, got "
            f"{', '.join(sorted(options)) or 'none'}"
        )
    return Web(**options)


def _cut(text: str) -> str:
    words = text.split()
    return " ".join(words[:PASSAGE_WORDS]) + (" …" if len(words) > PASSAGE_WORDS else "")
