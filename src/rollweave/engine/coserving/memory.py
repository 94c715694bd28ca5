"""The memory that a serving model and a rollout model share: the KV cache of each one
over one pool of pages, and the division of the pages.

The pool of blocks (`engine/kv.py`) is a tensor over a range of addresses, so attention
does not change. Blocks come and go in *groups*: as few neighbors as fill whole pages in
each layer. Blocks without memory are absent from the ledger, so no request can hold
one. The first group always has memory, because attention pads with the first block.

`core/policy/kv_budget` divides the pages. Serving takes what it needs: free pages
first, then cached pages of the rollouts, then pages of rollouts that are aborted.
Rollouts take what their budget allows, from free pages and from pages that serving does
not use.
"""

import math
from collections import deque
from collections.abc import Callable

import torch

from rollweave.core.policy.kv_budget import Holding, KvBudget, Leases, victims
from rollweave.engine.batching import Batcher
from rollweave.engine.blocks import BlockLedger
from rollweave.engine.kv import PagedPool
from rollweave.engine.pages import PagePool, driver_of
from rollweave.schema.errors import ConfigError, PagesError
from rollweave.weights.checkpoint import ModelShape


def group_size(
    shape: ModelShape, *, block_tokens: int, dtype: torch.dtype, page_bytes: int
) -> tuple[int, int]:
    """Return the number of blocks in a group, and of pages that they take in each
    layer.
    """
    block_bytes = block_tokens * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    blocks = page_bytes // math.gcd(page_bytes, block_bytes)
    return blocks, blocks * block_bytes // page_bytes


