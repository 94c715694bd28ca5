"""KV blocks in use on a simulated engine and finished prefixes that can still be hit,
in counts.

This module stands in for `engine/blocks`, whose keys are digests of real
tokens. Here a prefix is known by name: a *segment* is a run of blocks that stores the
start of one trajectory (its `key`) or the common prompt of a group (its `shared_key`).

Invariants: `held` plus the blocks of idle segments is at most `total`; the rest is
blank. Blank blocks are allocated first, then those of the segment that was released
longest ago, its last block first, as in the ledger. A user of a segment holds its first
blocks; the rest of it is idle. New weights void everything: a segment always stems from
the loaded weights.
"""

from collections import OrderedDict

from rollweave.schema.base import Struct


class Request(Struct, frozen=True, kw_only=True):
    """One turn: `context_tokens` of prompt, of which the engine may know a prefix, and
    `output_tokens` to sample.

    `key` names the trajectory whose prefix it continues; its first `shared_tokens` are
    the same for all requests of one `shared_key`.
    """

    key: str
    shared_key: str = ""
    shared_tokens: int = 0
    context_tokens: int
    output_tokens: int
    rank: float = 0.0


class Segment:
    """`blocks` blocks of one prefix, after the `start` blocks before it.

    The first `ready` are computed, `held` are in use. `users` counts the live turns
    that use that many of its blocks; `owner` is the turn that is computing the rest of
    it, if any.
    """

    __slots__ = ("at", "blocks", "held", "name", "owner", "ready", "start", "users")

    def __init__(self, *, name: str, start: int, blocks: int) -> None:
        self.name = name
        self.at = 0.0
        """Time since which it is idle."""
        self.start = start
        self.blocks = self.ready = blocks
        self.held = 0
        self.users: dict[int, int] = {}
        self.owner: Turn | None = None

    def deepest(self, *, without: list[int]) -> int:
        """Return the number of blocks in use after the users of `without` blocks have
        left.
        """
        return max(
            (depth for depth, count in self.users.items() if count > without.count(depth)),
            default=0,
        )


class Turn:
    """A request on an engine.

    While it decodes, its length is `base` plus the engine's clock, and it samples its
    last token as that reaches `due`; the fields `length`, `left` (tokens to sample),
    `computed` and `own` are kept for the other turns alone. `shared` of its blocks
    belong to `segment`, `own` to itself alone. `item` sorts turns: higher rank first,
    then by arrival.
    """

    __slots__ = (
        "base",
        "cached",
        "common",
        "computed",
        "decoding",
        "due",
        "item",
        "left",
        "length",
        "own",
        "queue_s",
        "queued_at",
        "rank",
        "reached",
        "request",
        "running",
        "segment",
        "shared",
    )

    def __init__(self, request: Request, *, arrival: int, common: int) -> None:
        self.request = request
        self.rank = request.rank
        self.item: Item = (-request.rank, arrival, self)
        self.common = common
        """Blocks of the group's common prompt."""
        self.length = request.context_tokens
        self.left = request.output_tokens
        self.computed = 0
        self.reached = 0
        """Maximum tokens ever computed: computing tokens below it again is
        recomputation.
        """
        self.cached = -1
        """Tokens that the prefix cache gave at the first admission; -1 before it."""
        self.queued_at = 0.0
        self.queue_s = 0.0
        """Seconds spent waiting for a slot, as of the last admission."""
        self.running = False
        self.decoding = False
        self.base = self.due = 0
        self.own = self.shared = 0
        self.segment: Segment | None = None


Item = tuple[float, int, Turn]


