"""Work: the task that is attempted (`Task`), the outcome (`Trajectory`), and the unit
of training (`Batch`).
"""

import enum
import math
from typing import Literal

import msgspec

from rollweave.schema.base import GroupId, Struct, TaskId, TrajectoryId
from rollweave.schema.chat import Message


class StopReason(enum.StrEnum):
    """Why a trajectory ended. Every trajectory ends with exactly one reason."""

    FINISHED = "finished"  # the environment reported `done`
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIME_BUDGET = "time_budget"  # active time over the budget while the agent or environment worked
    ENV_ERROR = "env_error"  # the environment raised or returned garbage
    ENV_HANG = "env_hang"  # the environment did not answer within its limit
    REWARD_ERROR = "reward_error"
    REWARD_HANG = "reward_hang"
    REWARD_UNAVAILABLE = "reward_unavailable"  # a reward's URL or judge gave none
    TEACHER_ERROR = "teacher_error"  # the teacher gave no log-probs
    ENGINE_FAILURE = "engine_failure"  # a turn failed more often than the retry policy allows
    ENGINES_LOST = "engines_lost"  # two engines were lost while they had the same turn
    STALE = "stale"  # aborted by the staleness bound
    SURPLUS = "surplus"  # a spare member or group that is no longer needed
    WORLD_LOST = "world_lost"  # the controller restarted, and the trajectory could not continue
    WORKER_LOST = "worker_lost"  # the process that ran the attempt was lost
    IMAGE_ERROR = "image_error"  # the image of a sandbox could not be obtained
    CANCELLED = "cancelled"  # by the user or by the end of the run


class Blame(enum.StrEnum):
    """The party that caused the stop.

    Only `AGENT` and `NONE` leave a reward that may be trained on.
    """

    NONE = "none"
    AGENT = "agent"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"
    USER = "user"


BLAME_OF: dict[StopReason, Blame] = {
    StopReason.FINISHED: Blame.NONE,
    StopReason.MAX_TURNS: Blame.AGENT,
    StopReason.MAX_TOKENS: Blame.AGENT,
    StopReason.TIME_BUDGET: Blame.ENVIRONMENT,
    StopReason.ENV_ERROR: Blame.ENVIRONMENT,
    StopReason.ENV_HANG: Blame.ENVIRONMENT,
    StopReason.REWARD_ERROR: Blame.ENVIRONMENT,
    StopReason.REWARD_HANG: Blame.ENVIRONMENT,
    StopReason.REWARD_UNAVAILABLE: Blame.INFRASTRUCTURE,
    StopReason.TEACHER_ERROR: Blame.INFRASTRUCTURE,
    StopReason.ENGINE_FAILURE: Blame.INFRASTRUCTURE,
    StopReason.ENGINES_LOST: Blame.AGENT,
    StopReason.STALE: Blame.INFRASTRUCTURE,
    StopReason.SURPLUS: Blame.INFRASTRUCTURE,
    StopReason.WORLD_LOST: Blame.INFRASTRUCTURE,
    StopReason.WORKER_LOST: Blame.INFRASTRUCTURE,
    StopReason.IMAGE_ERROR: Blame.INFRASTRUCTURE,
    StopReason.CANCELLED: Blame.USER,
}

TRAINABLE: frozenset[StopReason] = frozenset(
    {StopReason.FINISHED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS}
)
"""Stop reasons whose trajectory may be scored and trained on. A failure is never a
reward of 0.
"""


