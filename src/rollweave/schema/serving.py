"""Messages between clients and an engine: requests, results, and the commands of the
engine's loop.

An engine's loop takes commands between two steps (RollArt §6.1), so adding or aborting
one request never stalls another.
"""

import enum
from collections.abc import Sequence
from typing import Final, Literal, Self

from rollweave.schema.base import EngineId, Struct, TaggedStruct
from rollweave.schema.events import StepTime
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Routes

DialectName = Literal["rollweave", "vllm", "completions", "sglang", "prorl"]
"""The API of an engine behind HTTP (`engine/clients/dialects.py`)."""


COLDEST: Final = 1e-30
"""Minimum temperature above 0: logits that are divided by a smaller temperature
overflow float32.
"""

STATE_WIDTH: Final = 64
"""Number of values of a turn's state."""


class Constraint(Struct, frozen=True, kw_only=True):
    """The form that the text of a turn must have: JSON of the schema `text`, a match of
    the regular expression `text`, or a text of the grammar `text` (llguidance's Lark).
    """

    kind: Literal["json", "regex", "lark"]
    text: str


class Adjustments(Struct, frozen=True, kw_only=True):
    """Changes of the distribution from which a turn is sampled, as OpenAI's and vLLM's
    APIs define them. They change no log-prob, and turns that are trained on have no
    adjustments.

    `bias` is added to the logits of tokens. The last token of a `banned` sequence is
    never sampled after the others. Tokens that are less than `min_p` times as likely as
    the likeliest are not sampled. No token that ends the turn is sampled before
    `min_tokens`; with `ignores_eos`, only tokens that the request names end the turn.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignores_eos: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"adjustments.min_p must be in [0, 1], got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"adjustments.repetition_penalty must be positive, got {self.repetition_penalty}"
            )
        if self.min_tokens < 0:
            raise ValueError(f"adjustments.min_tokens must be 0 or more, got {self.min_tokens}")
        if not all(self.banned):
            raise ValueError("adjustments.banned must have at least a token each, got none")

    @property
    def has_penalties(self) -> bool:
        """True if a token's chance depends on the tokens before it."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


TokenChances = tuple[tuple[int, float], ...]
"""Tokens with their log-probs."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters. `logprobs` always belong to the sampled token at
    `temperature`, before any restriction.

    `temperature` 0 is greedy, with log-probs at temperature 1. `allowed` restricts
    sampling to these token ids; empty means no restriction. `constraint` restricts
    sampling to tokens with which the text can have the described form. Randomness is
    keyed by `(seed, position)`, so a request's tokens do not depend on the rest of the
    batch. Only the embedded engine makes `adjustments`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    allowed: tuple[int, ...] = ()
    constraint: Constraint | None = None
    adjustments: Adjustments | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not self.temperature >= COLDEST:
            rule = f"must be 0, or at least {COLDEST:g}"
            raise ValueError(f"sampling.temperature {rule}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k must be 0 (off) or more, got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens must be at least 1, got {self.max_tokens}")
        if self.constraint is not None and self.allowed:
            raise ValueError(
                f"sampling.constraint must be null with allowed tokens, got {self.constraint}"
            )


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or a stop string; the stop token is part of `tokens`
    LENGTH = "length"
    TIME = "time"  # `budget_s` was used up
    ABORTED = "aborted"
    RETURNED = "returned"  # an engine that is lent needs its time or memory for its own users
    REFUSED = "refused"  # no engine can meet the constraint: the client is to blame
    ERROR = "error"


def openai_finish_reason(finish: FinishReason) -> str:
    """Return the finish reason in the terms of OpenAI's API: "stop", or "length" if a
    limit cut the turn.
    """
    return "stop" if finish is FinishReason.STOP else "length"


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` were sampled by weights `version`."""

    start: int
    end: int
    version: int


