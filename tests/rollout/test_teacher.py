"""The teacher's log-probs belong to the student's tokens; every other answer is an
error that names the teacher, within a limit.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models

from rollweave.rollout.http_service import MAX_UNREADABLE
from rollweave.rollout.teacher import (
    PROBED_TOKENS,
    Teacher,
    TeacherError,
    check_teacher,
)
from rollweave.schema.config.training import TeacherConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Segment, SegmentKind, TokenSequence

DIALECTS = ("completions", "sglang")


def logprob(prefix: list[int], token: int) -> float:
    """Return what the fake teacher thinks of a token after a prefix."""
    return -((7 * sum(prefix) + token) % 13) / 4


def text(token: int) -> str:
    return f"word{token}"


class FakeServer:
    """A server that speaks both dialects. `spoil` changes an answer, or raises."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.models = ["big"]
        self.text: Callable[[int], str | None] = text
        self.spoil: Callable[[Any], Any] = lambda answer: answer
        self.url = ""
        self.is_sglang = False

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/model_info", self._model_info),
                web.post("/v1/completions", self._completion),
                web.post("/generate", self._generate),
            ]
        )
        return app

    async def _read(self, request: web.Request) -> dict[str, Any]:
        self.tokens.append(request.headers.get("Authorization", ""))
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        return body

    async def _model_info(self, _: web.Request) -> web.Response:
        if not self.is_sglang:
            raise web.HTTPNotFound
        return web.json_response({"model_path": "big"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _completion(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("big", 1, 0)
        prompt = body["prompt"]
        entries: list[Any] = [None]
        for at, token in enumerate(prompt[1:], start=1):
            value = {"logprob": logprob(prompt[:at], token), "decoded_token": self.text(token)}
            entries.append({str(token): value})
        answer = self.spoil({"choices": [{"prompt_logprobs": entries}]})
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
        prompt = body["input_ids"]
        shown = self.text if body.get("return_text_in_logprobs") else lambda _: None
        entries = [
            [logprob(prompt[:at], token) if at else None, token, shown(token)]
            for at, token in enumerate(prompt)
        ]
        answer = self.spoil({"meta_info": {"input_token_logprobs": entries}})
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    runner = web.AppRunner(fake.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


def sequence() -> TokenSequence:
    """A prompt, an answer, an observation, an answer, and a last observation."""
    parts = [("prompt", 3), ("output", 2), ("observation", 2), ("output", 3), ("observation", 1)]
    segments, start = [], 0
    for kind, count in parts:
        version = 0 if kind == "output" else -1
        segments.append(
            Segment(start=start, end=start + count, kind=SegmentKind(kind), version=version)
        )
        start += count
    tokens = tuple((3 * at) % 11 for at in range(start))
    return TokenSequence(tokens=tokens, segments=tuple(segments), logprobs=(0.0,) * start)


Make = Callable[..., Teacher]


@pytest.fixture
async def teacher_of(server: FakeServer) -> AsyncIterator[Make]:
    """Return what makes teachers, which are closed in the end."""
    made: list[Teacher] = []

    def make(
        *, dialect: str = "completions", timeout_s: float | None = None, **changes: Any
    ) -> Teacher:
        server.is_sglang = dialect == "sglang"
        config = TeacherConfig.model_validate({"url": server.url, **changes})
        clock = asyncio.get_running_loop().time
        made.append(Teacher(config, clock=clock, timeout_s=timeout_s))
        return made[-1]

    yield make
    for teacher in made:
        await teacher.close()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_output_tokens_get_the_log_probs_of_the_teacher(
    server: FakeServer, teacher_of: Make, dialect: str
) -> None:
    teacher = teacher_of(dialect=dialect)
    given = sequence()
    prompt = TokenSequence(
        tokens=(1, 2),
        segments=(Segment(start=0, end=2, kind=SegmentKind.PROMPT),),
        logprobs=(0.0, 0.0),
    )
    taught, untouched = await teacher.teach((given, prompt))
    assert untouched == prompt  # nothing was sampled
    assert len(server.requests) == 1
    tokens = list(given.tokens)
    assert list(taught.teacher) == [
        logprob(tokens[:at], token) if sampled else 0.0
        for (at, token), sampled in zip(enumerate(tokens), given.output_mask(), strict=True)
    ]
    sent = server.requests[0]["prompt" if dialect == "completions" else "input_ids"]
    assert sent == tokens[:-1]  # the last observation is not sent


@pytest.mark.usefixtures("quick")
async def test_a_busy_teacher_is_asked_again_and_its_wait_is_named(
    server: FakeServer, teacher_of: Make
) -> None:
    teacher = teacher_of(model="big")
    waits = []

    def spoil(answer: Any) -> Any:
        waits.append(teacher.wait())
        statuses = {1: 503, 2: 429, 3: 500}
        status = statuses.get(len(server.requests))
        return answer if status is None else web.Response(status=status, text="loading")

    server.spoil = spoil
    (taught,) = await teacher.teach((sequence(),))
    assert taught.teacher
    assert len(server.requests) == 4
    assert [wait.service for wait in waits if wait] == [f"teacher {server.url}"] * 4
    last = waits[-1]
    assert last.what == "1 trajectory waits; status 500 of /v1/completions: loading"
    assert teacher.wait() is None


def changed(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    """Return what changes the entries of an answer."""

    def spoil(answer: Any) -> Any:
        change(answer["choices"][0]["prompt_logprobs"])
        return answer

    return spoil


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda _: {"choices": [{}]}, "its answer has no prompt_logprobs: the server does not"),
        (changed(list.pop), "it gave 9 log-probs for 10 tokens"),
        (
            changed(lambda entries: entries.__setitem__(2, {"99": {"logprob": -1.0}})),
            "its answer has no log-prob of token 2, whose id is 6",
        ),
        (
            changed(lambda entries: next(iter(entries[1].values())).update(logprob=3.0)),
            "the log-prob of token 1 must be at most 0, got 3.0",
        ),
        (lambda _: {"choices": []}, "its answer has no prompt_logprobs"),
        (lambda _: [], "its answer cannot be read"),
        (
            lambda _: web.Response(text='{"choices": [{"prompt_logprobs": [NaN]}]}'),
            "cannot be read",
        ),
    ],
)
@pytest.mark.usefixtures("quick")
async def test_a_wrong_answer_is_asked_for_again_and_then_an_error(
    server: FakeServer, teacher_of: Make, spoil: Callable[[Any], Any], error: str
) -> None:
    server.spoil = lambda answer: spoil(answer) if len(server.requests) != 3 else answer
    teacher = teacher_of()
    (taught,) = await teacher.teach((sequence(),))
    assert taught.teacher
    with pytest.raises(TeacherError, match=error):
        await teacher.teach((sequence(),))
    assert len(server.requests) == 3 + MAX_UNREADABLE


SGLANG = {"dialect": "sglang"}


def of_sglang(entries: Any) -> Callable[[Any], Any]:
    return lambda _: {"meta_info": {"input_token_logprobs": entries}}


@pytest.mark.parametrize(
    ("spoil", "settings", "error", "requests"),
    [
        (
            lambda _: web.Response(status=400, text="too long"),
            {},
            r"status 400 of /v1/comp.*: too",
            1,
        ),
        (
            lambda _: web.Response(body=b"{" * 1001),
            {},
            "/v1/comp.* gave an answer of more than 1000",
            3,
        ),
        (of_sglang(None), SGLANG, "it gave 0 log-probs for 10 tokens", 3),
        (of_sglang([]), SGLANG, "it gave 0 log-probs for 10 tokens", 3),
        (of_sglang([[None, 0, None]]), SGLANG, "it gave 1 log-probs for 10 tokens", 3),
        (of_sglang([[None, at, None] for at in range(10)]), SGLANG, "no log-prob of token 1", 3),
    ],
)
@pytest.mark.usefixtures("quick")
async def test_what_is_no_answer_is_an_error(
    server: FakeServer,
    teacher_of: Make,
    spoil: Callable[[Any], Any],
    settings: dict[str, Any],
    error: str,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.rollout.http_service.ANSWER_BYTES", 1000)
    server.spoil = spoil
    with pytest.raises(TeacherError, match=error):
        await teacher_of(**settings).teach((sequence(),))
    assert len(server.requests) == requests


async def test_a_teacher_that_never_answers_is_given_up_within_the_limit(
    server: FakeServer, teacher_of: Make
) -> None:
    server.spoil = lambda _: web.Response(status=503, text="busy")
    with pytest.raises(TeacherError, match=r"gave no log-probs within 0.2 s: status 503 of .*busy"):
        await teacher_of(timeout_s=0.2).teach((sequence(),))
    absent = teacher_of(timeout_s=0.2, url="http://127.0.0.1:9")
    with pytest.raises(TeacherError, match=r"teacher http://127.0.0.1:9 gave no log-probs within"):
        await absent.teach((sequence(),))


async def test_a_server_of_several_models_needs_a_name(
    server: FakeServer, teacher_of: Make
) -> None:
    server.models = ["a", "b"]
    with pytest.raises(TeacherError, match=r"teacher.model must name one of its models \(a, b\)"):
        await teacher_of().teach((sequence(),))


def tokenizer(size: int = 1000) -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({text(token): token for token in range(size)}, unk_token=text(0))
    )
    made.decoder = decoders.Fuse()
    return made


async def checked(
    server: FakeServer, size: int = 1000, *, dialect: str = "completions", **changes: Any
) -> int:
    server.is_sglang = dialect == "sglang"
    config = TeacherConfig.model_validate({"url": server.url, **changes})
    return await asyncio.to_thread(check_teacher, config, tokenizer(size), limit_s=5.0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("size", [7, 1000])
async def test_a_teacher_with_the_same_vocabulary(
    server: FakeServer, dialect: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWEAVE_TEACHER_TOKEN", "secret")
    count = await checked(server, size, dialect=dialect)
    assert min(size, PROBED_TOKENS) <= count <= PROBED_TOKENS + 1
    assert set(server.tokens) == {"Bearer secret"}
    assert all(len(json.dumps(body)) < 2000 for body in server.requests)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_teacher_with_another_vocabulary_is_refused(
    server: FakeServer, dialect: str
) -> None:
    server.text = lambda token: text(token + 1 if token > 500 else token)
    with pytest.raises(ConfigError, match="must have the student's vocabulary, got another one: "):
        await checked(server, dialect=dialect)
    server.text = lambda _: None
    with pytest.raises(ConfigError, match="must name the texts of tokens, so that its vocabulary"):
        await checked(server, dialect=dialect)
    server.spoil = lambda _: web.Response(status=400, text="token id 999 is out of vocabulary")
    with pytest.raises(ConfigError, match=r"status 400 .*: token id 999 is out of vocabulary"):
        await checked(server, dialect=dialect)
