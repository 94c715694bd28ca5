"""The pages that a serving model and a rollout model share, as `core/policy/kv_budget`
divides them.

Serving takes what it needs: free pages first, then cached ones of the rollouts, then
those of rollouts that are aborted. Rollouts take what their budget allows, from free
pages and from those that serving does not use.
"""

from collections import deque
from collections.abc import Callable

from rollweave.core.policy.kv_budget import KvBudget, victims
from rollweave.engine.coserving.memory import ModelMemory
from rollweave.engine.pages.base import PagePool
from rollweave.schema.errors import PagesError

LEASES_S = 1.0
"""Seconds between two searches for pages whose lease is over."""

RECENT_S = 60.0
"""Seconds of serving whose largest use of pages counts as recent."""


class SharedPages:
    """All pages. `rollouts` is the memory of the borrower's model, once it computes;
    `abort` hands a rollout back, which frees its blocks.
    """

    def __init__(
        self,
        pages: PagePool,
        budget: KvBudget,
        serving: ModelMemory,
        *,
        abort: Callable[[str], None],
        now: float,
    ) -> None:
        self.pages, self.budget, self.serving = pages, budget, serving
        self.rollouts: ModelMemory | None = None
        self._abort = abort
        self._uses: deque[tuple[float, int]] = deque()
        self._leases_at = 0.0
        while serving.pool.groups > len(serving.pool.mapped) and self._serving_may_grow:
            serving.grow(now)

    @property
    def most(self) -> int:
        """Maximum number of pages that rollouts may ever have."""
        return self.budget.total - self.budget.headroom

    @property
    def in_use(self) -> int:
        """Number of pages that serving requests use now."""
        pool = self.serving.pool
        unused = self.serving.free_blocks // pool.group_blocks
        return max(1, len(pool.mapped) - unused) * pool.group_pages

    def begin_step(self) -> None:
        """Begin an RL step: the borrower has new weights."""
        self.budget.begin_step(max((pages for _, pages in self._uses), default=self.in_use))

    def keep(self, now: float) -> None:
        """Cut the rollouts' budget in a burst, and return pages whose lease is over."""
        assert self.rollouts is not None
        use, before = self.in_use, self.budget.budget
        self._uses.append((now, use))
        while self._uses[0][0] < now - RECENT_S:
            self._uses.popleft()
        if self.budget.observe(use) < before:
            while self.budget.excess(self.rollouts.pages) and self._cut_one():
                pass
        if now >= self._leases_at:
            self._leases_at = now + LEASES_S
            for group in self.rollouts.expired(now):
                self.rollouts.shrink(group)

    def make_room(self, now: float) -> bool:
        """Give the serving model the pages that its requests need. Return False if only
        the end of the loan returns enough.
        """
        need = self.serving.pool.group_pages
        for _ in range(self.serving.missing_groups()):
            if not self._serving_may_grow:
                return True
            while self.pages.free < need and self._cut_one():
                pass
            if self.pages.free < need:
                return False
            self.serving.grow(now)
        return True

    def free_first(self, count: int) -> None:
        """Free pages for the first group of a borrower. Raises PagesError if serving
        uses all.
        """
        if not self._free(count):
            raise PagesError("the serving model uses all pages")

    def grow_rollouts(self, now: float) -> bool:
        """Give rollouts one more group. Return whether their budget allows it."""
        memory = self.rollouts
        assert memory is not None
        need = memory.pool.group_pages
        if not self.budget.fits(serving=self.in_use, held=memory.pages, more=need):
            return False
        if not self._free(need):
            return False
        memory.grow(now)
        return True

    @property
    def _serving_may_grow(self) -> bool:
        more = self.serving.pages + self.serving.pool.group_pages
        return more <= self.budget.serving_most

    def _free(self, count: int) -> bool:
        """Free so many pages, of those that serving does not use."""
        while self.pages.free < count:
            unused = self.serving.unused()
            if not unused:
                return False
            self.serving.shrink(unused[0])
        return True

    def _cut_one(self) -> bool:
        """Return a group of the rollouts' pages: a cached one, or else those of the
        request that is aborted for it. Return False if there is none.
        """
        memory = self.rollouts
        if memory is None:
            return False
        while not (unused := memory.unused()):
            chosen = victims(memory.holdings(), 1)
            if not chosen:
                return False
            self._abort(chosen[0])
        memory.shrink(unused[0])
        return True
