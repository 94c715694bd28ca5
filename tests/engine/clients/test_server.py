"""The embedded engine behind its HTTP server and client: the tokens are those in
process, and cancelled work ends.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.probe import Logprobs
from rollweave.engine.clients.server import EngineServer
from rollweave.io.http.fields import NEUTRAL, WITHOUT_EFFECT
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.front import ServingFront
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError, EngineLostError
from tests.support.engines import engine_in_thread, tiny_checkpoint

VOCAB = 128
MOST = 30
DIALECTS: tuple[s.DialectName, ...] = ("rollweave", "completions", "prorl")


class Letters(TextCodec):
    """A tokenizer of single letters."""

    def encode_literal(self, text: str, *, adds_special: bool = False) -> tuple[int, ...]:
        del adds_special
        return tuple(map(ord, text))

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def application(engine: Any, **limits: Any) -> web.Application:
    """Return an engine's server with the front of OpenAI's APIs."""
    server = EngineServer(engine, model="tiny", **limits)
    app = server.application()
    ServingFront(server, Letters(None), context=256).add_to(app)
    return app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("served"))


class Served:
    """An engine in a thread, and the address at which it is served."""

    def __init__(self, engine: EngineClient, url: str) -> None:
        self.engine, self.url = engine, url

    @asynccontextmanager
    async def remote(
        self, dialect: s.DialectName = "rollweave", *, check_s: float = 1000.0
    ) -> AsyncIterator[HttpEngine]:
        spec = HttpSpec(name="remote", url=self.url, vocab=VOCAB, dialect=dialect)
        engine = HttpEngine(spec, reply_s=10.0, check_s=check_s)
        try:
            await engine.ready()
            yield engine
        finally:
            await engine.close()

    async def until(self, meets: Callable[[s.EngineStats], bool]) -> s.EngineStats:
        """Return the engine's state once it satisfies the condition."""
        while not meets(stats := await self.engine.stats()):
            continue
        return stats

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, headers=head) as response,
        ):
            return response.status, json.loads(await response.read())


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    spec = s.EngineSpec(
        id=EngineId("e0"), model=str(model), max_slots=4, kv_tokens=2048, deterministic=True
    )
    engine = engine_in_thread(spec, reply_s=20.0)
    app = application(engine, read_s=0.5, max_requests=MOST)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await engine.ready()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Served(engine, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()
    await engine.close()


SAMPLINGS = [
    s.Sampling(temperature=0.0, max_tokens=30),
    s.Sampling(temperature=1.0, max_tokens=30, seed=3),
    s.Sampling(temperature=0.7, top_p=0.9, top_k=20, max_tokens=30, seed=1 << 62),
    s.Sampling(temperature=1.3, max_tokens=30, seed=4, stop_token_ids=tuple(range(0, 128, 9))),
]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_served_tokens_equal_the_engine_s(served: Served, dialect: s.DialectName) -> None:
    async with served.remote(dialect) as remote:
        assert remote._logprobs is Logprobs.SAMPLED
        requests = [
            s.GenerateRequest(id=f"r{number}-{at}", tokens=(5, 6, 7 + at), sampling=sampling)
            for number, sampling in enumerate(SAMPLINGS)
            for at in range(3)
        ]
        here = [await served.engine.generate(request) for request in requests]
        there = await asyncio.gather(*(remote.generate(request) for request in requests))
        for local, served_result in zip(here, there, strict=True):
            expected = (local.id, local.tokens, local.logprobs)
            assert (served_result.id, served_result.tokens, served_result.logprobs) == expected
            assert served_result.finish is local.finish
            assert [(span.start, span.end, span.version) for span in served_result.versions] == [
                (0, len(local.tokens), 0)
            ]
        assert {result.finish for result in there} == {s.FinishReason.LENGTH, s.FinishReason.STOP}


async def test_ready_and_stats_are_forwarded(served: Served) -> None:
    async with served.remote() as remote:
        here, there = await served.engine.ready(), await remote.ready()
        assert there == msgspec.structs.replace(here, version=0, stages=False, moves_kv=False)
        assert (await remote.stats()).kv_total_tokens == here.kv_total_tokens
        request = s.GenerateRequest(
            id="r0", tokens=tuple(range(2, 42)), sampling=s.Sampling(max_tokens=3)
        )
        await remote.generate(request)
        assert (await remote.generate(request)).cached_tokens >= 32
        second = s.GenerateRequest(
            id="r1", tokens=(5,), sampling=s.Sampling(max_tokens=200), budget_s=1e-6
        )
        assert (await remote.generate(second)).finish is s.FinishReason.TIME
        masked = s.GenerateRequest(
            id="r2", tokens=(5,), sampling=s.Sampling(max_tokens=20, allowed=(7, 8))
        )
        assert set((await remote.generate(masked)).tokens) <= {7, 8}
        with pytest.raises(EngineError, match=r"tokens must be in \[0, 128\)"):
            await remote.generate(s.GenerateRequest(id="r3", tokens=(500,)))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_disconnecting_stops_the_generation(served: Served, dialect: s.DialectName) -> None:
    """While it is suspended, the engine cannot have finished the request by itself."""
    async with served.remote(dialect) as remote:
        await served.engine.suspend()
        answer = remote.generate(
            s.GenerateRequest(id="r0", tokens=(5,), sampling=s.Sampling(max_tokens=200))
        )
        await served.until(lambda stats: stats.waiting == 1)
        answer.cancel()
        await served.until(lambda stats: stats.waiting + stats.running == 0)
        served.engine.resume()
        assert (await remote.generate(s.GenerateRequest(id="r0", tokens=(5,)))).id == "r0"


async def test_running_generation_is_stopped(served: Served) -> None:
    async with served.remote() as remote:
        before = (await served.engine.stats()).output_tokens
        answer = remote.generate(
            s.GenerateRequest(
                id="r0", tokens=(5,), sampling=s.Sampling(max_tokens=250, stop_token_ids=())
            )
        )
        await served.until(lambda stats: stats.output_tokens > before)
        await served.engine.suspend()
        stats = await served.engine.stats()
        if stats.running:  # else it was faster than we could stop it
            answer.cancel()
            await served.until(lambda stats: stats.running == 0)


async def test_abort_returns_the_tokens_so_far(served: Served) -> None:
    async with served.remote() as remote:
        await served.engine.suspend()
        answer = remote.generate(
            s.GenerateRequest(id="r0", tokens=(5,), sampling=s.Sampling(max_tokens=200))
        )
        await served.until(lambda stats: stats.waiting == 1)
        remote.abort("r0")
        result = await answer
        assert (result.id, result.finish) == ("r0", s.FinishReason.ABORTED)
        served.engine.resume()


async def test_text_is_served_with_a_tokenizer(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    status, answer = await served.post("/v1/completions", body)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["text"] == "".join(map(chr, choice["token_ids"]))
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) <= 4
    assert answer["usage"]["prompt_tokens"] == 3
    bare = await served.post(
        "/v1/completions", {"prompt": [97, 98, 99], "max_tokens": 4, "temperature": 0, "n": None}
    )
    assert bare[1]["choices"][0]["text"] == choice["text"]
    assert bare[1]["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    ("stop", "visible"),
    [
        ({}, "hello"),
        ({"stop": "lo"}, "hel"),
        ({"stop": ["x", "l"]}, "he"),
        ({"stop_token_ids": [ord("o")]}, "hell"),
    ],
)
async def test_text_ends_before_the_stop(stop: dict[str, Any], visible: str) -> None:
    class Speaker:
        async def generate(
            self, request: s.GenerateRequest, on_tokens: Any, *, report_s: float
        ) -> s.GenerateResult:
            tokens = tuple(map(ord, "hello"))
            versions = (s.VersionSpan(start=0, end=5, version=0),)
            return s.GenerateResult(
                id=request.id,
                tokens=tokens,
                logprobs=(0.0,) * 5,
                versions=versions,
                finish=s.FinishReason.STOP,
            )

    speaker: Any = Speaker()
    app = application(speaker)
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=1.0) as url:
        body = {"prompt": "say", "return_token_ids": True, **stop}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=body) as response,
        ):
            (choice,) = (await response.json())["choices"]
    assert (choice["text"], len(choice["token_ids"])) == (visible, 5)