class MappedPool(PagedPool):
    """A pool of blocks whose memory is mapped group by group.

    Raises `PagesError` if there are no pages for the first group.
    """

    def __init__(
        self,
        pages: PagePool,
        shape: ModelShape,
        *,
        groups: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.group_blocks, self._layer_pages = group_size(
            shape,
            block_tokens=block_tokens,
            dtype=dtype,
            page_bytes=pages.driver.page_bytes,
        )
        self.groups, self.group_pages = groups, self._layer_pages * shape.layers
        self.pages, self._range = pages, pages.reserve(groups * self.group_pages)
        self.mapped: set[int] = set()
        self.closed = False
        super().__init__(
            shape,
            blocks=groups * self.group_blocks,
            block_tokens=block_tokens,
            device=device,
            dtype=dtype,
        )

    def _memory(self, blocks: int) -> torch.Tensor:
        if not blocks:
            for group in list(self.mapped):
                self.unmap(group)
            return super()._memory(0)
        if 0 not in self.mapped:
            self.map(0)
        flat = self._range.tensor().view(self._dtype)
        return flat.view(self._layers, blocks * self.block_tokens, self.width)

    def blocks_of(self, group: int) -> range:
        """Return the blocks of a group."""
        return range(group * self.group_blocks, (group + 1) * self.group_blocks)

    def map(self, group: int) -> None:
        """Give a group memory. Raises `PagesError`, with nothing changed, without
        enough pages.
        """
        places = self._places(group)
        done: list[int] = []
        try:
            for place in places:
                self._range.map(place)
                done.append(place)
        except BaseException:
            for place in done:
                self._range.unmap(place)
            raise
        self.mapped.add(group)

    def unmap(self, group: int) -> None:
        """Take a group's memory."""
        for place in self._places(group):
            self._range.unmap(place)
        self.mapped.remove(group)

    def _places(self, group: int) -> list[int]:
        first, layer = group * self._layer_pages, self.groups * self._layer_pages
        return [
            number * layer + first + page
            for number in range(self._layers)
            for page in range(self._layer_pages)
        ]

    def clear(self) -> None:
        for group in self.mapped:
            blocks = self.blocks_of(group)
            self.by_block[:, blocks.start : blocks.stop] = 0

    def close(self) -> None:
        """Return all pages. Nothing may read the pool any longer."""
        if not self.closed:
            self.closed = True
            self.mapped.clear()
            self._range.close()


def serving_pool(
    shape: ModelShape,
    *,
    page_bytes: int,
    blocks: int,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    released: bool,
) -> MappedPool:
    """Return the pool of a serving model of so many blocks, and of all models beside
    it, over pages of `page_bytes` or more.
    """
    assert not released, "a serving model keeps its memory"
    driver = driver_of(device, page_bytes)
    size, layer_pages = group_size(
        shape, block_tokens=block_tokens, dtype=dtype, page_bytes=driver.page_bytes
    )
    groups = max(1, -(-blocks // size))
    pages = PagePool(driver, groups * layer_pages * shape.layers)
    return MappedPool(
        pages, shape, groups=groups, block_tokens=block_tokens, device=device, dtype=dtype
    )


class ModelMemory:
    """The groups of one model: which have memory, and which are used."""

    def __init__(self, pool: MappedPool, ledger: BlockLedger, batcher: Batcher) -> None:
        self.pool, self._ledger, self._batcher = pool, ledger, batcher
        self._leases: Leases[int] = Leases()
        absent = [group for group in range(pool.groups) if group not in pool.mapped]
        ledger.remove([block for group in absent for block in pool.blocks_of(group)])

    @property
    def pages(self) -> int:
        """Number of pages that the model holds."""
        return len(self.pool.mapped) * self.pool.group_pages

    @property
    def free_blocks(self) -> int:
        """Number of blocks with memory that no request uses."""
        return self._ledger.free

    def holdings(self) -> list[Holding]:
        """Return the live requests, with the pages that their blocks fill, at least in
        part.
        """
        return [
            Holding(
                id=entry.id,
                pages=-(-len(entry.blocks) // self.pool.group_blocks) * self.pool.group_pages,
                rank=entry.rank,
                arrival=entry.arrival,
            )
            for entry in self._batcher.live.values()
        ]

    def missing_groups(self) -> int:
        """Return how many more groups the live requests need for their next tokens."""
        batcher, ledger = self._batcher, self._ledger
        if not batcher.live:
            return 0
        slots = max(batcher.slots, len(batcher.running))
        entries = [*batcher.running, *batcher.waiting[: slots - len(batcher.running)]]
        blocks = len(entries) + sum(
            max(0, ledger.blocks_for(len(entry.tokens) + 1) - len(entry.blocks))
            for entry in entries
        )
        room = self.pool.groups - len(self.pool.mapped)
        return min(room, max(0, -(-(blocks - ledger.free) // self.pool.group_blocks)))

    def grow(self, now: float) -> None:
        """Give memory to one more group. Raises `PagesError` without enough pages."""
        group = next(n for n in range(self.pool.groups) if n not in self.pool.mapped)
        self.pool.map(group)
        self._ledger.restore(self.pool.blocks_of(group))
        self._leases.renew(group, now)

    def unused(self) -> list[int]:
        """Return the groups with memory that no request uses, except the first one."""
        return [
            group
            for group in sorted(self.pool.mapped, reverse=True)
            if group and not any(map(self._ledger.references, self.pool.blocks_of(group)))
        ]

    def shrink(self, group: int) -> None:
        """Return the pages of an unused group, and forget what it caches."""
        self._ledger.remove(self.pool.blocks_of(group))
        self.pool.unmap(group)
        self._leases.forget(group)

    def expired(self, now: float) -> list[int]:
        """Return the groups that no request has used for the time of a lease. Call it
        about every second.
        """
        unused = set(self.unused())
        for group in self.pool.mapped - unused:
            self._leases.renew(group, now)
        known = set(self._leases.expired(now))
        return [group for group in unused if group in known]


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

    def pool_for(
        self,
        shape: ModelShape,
        *,
        kv_tokens: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> MappedPool:
        """Return the pool of a borrower's model, whose first group has memory. Raises
        ConfigError if rollouts may never have as many pages, and PagesError if serving
        uses all.
        """
        page_bytes = self.pages.driver.page_bytes
        size, layer_pages = group_size(
            shape, block_tokens=block_tokens, dtype=dtype, page_bytes=page_bytes
        )
        most, group_pages = self.budget.total - self.budget.headroom, layer_pages * shape.layers
        groups = min(-(-kv_tokens // (size * block_tokens)), most // group_pages)
        if groups < 1:
            raise ConfigError(
                f"engines.kv_tokens must leave the serving model its headroom: the first "
                f"{size * block_tokens} tokens take {group_pages} pages, got a pool whose "
                f"rollouts may have {most}"
            )
        if not self._free(group_pages):
            raise PagesError("the serving model uses all pages")
        return MappedPool(
            self.pages,
            shape,
            groups=groups,
            block_tokens=block_tokens,
            device=device,
            dtype=dtype,
        )

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
        """Take unused pages from serving until `count` are free. Return whether that
        many are free then.
        """
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
