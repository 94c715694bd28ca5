"""The words between whoever wants tokens and an engine: requests, results, and the
commands of the engine's loop.

An engine's loop takes these commands between two steps (RollArt §6.1), so adding or
aborting one request never stalls another.
"""

import enum
from typing import Literal

from rollweave.schema.base import EngineId, Struct, TaggedStruct
from rollweave.schema.events import StepTime
from rollweave.schema.weights import WeightManifest

DialectName = Literal["rollweave", "vllm", "completions", "sglang", "prorl"]
"""How an engine behind HTTP is spoken to (`engine/clients/dialects.py`)."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How to sample. `logprobs` are always those of the sampled token at `temperature`
    before top-k and top-p cut.

    `temperature` 0 is greedy (log-probs then are those at temperature 1). `allowed`
    restricts sampling to these token ids (empty: no restriction). Randomness is keyed
    by `(seed, position)`, so a request's tokens do not depend on its neighbours.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    allowed: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"sampling.temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k must be 0 (off) or more, got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens must be at least 1, got {self.max_tokens}")


class Finish(enum.StrEnum):
    STOP = "stop"  # a stop token or a stop string; the stop token is part of `tokens`
    LENGTH = "length"
    TIME = "time"  # `budget_s` was used up
    ABORTED = "aborted"
    ERROR = "error"


def finish_word(finish: Finish) -> str:
    """How a turn that counts has ended, in the terms of OpenAI's API: "stop", or
    "length" if a limit cut it.
    """
    return "stop" if finish is Finish.STOP else "length"


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` were sampled by weights `version`."""

    start: int
    end: int
    version: int


class Partial(Struct, frozen=True, kw_only=True):
    """The beginning of a turn, as engines have sampled it in `generate_s` seconds of a
    slot: at least one token.
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
        if not covers(self.versions, 0, len(self.tokens)):
            raise ValueError(
                f"versions must cover the {len(self.tokens)} tokens of a partial "
                f"turn, got {self.versions}"
            )
        if not self.generate_s >= 0:
            raise ValueError(f"generate_s must be 0 or more, got {self.generate_s}")


def covers(spans: tuple[VersionSpan, ...], start: int, end: int) -> bool:
    """Whether the spans name one version for each of the tokens `[start, end)`, in
    order.
    """
    for span in spans:
        if span.start != start or span.end <= start:
            return False
        start = span.end
    return start == end


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Continue `tokens`. Higher `rank` runs first; among equals the earlier arrival.
    `id` is unique among live requests.

    `budget_s` bounds the seconds that it has a slot (0: no bound), not those that it
    waits, or that the engine is suspended. With `resumed`, the turn goes on after these
    tokens (Laminar §3.3): they count for `max_tokens`, stop strings and `budget_s`, and
    are part of the result. Nothing is sampled where they end the turn already.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling = Sampling()
    rank: float = 0.0
    budget_s: float = 0.0
    resumed: Partial | None = None


class GenerateResult(Struct, frozen=True, kw_only=True):
    """The continuation, token-exact. `cached_tokens` of the prompt came from the prefix
    cache.

    `queue_s` it had no slot: before the first, and while preempted. `generate_s` it had
    one and the engine was not suspended. `resumed_tokens` of the tokens were in the
    request: none where an engine that cannot go on has begun the turn again.
    `text_only`: the engine gave text alone. Its tokens are ours, encoded from the text,
    its log-probs 0: never trained on.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    cached_tokens: int = 0
    queue_s: float = 0.0
    generate_s: float = 0.0
    preemptions: int = 0
    resumed_tokens: int = 0
    text_only: bool = False
    error: str = ""


# KV on its way from engine to engine (Heddle §5.3).


class KvMemory(TaggedStruct, frozen=True, kw_only=True):
    """A sealed memory file that any process on the host can open while the engine that
    made it lives.
    """

    path: str


class KvPort(TaggedStruct, frozen=True, kw_only=True):
    """Who connects here and shows the secret gets the payload, once."""

    host: str
    port: int
    secret: bytes


KvOver = Literal["shm", "tcp"]


class KvManifest(Struct, frozen=True, kw_only=True):
    """The KV of the first `tokens` tokens of a context, in whole blocks, as an engine
    exported it under `id`.

    `key` is that of the last block: a digest of all these tokens and the weights
    (engine/planner/blocks.py). `layout` names the order of the payload's bytes, `model`
    is a digest of what else the numbers depend on. `digests` are the xxh3-64 of the
    payload's chunks, each of `chunk_blocks` blocks but the last.
    """

    id: str
    tokens: int
    key: bytes
    weights_id: int
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
    where: KvMemory | KvPort