class PartialOutput(Struct, frozen=True, kw_only=True):
    """The first tokens of a turn, at least one, and the seconds in a slot
    (`generate_s`) in which engines sampled them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    generate_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a partial turn must have a log-prob for each token, got {len(self.logprobs)} "
                f"for {len(self.tokens)}"
            )
        if not spans_cover(self.versions, len(self.tokens)):
            raise ValueError(
                f"versions must cover the {len(self.tokens)} tokens of a partial "
                f"turn, got {self.versions}"
            )
        if not self.generate_s >= 0:
            raise ValueError(f"generate_s must be 0 or more, got {self.generate_s}")


def spans_cover(spans: Sequence[VersionSpan], end: int, *, start: int = 0) -> bool:
    """Return whether the spans name one version for each of the tokens `[start, end)`,
    in order.
    """
    for span in spans:
        if span.start != start or span.end <= start:
            return False
        start = span.end
    return start == end


def spans_between(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Return the parts of the spans in `[start, end)`, with one span for neighbors of
    the same version.
    """
    parts = list[VersionSpan]()
    for span in spans:
        first, last = max(start, span.start), min(end, span.end)
        if first >= last:
            continue
        if parts and (parts[-1].version, parts[-1].end) == (span.version, first):
            first = parts.pop().start
        parts.append(VersionSpan(start=first, end=last, version=span.version))
    return tuple(parts)


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Continue `tokens`. A higher `rank` runs first, and equals run in the order of
    arrival. `id` is unique among live requests.

    `budget_s` bounds the seconds in a slot (0 means no bound); waiting and suspension
    do not count. With `resumed`, the turn continues after these tokens (Laminar §3.3):
    they count for `max_tokens`, stop strings and `budget_s`, and are part of the
    result. If they already end the turn, nothing is sampled. With `prompt_logprobs`,
    the result also has the log-probs of the prompt's tokens. `top_logprobs` is the
    number of likeliest tokens that are reported for each token of the answer, and for
    each token of the prompt whose log-prob is reported; only the embedded engine
    reports them, and for the answer also the tokens `logprob_ids`. An engine that
    records routes returns the routes of the tokens from `routes_from` on.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling = Sampling()
    rank: float = 0.0
    budget_s: float = 0.0
    resumed: PartialOutput | None = None
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    routes_from: int = 0