class Decoding(Struct, frozen=True, kw_only=True):
    """Sampling parameters of a rollout that override the service's; None keeps the
    service's value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0.0, math.inf),
            "top_p": (1e-6, 1.0),
            "top_k": (0, 2**31),
            "seed": (0, 2**63 - 1),
        }
        for name, (least, most) in rules.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"sampling.{name} must be from {least:g} to {most:g}, got {value}")


class Purpose(enum.StrEnum):
    """The purpose of a group.

    Only `TRAIN` groups enter the experience buffer. `SERVE` groups belong to clients of
    a service.
    """

    TRAIN = "train"
    EVAL = "eval"
    SERVE = "serve"


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one trajectory.

    `time_s` counts active time over init, run and eval (ProRL §3.2), without queueing.
    """

    max_turns: int = 16
    max_tokens: int = 1024
    max_turn_tokens: int = 128
    time_s: float = 300.0
    step_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_turn_tokens", "time_s", "step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} must be positive, got {getattr(self, name)}")


TaskContent = tuple[int, str]


class Task(Struct, frozen=True, kw_only=True):
    """A task to attempt.

    `payload` is JSON that only the environment reads; `tag` is the task domain.
    """

    id: TaskId
    env: str
    seed: int
    payload: str = "{}"
    tag: str = ""
    limits: Limits = Limits()

    @property
    def content(self) -> TaskContent:
        """The seed and the payload: they are the same each time that a task domain's
        task is drawn, while `id` belongs to the draw.
        """
        return self.seed, self.payload


class SegmentKind(enum.StrEnum):
    """The origin of a segment's tokens."""

    PROMPT = "prompt"
    OUTPUT = "output"
    OBSERVATION = "observation"


class Segment(Struct, frozen=True, kw_only=True):
    """Tokens `[start, end)` of one kind.

    `version` is the weight version that sampled an output segment, and -1 otherwise.
    """

    start: int
    end: int
    kind: SegmentKind
    version: int = -1


class TurnSpan(Struct, frozen=True, kw_only=True):
    """One turn: output tokens `[start, end)`, the reward of its step, and a key that is
    equal for equal observations.

    Turns with the same `state_key` within one task share a baseline (GiGPO); "" means
    no key. `finish_reason` is "stop", or "length" if a token limit cut the turn before
    the agent ended it.
    """

    start: int
    end: int
    reward: float = 0.0
    state_key: str = ""
    finish_reason: str = "stop"