class EngineStats(Struct, frozen=True, kw_only=True):
    """A sample of an engine's state.

    Times are seconds since the engine started; token counts are since the start too.
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


# Commands to an engine's loop.


class Add(TaggedStruct, frozen=True, kw_only=True):
    """With `stream`, what is sampled is told by `Progress` as it comes, too."""

    request: GenerateRequest
    stream: bool = False


class Abort(TaggedStruct, frozen=True, kw_only=True):
    """Stop `id` between two steps; it is answered with what it has, finish `aborted`.

    Unknown ids are ignored.
    """

    id: str


class Rerank(TaggedStruct, frozen=True, kw_only=True):
    """Set a live request's rank; the engine preempts locally (slot preemption keeps the
    victim's blocks).
    """

    id: str
    rank: float


class ExportKv(TaggedStruct, frozen=True, kw_only=True):
    """Lay the KV of the longest cached prefix of `tokens` out for another engine, until
    `ReleaseKv` or for a while.

    Answered by `KvExported` or `KvRefused`.
    """

    id: str
    tokens: tuple[int, ...]
    over: KvOver


class ImportKv(TaggedStruct, frozen=True, kw_only=True):
    """Take the KV of a prefix of `tokens` into the prefix cache.

    Answered by `KvImported` or `KvRefused`.
    """

    id: str
    tokens: tuple[int, ...]
    manifest: KvManifest


class ReleaseKv(TaggedStruct, frozen=True, kw_only=True):
    """The export is not needed any more. Unknown ids are ignored."""

    id: str


class Suspend(TaggedStruct, frozen=True, kw_only=True):
    """Take no further step until `Resume`; requests stay, additions queue.

    Answered by `Suspended`.
    """


class Resume(TaggedStruct, frozen=True, kw_only=True):
    pass


class Load(TaggedStruct, frozen=True, kw_only=True):
    """Verify and swap in the weights; the live KV is recomputed under them.

    Answered by `Loaded` or `LoadFailed`.
    """

    manifest: WeightManifest


class LoadSaved(TaggedStruct, frozen=True, kw_only=True):
    """The same with what the trainer's checkpoint of step `version` in `directory`
    holds, as it was published: as `dtype`.
    """

    version: int
    weights_id: int
    directory: str
    dtype: str


class Stats(TaggedStruct, frozen=True, kw_only=True):
    """Answered by `Sampled`."""


class Shutdown(TaggedStruct, frozen=True, kw_only=True):
    pass


EngineCommand = (
    Add
    | Abort
    | Rerank
    | ExportKv
    | ImportKv
    | ReleaseKv
    | Suspend
    | Resume
    | Load
    | LoadSaved
    | Stats
    | Shutdown
)


# What an engine's loop says.


class Ready(TaggedStruct, frozen=True, kw_only=True):
    """The engine serves. `version` is -1 where no weights have been loaded from a
    manifest yet (it serves its checkpoint).

    `profile` is what it measured of its decode steps, by growing batch, if it was to
    (`EngineSpec.profile`).
    """

    version: int
    kv_total_tokens: int
    max_slots: int
    max_context: int
    profile: tuple[StepTime, ...] = ()


class Generated(TaggedStruct, frozen=True, kw_only=True):
    result: GenerateResult


class Piece(Struct, frozen=True, kw_only=True):
    """Of request `id`, the tokens from place `start` of the turn on. `versions` name
    places of the turn, too.

    `generate_s`: as in the result, if the turn ended here.
    """

    id: str
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    generate_s: float = 0.0


TELL_S = 0.5
"""Seconds between two `Progress`: what a lost engine loses at most, beside the step
that it is in. A message of all that 64 requests sample meanwhile takes an engine less
than a thousandth of that.
"""


class Progress(TaggedStruct, frozen=True, kw_only=True):
    """What was sampled since the last `Progress`, for all live requests that stream.

    Nothing follows a request's result.
    """

    pieces: tuple[Piece, ...]


class Suspended(TaggedStruct, frozen=True, kw_only=True):
    in_flight: int


class Loaded(TaggedStruct, frozen=True, kw_only=True):
    version: int
    load_s: float
    recompute_tokens: int


class LoadFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine stays on the weights that it had."""

    version: int
    error: str


class Sampled(TaggedStruct, frozen=True, kw_only=True):
    stats: EngineStats


class KvExported(TaggedStruct, frozen=True, kw_only=True):
    id: str
    manifest: KvManifest


class KvImported(TaggedStruct, frozen=True, kw_only=True):
    """The cache holds the first `moved_tokens` tokens: fewer than in the manifest where
    it had no room for more.
    """

    id: str
    moved_tokens: int


class KvRefused(TaggedStruct, frozen=True, kw_only=True):
    """The KV cannot be exported or imported; nothing has changed."""

    id: str
    error: str


class EngineFatal(TaggedStruct, frozen=True, kw_only=True):
    error: str


EngineReply = (
    Ready
    | Generated
    | Progress
    | Suspended
    | Loaded
    | LoadFailed
    | Sampled
    | KvExported
    | KvImported
    | KvRefused
    | EngineFatal
)


class EngineSpec(Struct, frozen=True, kw_only=True):
    """How to build one engine. `model` is a checkpoint directory; `deterministic`
    trades speed for bit-equal batches.

    `version` is what the checkpoint's own weights are called, -1 where none are served
    before others are loaded. With `profile` it measures its decode steps before it is
    ready. `kv_host` is the address on which it gives KV away over TCP.
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
    kv_host: str = "127.0.0.1"