class KvCounts:
    """A cache of `total` blocks of `block_tokens` tokens.

    With `caching` off, no block is kept, hit or shared.
    """

    def __init__(self, *, total: int, block_tokens: int, caching: bool) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.caching = caching
        self.at = 0.0
        """Time of the current change."""
        self.held = 0
        self._idle: OrderedDict[Segment, None] = OrderedDict()
        self._idle_blocks = 0
        self._kept: dict[str, Segment] = {}
        self._common: dict[str, Segment] = {}

    @property
    def free(self) -> int:
        """Return the number of blocks that can be allocated now."""
        return self.total - self.held

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> None:
        """Allocate `count` more blocks, at most `free`.

        Idle prefixes shrink where no blank block is left.
        """
        self.held += count
        over = self.held + self._idle_blocks - self.total
        while over > 0:
            segment = next(iter(self._idle))
            cut = min(over, segment.blocks - segment.held)
            segment.blocks -= cut
            segment.ready = segment.blocks
            self._idle_blocks -= cut
            over -= cut
            if segment.blocks == segment.held:
                self._busy(segment)

    def match(self, turn: Turn) -> tuple[int, int]:
        """Return the blocks that `turn` can start from, and the number of its group's
        prompt blocks that an earlier turn is computing now.
        """
        # the last token is computed anyway: it gives the logits
        useful = (turn.length - 1) // self.block_tokens
        segment = self._common.get(turn.request.shared_key) if turn.common else None
        hit = min(segment.ready, useful) if segment is not None else 0
        kept = self._kept.get(turn.request.key)
        if kept is not None and kept.start <= hit and kept.start + kept.blocks > hit:
            return min(kept.start + kept.blocks, useful), 0
        if segment is not None and segment.owner is not None and segment.owner.item < turn.item:
            return hit, min(segment.blocks, useful) - hit
        return hit, 0

    def hold(self, turn: Turn, hit: int) -> None:
        """Give `turn`, which has no blocks, the `hit` blocks that `match` returned."""
        segment = self._common.get(turn.request.shared_key) if turn.common else None
        if segment is not None and hit and segment.ready:
            turn.segment = segment
            turn.shared = min(segment.ready, hit)
            self._use(segment, turn.shared)
        kept = self._kept.pop(turn.request.key, None)
        if kept is not None:
            del self._idle[kept]
            self._idle_blocks -= kept.blocks
        turn.own = hit - turn.shared
        self.held += turn.own

    def extend(self, turn: Turn, *, hit: int) -> None:
        """Give `turn`, which has its `hit` blocks, the rest for its full length.

        The caller has made room. Where no earlier turn computes the rest of the group's
        prompt, `turn` does so for all.
        """
        need = self.blocks_for(turn.length) - turn.own - turn.shared
        self.allocate(need)
        if hit < turn.common and hit == turn.shared and self.caching:
            need -= self._compute_for_group(turn)
        turn.own += need

    def _compute_for_group(self, turn: Turn) -> int:
        """Make `turn` the owner of its group's prompt where it may be.

        Returns the number of blocks that became the group's.
        """
        segment = self._common.get(turn.request.shared_key)
        if segment is None:
            segment = self._common[turn.request.shared_key] = Segment(
                name=turn.request.shared_key, start=0, blocks=0
            )
        old, ready = segment.owner, segment.ready
        if (
            turn.shared < ready
            or ready >= turn.common
            or (old is not None and (old.decoding or old.item < turn.item))
        ):
            return 0
        if old is not None:  # this turn is later and computes its own copy
            self._move(segment, old, ready)
            old.own += turn.common - ready
        if turn.segment is None:
            turn.segment = segment
            segment.users[0] = segment.users.get(0, 0) + 1
        self._move(segment, turn, turn.common)
        segment.owner = turn
        segment.blocks = segment.held = turn.common
        return turn.common - ready

    def progress(self, turn: Turn) -> None:
        """Record progress of `turn`: the part that it computes for its group can be hit
        from now on.
        """
        segment = turn.segment
        if segment is not None and segment.owner is turn:
            segment.ready = min(segment.blocks, turn.computed // self.block_tokens)
            if segment.ready == segment.blocks:
                segment.owner = None

    def release(self, turn: Turn) -> None:
        """Release all blocks of `turn`, of which `computed` tokens are computed.

        Full blocks stay as idle segments.
        """
        self.held -= turn.own
        if self.caching:
            segment = self._common.get(turn.request.shared_key) if turn.common else None
            if segment is not None and segment.owner is turn:
                segment.owner = None
                self.held -= segment.blocks - segment.ready
                segment.blocks = segment.held = segment.ready
                self._move(segment, turn, segment.ready)
            # A second copy of the group's blocks is not kept: as in the ledger, only
            # the first one can be hit.
            rest = turn.computed // self.block_tokens - turn.common
            if rest > 0:
                kept = Segment(name=turn.request.key, start=turn.common, blocks=rest)
                kept.at = self.at
                self._kept[kept.name] = kept
                self._idle[kept] = None
                self._idle_blocks += kept.blocks
            if turn.segment is not None:
                self._leave(turn.segment, turn.shared)
        turn.own = turn.shared = turn.computed = 0
        turn.segment = None

    def _use(self, segment: Segment, depth: int) -> None:
        segment.users[depth] = segment.users.get(depth, 0) + 1
        if depth > segment.held:
            self._idle_blocks -= depth - segment.held
            self.held += depth - segment.held
            segment.held = depth
            if segment.blocks == depth:
                self._busy(segment)

    def _leave(self, segment: Segment, depth: int) -> None:
        segment.users[depth] -= 1
        if not segment.users[depth]:
            del segment.users[depth]
            deepest = max(segment.users, default=0)
            if deepest < segment.held:
                self._idle_blocks += segment.held - deepest
                self.held -= segment.held - deepest
                segment.held, segment.at = deepest, self.at
                self._idle[segment] = None
                self._idle.move_to_end(segment)
            elif not segment.blocks and not segment.users:
                del self._common[segment.name]

    def _move(self, segment: Segment, turn: Turn, depth: int) -> None:
        """Change the number of blocks that `turn` uses."""
        segment.users[turn.shared] -= 1
        if not segment.users[turn.shared]:
            del segment.users[turn.shared]
        segment.users[depth] = segment.users.get(depth, 0) + 1
        turn.shared = depth

    def _busy(self, segment: Segment) -> None:
        """Mark `segment` as without idle blocks; forget it if it has no blocks and no
        users.
        """
        del self._idle[segment]
        if not segment.blocks and not segment.users:
            for names in (self._kept, self._common):
                if names.get(segment.name) is segment:
                    del names[segment.name]

    def kept(self, key: str, shared_key: str) -> int:
        """Return the blocks of the longest cached prefix of `key`'s trajectory."""
        common, own = self._common.get(shared_key), self._kept.get(key)
        ready = common.ready if common is not None else 0
        return (
            own.start + own.blocks
            if own is not None and own.start <= ready < own.start + own.blocks
            else ready
        )

    def insert(self, key: str, shared_key: str, blocks: int, *, common: int = 0) -> int:
        """Keep `blocks` blocks of `key`'s prefix that another engine sent, as far as
        they fit. The first `common` are those of its group.

        Returns the number kept.
        """
        present = self.kept(key, shared_key)
        if present >= blocks:
            return blocks
        self._insert_common(shared_key, min(common, blocks))
        former = self._kept.pop(key, None)
        if former is not None:
            del self._idle[former]
            self._idle_blocks -= former.blocks
        group = self._common.get(shared_key)
        start = min(group.ready, blocks) if group is not None else 0
        rest = min(blocks - start, self.free)
        if rest > 0:
            kept = self._kept[key] = Segment(name=key, start=start, blocks=rest)
            self._idle[kept] = None
            self._idle_blocks += rest
            self.allocate(0)
        return start + max(0, rest)

    def _insert_common(self, shared_key: str, blocks: int) -> None:
        """Keep the group's prompt that another engine sent, if none of it is here."""
        if blocks < 1 or shared_key in self._common or self.free < blocks:
            return
        segment = self._common[shared_key] = Segment(name=shared_key, start=0, blocks=blocks)
        self._idle[segment] = None
        self._idle_blocks += blocks
        self.allocate(0)

    def resize(self, total: int) -> None:
        """Change the number of blocks to at least those in use; idle prefixes shrink
        where they no longer fit.
        """
        assert self.held <= total, "blocks in use are not taken away"
        self.total = total
        self.allocate(0)

    def forget(self, before: float) -> None:
        """Discard the idle blocks that were released before this time."""
        while self._idle:
            segment = next(iter(self._idle))
            if segment.at >= before:
                return
            self._idle_blocks -= segment.blocks - segment.held
            segment.blocks = segment.ready = segment.held
            self._busy(segment)

    def void(self) -> None:
        """Discard all blocks for new weights.

        The caller resets the turns.
        """
        self.held = self._idle_blocks = 0
        self._idle.clear()
        self._kept.clear()
        self._common.clear()

    def check(self, turns: list[Turn]) -> None:
        """Assert the invariants of this module, given all live turns with their `own`
        up to date.
        """
        assert self.held >= 0, "more released than held"
        assert self.held + self._idle_blocks <= self.total, "more blocks than there are"
        idle = sum(segment.blocks - segment.held for segment in self._idle)
        assert self._idle_blocks == idle, "idle blocks are miscounted"
        used = {turn.segment: None for turn in turns if turn.segment is not None}
        assert self.held == sum(turn.own for turn in turns) + sum(
            segment.held for segment in used
        ), "held is miscounted"
        for segment in [*self._kept.values(), *self._common.values()]:
            users = sorted(turn.shared for turn in turns if turn.segment is segment)
            assert users == sorted(
                depth for depth, count in segment.users.items() for _ in range(count)
            ), "users are wrong"
            assert segment.held == max(users, default=0), (
                f"{segment.name} is held otherwise than used"
            )
            assert (segment in self._idle) == (segment.held < segment.blocks), (
                f"{segment.name} is in the wrong state"
            )
            assert 0 <= segment.ready <= segment.blocks, (
                f"{segment.name} has computed more than its blocks"
            )
            assert segment.owner is None or segment.owner.segment is segment, (
                f"{segment.name} is computed by a stranger"
            )
        assert len(self._idle) <= len(self._kept) + len(self._common), "an idle segment has no name"
