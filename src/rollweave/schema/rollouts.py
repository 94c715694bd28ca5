"""Messages between the controller and a rollout worker, which runs INIT, RUN and EVAL
of attempts (`rollout/worker.py`).

The controller forwards the core's commands about stages, and answers turns. The worker
reports the progress and the end of its attempts; the controller stores tokens before it
posts the event that refers to them.
"""

import msgspec

from rollweave.schema.base import EngineId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.commands import (
    CancelTrajectory,
    DrawTask,
    StartEval,
    StartInit,
    StartRun,
)
from rollweave.schema.events import AttemptDelayed, DrawFailed, EnvReady, GroupSubmitted
from rollweave.schema.images import GrantImage, ImageReport, ImageWait
from rollweave.schema.roles import RolesAddress
from rollweave.schema.serving import GenerateResult, Sampling, TokenDelta
from rollweave.schema.work import StopReason, Trajectory, Unscored

BEAT_S = 0.5
"""Seconds between two heartbeats of a worker's event loop."""


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """The specification of a worker process.

    `config` is the run's configuration as JSON, and `run_id` its id. `deployed` has the
    URLs of the functions of rewards that the run has deployed, and of its own judges.
    `roles` is where the run takes calls of its roles. `logs` is the
    folder for the output of its environments' processes. `waiting_limit` bounds the
    attempts that are kept for an evaluation that may never come. The worker serves
    images to other hosts at `address`, as `host`, if that is given.
    """

    id: str
    host: str = ""
    address: str = ""
    run_id: str = ""
    deployed: dict[str, str] = msgspec.field(default_factory=dict)
    roles: RolesAddress | None = None
    config: str
    model_dir: str
    logs: str
    waiting_limit: int


# Commands, in addition to the core's.


class AnswerTurn(TaggedStruct, frozen=True, kw_only=True):
    """The answer to `TurnAsked`: a result and the engine that produced it, or the
    reason for which the attempt must stop.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    result: GenerateResult | None = None
    stop: StopReason | None = None
    error: str = ""


class StreamTurn(TaggedStruct, frozen=True, kw_only=True):
    """Tokens that an engine has sampled of a turn with `TurnAsked.streamed`.

    A delta continues the delta before it, unless it starts at 0: then the turn has
    begun again. The last tokens come with the answer.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    delta: TokenDelta


class StopRolloutWorker(TaggedStruct, frozen=True, kw_only=True):
    """Cancel all attempts, report their ends, and exit."""


RolloutCommand = (
    StartInit | StartRun | StartEval | CancelTrajectory | DrawTask | AnswerTurn | StreamTurn
)
"""Commands to a worker, in the controller or in another process."""

RolloutWorkerCommand = RolloutCommand | GrantImage | StopRolloutWorker
"""Messages to the process of a worker."""


# Reports, in addition to the core's events that a worker sends itself.


class WorkerReady(TaggedStruct, frozen=True, kw_only=True):
    """The worker takes attempts. `now` is the time on its clock, in seconds."""

    now: float


IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header of a request that names it: requests with the same key are the same request,
sent again.
"""

PAYLOAD_BYTES = 6 << 20
"""Maximum number of bytes of a request to a service: the limit of AWS Lambda, the
lowest of the common platforms. RollArt §7.5 has requests of up to 5.2 MB.
"""

SERVICE_CALLS = 64
"""Maximum number of calls of one service by one process that are under way; others
wait, in the order in which they began.
"""


class ServiceWait(Struct, frozen=True, kw_only=True):
    """Attempts wait for a service behind HTTP, such as the teacher, since `since`, on
    the worker's clock.
    """

    service: str
    what: str
    since: float


class WorkerBeat(TaggedStruct, frozen=True, kw_only=True):
    """Sent every `BEAT_S` seconds by the event loop of the worker, with the images that
    it waits for, and its waits for services.
    """

    images: tuple[ImageWait, ...] = ()
    services: tuple[ServiceWait, ...] = ()


class WorkerWarned(TaggedStruct, frozen=True, kw_only=True):
    """A warning for the user."""

    component: str
    message: str


class TurnAsked(TaggedStruct, frozen=True, kw_only=True):
    """The episode needs the agent's next message. Answered by `AnswerTurn`.

    The context is the first `kept` tokens of the context and answer of turn `base`, and
    then `tokens`. `budget_s` are the active seconds that remain, and `reward` is the
    reward so far. If `streamed`, `StreamTurn` brings the tokens while they are sampled.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    base: int
    kept: int
    tokens: tuple[int, ...]
    sampling: Sampling
    budget_s: float
    reward: float
    streamed: bool = False


class TurnGivenUp(TaggedStruct, frozen=True, kw_only=True):
    """The agent program has given up this turn, and continues without it."""

    trajectory_id: TrajectoryId
    attempt: int
    turn: int


class AttemptEnded(TaggedStruct, frozen=True, kw_only=True):
    """INIT and RUN are over, and the environment is closed."""

    trajectory: Trajectory
    turns: int


class AttemptScored(TaggedStruct, frozen=True, kw_only=True):
    """EVAL is over. Without a `reward`, `stop_reason` and `error` say why. `rewards`
    and `unscored` are as in `record/store.Scored`.
    """

    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    reward: float | None = None
    success: bool | None = None
    eval_s: float = 0.0
    error: str = ""
    result: str = ""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    unscored: Unscored | None = None


class PhaseEnded(TaggedStruct, frozen=True, kw_only=True):
    """A phase of an attempt, for the trace. Times are on the worker's clock."""

    trajectory_id: TrajectoryId
    attempt: int
    name: str
    start: float
    end: float


AttemptReport = (
    EnvReady | AttemptDelayed | TurnAsked | TurnGivenUp | AttemptEnded | AttemptScored | PhaseEnded
)
"""Reports of a worker about an attempt."""

WorkerReport = (
    AttemptReport
    | GroupSubmitted
    | DrawFailed
    | ImageReport
    | WorkerReady
    | WorkerBeat
    | WorkerWarned
)
"""Messages from the process of a worker."""
