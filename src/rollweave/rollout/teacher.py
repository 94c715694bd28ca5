"""The teacher of on-policy distillation: a model behind HTTP that tells how likely each
token of the student's trajectories is.

Invariants: a log-prob belongs to exactly the token that was sent; a call ends as
`rollout/http_service.py` promises. Retrying is harmless, because scoring changes
nothing at the server.
"""

import functools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from rollweave.engine.clients.responses import ResponseError, parse
from rollweave.io.http.guard import optional_token
from rollweave.io.loop_thread import run_apart
from rollweave.rollout.http_service import HttpService, RefusedError, ServiceError
from rollweave.schema.config.training import TeacherConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.work import TokenSequence

TEACHER_TOKEN = "ROLLWEAVE_TEACHER_TOKEN"
"""Environment variable with the bearer token of the teacher's server, if it has one."""

TEACHER_S = 120.0
"""Maximum seconds for the log-probs of one trajectory, with all retries."""

PROBED_TOKENS, PROBE_TOKENS = 512, 64
"""Number of tokens of the vocabulary that are compared, and that one request has."""

DIFFERING = 0.02
"""Maximum share of compared tokens whose texts may differ: servers may clean up the
texts of a few tokens, but those of another vocabulary differ nearly everywhere.
"""


class TeacherError(RollweaveError):
    """The teacher gave no log-probs."""


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float
    decoded_token: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: tuple[dict[str, _TokenLogprob] | None, ...] | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: tuple[tuple[float | None, int, str | None], ...] | None = None


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class _SglangModel(msgspec.Struct, frozen=True):
    model_path: str


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


Teach = Callable[[Sequence[TokenSequence]], Awaitable[tuple[TokenSequence, ...]]]
"""Returns sequences with the teacher's log-probs. Raises TeacherError."""

Scored = tuple[float, str | None]
"""A token's log-prob after those before it, and its text if the server names it."""