class Routes(Struct, frozen=True, kw_only=True):
    """The experts to which a mixture-of-experts model routed the tokens `[start, end)`
    of a sequence: in each of `layers` layers, the experts with the `top_k` highest
    scores.

    `data` has their numbers by token, layer and rank, in one byte each, or in two
    (little endian) if the model has more than 256. Layers without experts have zeros.
    """

    start: int
    end: int
    layers: int
    top_k: int
    data: bytes

    def __post_init__(self) -> None:
        numbers = (self.end - self.start) * self.layers * self.top_k
        if self.start < 0 or numbers <= 0 or len(self.data) not in (numbers, 2 * numbers):
            raise ValueError(
                f"routes of the tokens {self.start} to {self.end} must have {numbers} numbers of "
                f"one or two bytes, got {len(self.data)} bytes"
            )

    def between(self, start: int, end: int) -> "Routes | None":
        """Return the part for tokens in `[start, end)`, or None if it is empty."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return None
        if (start, end) == (self.start, self.end):
            return self
        width = len(self.data) // (self.end - self.start)
        return Routes(
            start=start,
            end=end,
            layers=self.layers,
            top_k=self.top_k,
            data=self.data[(start - self.start) * width : (end - self.start) * width],
        )


def with_routes(known: tuple[Routes, ...], later: Routes | None) -> tuple[Routes, ...]:
    """Return the `known` routes of a sequence and the part of `later` that follows
    them. If two routes are recorded for a token, it was sampled under the first.
    """
    if later is not None:
        later = later.between(known[-1].end if known else 0, later.end)
    return known if later is None else (*known, later)


class SequenceCause(enum.StrEnum):
    """Why a sequence of an agent program began, instead of another sequence growing."""

    FIRST = "first"
    NEW_CONVERSATION = "new_conversation"  # it shares neither user messages nor answers
    BRANCH = "branch"  # an earlier turn is sampled again, or continued beside its continuation
    HISTORY_EDITED = "history_edited"
    HISTORY_SHORTENED = "history_shortened"  # messages are left out or summarized
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_CHANGED = "template_changed"  # other arguments of the chat template
    THOUGHTS_DROPPED = "thoughts_dropped"  # the chat template leaves out those of earlier turns


Unreadable = Literal["ignore", "refuse"]
"""The treatment of fields of requests that neither the model nor its chat template can
read.
"""


class Ignored(Struct, frozen=True, kw_only=True):
    """A field of an agent program's requests that was not honored, since neither the
    model nor its chat template can read it.

    `field` has `*` for the numbers of messages and parts; `value` is the first value,
    as text; `action` is how it was handled; `requests` counts the requests that had it.
    """

    field: str
    value: str
    action: str = "ignored"
    requests: int = 1

    def __str__(self) -> str:
        count = f"{self.requests} request{'s' * (self.requests != 1)}"
        return f"{self.field} = {self.value}: {self.action}, in {count}"


class Origin(Struct, frozen=True, kw_only=True):
    """The beginning of an agent program's sequence: its cause, and the number of the
    earlier sequence from which it departs, counted from 0, or -1.

    `message` is the first message that differs from that sequence's, counted from 0, or
    -1, and `role` is its role. `arguments` are the arguments that its requests gave the
    chat template in addition to the run's, as JSON; "" without arguments.
    """

    cause: SequenceCause
    of: int = -1
    message: int = -1
    role: str = ""
    arguments: str = ""

    def __str__(self) -> str:
        text = self.cause.value.replace("_", " ")
        if self.of >= 0:
            text += f", departs from sequence {self.of + 1}"
        if self.message >= 0:
            text += f" at message {self.message + 1} ({self.role})"
        return f"{text}, with template arguments {self.arguments}" if self.arguments else text


class TokenSequence(Struct, frozen=True, kw_only=True):
    """One training sequence. `logprobs[i]` is the log-prob with which `tokens[i]` was
    sampled, and 0.0 outside output segments. `teacher` has a teacher's log-probs, or is
    empty without a teacher. `routes` may be known for all, some or no tokens. `origin`
    says why an agent program's sequence began; a sequence of an environment has no
    origin.

    Invariants: segments are contiguous from 0 to `len(tokens)`; `len(logprobs) ==
    len(tokens)`; output segments carry a version of at least 0; routes are ascending
    and disjoint. A weight update in the middle of a turn makes two output segments.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    logprobs: tuple[float, ...]
    turns: tuple[TurnSpan, ...] = ()
    teacher: tuple[float, ...] = ()
    routes: tuple[Routes, ...] = ()
    origin: Origin | None = None

    def __post_init__(self) -> None:
        ends = [0, *(part.end for part in self.routes)]
        if ends[-1] > len(self.tokens) or any(
            part.start < end for part, end in zip(self.routes, ends, strict=False)
        ):
            raise ValueError(
                f"routes must be ascending and disjoint in {len(self.tokens)} tokens, got "
                f"{[(part.start, part.end) for part in self.routes]}"
            )
        if self.teacher and len(self.teacher) != len(self.tokens):
            raise ValueError(
                f"teacher must have one entry per token, got {len(self.teacher)} "
                f"for {len(self.tokens)}"
            )
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"logprobs must have one entry per token, got {len(self.logprobs)} "
                f"for {len(self.tokens)}"
            )
        position = 0
        for segment in self.segments:
            if segment.start != position or segment.end <= segment.start:
                raise ValueError(
                    f"segments must be contiguous and not empty, got {segment} at "
                    f"position {position}"
                )
            if (segment.kind is SegmentKind.OUTPUT) != (segment.version >= 0):
                raise ValueError(f"exactly the output segments carry a version, got {segment}")
            position = segment.end
        if position != len(self.tokens):
            raise ValueError(f"segments must cover all {len(self.tokens)} tokens, got {position}")

    def output_mask(self) -> list[bool]:
        """Return the loss mask: true for the tokens that the agent sampled."""
        mask = [False] * len(self.tokens)
        for segment in self.segments:
            if segment.kind is SegmentKind.OUTPUT:
                mask[segment.start : segment.end] = [True] * (segment.end - segment.start)
        return mask

    def versions(self) -> tuple[int, int]:
        """Return the lowest and the highest weight version of the output segments, or
        (-1, -1) without output.
        """
        generated_by = [
            segment.version for segment in self.segments if segment.kind is SegmentKind.OUTPUT
        ]
        return (min(generated_by), max(generated_by)) if generated_by else (-1, -1)


