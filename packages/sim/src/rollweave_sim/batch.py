"""Slots, KV blocks and prompt computation of a simulated engine, in counts.

The rules are those of `engine/batching`, restated for turns whose tokens are
only counted. The difference is growth: a decoding turn is not touched as it gains
tokens. `clock` counts the engine's steps, a turn's length is its `base` plus the clock,
a heap orders turns by their last token, and `_growing` counts the turns that need
another block at each clock (modulo the block size).

Invariant (`check`): between `settle` and the step's end, every running turn has the
blocks for its full length; at other times, a decoding turn has them for all but its
last token.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import takewhile

from rollweave_sim.kv import Item, KvCounts, Segment, Turn


class Batch:
    """The live turns of one engine.

    Call `settle` before a step and `advance` with what was computed; turns are added
    and removed in between.
    """

    def __init__(self, kv: KvCounts, *, slots: int) -> None:
        self.kv = kv
        self.waiting: list[Item] = []
        self.running: list[Item] = []
        self.prefilling: list[Item] = []
        self.preemptions = 0
        self.clock = 0
        self.at = 0.0
        """Time of the current change to the turns."""
        self.decoding = 0
        self.context = 0
        """Tokens of all decoding turns, including those computed next."""
        self.prompt_pending = False
        """True if a turn waits while its group's prompt is computed.

        Every step may then change the running turns.
        """
        self._slots, self._size = slots, kv.block_tokens
        self._paused: list[Item] = []  # waiting turns that have blocks
        self._ends: list[tuple[int, float, int, Turn]] = []
        self._growing = [0] * kv.block_tokens
        self._grown = False
        # Turns that decode the last token of the prompt they compute for their group.
        self._tails: list[Turn] = []

    def could_run(self, turn: Turn) -> bool:
        """Return whether a newly arrived turn may get a slot in the next step."""
        return len(self.running) < self._slots or self.running[-1][2].rank < turn.rank

    # Steps.

    def settle(self, chunk: list[tuple[Turn, int]]) -> None:
        """Assign slots and blocks for the next step.

        `chunk` is the part of each prompt that the last step computed.
        """
        if not self._grown:  # unless the step was planned before, and not begun
            need = self._growing[self.clock % self._size]
            if need <= self.kv.free:
                if need:
                    self.kv.allocate(need)
            else:
                self._grow_in_order()
            self._grown = True
        self.prompt_pending = False
        if self.waiting:
            self._admit()
        for turn, _ in chunk:  # a prompt's last token is decoded
            if turn.running and not turn.decoding and turn.length - turn.computed == 1:
                _remove(self.prefilling, turn)
                self._join(turn)

    def steps(self, most: int | None) -> int:
        """Return the number of steps, at most `most` if given, that keep the same
        turns.

        A turn that ends or lacks a block bounds it.
        """
        if self._tails:
            return 1
        if self.decoding:
            until = self._ends[0][0] - self.clock
            most = until if most is None else min(most, until)
        assert most, "live requests, and nothing to compute"
        return self._affordable(most)

    def _affordable(self, steps: int) -> int:
        """Return how many of the next `steps` steps can be computed before a block is
        lacking.
        """
        free, size = self.kv.free, self._size
        if self.decoding * ((steps - 1) // size + 1) <= free:
            return steps
        cycles = free // self.decoding
        free -= cycles * self.decoding
        grown = cycles * size
        while grown < steps - 1:
            free -= self._growing[(self.clock + grown + 1) % size]
            if free < 0:
                break
            grown += 1
        return min(grown + 1, steps)

    def advance(self, steps: int, *, more: bool) -> None:
        """Let all decoding turns gain `steps` tokens.

        With `more`, the same step comes next and gets its blocks.
        """
        size, growing = self._size, self._growing
        cycles, rest = divmod(steps - (not more), size)
        first = (self.clock + 1) % size
        past = first + rest - size
        grown = (
            cycles * self.decoding
            + sum(growing[first : first + rest])
            + (sum(growing[:past]) if past > 0 else 0)
        )
        if grown:
            self.kv.allocate(grown)
        self._grown = more
        self.clock += steps
        self.context += steps * self.decoding
        for turn in self._tails:
            turn.computed = turn.base + self.clock - 1
            self.kv.progress(turn)
        self._tails.clear()

    def ended(self) -> Iterator[Turn]:
        """Yield the decoding turns that have just sampled their last token."""
        while self._ends and self._ends[0][0] <= self.clock:
            turn = heappop(self._ends)[3]
            if turn.decoding and turn.due == self.clock:
                yield turn

    def sampled(self, turn: Turn) -> None:
        """Record that the prompt of `turn` is computed and its first token sampled.

        The turn decodes unless that token is its last.
        """
        _remove(self.prefilling, turn)
        turn.length += 1
        turn.left -= 1
        if turn.left:
            self._join(turn)

    def void(self) -> None:
        """Discard all KV for new weights and requeue every turn, in order."""
        for _, _, turn in [*self.running]:
            self._stop(turn)
            self.wait(turn)
        for _, _, turn in self.waiting:
            turn.computed = turn.own = turn.shared = 0
            turn.segment = None
        self._paused.clear()
        self._tails.clear()
        self.kv.void()

    # Turns come and go.

    def wait(self, turn: Turn) -> None:
        """Queue `turn` for a slot from now on."""
        turn.queued_at = self.at
        insort(self.waiting, turn.item)

    def rerank(self, turn: Turn, rank: float) -> None:
        """Give `turn`, which is live, another rank from the next step on."""
        queues = [
            queue
            for queue in (self.waiting, self.running, self.prefilling, self._paused)
            if _holds(queue, turn)
        ]
        for queue in queues:
            _remove(queue, turn)
        turn.rank, turn.item = rank, (-rank, turn.item[1], turn)
        for queue in queues:
            insort(queue, turn.item)

    def _join(self, turn: Turn) -> None:
        """Let `turn` decode from the next step on."""
        turn.decoding = True
        turn.base = turn.length - self.clock
        turn.due = self.clock + turn.left
        self.decoding += 1
        self.context += turn.length
        self._growing[(1 - turn.base) % self._size] += 1
        if turn.segment is not None and turn.segment.owner is turn:
            self._tails.append(turn)
        heappush(self._ends, (turn.due, turn.item[0], turn.item[1], turn))
        if len(self._ends) > 64 + 2 * self.decoding:  # entries of stopped turns
            self._ends = [end for end in self._ends if end[3].decoding and end[3].due == end[0]]
            heapify(self._ends)

    def _own(self, turn: Turn) -> int:
        """Return the number of blocks that belong to `turn` alone."""
        if turn.decoding:
            return self.kv.blocks_for(turn.base + self.clock - (not self._grown)) - turn.shared
        return turn.own

    def _stop(self, turn: Turn) -> None:
        """Take the slot of `turn`, which keeps its blocks."""
        _remove(self.running, turn)
        turn.running = False
        if turn.decoding:
            turn.own = self._own(turn)
            turn.decoding = False
            turn.length = turn.base + self.clock
            turn.left = turn.due - self.clock
            turn.computed = turn.length - 1
            turn.reached = max(turn.reached, turn.computed)
            self.decoding -= 1
            self.context -= turn.length
            self._growing[(1 - turn.base) % self._size] -= 1
        elif turn.left:
            _remove(self.prefilling, turn)

    def drop(self, turn: Turn) -> None:
        """Forget `turn`, of which only the prefix is kept."""
        if turn.running:
            self._stop(turn)
        else:
            _remove(self.waiting, turn)
            if turn.own or turn.shared:
                _remove(self._paused, turn)
        self.kv.release(turn)

    def _preempt(self, turn: Turn) -> None:
        self._stop(turn)
        self.wait(turn)
        insort(self._paused, turn.item)
        self.preemptions += 1

    def _evict(self, turn: Turn) -> None:
        """Take the blocks of `turn`, and its slot if it has one."""
        if turn.running:
            self._preempt(turn)
        _remove(self._paused, turn)
        self.kv.release(turn)

    # Slots and blocks.

    def _grow_in_order(self) -> None:
        """Give a block to each decoding turn that needs one, in order.

        Where none is free, it comes from the turns behind.
        """
        size, clock = self._size, self.clock
        for turn in [
            turn
            for _, _, turn in self.running
            if turn.decoding and (turn.base + clock - 1) % size == 0
        ]:
            if not turn.running:  # an earlier turn has just claimed its blocks
                continue
            if self._make_room(
                1, merge(_after(turn, self._paused), _after(turn, self.running), reverse=True)
            ):
                self.kv.allocate(1)
            else:
                self._evict(turn)

    def _admit(self) -> None:
        """Give waiting turns slots and blocks, in order."""
        running = self.running
        if len(running) >= self._slots and running[-1][2].rank >= self.waiting[0][2].rank:
            return
        for _, _, turn in self.waiting[:]:
            victim = running[-1][2] if len(running) >= self._slots else None
            if victim is not None and victim.rank >= turn.rank:
                break
            hit = 0
            if self.kv.caching and not (turn.own or turn.shared):
                hit, coming = self.kv.match(turn)
                self.prompt_pending |= coming > 0
                if coming and 2 * coming >= (turn.length - 1) // self._size - hit:
                    continue  # at least half of the missing blocks will be shared
            if not self._place(turn, hit, victim):
                break
            if turn.cached < 0:
                turn.cached = turn.computed

    def _place(self, turn: Turn, hit: int, victim: Turn | None) -> bool:
        """Give `turn` blocks and a slot (that of `victim`, if any).

        Returns False and changes nothing where KV is short.
        """
        running, kv = self.running, self.kv
        if turn.own or turn.shared:
            paused = True
        else:
            paused = False
            kv.hold(turn, hit)
            turn.computed = hit * self._size
        need = kv.blocks_for(turn.length) - turn.own - turn.shared
        spare = len(running) - (victim is not None)
        if kv.free < need + spare:
            # A turn that may claim the blocks of lower ranks needs no spare: it claims
            # again what it lacks later.
            claims = not running or running[-1][2].rank < turn.rank
            lower = takewhile(lambda item: item[2].rank < turn.rank, reversed(running))
            victims = merge(_after(turn, self._paused), lower, reverse=True)
            if not self._make_room(need if claims else need + spare, victims):
                if not paused:
                    kv.release(turn)
                return False
        if victim is not None and victim.running:
            self._preempt(victim)
        _remove(self.waiting, turn)
        if paused:
            _remove(self._paused, turn)
        kv.extend(turn, hit=hit if not paused else -1)
        turn.running = True
        turn.queue_s += self.at - turn.queued_at
        insort(running, turn.item)
        if turn.length - turn.computed == 1:
            self._join(turn)
        else:
            insort(self.prefilling, turn.item)
        return True

    def _make_room(self, need: int, victims: Iterator[Item]) -> bool:
        """Evict `victims` until `need` blocks are free.

        Returns False and changes nothing if they do not suffice.
        """
        free = self.kv.free
        if free >= need:
            return True
        chosen: list[Turn] = []
        leaving: dict[Segment, list[int]] = {}
        for _, _, turn in victims:
            chosen.append(turn)
            free += self._own(turn)
            segment = turn.segment
            if segment is not None:
                left_turns = leaving.setdefault(segment, [])
                before = segment.deepest(without=left_turns)
                left_turns.append(turn.shared)
                free += before - segment.deepest(without=left_turns)
            if free >= need:
                break
        else:
            return False
        for turn in chosen:
            self._evict(turn)
        return True

    def check(self, turns: list[Turn]) -> None:
        """Assert the invariants of this module, given all live turns.

        Only tests call this.
        """
        for turn in turns:
            turn.own = self._own(turn)
        self.kv.check(turns)
        assert sorted(self.waiting + self.running) == sorted(turn.item for turn in turns), (
            "a request is lost"
        )
        assert self.waiting == sorted(self.waiting), "waiting is not in order"
        assert self.running == sorted(self.running), "running is not in order"
        assert self._paused == [item for item in self.waiting if item[2].own or item[2].shared], (
            "paused is wrong"
        )
        assert len(self.running) <= self._slots, "more running than slots"
        decoding = [item[2] for item in self.running if item[2].decoding]
        assert self.prefilling == [item for item in self.running if not item[2].decoding], (
            "prefilling is wrong"
        )
        assert (self.decoding, self.context) == (
            len(decoding),
            sum(turn.base + self.clock for turn in decoding),
        )
        assert min(self._growing) >= 0, "growth is miscounted"
        assert sum(self._growing) == self.decoding, "growth is miscounted"


def _remove(queue: list[Item], turn: Turn) -> None:
    """Remove `turn`, which is present, from a sorted queue."""
    del queue[bisect_left(queue, turn.item)]


def _holds(queue: list[Item], turn: Turn) -> bool:
    place = bisect_left(queue, turn.item)
    return place < len(queue) and queue[place][2] is turn


def _after(turn: Turn, queue: list[Item]) -> Iterator[Item]:
    """Return the items after `turn` in a sorted queue, the last first."""
    return takewhile(lambda item: item > turn.item, reversed(queue))
