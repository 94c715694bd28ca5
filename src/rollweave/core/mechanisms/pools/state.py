"""The pools of the task domains, as they are learned."""

import msgspec

from rollweave.core.policy.profile import DomainProfile, TokenCosts, Worked
from rollweave.core.policy.turn_times import Fit
from rollweave.core.state import State

NAME = "pools"
"""Key of the part in `State.mechanisms`."""


class Pools(msgspec.Struct):
    """The part of the state."""

    profiles: dict[str, DomainProfile] = {}  # by task domain
    # task domain → pool → its share of the trajectories; none before the first change
    shares: dict[str, dict[str, float]] = {}
    trial: dict[str, dict[str, float]] = {}  # shares until the next plan, instead of these
    given: dict[str, dict[str, int]] = {}  # trajectories that were given to pools since
    fits: dict[str, dict[int, Fit]] = {}  # prices, by class of engines and degree
    worked: dict[str, dict[int, Worked]] = {}  # by the same
    # task domain → pool → the cost of its tokens there, as of the last plan
    token_costs: dict[str, dict[str, TokenCosts]] = {}
    planned_at: int = 0  # step of the last plan


def pools_of(state: State) -> Pools | None:
    """Return the part of the state; None if pools are not learned."""
    part = state.mechanisms.get(NAME)
    return part if isinstance(part, Pools) else None