class GenerateResult(Struct, frozen=True, kw_only=True):
    """The continuation, token-exact. `cached_tokens` of the prompt came from the prefix
    cache.

    `queue_s` is the time without a slot, before the first one and while preempted;
    `generate_s` is the time in a slot while the engine was not suspended.
    `first_token_s` is the time from the request's arrival to its first token, 0 if the
    engine does not say. `resumed_tokens` of the tokens were in the request; it is 0 if
    an engine that cannot resume started the turn over. `prompt_logprobs` are the
    log-probs of the prompt's tokens from the second on, at temperature 1, if they were
    requested. `top_logprobs` and `prompt_top_logprobs` have the reported alternatives
    for each token of the answer and of the prompt. `routes` are the routes of prompt
    and answer from an engine that records them, without the last token, which the model
    has not processed. `prompt_tokens` is the engine's own count of the prompt, 0 if it
    does not say. `state` has the `STATE_WIDTH` values of the turn from an engine that
    computes states (`engine/runner`): the model's last hidden state at the last
    position that it has processed, in float16.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    generate_s: float = 0.0
    first_token_s: float = 0.0
    preemptions: int = 0
    resumed_tokens: int = 0
    prompt_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TokenChances, ...] = ()
    prompt_top_logprobs: tuple[TokenChances, ...] = ()
    routes: Routes | None = None
    state: tuple[float, ...] = ()
    error: str = ""

    @classmethod
    def empty(cls, id: str, finish: FinishReason, error: str = "") -> Self:
        """Return a result without a token."""
        return cls(id=id, tokens=(), logprobs=(), versions=(), finish=finish, error=error)


# KV that moves between engines (Heddle §5.3).


class KvMemory(TaggedStruct, frozen=True, kw_only=True):
    """A sealed memory file, which any process on the host can open while the exporting
    engine lives.
    """

    path: str


class KvPort(TaggedStruct, frozen=True, kw_only=True):
    """A TCP listener that sends the payload once, to the first peer that presents the
    secret.
    """

    host: str
    port: int
    secret: bytes


class KvHeld(TaggedStruct, frozen=True, kw_only=True):
    """KV that an inference server holds until another server has read it: the exporting
    server's answer, as JSON, which the importing server gets with its request. The
    answer says when the lease of the KV ends.
    """

    parameters: str


KvTransport = Literal["shm", "tcp"]
"""The transport of a KV migration."""


class KvManifest(Struct, frozen=True, kw_only=True):
    """The KV of the first `tokens` tokens of a context, in whole blocks, as an engine
    exported it under `id`.

    `key` is the key of the last block: a digest of all these tokens and the weights
    (engine/blocks.py). `layout` names the order of the payload's bytes, and
    `model` is a digest of everything else that the numbers depend on. `digests` are the
    xxh3-64 of the payload's chunks, each of `chunk_blocks` blocks except the last. KV
    that servers move themselves has no digests, and its bytes are not counted.
    """

    id: str
    tokens: int
    key: bytes
    publication_id: int
    model: str
    layout: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    chunk_blocks: int
    nbytes: int
    digests: tuple[int, ...]
    where: KvMemory | KvPort | KvHeld


class LendingStats(Struct, frozen=True, kw_only=True):
    """The loans of a serving engine (`LendSpec`), and their totals since it started.

    `lent` is true while a run's model computes here. `cuts` of the budget returned
    pages to serving. `aborted` rollouts were returned, among them all that were live
    at each of the `stalls`. Rollout steps took `rollout_busy_s`, and the latest one
    ended `rollout_age_s` ago. For `delay_s` in total, at least one serving request
    waited for a step of a run's model. `activation_s` is the time from the latest run's
    request until its model was ready.
    """

    lent: bool
    loans: int
    budget_pages: int
    rollout_pages: int
    total_pages: int
    pages_moved: int
    cuts: int
    aborted: int
    stalls: int
    rollout_steps: int
    rollout_tokens: int
    rollout_busy_s: float
    rollout_age_s: float
    delay_s: float
    activation_s: float


class EngineStats(Struct, frozen=True, kw_only=True):
    """A sample of an engine's state.

    Times are in seconds since the engine started, and token counts are totals since
    then. `lending` is set for an engine that lends its slack.
    """

    version: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    suspended_s: float = 0.0
    uptime_s: float = 0.0
    steps: int = 0
    lending: LendingStats | None = None


# Commands to an engine's loop.


class Add(TaggedStruct, frozen=True, kw_only=True):
    """Run a request. With `report_s`, `Progress` also reports its tokens as they are
    sampled, at most this many seconds after the step that sampled them.
    """

    request: GenerateRequest
    report_s: float | None = None


class Abort(TaggedStruct, frozen=True, kw_only=True):
    """Stop request `id` between two steps. It is answered with the tokens so far and
    finish `aborted`.

    Unknown ids are ignored.
    """

    id: str


class Rerank(TaggedStruct, frozen=True, kw_only=True):
    """Set the rank of a live request. The engine preempts locally; a preempted request
    keeps its blocks.
    """

    id: str
    rank: float


class ExportKv(TaggedStruct, frozen=True, kw_only=True):
    """Export the KV of the longest cached prefix of `tokens` for another engine, until
    `ReleaseKv` or a timeout.

    Answered by `KvExported` or `KvRefused`.
    """

    id: str
    tokens: tuple[int, ...]
    over: KvTransport


class ImportKv(TaggedStruct, frozen=True, kw_only=True):
    """Import the KV of a prefix of `tokens` into the prefix cache.

    Answered by `KvImported` or `KvRefused`.
    """

    id: str
    tokens: tuple[int, ...]
    manifest: KvManifest


class ReleaseKv(TaggedStruct, frozen=True, kw_only=True):
    """Free the export, which may still be read if it is `abandoned`: the importing
    engine has not answered. Unknown ids are ignored.
    """

    id: str
    abandoned: bool = False


class Suspend(TaggedStruct, frozen=True, kw_only=True):
    """Take no further step until `Resume`. Requests stay, and new requests queue. With
    `release`, give back the memory of weights and KV, too, until weights are loaded.

    Answered by `Suspended`.
    """

    release: bool = False


class Resume(TaggedStruct, frozen=True, kw_only=True):
    """Take steps again."""


class Stage(TaggedStruct, frozen=True, kw_only=True):
    """Receive and verify the weights in the background, next to the weights in use, for
    a `Load` of the same manifest. A version that is staged already is dropped.

    Answered by `Staged` or `StageFailed`.
    """

    manifest: WeightManifest


class Load(TaggedStruct, frozen=True, kw_only=True):
    """Swap the weights in. They are verified first unless they are staged. The live KV
    is recomputed under them.

    Answered by `Loaded` or `LoadFailed`.
    """

    manifest: WeightManifest


class LoadCheckpoint(TaggedStruct, frozen=True, kw_only=True):
    """Load the weights of the trainer's checkpoint of step `version` in `directory`,
    cast to `dtype` as they were published. Answered as `Load` is.
    """

    version: int
    publication_id: int
    directory: str
    dtype: str


class Stats(TaggedStruct, frozen=True, kw_only=True):
    """Sample the engine's state. Answered by `Sampled`."""


