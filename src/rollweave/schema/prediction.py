"""Messages about remaining lengths: the features of a running trajectory, and the
protocol of a predictor process (Heddle §4.1).
"""

from rollweave.schema.base import Struct, TaggedStruct, TrajectoryId


class LengthContext(Struct, frozen=True, kw_only=True):
    """Describes a trajectory before turn `turn`: its task, its progress, and the
    lengths observed in its group. Lengths are in tokens.

    `siblings` members of its group have ended, after `sibling_mean` sampled tokens on
    average and `sibling_longest` at most. `reward` (of the steps so far) and `plan`
    (the first tokens of the first turn) are added by the world, which holds them.
    """

    domain: str
    prompt_tokens: int
    turn: int
    output_tokens: int
    last_output_tokens: int
    observation_tokens: int
    tool_s: float
    siblings: int
    sibling_mean: float
    sibling_longest: int
    reward: float = 0.0
    plan: tuple[int, ...] = ()


class PredictorSpec(Struct, frozen=True, kw_only=True):
    """Describes how to build a predictor.

    `checkpoint` is the directory of the language model with which regressor `lm` reads
    plans.
    """

    regressor: str
    checkpoint: str | None = None


# Messages to a predictor, which processes them in the order in which they were sent.


class PredictionRequest(TaggedStruct, frozen=True, kw_only=True):
    """Ask for the remaining length. `number` increases from request to request."""

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    context: LengthContext


class RecordLength(TaggedStruct, frozen=True, kw_only=True):
    """Record that the attempt ended after `output_tokens` sampled tokens, or None if it
    is not usable for training.
    """

    trajectory_id: TrajectoryId
    attempt: int
    output_tokens: int | None


class Fit(TaggedStruct, frozen=True, kw_only=True):
    """Fit the regressor to the recorded lengths."""


class StopPredictor(TaggedStruct, frozen=True, kw_only=True):
    """End the process; no message follows."""


PredictorMessage = PredictionRequest | RecordLength | Fit | StopPredictor


# A predictor reports after every few messages that it processed together.


class PredictedLength(Struct, frozen=True, kw_only=True):
    number: int
    remaining_tokens: float


class PredictorReport(Struct, frozen=True, kw_only=True):
    """`processed` messages since the start, with the answers to all requests among
    them.

    `failed` counts fits and predictions that failed since the start, and `fits` the
    fits that succeeded, in `fit_s` seconds altogether. `pairs` is the number of pairs
    available for training.
    """

    processed: int
    answers: tuple[PredictedLength, ...] = ()
    failed: int = 0
    fits: int = 0
    fit_s: float = 0.0
    pairs: int = 0


class PredictorStats(Struct, frozen=True, kw_only=True):
    """The outcome of all requests of a run: the `requests` are `answered`,
    pending, or `lost` with a predictor that died.

    `dropped` requests were not sent, because too many were pending or no predictor was
    running. `failed` counts the fits and predictions that failed and were replaced.
    Latencies from request to answer are in milliseconds; `fit_s` is the total of all
    fits, in seconds.
    """

    requests: int = 0
    answered: int = 0
    lost: int = 0
    dropped: int = 0
    failed: int = 0
    restarts: int = 0
    fits: int = 0
    fit_s: float = 0.0
    pairs: int = 0
    mean_ms: float = 0.0
    p99_ms: float = 0.0