class Timing(Struct, frozen=True, kw_only=True):
    """Seconds of active time per stage, of queueing before the stages, and of the
    phases within a turn.
    """

    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    env_s: float = 0.0


class Trajectory(Struct, frozen=True, kw_only=True):
    """The outcome of one attempt at a task. `reward` is None if the stop reason leaves
    nothing to score.

    `rewards` has the components of the reward, unweighted and by name, if the task
    domain has several. `ignored` are the fields of an agent program's requests that had
    no effect. `result` holds any further result of the handler, as JSON
    (`envs/handlers/base.py`), or "". `tools` are the declarations of the tools that the
    agent was shown last, each as JSON in the form of OpenAI's API.
    """

    id: TrajectoryId
    group_id: GroupId
    task: Task
    attempt: int
    initiated_version: int
    sequences: tuple[TokenSequence, ...]
    reward: float | None
    stop_reason: StopReason
    blame: Blame
    engine: str = ""
    success: bool | None = None
    timing: Timing = Timing()
    error: str = ""
    result: str = ""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"trajectory.reward must be finite, got {self.reward}")
        if self.reward is not None and self.stop_reason not in TRAINABLE:
            raise ValueError(
                f"trajectory.reward must be None after {self.stop_reason}, got {self.reward}"
            )


class Comparison(Struct, frozen=True, kw_only=True):
    """A comparison of an attempt with another member of its group, by the pairwise
    judge `reward`. `points` are the attempt's points, from 0 to 1; None if the
    comparison failed.
    """

    reward: str
    opponent: TrajectoryId
    attempt: int
    conversation: tuple[Message, ...]
    points: float | None


class Unscored(Struct, frozen=True, kw_only=True):
    """An attempt whose rewards partly failed or are still to come, with the data from
    which they are computed. `missing` names these rewards. `reward` is the
    environment's, and `stop_reason` says why the rollout ended. `comparisons` are the
    comparisons by pairwise judges that failed.
    """

    missing: tuple[str, ...]
    conversation: tuple[Message, ...]
    reward: float
    success: bool | None
    stop_reason: StopReason
    comparisons: tuple[Comparison, ...] = ()


class ScoredGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Trajectories of one task with finite rewards: the unit of a group-relative
    advantage. `restored_to` has the trajectories that may have tokens of discarded
    weights, as in `GroupRef`.
    """

    id: GroupId
    env: str
    trajectories: tuple[Trajectory, ...]
    restored_to: dict[TrajectoryId, int] = msgspec.field(default_factory=dict)


class Measures(Struct, frozen=True, kw_only=True):
    """Means over the output tokens of a group, under the weights of the trainer when it
    measured them (`train/passes.py`, `train/critic.py`); None if not measured.

    `ratio` is the geometric mean of the importance ratios of the current policy to the
    policy that sampled the group, above 0. `entropy` is that of the current policy, in
    nats, at least 0. `td_error` is the mean absolute TD error of the critic's values,
    at least 0, over its steps: tokens, or turns with the estimator gae_turn.
    """

    ratio: float | None = None
    entropy: float | None = None
    td_error: float | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """Mini-batch `part` of `parts` of training step `step`. `version` is the weight
    version that the step starts from.
    """

    step: int
    version: int
    part: int
    parts: int
    groups: tuple[ScoredGroup, ...]