class Beat(TaggedStruct, frozen=True, kw_only=True):
    """Answer by `Beating` immediately, without waiting for the end of a step."""


class Shutdown(TaggedStruct, frozen=True, kw_only=True):
    """End the loop."""


EngineCommand = (
    Add
    | Abort
    | Rerank
    | ExportKv
    | ImportKv
    | ReleaseKv
    | Suspend
    | Resume
    | Stage
    | Load
    | LoadCheckpoint
    | Stats
    | Beat
    | Shutdown
)


# Replies of an engine's loop.


class Ready(TaggedStruct, frozen=True, kw_only=True):
    """The engine serves. `version` is -1 if no weights have been loaded from a manifest
    yet, and it serves its checkpoint.

    `profile` holds its decode step times by increasing batch size, if
    `EngineSpec.profile` is set. `stages` is true if the engine has room for a second
    copy of the weights, and so can receive them while it generates; `moves_kv`, if it
    can export and import KV; `preempts`, if a request takes the slot of a request of
    lower rank; `lent`, if a serving engine lends it.
    """

    version: int
    kv_total_tokens: int
    max_slots: int
    max_context: int
    profile: tuple[StepTime, ...] = ()
    stages: bool = False
    moves_kv: bool = True
    preempts: bool = True
    lent: bool = False


class Generated(TaggedStruct, frozen=True, kw_only=True):
    """A request is complete."""

    result: GenerateResult


class TokenDelta(Struct, frozen=True, kw_only=True):
    """Tokens of request `id`, from position `start` of the turn on. `versions` use
    positions of the turn, too.

    `generate_s` is the value that the result would have if the turn ended here.
    """

    id: str
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    generate_s: float = 0.0
    top_logprobs: tuple[TokenChances, ...] = ()


PROGRESS_S = 0.5
"""Seconds between two `Progress` messages: the maximum that is lost with an engine,
besides its current step. A message with all tokens that 64 requests sample in that time
costs an engine less than a thousandth of it.
"""

STREAM_S = 0.05
"""Seconds between two `Progress` messages while a client reads a turn as it is sampled:
fewer than a reader notices.
"""


class Progress(TaggedStruct, frozen=True, kw_only=True):
    """The tokens sampled since the last `Progress`, for all live requests with
    `Add.report_s`; the shortest `report_s` is the time between two messages.

    No delta follows a request's result.
    """

    pieces: tuple[TokenDelta, ...]


class Suspended(TaggedStruct, frozen=True, kw_only=True):
    """The engine is suspended with `in_flight` requests."""

    in_flight: int


class Staged(TaggedStruct, frozen=True, kw_only=True):
    """The weights are verified and ready to be swapped in."""

    version: int
    publication_id: int


class StageFailed(TaggedStruct, frozen=True, kw_only=True):
    """The weights are not staged. Nothing has changed."""

    version: int
    publication_id: int
    error: str


class Loaded(TaggedStruct, frozen=True, kw_only=True):
    """The engine serves the weights of this version."""

    version: int
    load_s: float
    recompute_tokens: int


class LoadFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine still serves its former weights."""

    version: int
    error: str


class Sampled(TaggedStruct, frozen=True, kw_only=True):
    """A sample of the engine's state."""

    stats: EngineStats


class Beating(TaggedStruct, frozen=True, kw_only=True):
    """A heartbeat: what the engine is doing, and for how many seconds; "" if it does
    nothing. `kv_used` is the number of tokens in the KV that its turns hold now; None
    if it is not known.
    """

    doing: str = ""
    for_s: float = 0.0
    kv_used: int | None = None


class KvExported(TaggedStruct, frozen=True, kw_only=True):
    """The KV can be fetched as the manifest describes."""

    id: str
    manifest: KvManifest


