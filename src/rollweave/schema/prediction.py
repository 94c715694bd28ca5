"""What is known of a trajectory under way when its remaining length is predicted (Heddle §4.1)."""

from rollweave.schema.base import Noun


class LengthContext(Noun, frozen=True, kw_only=True):
    """A trajectory before turn `turn`: what it is, what it has done, what its group has shown. Lengths are tokens.

    `siblings` members of its group have ended, after `sibling_mean` sampled tokens on average and `sibling_longest` at most.
    `reward` (of the steps so far) and `plan` (the first tokens of the first turn) are for the world to add, which holds them.
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
