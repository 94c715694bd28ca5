"""Decide how many pages of KV rollouts may hold on the engine of a serving model (ROSE
§4.1, preemptive memory sharing).

- At the beginning of each RL step, rollouts get the pages that serving has recently not
  used, less a headroom.
- **Burst**: once serving has used up half of the headroom, the budget is halved, and
  the pages above the budget return to the pool: first cached pages, then the pages of
  whole requests, which are aborted. If serving uses up the new headroom, too, the
  budget is halved again.
- **Freeze**: after a cut, the budget does not grow before the next step.
- A cached page is kept for 10 s after its last use: most next turns come within this
  time.

All amounts are in pages.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from rollweave.schema.base import Struct

HEADROOM = 0.2
"""Share of all pages that is reserved for serving (ROSE §4.1)."""

HIGH_WATER = 0.5
"""Share of the headroom which serving may use before the budget is cut."""

CUT = 2
"""Divisor of the budget in a burst (ROSE §4.1)."""

LEASE_S = 10.0
"""Seconds for which an unused page stays cached (ROSE §4.1, appendix C)."""

Page = TypeVar("Page", bound=Hashable)


class Holding(Struct, frozen=True, kw_only=True):
    """A rollout request and the pages that return if it is aborted."""

    id: str
    pages: int
    rank: float = 0.0
    arrival: int = 0


class KvBudget:
    """The budget of one serving engine with `total` pages. It is 0 before the first
    step.
    """

    def __init__(self, total: int, *, headroom: float = HEADROOM) -> None:
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        if not 0 <= headroom <= 1:
            raise ValueError(f"headroom must be in [0, 1], got {headroom}")
        self.total = total
        self.headroom = math.ceil(headroom * total)
        self.budget = 0
        self.frozen = False
        self.cuts = 0
        self._least_left = math.ceil((1 - HIGH_WATER) * self.headroom)

    @property
    def serving_most(self) -> int:
        """Maximum number of pages that serving may have: all."""
        return self.total

    def begin_step(self, recent_use: int) -> int:
        """Begin an RL step, given the most pages that serving has recently used. Return
        the new budget.
        """
        self.budget = max(0, self.total - self.headroom - recent_use)
        self.frozen = False
        return self.budget

    def observe(self, serving: int) -> int:
        """Learn how many pages serving uses, and return the budget. It is cut until
        enough of the headroom is left, or no budget remains.
        """
        while self.budget and self.total - self.budget - serving < self._least_left:
            self.budget //= CUT
            self.frozen = True
            self.cuts += 1
        return self.budget

    def fits(self, *, serving: int, held: int, more: int) -> bool:
        """Return whether rollouts that hold `held` pages may take `more`: within the
        budget, and with the headroom left for serving beyond what it uses.
        """
        if not more:
            return True
        return held + more <= self.budget and self.total - serving - held - more >= self.headroom

    def excess(self, held: int) -> int:
        """Return how many pages rollouts hold above the budget."""
        return max(0, held - self.budget)


def victims(holdings: Iterable[Holding], excess: int) -> list[str]:
    """Return the requests to abort so that at least `excess` pages return, or all
    requests that hold pages if they hold too few. The lowest rank goes first, then the
    newest.
    """
    chosen: list[str] = []
    for holding in sorted(holdings, key=lambda one: (one.rank, -one.arrival)):
        if excess <= 0:
            break
        if holding.pages > 0:
            chosen.append(holding.id)
            excess -= holding.pages
    return chosen


class Leases(Generic[Page]):
    """The cached pages, each kept for `LEASE_S` after its last use."""

    def __init__(self) -> None:
        self._used: OrderedDict[Page, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def renew(self, page: Page, now: float) -> None:
        """Record that the page was used. Times must not decrease."""
        self._used[page] = now
        self._used.move_to_end(page)

    def forget(self, page: Page) -> None:
        """Forget a page that is in use, or gone. Unknown pages are ignored."""
        self._used.pop(page, None)

    def expired(self, now: float) -> Sequence[Page]:
        """Return the pages whose lease is over, the oldest first."""
        over: list[Page] = []
        for page, used in self._used.items():
            if now - used < LEASE_S:
                break
            over.append(page)
        return over

    def oldest(self, count: int) -> Sequence[Page]:
        """Return the `count` pages whose last use is the longest ago, or all pages."""
        return list(self._used)[: max(0, count)]