class KvImported(TaggedStruct, frozen=True, kw_only=True):
    """The cache holds the first `moved_tokens` tokens, fewer than the manifest's if
    there was no room for more.
    """

    id: str
    moved_tokens: int


class KvRefused(TaggedStruct, frozen=True, kw_only=True):
    """The KV cannot be exported or imported. Nothing has changed."""

    id: str
    error: str


class EngineFatal(TaggedStruct, frozen=True, kw_only=True):
    """The engine's loop failed and has ended."""

    error: str


EngineReply = (
    Ready
    | Generated
    | Progress
    | Suspended
    | Staged
    | StageFailed
    | Loaded
    | LoadFailed
    | Sampled
    | Beating
    | KvExported
    | KvImported
    | KvRefused
    | EngineFatal
)


ServerName = Literal["vllm", "sglang"]
"""A kind of inference server that a run can start."""


SERVER_PYTHON = "python3"
"""Interpreter of an inference server unless the user names one."""


class ServerSpec(Struct, frozen=True, kw_only=True):
    """The inference server of an engine: its kind, the interpreter that has it, more
    arguments, and its tensor parallelism.

    With `scaled_logprobs`, requests have temperatures other than 0 and 1, at which
    their log-probs must be. The server must be ready within `start_s`, and answer each
    control call within `control_s`. With `addresses`, no server is started: the engine
    leases one of the servers there as `holder`, with their `token`; the server must
    compute sequences of `context` tokens. With `moves_kv`, the server exchanges KV with
    other servers of its kind. With `collective`, it receives weights by its own code in
    a group with the trainer.
    """

    kind: ServerName
    python: str = ""
    args: tuple[str, ...] = ()
    scaled_logprobs: bool = False
    degree: int = 1
    start_s: float
    control_s: float
    addresses: tuple[str, ...] = ()
    token: str = ""
    holder: str = ""
    context: int = 0
    moves_kv: bool = False
    collective: bool = False

    @property
    def is_ours(self) -> bool:
        """True if neither the interpreter nor the options are the user's, which may
        name files of code.
        """
        return bool(self.addresses) or (self.python == SERVER_PYTHON and not self.args)


class LendSpec(Struct, frozen=True, kw_only=True):
    """The slack that a serving engine lends to a run: the run's engine process connects
    to `socket`. Also the latency limits of the serving engine's own requests (infinite
    if there is no limit), and the size of a page of KV. With `beside`, the server whose
    socket this is serves, and the engine serves nothing itself.
    """

    socket: str
    ttft_s: float
    tpot_s: float
    beside: str = ""
    page_bytes: int = 2 << 20


class EngineSpec(Struct, frozen=True, kw_only=True):
    """The settings of one engine. `model` is a checkpoint directory; `deterministic`
    trades speed for results that do not depend on the batch, bit for bit.

    `version` is the version of the checkpoint's own weights, or -1 if no weights are
    served before others are loaded. With `profile`, the engine measures its decode
    steps before it is ready; with `slots_context`, it also lowers `max_slots` to as few
    sequences of so many tokens as decode nearly as fast. If `released`, it begins
    without memory for weights and KV, as after `Suspend.release`, and measures nothing.
    `kv_host` is the address on which it exports KV over TCP. With `server`, an
    inference server computes instead of our engine. With `lora_scale`, new versions are
    adapters of `model`, whose output is multiplied by this scale. On a GPU,
    `paged_attention` uses a kernel that reads KV in place, and `cuda_graphs` replays
    recorded decoding steps; neither is used if `deterministic`. With `routes`, results
    have the routes of their tokens, and with `states` the states of their turns, if our
    engine computes them. With `lend`, the engine's process lends the slack that its
    requests leave.
    """

    id: EngineId
    model: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_slots: int = 64
    kv_tokens: int = 65536
    block_tokens: int = 16
    prefill_chunk_tokens: int = 512
    prefix_cache: bool = True
    deterministic: bool = False
    eos_token_ids: tuple[int, ...] = ()
    version: int = -1
    profile: bool = False
    slots_context: int = 0
    released: bool = False
    kv_host: str = "127.0.0.1"
    server: ServerSpec | None = None
    lora_scale: float | None = None
    paged_attention: bool = True
    cuda_graphs: bool = True
    routes: bool = False
    states: bool = False
    lend: LendSpec | None = None