async def test_neutral_and_unknown_fields_change_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown field of OpenAI's API is ignored, with one warning."""
    body = {"prompt": [5], "max_tokens": 6, "seed": 1, "return_token_ids": True}
    plain = (await served.post("/v1/completions", body))[1]["choices"]
    nothing = {name: values[0] for name, values in NEUTRAL.items() if values}
    with_others = nothing | dict.fromkeys(WITHOUT_EFFECT, "x") | {"surprise": 1} | body
    for _ in range(2):
        status, answer = await served.post("/v1/completions", with_others)
        assert (status, answer.get("choices")) == (200, plain)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["ignored: surprise = 1"]


async def test_requests_without_a_seed_differ(served: Served) -> None:
    answers = [
        await served.post("/generate", {"prompt_ids": [5], "max_tokens": 12}) for _ in range(4)
    ]
    assert len({tuple(answer["response_ids"]) for _, answer in answers}) > 1


REFUSED: dict[str, list[tuple[object, str]]] = {
    "/v1/completions": [
        ({"prompt": [5], "best_of": 2}, "best_of must be 1 or null: it is not supported, got 2"),
        (
            {"prompt": [5], "stream": True, "prompt_logprobs": 0},
            "prompt_logprobs must be null where stream is true",
        ),
        ({"prompt": [5], "length_penalty": 1.05}, "length_penalty must be 1 or null"),
        (
            {"prompt": [5], "logit_bias": {"word": 1.0}},
            "logit_bias must have token ids as its keys",
        ),
        ({"prompt": [5], "bad_words": [" "]}, "bad_words must have texts"),
        (
            {"prompt": [5], "structured_outputs": {"json": {}}},
            "sampling.constraint needs a tokenizer",
        ),
        ({"prompt": [5], "logprobs": 21}, "logprobs: Input should be less"),
        ([5], "body: Input should be an object"),
        ({"prompt": [], "max_tokens": 2}, "at least one token"),
        ({"prompt": [5], "temperature": -1}, "temperature: Input should be greater"),
        ({"prompt": [5], "max_tokens": "many"}, "max_tokens: Input should be a valid int"),
        ({"prompt": [5.5]}, "prompt.0"),
        ({"prompt": ["a", 5]}, "prompt"),
        (b'{"prompt": [5', "Invalid JSON"),
    ],
    "/generate": [
        ({"prompt_ids": [5], "surprise": 1}, "surprise must not be given"),
        ({"prompt_ids": [5], "max_tokens": 1, "min_p": 0.1}, "min_p must be 0 or null"),
        ({"prompt_ids": [5]}, "max_tokens must be given, got none"),
        ({"prompt_ids": [5], "max_tokens": "many"}, "max_tokens must be int, got 'many'"),
        ({"prompt_ids": [5, "x"], "max_tokens": 1}, "prompt_ids.1 must be int, got 'x'"),
        ([5], "the body must be object, got [5]"),
        (b'{"prompt_ids": [5', "the body must be JSON: "),
        (b'{"max_tokens": "x", "a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "fewer levels"),
        ({"prompt_ids": [999], "max_tokens": 1}, "prompt_ids must be in"),
        ({"prompt_ids": [], "max_tokens": 1}, "prompt_ids must have at least one"),
        ({"prompt_ids": [10**30], "max_tokens": 1}, "prompt_ids"),
        (b'{"prompt_ids": [5], "max_tokens": 1e400}', "numbers must be at most 1.8e308"),
        (b'{"prompt_ids": [5], "a": {"b": -2e999}}', "numbers must be at most 1.8e308"),
        (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "fewer levels"),
        (
            {"prompt_ids": [5], "max_tokens": 1, "temperature": 1e-40},
            "temperature must be 0, or at least 1e-30",
        ),
        ({"two\nlines": 1}, "'two\\nlines' must not be given"),
    ],
    "/rollweave/v1/generate": [
        (
            {"id": "r0", "tokens": [5], "surprise": 1},
            "surprise must not be given: no field of that name is known, got 1",
        ),
        (
            {"id": "r0", "tokens": [5], "sampling": {"temperature": -1}},
            "temperature must be 0, or at least",
        ),
        (b"\x00" * 10, "the body must be JSON: "),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
async def test_unsupported_requests_are_refused_with_the_reason(served: Served, path: str) -> None:
    for body, reason in REFUSED[path]:
        status, answer = await served.post(path, body)
        assert (status, reason in answer["error"]["message"]) == (400, True), (reason, answer)
        assert "detail" not in answer or answer["detail"] == answer["error"]["message"]


async def test_other_paths_and_methods_are_refused(served: Served) -> None:
    for path, status, reason in (("/nowhere", 404, "Not Found"), ("/health", 405, "Not Allowed")):
        code, answer = await served.post(path, {})
        assert code == status
        assert reason in answer["error"]["message"]


async def test_all_ways_to_generate_are_in_the_metrics(served: Served) -> None:
    """The outcomes of each are those of its answers."""
    for path, body in (
        ("/generate", {"prompt_ids": [5], "max_tokens": 2}),
        ("/rollweave/v1/generate", {"id": "r0", "tokens": [5], "sampling": {"max_tokens": 3}}),
        ("/v1/completions", {"prompt": [5], "max_tokens": 1}),
    ):
        before = await metrics(served)
        status, _ = await served.post(path, body)
        wrong = "temperature" if path == "/v1/completions" else "surprise"
        refused, answer = await served.post(path, {**body, wrong: -1})
        assert (status, refused, answer["error"]["param"]) == (200, 400, wrong)
        after = await metrics(served)
        grown = {name for name, value in after.items() if value != before.get(name)}
        assert {
            'rollweave_serving_requests_total{outcome="answered"}',
            'rollweave_serving_requests_total{outcome="refused"}',
            'rollweave_serving_tokens_total{kind="output"}',
            "rollweave_serving_request_seconds_count",
        } <= grown, path
        assert 'rollweave_serving_requests_total{outcome="failed"}' not in grown
        assert 'rollweave_serving_requests_total{outcome="cancelled"}' not in grown


async def metrics(served: Served) -> dict[str, str]:
    async with aiohttp.ClientSession() as http, http.get(served.url + "/metrics") as got:
        return dict(re.findall(r"^(\S+) (\S+)$", await got.text(), re.MULTILINE))


async def test_too_many_requests_are_refused_with_a_retry_time(served: Served) -> None:
    async with served.remote() as remote:
        await served.engine.suspend()
        waiting = [
            remote.generate(s.GenerateRequest(id=f"r{number}", tokens=(5,)))
            for number in range(MOST)
        ]
        await served.until(lambda stats: stats.waiting == MOST)
        status, answer = await served.post("/generate", {"prompt_ids": [5], "max_tokens": 1})
        assert (status, answer["detail"]) == (429, "Too Many Requests")
        second = remote.generate(s.GenerateRequest(id="late", tokens=(5,)))
        served.engine.resume()
        assert len(await asyncio.gather(*waiting, second)) == MOST + 1


async def test_unfinished_request_is_cut_off(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b"408" in await reader.readline()
    writer.close()


async def test_lost_engine_is_reported_and_lost_to_its_clients(served: Served) -> None:
    async with served.remote(check_s=0.05) as remote:
        await served.engine.suspend()
        pending = remote.generate(s.GenerateRequest(id="r0", tokens=(5,)))
        await served.until(lambda stats: stats.waiting == 1)
        served.engine.kill()
        with pytest.raises(EngineLostError, match="its health is status 503"):
            await pending
        assert remote.lost.done()
        status, answer = await served.post("/v1/completions", {"prompt": [5]})
        assert status == 503
        assert "killed" in answer["error"]["message"]


async def test_completions_score_the_prompt_as_vllm_does(served: Served) -> None:
    prompt = [5, 9, 2, 77]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
    status, answer = await served.post("/v1/completions", body)
    assert status == 200
    first, *entries = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in entries] == [[str(token)] for token in prompt[1:]]
    assert [
        entry[str(token)]["decoded_token"] for entry, token in zip(entries, prompt[1:], strict=True)
    ] == [chr(token) for token in prompt[1:]]
    for at, entry in enumerate(entries, start=1):
        # the log-prob of a token is that with which it would be sampled
        body = {"prompt": prompt[:at], "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
        _, sampled = await served.post(
            "/v1/completions", {**body, "allowed_token_ids": [prompt[at]]}
        )
        assert sampled["choices"][0]["token_ids"] == [prompt[at]]
        (expected,) = sampled["choices"][0]["logprobs"]["token_logprobs"]
        assert entry[str(prompt[at])]["logprob"] == pytest.approx(expected, abs=1e-4)
    _, plain = await served.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert plain["choices"][0]["prompt_logprobs"] is None
    status, answer = await served.post("/v1/completions", {"prompt": prompt, "prompt_logprobs": 21})
    assert status == 400
    assert answer["error"]["message"].startswith("prompt_logprobs: Input should be less")
