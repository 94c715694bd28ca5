"""Requests and answers of a rollout service: the JSON of `/v1`."""

import math
from typing import Any, Literal

import msgspec

from rollweave.schema.address import parse_address
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.serving import DialectName
from rollweave.schema.work import Decoding, Trajectory

ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/@")
ID_LENGTH = 200
MEMBERS = 4096
TOKEN_LENGTH = 4096


class RequestedLimits(Struct, frozen=True, kw_only=True):
    """Limits of a rollout that override those of its handler; they never exceed
    them.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_turn_tokens: int | None = None
    time_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"limits.{name} must be a positive number, got {value}")


class RolloutRequest(Struct, frozen=True, kw_only=True):
    """`members` attempts at one task of `handler`: number `index` of its tasks, or the
    task with `payload` and `seed`.

    `id` is chosen by the client and makes a repeated request harmless. Without it the
    service chooses one.
    """

    handler: str
    id: str = ""
    index: int | None = None
    payload: dict[str, Any] | None = None
    seed: int = 0
    members: int = 1
    sampling: Decoding = Decoding()
    limits: RequestedLimits = RequestedLimits()

    def __post_init__(self) -> None:
        if len(self.id) > ID_LENGTH or not set(self.id) <= ID_CHARS:
            raise ValueError(
                f"id must be at most {ID_LENGTH} letters, digits and -_.:/@, got {self.id!r:.100}"
            )
        if self.id in (".", ".."):  # no path of a URL can end in them
            raise ValueError(f"id must be more than dots, got {self.id!r}")
        if not 1 <= self.members <= MEMBERS:
            raise ValueError(f"members must be from 1 to {MEMBERS}, got {self.members}")
        if self.index is not None and not 0 <= self.index < 2**53:
            raise ValueError(f"index must be from 0 to 2^53 - 1, got {self.index}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        if (self.index is None) == (self.payload is None):
            given = "neither" if self.index is None else "both"
            raise ValueError(f"a rollout must have either index or payload, got {given}")


class Batch(Struct, frozen=True, kw_only=True):
    """Several requests, of which either all or none are accepted."""

    rollouts: tuple[RolloutRequest, ...]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError("rollouts must have at least one request, got none")


class MemberStatus(Struct, frozen=True, kw_only=True):
    """The state of one member. `stage` is queued, init, run, eval, or done.

    `result` is set if it was requested, the member is done, and the attempt had
    started.
    """

    id: TrajectoryId
    stage: str
    attempt: int
    stop_reason: str | None = None
    result: Trajectory | None = None


class RolloutStatus(Struct, frozen=True, kw_only=True):
    """The state of a rollout. `state` is queued or running, and done once all members
    are done.

    `waits_for` says why the rollout waits if no engine serves.
    """

    id: str
    handler: str
    state: str
    members: tuple[MemberStatus, ...]
    waits_for: str = ""


class RolloutStatuses(Struct, frozen=True, kw_only=True):
    """The states of the rollouts of a batch, in its order."""

    rollouts: tuple[RolloutStatus, ...]


class RolloutPage(RolloutStatuses, frozen=True, kw_only=True):
    """Rollouts in order of acceptance. `next` is the `after` of the next page."""

    next: int


class Completion(Struct, frozen=True, kw_only=True):
    """Member number `number`, counted in the order of completion in this service's
    lifetime.
    """

    number: int
    rollout: str
    member: TrajectoryId
    stop_reason: str


class Completions(Struct, frozen=True, kw_only=True):
    """Completions in their order. `next` is the `after` of the next request."""

    completions: tuple[Completion, ...]
    next: int


class Handlers(Struct, frozen=True, kw_only=True):
    """The task domains for which rollouts may be requested."""

    handlers: tuple[str, ...]


class EngineRequest(Struct, frozen=True, kw_only=True):
    """Register an engine at `address` (http://host:port) that speaks `dialect` and
    serves `slots` turns at the same time.

    `token` is its bearer token, if it requires one; no response of the service contains
    it.
    """

    address: str
    dialect: DialectName
    slots: int = 64
    kv_tokens: int = 1 << 20
    token: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "address", parse_address(self.address))
        if (
            len(self.token) > TOKEN_LENGTH
            or not (self.token.isascii() and self.token.isprintable())
            or " " in self.token
        ):
            raise ValueError(
                f"token must be at most {TOKEN_LENGTH} printable ASCII characters without spaces"
            )
        for name in ("slots", "kv_tokens"):
            if not 1 <= getattr(self, name) <= 2**31:
                raise ValueError(f"{name} must be from 1 to 2^31, got {getattr(self, name)}")


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The state of a registered engine. `reason` says why it does not serve, as far as
    known; it is "" for an engine that serves. The numbers have their defaults until the
    engine starts.
    """

    id: str
    address: str
    status: str
    version: int = -1
    slots: int = 0
    running: int = 0
    draining: bool = False
    restarts: int = 0
    reason: str = ""


class EngineStatuses(Struct, frozen=True, kw_only=True):
    """All engines, local ones first."""

    engines: tuple[EngineStatus, ...]


class Health(Struct, frozen=True, kw_only=True):
    """The state of a service. `reason` says why rollouts wait; "" if they do not.

    The numbers are rollouts by stage, of which `queued`, `run_queued` and `eval_queued`
    wait for a place in INIT, RUN and EVAL, engines that serve, turns, and all submitted
    rollouts and sampled tokens so far.
    """

    status: Literal["ok", "no engine", "closing"]
    reason: str
    queued: int
    init: int
    run_queued: int
    run: int
    eval_queued: int
    eval: int
    closing: int
    engines: int
    turns_waiting: int
    turns_running: int
    submitted: int
    output_tokens: int


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """`message` names the field, the rule and the value."""

    type: str
    message: str


class Error(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The answer to a request that is refused. It may have more fields."""

    error: ErrorDetail