class Teacher:
    """The teacher that `config` describes. It starts within `start_s`; `clock` gives
    the times of `wait`. An answer may take `timeout_s` with all retries, `TEACHER_S` if
    it is None.
    """

    def __init__(
        self,
        config: TeacherConfig,
        *,
        clock: Callable[[], float],
        start_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> None:
        """Raises ConfigError for a token that is no printable ASCII."""
        self._config, self._model = config, config.model
        self._sglang: bool | None = None
        """True if the server is SGLang; None while that is not known."""
        self._service = HttpService(
            "teacher",
            config.url,
            answer="log-probs",
            token=optional_token(TEACHER_TOKEN),
            variable=TEACHER_TOKEN,
            timeout_s=TEACHER_S if timeout_s is None else timeout_s,
            start_s=start_s,
            clock=clock,
        )

    def wait(self) -> ServiceWait | None:
        """Return the wait of the calls under way, since the oldest began."""
        return self._service.wait()

    async def teach(self, sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
        """Return the sequences with the teacher's log-probs of their output tokens.

        Raises TeacherError.
        """
        return tuple([await self._taught(sequence) for sequence in sequences])

    async def _taught(self, sequence: TokenSequence) -> TokenSequence:
        mask = sequence.output_mask()
        if not any(mask):
            return sequence
        end = len(mask) - mask[::-1].index(True)
        scored = await self.scored(sequence.tokens[:end])
        teacher = [
            logprob if wanted else 0.0
            for (logprob, _), wanted in zip(scored, mask[:end], strict=True)
        ]
        teacher += [0.0] * (len(mask) - end)
        return msgspec.structs.replace(sequence, teacher=tuple(teacher))

    async def scored(self, tokens: Sequence[int], *, texts: bool = False) -> list[Scored]:
        """Return the log-prob of each token, 0 for the first, and with `texts` its
        text.

        Raises TeacherError.
        """
        try:
            return await self._service.call(functools.partial(self._ask, tokens, texts=texts))
        except ServiceError as error:
            raise TeacherError(str(error)) from error

    async def check_vocabulary(self, tokenizer: Tokenizer) -> int:
        """Compare the texts of tokens of the student's `tokenizer` with those that the
        teacher gives them, and return how many were compared.

        Raises TeacherError if it has another vocabulary, or names no texts.
        """
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        ids = sorted({index * size // PROBED_TOKENS for index in range(PROBED_TOKENS)} | {size - 1})
        compared, wrong = 0, list[tuple[int, str, str]]()
        for start in range(0, len(ids), PROBE_TOKENS - 1):
            # the first token of a prompt has neither log-prob nor text
            part = [ids[0], *ids[start : start + PROBE_TOKENS - 1]]
            for token, (_, text) in list(
                zip(part, await self.scored(part, texts=True), strict=True)
            )[1:]:
                own = tokenizer.decode([token], skip_special_tokens=False).strip()
                if text is None or not own or "\ufffd" in own or not text.strip():
                    continue
                compared += 1
                if text.strip() != own:
                    wrong.append((token, own, text.strip()))
        url = self._config.url
        if 2 * compared < len(ids) and compared < PROBE_TOKENS:
            raise TeacherError(
                f"teacher {url} must name the texts of tokens, so that its vocabulary can be "
                f"compared, got those of {compared} of {len(ids)} tokens"
            )
        if len(wrong) > DIFFERING * compared:
            token, own, other = wrong[0]
            raise TeacherError(
                f"teacher {url} must have the student's vocabulary, got another one: "
                f"{len(wrong)} of {compared} tokens differ, token {token} is {own!r:.40} for the "
                f"student and {other!r:.40} for the teacher"
            )
        return compared

    async def close(self) -> None:
        """Close all connections."""
        await self._service.close()

    async def _is_sglang(self) -> bool:
        """Return whether the server is SGLang, which alone has the route /model_info.
        Raises RetryableError.
        """
        if self._sglang is None:
            try:
                parse(await self._service.exchange("GET", "/model_info"), _SglangModel)
            except ResponseError:
                self._sglang = False
            else:
                self._sglang = True
        return self._sglang

    async def _ask(self, tokens: Sequence[int], *, texts: bool) -> list[Scored]:
        """Send one request. Raises RetryableError or ResponseError."""
        if await self._is_sglang():
            body: dict[str, Any] = {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            if texts:
                body["return_text_in_logprobs"] = True
            answer = parse(await self._service.exchange("POST", "/generate", body), _Generated)
            return _of_sglang(answer, tokens)
        if not self._model:
            models = parse(await self._service.exchange("GET", "/v1/models"), _Models).data
            if len(models) != 1:
                names = ", ".join(model.id for model in models) or "none"
                raise RefusedError(f"teacher.model must name one of its models ({names})")
            self._model = models[0].id
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        answer_ = parse(await self._service.exchange("POST", "/v1/completions", body), _Completion)
        return _of_completion(answer_, tokens)


def _of_completion(answer: _Completion, tokens: Sequence[int]) -> list[Scored]:
    """Return what vLLM's extension `prompt_logprobs` says of each token."""
    entries = answer.choices[0].prompt_logprobs if answer.choices else None
    if entries is None:
        raise ResponseError("its answer has no prompt_logprobs: the server does not offer them")
    if len(entries) != len(tokens):
        raise ResponseError(f"it gave {len(entries)} log-probs for {len(tokens)} tokens")
    scored: list[Scored] = [(0.0, None)]
    for place, (token, entry) in enumerate(zip(tokens[1:], entries[1:], strict=True), start=1):
        own = (entry or {}).get(str(token))
        if own is None:
            raise ResponseError(f"its answer has no log-prob of token {place}, whose id is {token}")
        scored.append((_finite(own.logprob, place), own.decoded_token))
    return scored


def _of_sglang(answer: _Generated, tokens: Sequence[int]) -> list[Scored]:
    entries = answer.meta_info.input_token_logprobs
    if entries is None or len(entries) != len(tokens):
        count = 0 if entries is None else len(entries)
        raise ResponseError(f"it gave {count} log-probs for {len(tokens)} tokens")
    scored: list[Scored] = []
    for place, (token, (logprob, id_, text)) in enumerate(zip(tokens, entries, strict=True)):
        if id_ != token or (logprob is None and place):
            raise ResponseError(f"its answer has no log-prob of token {place}, whose id is {token}")
        scored.append((_finite(logprob, place) if logprob is not None and place else 0.0, text))
    return scored


def _finite(logprob: float, place: int) -> float:
    if not math.isfinite(logprob) or logprob > 1e-3:
        raise ResponseError(f"the log-prob of token {place} must be at most 0, got {logprob}")
    return logprob


def check_teacher(config: TeacherConfig, tokenizer: Tokenizer, *, limit_s: float) -> int:
    """Ask the teacher whether it has the student's vocabulary, and return the number of
    tokens compared. Each request may take `limit_s` at most.

    Raises ConfigError, whose text is the broken rule.
    """

    async def ask() -> int:
        teacher = Teacher(config, clock=time.monotonic, timeout_s=min(limit_s, TEACHER_S))
        try:
            return await teacher.check_vocabulary(tokenizer)
        finally:
            await teacher.close()

    try:
        return run_apart(ask())
    except TeacherError as error:
        raise ConfigError(str(error).removeprefix("teacher ")) from error
