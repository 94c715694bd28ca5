"""The words about remaining lengths: what is known of a trajectory under way, and what
is said to a predictor (Heddle §4.1).
"""

from rollweave.schema.base import Struct, TaggedStruct, TrajectoryId


class LengthContext(Struct, frozen=True, kw_only=True):
    """A trajectory before turn `turn`: what it is, what it has done, what its group has
    shown. Lengths are tokens.

    `siblings` members of its group have ended, after `sibling_mean` sampled tokens on
    average and `sibling_longest` at most. `reward` (of the steps so far) and `plan`
    (the first tokens of the first turn) are for the world to add, which holds them.
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
    """How to build a predictor.

    `checkpoint` is the directory of the language model that regressor `lm` reads plans
    with.
    """

    regressor: str
    checkpoint: str | None = None


# Words to a predictor, which takes them in the order in which they are said.


class Ask(TaggedStruct, frozen=True, kw_only=True):
    """How long will it be? `number` grows from question to question."""

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    context: LengthContext


class Learn(TaggedStruct, frozen=True, kw_only=True):
    """The attempt is over after `output_tokens` sampled tokens; None where it teaches
    nothing.
    """

    trajectory_id: TrajectoryId
    attempt: int
    output_tokens: int | None


class Fit(TaggedStruct, frozen=True, kw_only=True):
    """Fit the regressor to what was learned."""


class StopPredictor(TaggedStruct, frozen=True, kw_only=True):
    """Nothing follows."""


PredictorWord = Ask | Learn | Fit | StopPredictor


# What a predictor says, after every few words that it took at once.


class Answer(Struct, frozen=True, kw_only=True):
    number: int
    remaining_tokens: float


class PredictorReport(Struct, frozen=True, kw_only=True):
    """`taken` words since it began, with all answers to those among them that ask.

    `failed` fits and predictions since it began, `fits` that succeeded, `fit_s` seconds
    of all; `pairs` to learn from now.
    """

    taken: int
    answers: tuple[Answer, ...] = ()
    failed: int = 0
    fits: int = 0
    fit_s: float = 0.0
    pairs: int = 0


class PredictorStats(Struct, frozen=True, kw_only=True):
    """What became of all questions of a run: `asked` are `answered`, wait, or were lost
    with a predictor that died.

    `dropped` were not asked, because too many waited or no predictor lives. `failed`
    fits and predictions, which other numbers replaced. Milliseconds from question to
    answer; seconds of all fits.
    """

    asked: int = 0
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
