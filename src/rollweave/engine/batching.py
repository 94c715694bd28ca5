"""Plans the next engine step: which requests hold a slot, which prompts are prefilled
and how far, and which requests decode. Pure.

Requests are ordered by rank (higher first), then by arrival. The rules:

- A waiting request takes a free slot in order, or the slot of the lowest running
  request if its own rank is strictly higher. The victim is paused and keeps its
  blocks; equal ranks never preempt each other.
- When KV runs out, victims give up all their blocks, the lowest first, and are
  recomputed later. A running request may claim the blocks of any request after it; a
  waiting one may claim those of paused requests after it and of running requests of
  lower rank.
- Admission without eviction leaves one free block for each running request, so that
  it is not undone at the next block boundary.
- A request is accepted only if it fits alone, so the first in order can always run
  and there is no deadlock.
- A request most of whose prompt is being computed by an earlier one (a member of the
  same group) waits for that request and then shares its blocks.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollweave.engine.blocks import BlockLedger, Key


@dataclass(eq=False, slots=True)
class Entry:
    """One live request. `tokens` grows as it is sampled; the KV of the first `computed`
    tokens lies in `blocks`.

    `limit` is the maximum number of tokens that it can ever have, `reached` the maximum
    that were ever computed (under any weights).
    """

    id: str
    tokens: list[int]
    limit: int
    rank: float = 0.0
    arrival: int = 0
    computed: int = 0
    reached: int = 0
    running: bool = False
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    preemptions: int = 0
    cached: int | None = None
    """Number of tokens found in the prefix cache at the first admission; None
    before.
    """
    scored: int = 0
    """Number of first tokens whose log-probs are wanted: none comes from the cache."""
    held: bool = False
    """True while its next token cannot be sampled: it takes no slot, and computes
    nothing in the one that it has.
    """
    scored_top: int = 0
    """Number of likeliest tokens that are wanted beside each of them."""

    @property
    def missing(self) -> int:
        """Number of tokens that are not computed yet; a sequence that decodes has 1."""
        return len(self.tokens) - self.computed


def _order(entry: Entry) -> tuple[float, int]:
    return (-entry.rank, entry.arrival)


class StepWork(NamedTuple):
    """The work of one step: the number of prompt tokens and the sum of their attention
    spans, the number of decoding sequences and the sum of their contexts.

    `longest_prompt` is the number of tokens of the longest prompt in it, without those
    from the prefix cache, of which the step may compute a part.
    """

    prefill_tokens: int
    prefill_context: int
    decode: int
    decode_context: int
    longest_prompt: int = 0


@dataclass(slots=True)
class StepPlan:
    """Entries in `decode` compute one token each and sample; entries in `prefill`
    compute the given number of tokens, and sample if the last token is among them.

    Entries in `left` gave up their slot since the last plan (and may have one again);
    entries in `entered` took one, for the first time or again.
    """

    decode: list[Entry]
    prefill: list[tuple[Entry, int]]
    left: list[Entry]
    entered: list[Entry]

    @property
    def work(self) -> StepWork:
        """Return what the step's time depends on. Read it before the plan is
        computed.
        """
        spans = [count * entry.computed + count * (count + 1) // 2 for entry, count in self.prefill]
        contexts = [len(entry.tokens) for entry in self.decode]
        prompts = [len(entry.tokens) - (entry.cached or 0) for entry, _ in self.prefill]
        return StepWork(
            sum(count for _, count in self.prefill),
            sum(spans),
            len(contexts),
            sum(contexts),
            max(prompts, default=0),
        )


class Batcher:
    """The live requests of one engine.

    Call `plan`, compute it, then `advance` each entry; add and remove requests in
    between.
    """

    def __init__(self, ledger: BlockLedger, *, slots: int, chunk_tokens: int) -> None:
        if slots < 1 or chunk_tokens < 1:
            raise ValueError(
                f"slots and chunk_tokens must be at least 1, got {slots} and {chunk_tokens}"
            )
        self.ledger = ledger
        self.slots = slots
        self.chunk_tokens = chunk_tokens
        self.decoding = slots
        """Maximum number of sequences that decode in a step: the first ones do."""
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.live: dict[str, Entry] = {}
        self.preemptions = 0
        self._arrivals = 0
        self._left: list[Entry] = []
        self._promised: dict[Key, Entry] = {}

    # Requests

    def add(self, entry: Entry) -> None:
        """Queue a request.

        Raises ValueError for an id that is live, and for a request that could not run
        even alone.
        """
        if entry.id in self.live:
            raise ValueError(f"id must be unique among live requests, got {entry.id!r} again")
        capacity = self.ledger.total * self.ledger.block_tokens
        if entry.limit > capacity:
            raise ValueError(
                f"tokens must fit the KV cache ({capacity} tokens), got a request of "
                f"up to {entry.limit}"
            )
        entry.arrival = self._arrivals
        self._arrivals += 1
        self.live[entry.id] = entry
        insort(self.waiting, entry, key=_order)

    def remove(self, id: str) -> Entry | None:
        """Forget a finished or aborted request, and release its blocks.

        Return None if the id is not live.
        """
        entry = self.live.pop(id, None)
        if entry is None:
            return None
        if entry.running:
            self._stop(entry)
        else:
            self.waiting.remove(entry)
        self._release(entry)
        return entry

    def rerank(self, id: str, rank: float) -> None:
        """Change a request's rank; unknown ids are ignored.

        Preemption follows at the next plan.
        """
        entry = self.live.get(id)
        if entry is not None and entry.rank != rank:
            queue = self.running if entry.running else self.waiting
            queue.remove(entry)
            entry.rank = rank
            insort(queue, entry, key=_order)

    def retag(self, publication_id: int) -> int:
        """Switch to new weights, which voids all KV.

        All requests wait again, in order, and are recomputed. Return the number of
        tokens to recompute.
        """
        lost = 0
        for entry in [*self.running, *self.waiting]:
            lost += entry.computed
            if entry.running:
                self._stop(entry)
                insort(self.waiting, entry, key=_order)
            self._release(entry)
            entry.keys.clear()
        self.ledger.retag(publication_id)
        return lost

    # One step

    def plan(self) -> StepPlan:
        """Assign slots and blocks, and return what to compute: never nothing while all
        requests are live and none is held.
        """
        size = self.ledger.block_tokens
        for entry in [
            entry for entry in self.running if len(entry.tokens) > len(entry.blocks) * size
        ]:
            if entry.running:  # an earlier request may just have claimed its blocks
                self._grow(entry)
        entered = self._admit() if self.waiting else []
        decode: list[Entry] = []
        prefill: list[tuple[Entry, int]] = []
        budget = self.chunk_tokens
        for entry in self.running:
            if entry.held:
                continue
            if entry.missing == 1:
                if len(decode) < self.decoding:
                    decode.append(entry)
            elif budget:
                count = min(entry.missing, budget)
                prefill.append((entry, count))
                budget -= count
        left, self._left = self._left, []
        return StepPlan(decode=decode, prefill=prefill, left=left, entered=entered)

    def advance(self, entry: Entry, count: int) -> int:
        """Record that `count` more tokens of `entry` were computed, and index the
        blocks that became full. Return how many of the tokens were recomputed.
        """
        before = entry.computed
        after = entry.computed = before + count
        recomputed = 0
        if before < entry.reached:
            recomputed = min(entry.reached, after) - before
        if after > entry.reached:
            entry.reached = after
        if after % self.ledger.block_tokens < count and self.ledger.caching:
            self._commit(entry, before)
        return recomputed

    def _commit(self, entry: Entry, before: int) -> None:
        size = self.ledger.block_tokens
        full = entry.computed // size
        if len(entry.keys) < full:
            entry.keys = self.ledger.keys(entry.tokens[: full * size], known=entry.keys)
        for index in range(before // size, full):
            key = entry.keys[index]
            self.ledger.commit(entry.blocks[index], key)
            if self._promised.get(key) is entry:
                del self._promised[key]

    def _grow(self, entry: Entry) -> None:
        need = self.ledger.blocks_for(len(entry.tokens)) - len(entry.blocks)
        if self.ledger.free >= need or self._make_room(
            need, [other for other in self._block_holders() if _order(other) > _order(entry)]
        ):
            entry.blocks.extend(self.ledger.allocate(need))
        else:
            self._preempt(entry)
            self._release(entry)

    def _admit(self) -> list[Entry]:
        entered: list[Entry] = []
        for entry in self.waiting[:]:
            if entry.held:
                continue
            victim = self.running[-1] if len(self.running) >= self.slots else None
            if victim is not None and victim.rank >= entry.rank:
                break
            hit = [] if entry.blocks else self._hit(entry)
            if hit is None:
                continue
            if not self._give_slot(entry, hit, victim):
                break
            if entry.cached is None:
                entry.cached = entry.computed
            entered.append(entry)
        return entered

    def _hit(self, entry: Entry) -> list[int] | None:
        """Return cached blocks that `entry` can start from, or None if it should wait
        for an earlier request to compute more of them.
        """
        if not self.ledger.caching or entry.scored:
            return []
        entry.keys = self.ledger.keys(entry.tokens, known=entry.keys)
        # The last token is always computed, because it yields the logits.
        useful = (len(entry.tokens) - 1) // self.ledger.block_tokens
        hit = self.ledger.match(entry.keys[:useful])
        coming = 0
        for key in entry.keys[len(hit) : useful]:
            owner = self._promised.get(key)
            if owner is None or _order(owner) > _order(entry):
                break
            coming += 1
        # Waiting pays off if at least half of the missing blocks will be shared.
        return None if coming and 2 * coming >= useful - len(hit) else hit

    def _give_slot(self, entry: Entry, hit: list[int], victim: Entry | None) -> bool:
        """Give `entry` blocks and a slot (that of `victim`, if any).

        Return False, with nothing changed, if KV is short.
        """
        self.ledger.share(hit)
        need = self.ledger.blocks_for(len(entry.tokens)) - len(entry.blocks) - len(hit)
        spare = len(self.running) - (victim is not None)
        if self.ledger.free < need + spare:
            after = [
                other
                for other in self._block_holders()
                if other is not entry
                and _order(other) > _order(entry)
                and not (other.running and other.rank >= entry.rank)
            ]
            # A request that may claim the blocks of lower ranks needs no spare blocks:
            # it claims what it lacks later.
            claims = not self.running or self.running[-1].rank < entry.rank
            if not self._make_room(need if claims else need + spare, after):
                self.ledger.release(hit)
                return False
        if victim is not None and victim.running:
            self._preempt(victim)
        entry.blocks.extend(hit + self.ledger.allocate(need))
        entry.computed = max(entry.computed, len(hit) * self.ledger.block_tokens)
        entry.running = True
        self.waiting.remove(entry)
        insort(self.running, entry, key=_order)
        for key in entry.keys[entry.computed // self.ledger.block_tokens :]:
            self._promised.setdefault(key, entry)
        return True

    # Victims

    def _block_holders(self) -> Iterator[Entry]:
        """Yield all requests that hold blocks."""
        return (entry for queue in (self.waiting, self.running) for entry in queue if entry.blocks)

    def _make_room(self, need: int, candidates: Iterable[Entry]) -> bool:
        """Evict the last of `candidates` until `need` blocks are free.

        Return False, with nothing changed, if they do not suffice.
        """
        free = self.ledger.free
        if free >= need:
            return True
        released: Counter[int] = Counter()
        victims: list[Entry] = []
        for entry in sorted(candidates, key=_order, reverse=True):
            victims.append(entry)
            released.update(entry.blocks)
            free += sum(
                1 for block in entry.blocks if released[block] == self.ledger.references(block)
            )
            if free >= need:
                break
        else:
            return False
        for entry in victims:
            if entry.running:
                self._preempt(entry)
            self._release(entry)
        return True

    def _preempt(self, entry: Entry) -> None:
        self._stop(entry)
        insort(self.waiting, entry, key=_order)
        entry.preemptions += 1
        self.preemptions += 1

    def _stop(self, entry: Entry) -> None:
        self.running.remove(entry)
        entry.running = False
        self._left.append(entry)
        for key in entry.keys:
            if self._promised.get(key) is entry:
                del self._promised[key]

    def _release(self, entry: Entry) -> None:
        self.ledger.release(entry.blocks)
        entry.blocks.clear()
        entry.computed = 0

    def check(self) -> None:
        """Assert the invariants: slots, order, and that the ledger counts the blocks
        and they cover the computed tokens.
        """
        self.ledger.check()
        assert len(self.running) <= self.slots, "more running than slots"
        assert self.running == sorted(self.running, key=_order), "running is not in order"
        assert self.waiting == sorted(self.waiting, key=_order), "waiting is not in order"
        assert sorted(self.live) == sorted(entry.id for entry in [*self.running, *self.waiting]), (
            "a request is lost"
        )
        size = self.ledger.block_tokens
        references = Counter(block for entry in self.live.values() for block in entry.blocks)
        for block in range(self.ledger.total):
            assert references[block] == self.ledger.references(block), (
                f"block {block} is not held as the ledger counts it"
            )
        for entry in self.live.values():
            assert entry.computed <= len(entry.blocks) * size, (
                f"{entry.id} has computed more than its blocks hold"
            )
            assert entry.computed < len(entry.tokens) or not entry.computed, (
                f"{entry.id} has nothing to compute"
            )
            assert entry.running == (entry in self.running), f"{entry.id} is in the wrong queue"
        assert all(owner.running for owner in self._promised.values()), (
            "a promised block of a request that does not run"
        )
