"""The planner agrees with a plain reference, and the memory that its plans would write
is checked token by token.
"""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.batching import Batcher, Entry, StepPlan
from rollweave.engine.blocks import BlockLedger
from tests.support.properties import examples

SIZE = 4


def batcher(*, blocks: int = 64, slots: int = 2, chunk: int = 16, caching: bool = True) -> Batcher:
    return Batcher(
        BlockLedger(blocks=blocks, block_tokens=SIZE, caching=caching),
        slots=slots,
        chunk_tokens=chunk,
    )


def entry(id: str, tokens: list[int], *, output: int = 8, rank: float = 0.0) -> Entry:
    return Entry(id=id, tokens=list(tokens), limit=len(tokens) + output - 1, rank=rank)


@dataclass
class World:
    """Executes plans. Its memory holds, for each (block, offset), the weights and the
    whole prefix that the KV represents.
    """

    batcher: Batcher
    weights: int = -1
    steps: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.ends: dict[str, int] = {}
        self.finished: list[str] = []

    def add(self, new: Entry) -> None:
        self.batcher.add(new)
        self.ends[new.id] = new.limit + 1

    def step(self) -> StepPlan:
        plan = self.batcher.plan()
        self.batcher.check()
        work = [(one, 1) for one in plan.decode] + plan.prefill
        assert work or not self.batcher.live, "live requests, and nothing to compute"
        assert sum(count for _, count in plan.prefill) <= self.batcher.chunk_tokens
        for one, count in work:
            assert one.running
            self._compute(one, count)
        for one, count in work:
            self.batcher.advance(one, count)
            self.computed += count
            if one.computed == len(one.tokens):
                one.tokens.append(sum(one.tokens) % 3)
                if len(one.tokens) == self.ends[one.id]:
                    self.batcher.remove(one.id)
                    self.finished.append(one.id)
        self.steps += 1
        self.batcher.check()
        return plan

    def _compute(self, one: Entry, count: int) -> None:
        for at in range(one.computed + count):
            place = (one.blocks[at // SIZE], at % SIZE)
            content = (self.weights, tuple(one.tokens[: at + 1]))
            if at >= one.computed:
                if self.batcher.ledger.references(place[0]) > 1:
                    assert self.memory.get(place) == content, "a shared block was overwritten"
                self.memory[place] = content
            assert self.memory.get(place) == content, (
                f"{one.id} reads other KV than its own at {at}"
            )

    def finish(self, *, limit: int = 3000) -> None:
        while self.batcher.live:
            self.step()
            assert self.steps < limit, "the requests do not finish"

    def retag(self, weights: int) -> None:
        self.weights = weights
        self.batcher.retag(weights)


def names(entries: list[Entry]) -> list[str]:
    return [one.id for one in entries]


def test_equals_run_in_the_order_of_arrival_and_never_preempt_each_other() -> None:
    world = World(batcher(slots=2))
    for name in "abcd":
        world.add(entry(name, [ord(name), 2, 3]))
    world.finish()
    assert world.finished == ["a", "b", "c", "d"]
    assert world.batcher.preemptions == 0


def test_a_strictly_higher_rank_takes_the_slot_of_the_lowest_which_keeps_its_blocks() -> None:
    world = World(batcher(slots=2))
    low, middle = entry("low", [1, 2, 3]), entry("middle", [4, 5], rank=1.0)
    world.add(low)
    world.add(middle)
    world.step()
    blocks, computed = list(low.blocks), low.computed
    world.add(entry("high", [6, 7], rank=2.0))
    plan = world.step()
    assert names(plan.left) == ["low"]
    assert names(world.batcher.running) == ["high", "middle"]
    assert (low.blocks, low.computed, low.preemptions) == (blocks, computed, 1)
    world.finish()
    assert world.finished[-1] == "low"
    assert low.reached == low.limit  # nothing was computed twice
    assert world.computed == low.limit + 2 * (2 + 7)


def test_rerank_preempts_and_unknown_ids_are_ignored() -> None:
    world = World(batcher(slots=1))
    world.add(entry("a", [1, 2]))
    world.add(entry("b", [3, 4]))
    world.step()
    world.batcher.rerank("b", 1.0)
    world.batcher.rerank("nobody", 5.0)
    world.step()
    assert names(world.batcher.running) == ["b"]


def test_prefill_is_limited_by_the_budget_while_others_decode() -> None:
    world = World(batcher(slots=3, chunk=8))
    world.add(entry("short", [1, 2, 3], output=20))
    world.step()
    world.add(entry("long", list(range(20))))
    world.add(entry("next", list(range(30, 36))))
    plan = world.step()
    assert names(plan.decode) == ["short"]
    assert [(one.id, count) for one, count in plan.prefill] == [("long", 8)]
    world.step()
    plan = world.step()
    assert [(one.id, count) for one, count in plan.prefill] == [("long", 4), ("next", 4)]


def test_only_the_first_sequences_decode_if_few_may() -> None:
    world = World(batcher(slots=3))
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        world.add(entry(name, [token], output=3))
    world.batcher.decoding = 2
    world.batcher.rerank("c", 1.0)
    assert names(world.step().decode) == ["c", "a"]
    world.batcher.decoding = 0
    assert names(world.batcher.plan().decode) == []
    world.batcher.decoding = 1
    world.finish()
    assert world.finished == ["c", "a", "b"]


def test_plan_reports_the_work_of_its_step() -> None:
    planner = batcher(slots=3, chunk=16)
    planner.add(entry("a", list(range(4))))
    first = planner.plan()
    assert first.work == (4, 1 + 2 + 3 + 4, 0, 0, 4)
    planner.advance(first.prefill[0][0], 4)
    first.prefill[0][0].tokens.append(9)
    planner.add(entry("b", list(range(100, 120))))
    second = planner.plan()
    assert second.work == (16, 16 * 17 // 2, 1, 5, 20)  # of its 20 tokens, 4 come later
    planner.advance(second.decode[0], 1)
    second.decode[0].tokens.append(9)
    planner.advance(second.prefill[0][0], 16)
    assert planner.plan().work == (4, 17 + 18 + 19 + 20, 1, 6, 20)


def test_too_large_request_is_refused_and_one_that_just_fits_finishes() -> None:
    world = World(batcher(blocks=3))
    with pytest.raises(
        ValueError,
        match=r"must fit the KV cache \(12 tokens\), got a request of up to 13",
    ):
        world.add(entry("large", [1] * 6, output=8))
    world.add(entry("just", [1] * 6, output=7))
    with pytest.raises(ValueError, match="unique among live requests"):
        world.add(entry("just", [1]))
    world.finish()
    assert world.finished == ["just"]


def test_members_of_a_group_wait_for_the_first_and_share_its_prompt() -> None:
    world = World(batcher(slots=8, chunk=64))
    prompt = list(range(18))
    members = [entry(str(i), prompt) for i in range(6)]
    for member in members:
        world.add(member)
    world.finish()
    assert [member.cached for member in members] == [0] + [16] * 5
    assert world.computed == 18 + 5 * 2 + 6 * 7


def test_the_next_turn_finds_the_blocks_of_the_last() -> None:
    world = World(batcher())
    first = entry("first", list(range(10)))
    world.add(first)
    world.finish()
    second = entry("second", [*first.tokens, 7, 7, 7])
    world.add(second)
    world.finish()
    assert second.cached == first.limit // SIZE * SIZE


def test_after_an_update_everything_is_recomputed_and_nothing_old_is_hit() -> None:
    world = World(batcher(slots=2))
    a, b = entry("a", list(range(10))), entry("b", [9] * 5)
    world.add(a)
    world.add(b)
    world.step()
    assert world.batcher.running == [a, b]
    lost = a.computed + b.computed
    world.weights = 3
    assert world.batcher.retag(3) == lost > 0
    world.finish()  # the world's memory would see KV of other weights
    again = entry("again", list(range(10)))
    world.retag(4)
    world.add(again)
    world.finish()
    assert again.cached == 0


def reference_running(running: list[Entry], waiting: list[Entry], slots: int) -> set[str]:
    """Return which requests run if KV is plentiful, by the rules as documented."""
    runs, waits = list(running), list(waiting)
    while waits:
        best = min(waits, key=lambda one: (-one.rank, one.arrival))
        if len(runs) == slots:
            lowest = max(runs, key=lambda one: (-one.rank, one.arrival))
            if not best.rank > lowest.rank:
                break
            runs.remove(lowest)
            waits.append(lowest)
        waits.remove(best)
        runs.append(best)
    return {one.id for one in runs}


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_with_plenty_of_kv_the_slots_are_the_reference_s(seed: int) -> None:
    draw = Random(seed)
    slots = draw.randint(1, 4)
    world = World(batcher(blocks=400, slots=slots, chunk=draw.randint(1, 20), caching=False))
    submitted = 0
    for _ in range(draw.randint(1, 25)):
        for _ in range(draw.randint(0, 3)):
            tokens = [draw.randint(0, 2) for _ in range(draw.randint(1, 12))]
            world.add(
                entry(str(submitted), tokens, output=draw.randint(1, 6), rank=draw.randint(0, 3))
            )
            submitted += 1
        live = sorted(world.batcher.live)
        if live and draw.random() < 0.5:
            world.batcher.rerank(draw.choice(live), draw.randint(0, 3))
        expected = reference_running(world.batcher.running, world.batcher.waiting, slots)
        before = set(world.finished)
        world.step()
        assert {one.id for one in world.batcher.running} | (
            set(world.finished) - before
        ) == expected
    total = sum(world.ends.values()) - submitted
    world.finish()
    assert len(world.finished) == submitted
    assert world.computed == total  # with KV to spare, preemption costs no recomputation


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_any_history_finishes_and_every_token_reads_its_own_kv(seed: int) -> None:
    draw = Random(seed)
    blocks = draw.randint(4, 16)
    world = World(
        batcher(
            blocks=blocks,
            slots=draw.randint(1, 5),
            chunk=draw.randint(1, 20),
            caching=draw.random() < 0.7,
        )
    )
    stems = [[0] * 9, [1, 0, 2] * 4, [0, 0, 1, 1, 2]]
    submitted = removed = 0
    for step in range(draw.randint(1, 40)):
        for _ in range(draw.randint(0, 3)):
            stem = draw.choice(stems)
            tokens = stem[: draw.randint(1, len(stem))]
            output = draw.randint(1, min(12, blocks * SIZE + 1 - len(tokens)))
            world.add(entry(str(submitted), tokens, output=output, rank=draw.randint(0, 2)))
            submitted += 1
        live = sorted(world.batcher.live)
        action = draw.choice(["none", "none", "rerank", "remove", "retag"])
        if action == "rerank" and live:
            world.batcher.rerank(draw.choice(live), draw.randint(0, 2))
        elif action == "remove" and live:
            world.batcher.remove(draw.choice(live))
            removed += 1
        elif action == "retag":
            world.retag(step)
        world.step()
    world.finish()
    assert len(world.finished) == submitted - removed
    assert world.batcher.ledger.used == 0


@settings(max_examples=examples(40))
@given(st.integers(6, 14), st.integers(2, 6), st.integers(2, 8))
def test_scarce_kv_does_not_thrash(blocks: int, slots: int, count: int) -> None:
    """With equal ranks and scarce KV, the computed tokens stay within a small multiple
    of those with plentiful KV.
    """
    world = World(batcher(blocks=blocks, slots=slots, chunk=32, caching=False))
    for index in range(count):
        world.add(entry(str(index), [index] * 5, output=16))
    world.finish()
    assert world.computed <= 3 * count * 20


def test_highest_rank_never_waits_for_memory_of_lower_ranks() -> None:
    world = World(batcher(blocks=6, slots=4))
    for name in "abc":
        world.add(entry(name, [ord(name)] * 7, output=10))
    world.step()
    urgent = entry("urgent", [9] * 16, output=8, rank=1.0)
    world.add(urgent)
    world.step()
    assert urgent.running
    assert urgent.computed == 16
    world.finish()
    assert world.finished[0] == "urgent"
    assert sorted(world.finished) == ["a", "b", "c", "urgent"]
