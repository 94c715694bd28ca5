"""The macro-step engine against the real planner: `engine/batching` driven step
by step, with the same cost for each step.

The reference has tokens, the engine only counts. Without shared prompts the two agree
exactly (up to rounding), with ample and with tight KV; with shared prompts they agree
exactly with ample KV. With shared prompts and tight KV, the engine does not record
which member's copy of a block was the first, which can move an eviction: there the ends
must agree within 1 % of the elapsed time. (Not every seed would: in a cache of some
dozen blocks one block can decide an admission. Of 1,000 cases one is off.)
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random

import pytest

from rollweave.engine.batching import Batcher, Entry
from rollweave.engine.blocks import BlockLedger
from rollweave_sim.engine import Done, SimEngine
from rollweave_sim.kv import Request
from tests.support.simulation import Linear

SIZE = 4


@dataclass(frozen=True)
class Turn:
    """`new` tokens are appended to the context, `output` are sampled; the environment
    takes `gap_s` afterwards.
    """

    new: int
    output: int
    gap_s: float
    rank: float = 0.0


@dataclass(frozen=True)
class Trajectory:
    key: str
    start_s: float
    turns: tuple[Turn, ...]
    group: str = ""
    shared: int = 0


@dataclass(frozen=True)
class Case:
    """The calls to one engine. `orders` are (time, kind, trajectory or weights)."""

    trajectories: tuple[Trajectory, ...]
    orders: tuple[tuple[float, str, str], ...] = ()
    kv_tokens: int = 10_000
    slots: int = 4
    chunk: int = 16
    caching: bool = True
    kinked: bool = False

    @property
    def cost(self) -> Linear:
        return Linear(kv_tokens=self.kv_tokens, kinked=self.kinked)


@dataclass
class Outcome:
    """`ends` of turns by (trajectory, turn), their cached tokens, and the figures of
    the engine.

    `left` has the tokens that an aborted turn had sampled.
    """

    ends: dict[tuple[str, int], float] = field(default_factory=dict)
    cached: dict[tuple[str, int], int] = field(default_factory=dict)
    left: dict[tuple[str, int], int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class Agenda:
    """Future calls by time, in the order of insertion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Callable[[float], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, kind: str, call: Callable[[float], None]) -> None:
        heappush(self._heap, (when, next(self._count), kind, call))

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def until(self, now: float, *, kind: str = "") -> None:
        """Make the calls up to `now`, of one kind if given: "turn" for adding or
        aborting one, "engine" for the rest.
        """
        remaining = []
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if kind in ("", entry[2]):
                entry[3](entry[0])
            else:
                remaining.append(entry)
        for entry in remaining:
            heappush(self._heap, entry)


class Reference:
    """An engine that runs step by step, with real tokens.

    Orders take effect at the end of a step; an aborted turn is not reported.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.outcome, self.agenda = case, Outcome(), Agenda()
        ledger = BlockLedger(blocks=case.kv_tokens // SIZE, block_tokens=SIZE, caching=case.caching)
        self.batcher = Batcher(ledger, slots=case.slots, chunk_tokens=case.chunk)
        self.suspended = False
        self.fresh = itertools.count(1000)
        self.tokens: dict[str, list[int]] = {}
        self.at: dict[str, int] = {}
        self.by_key = {one.key: one for one in case.trajectories}
        self.computed_before: dict[str, int] = {}  # of the step under way: tokens computed
        self.again = self.computed = self.sampled = 0
        self.busy_s = 0.0

    def run(self) -> Outcome:
        now = 0.0
        for one in self.case.trajectories:
            group = [hash((one.group, index)) for index in range(one.shared)]
            self.tokens[one.key] = group + [
                next(self.fresh) for _ in range(one.turns[0].new - one.shared)
            ]
            self.at[one.key] = 0
            self.agenda.at(one.start_s, "turn", lambda _, key=one.key: self.add(key))
        for when, what, name in self.case.orders:
            kind = "turn" if what == "abort" else "engine"
            self.agenda.at(when, kind, lambda _, what=what, name=name: self.obey(what, name))
        while True:
            self.agenda.until(now)
            if self.batcher.live and not self.suspended:
                now = self.step(now)
                continue
            later = self.agenda.next()
            if later is None:
                break
            now = later
        figures = {
            "busy_s": self.busy_s,
            "tokens": self.sampled,
            "prefill": self.computed,
            "again": self.again,
        }
        self.outcome.figures = {**figures, "preemptions": self.batcher.preemptions}
        return self.outcome

    def add(self, key: str) -> None:
        turn = self.by_key[key].turns[self.at[key]]
        tokens = list(self.tokens[key])
        self.batcher.add(
            Entry(id=key, tokens=tokens, limit=len(tokens) + turn.output - 1, rank=turn.rank)
        )

    def obey(self, what: str, name: str) -> None:
        if what == "abort":
            removed = self.batcher.remove(name)
            if removed is not None:  # what the step under way samples is its own yet
                sampled = (
                    len(removed.tokens)
                    - len(self.tokens[name])
                    + (self.computed_before.get(name, -1) == len(removed.tokens))
                )
                self.outcome.left[name, self.at[name]] = sampled
        elif what == "load":
            self.batcher.retag(int(name))
        else:
            self.suspended = what == "suspend"

    def step(self, now: float) -> float:
        plan = self.batcher.plan()
        seconds = self.case.cost.step_s(
            prefill_tokens=sum(count for _, count in plan.prefill),
            prefill_context=sum(
                count * one.computed + count * (count + 1) // 2 for one, count in plan.prefill
            ),
            decode=len(plan.decode),
            decode_context=sum(len(one.tokens) for one in plan.decode),
        )
        now += seconds
        self.busy_s += seconds
        work = [(one, 1) for one in plan.decode] + plan.prefill
        for one, count in work:
            self.again += self.batcher.advance(one, count)
        self.computed += sum(count for _, count in plan.prefill)
        self.sampled += len(plan.decode)
        self.computed_before = {one.id: one.computed for one, _ in work}
        self.agenda.until(now, kind="turn")
        self.computed_before.clear()
        for one, _ in work:
            if one.id in self.batcher.live and one.computed == len(one.tokens):
                one.tokens.append(next(self.fresh))
                self.sampled += one not in plan.decode
                if len(one.tokens) > one.limit:
                    self.done(one, now)
        return now

    def done(self, one: Entry, now: float) -> None:
        index = self.at[one.id]
        self.batcher.remove(one.id)
        self.outcome.ends[one.id, index] = now
        self.outcome.cached[one.id, index] = one.cached or 0
        turns = self.by_key[one.id].turns
        self.at[one.id] += 1
        if index + 1 < len(turns):
            self.tokens[one.id] = one.tokens + [
                next(self.fresh) for _ in range(turns[index + 1].new)
            ]
            self.agenda.at(now + turns[index].gap_s, "turn", lambda _, key=one.id: self.add(key))


class Macro:
    """The same case on the engine under test.

    With `look_s` it is also queried between its events, which must change nothing.
    """

    def __init__(self, case: Case, *, interval_s: float = 0.0) -> None:
        self.case, self.outcome, self.agenda, self.interval_s = (
            case,
            Outcome(),
            Agenda(),
            interval_s,
        )
        self.engine = SimEngine(
            cost=case.cost,
            slots=case.slots,
            chunk_tokens=case.chunk,
            block_tokens=SIZE,
            prefix_cache=case.caching,
        )
        self.by_key = {one.key: one for one in case.trajectories}
        self.context = {one.key: one.turns[0].new for one in case.trajectories}
        self.at = {one.key: 0 for one in case.trajectories}

    def run(self) -> Outcome:
        for one in self.case.trajectories:
            self.agenda.at(one.start_s, "", lambda now, key=one.key: self.add(now, key))
        for when, what, name in self.case.orders:
            self.agenda.at(when, "", lambda now, what=what, name=name: self.obey(now, what, name))
        looked = 0.0
        while True:
            due = [time for time in (self.engine.next_at(), self.agenda.next()) if time is not None]
            if not due:
                break
            now = min(due)
            while self.interval_s and looked + self.interval_s < now:
                looked += self.interval_s
                assert self.engine.advance(looked) == []
                for key, tokens_reported in self.engine.reported_tokens(looked).items():
                    assert 0 <= tokens_reported <= self.by_key[key].turns[self.at[key]].output
                self.engine.check()
            # what arrives at the very end of a step is part of the next one
            if self.agenda.next() == now:
                self.agenda.until(now)
            else:
                for done in self.engine.advance(now):
                    assert done.at == now
                    self.done(done)
            self.engine.check()
        assert (self.engine.waiting, self.engine.running) == (0, 0) or self.engine._suspended
        engine = self.engine
        figures = {
            "busy_s": engine.busy_s,
            "tokens": engine.tokens,
            "prefill": engine.prefill_tokens,
        }
        self.outcome.figures = {
            **figures,
            "again": engine.recomputed_tokens,
            "preemptions": engine.preemptions,
        }
        return self.outcome

    def add(self, now: float, key: str) -> None:
        one = self.by_key[key]
        turn = one.turns[self.at[key]]
        request = Request(
            key=key,
            shared_key=one.group,
            shared_tokens=one.shared,
            context_tokens=self.context[key],
            output_tokens=turn.output,
            rank=turn.rank,
        )
        self.engine.add(now, request)

    def obey(self, now: float, what: str, name: str) -> None:
        if what == "abort":
            sampled = self.engine.abort(now, name)
            if sampled is not None:
                self.outcome.left[name, self.at[name]] = sampled
        elif what == "load":
            self.engine.load(now, int(name))
        elif what == "suspend":
            assert self.engine.suspend(now) >= now
        else:
            self.engine.resume(now)

    def done(self, done: Done) -> None:
        one, index = self.by_key[done.key], self.at[done.key]
        self.outcome.ends[done.key, index] = done.at
        self.outcome.cached[done.key, index] = done.cached_tokens
        assert done.output_tokens == one.turns[index].output
        self.at[done.key] += 1
        if index + 1 < len(one.turns):
            self.context[done.key] += done.output_tokens + one.turns[index + 1].new
            when = done.at + one.turns[index].gap_s
            self.agenda.at(when, "", lambda now: self.add(now, done.key))


def random_case(seed: str, *, tight: bool, shared: bool) -> Case:
    """Return a small workload: groups or single trajectories of several turns, ranks,
    aborts, loads, all kinds of batches.
    """
    random = Random(seed)
    ranks = random.choice([(0.0,), (0.0, 1.0, 2.0)])
    trajectories = []
    for number in range(random.randint(2, 6)):
        start, prompt = (
            random.random() * random.choice([0.0, 2.0]),
            random.choice([1, 3, 8, 9, 20, 33, 60]),
        )
        rank = random.choice(ranks)
        for member in range(random.randint(2, 4) if shared else random.randint(1, 2)):
            turns = []
            for index in range(random.randint(1, 4)):
                gap = random.choice([0.0, random.random() * 3])
                turns.append(
                    Turn(
                        new=random.randint(1, 20),
                        output=random.choice([1, 2, 7, 30]),
                        gap_s=gap,
                        rank=rank + index % 2,
                    )
                )
            suffix = random.choice([0, 0, 1, 5]) if shared else 0
            turns[0] = Turn(
                new=prompt + suffix, output=turns[0].output, gap_s=turns[0].gap_s, rank=rank
            )
            trajectories.append(
                Trajectory(
                    key=f"{number}.{member}",
                    start_s=start,
                    turns=tuple(turns),
                    group=f"g{number}" if shared else "",
                    shared=prompt if shared else 0,
                )
            )
    most = max(sum(turn.new + turn.output for turn in one.turns) for one in trajectories)
    orders = [
        (random.random() * 5, "abort", random.choice(trajectories).key)
        for _ in range(random.choice([0, 0, 3]))
    ]
    for weights in range(random.choice([0, 0, 1, 2])):
        when = random.random() * 4
        orders += [
            (when, "suspend", ""),
            (when + 0.3, "load", str(weights)),
            (when + 0.5, "resume", ""),
        ]
    return Case(
        trajectories=tuple(trajectories),
        orders=tuple(orders),
        kv_tokens=int(most * random.uniform(1.0, 2.5)) + SIZE if tight else 100_000,
        slots=random.choice([1, 2, 4, 8]) if not shared else random.choice([2, 4, 8]),
        chunk=random.choice([5, 16, 64]),
        caching=random.random() < 0.8 or shared,
        kinked=random.random() < 0.5,
    )


def check_exact(case: Case, *, interval_s: float) -> None:
    expected, outcome = Reference(case).run(), Macro(case, interval_s=interval_s).run()
    assert outcome.ends == pytest.approx(expected.ends, rel=1e-9)
    assert outcome.cached == expected.cached
    assert outcome.figures == pytest.approx(expected.figures, rel=1e-9)
    assert outcome.left == expected.left


@pytest.mark.variants
@pytest.mark.parametrize("tight", [False, True])
def test_without_shared_prompts_equals_the_planner_exactly(tight: bool) -> None:
    preempted = again = 0.0
    for number in range(80):
        case = random_case(f"single {number}", tight=tight, shared=False)
        check_exact(case, interval_s=0.013 if number % 2 else 0.0)
        figures = Reference(case).run().figures
        preempted += figures["preemptions"]
        again += figures["again"]
    assert preempted
    assert again


@pytest.mark.variants
@pytest.mark.parametrize("tight", [False, True])
def test_an_aborted_turn_has_sampled_as_in_the_planner(tight: bool) -> None:
    left: list[int] = []
    for number in range(60):
        case, random = random_case(f"aborted {number}", tight=tight, shared=False), Random(number)
        end = max(Reference(case).run().ends.values(), default=1.0)
        aborts = [
            (random.random() * end, "abort", one.key) for one in case.trajectories for _ in range(2)
        ]
        case = replace(case, orders=tuple(sorted((*case.orders, *aborts))))
        check_exact(case, interval_s=0.013 if number % 2 else 0.0)
        left += Reference(case).run().left.values()
    assert left.count(0) > 5  # while they waited, or before their first token
    assert len(left) - left.count(0) > 20


@pytest.mark.extended
def test_with_shared_prompts_and_ample_kv_equals_the_planner_exactly() -> None:
    for number in range(80):
        check_exact(
            random_case(f"group {number}", tight=False, shared=True),
            interval_s=0.013 if number % 2 else 0.0,
        )


def test_with_shared_prompts_and_tight_kv_the_ends_are_within_one_percent() -> None:
    shared = 0
    for number in range(80):
        case = random_case(f"group {number}", tight=True, shared=True)
        expected, outcome = Reference(case).run(), Macro(case).run()
        elapsed = max(expected.ends.values(), default=1.0)
        assert outcome.ends.keys() == expected.ends.keys()
        for key, end in expected.ends.items():
            assert abs(outcome.ends[key] - end) <= 0.01 * elapsed, (number, key)
        shared += sum(expected.cached.get((one.key, 0), 0) for one in case.trajectories)
    assert shared


class Counting(Linear):
    calls = 0

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        Counting.calls += 1
        return super().step_s(
            prefill_tokens=prefill_tokens,
            prefill_context=prefill_context,
            decode=decode,
            decode_context=decode_context,
        )

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        Counting.calls += 1
        return super().decode_s(decode=decode, decode_context=decode_context, steps=steps)


def engine(*, kv_tokens: int = 100_000, slots: int = 8) -> SimEngine:
    return SimEngine(
        cost=Counting(kv_tokens=kv_tokens),
        slots=slots,
        chunk_tokens=16,
        block_tokens=SIZE,
        prefix_cache=True,
    )


def drain(one: SimEngine) -> list[Done]:
    done: list[Done] = []
    while (at := one.next_at()) is not None:
        done += one.advance(at)
    return done


def test_cost_grows_with_events_and_not_with_tokens() -> None:
    calls = []
    for output in (100, 20_000):
        Counting.calls = 0
        one = engine()
        for name in "abc":
            one.add(0.0, Request(key=name, context_tokens=10, output_tokens=output + ord(name)))
        assert [done.key for done in drain(one)] == ["a", "b", "c"]
        calls.append(Counting.calls)
    assert calls[0] == calls[1] < 20


def test_an_arrival_waits_for_the_end_of_the_running_step() -> None:
    one = engine()
    one.add(0.0, Request(key="a", context_tokens=10, output_tokens=1000))
    one.advance(5.0)
    one.add(5.005, Request(key="b", context_tokens=10, output_tokens=5))
    at = one.next_at()
    assert at is not None
    # one step takes 10 ms and some microseconds for each token of context
    assert 5.005 < at < 5.005 + 0.03
    assert one.advance(at) == []
    assert (one.running, one.waiting) == (2, 0)


def test_suspension_ends_the_running_step_and_blocks_until_resume() -> None:
    one = engine()
    one.add(0.0, Request(key="a", context_tokens=10, output_tokens=50))
    one.advance(0.1)
    settled = one.suspend(0.105)
    assert 0.105 <= settled < 0.125
    assert one.next_at() == settled
    assert one.advance(settled) == []
    assert one.next_at() is None
    tokens = one.tokens
    one.load(3.0, 7)
    one.resume(4.0)
    assert one.tokens == tokens
    assert one.next_at() == 4.0
    (done,) = drain(one)
    assert done.at > 4.0 + 0.01 * (50 - tokens)
    assert (one.publication_id, done.output_tokens) == (7, 50)
    assert one.recomputed_tokens == 10 + tokens - 1  # the last token had no KV yet
    assert one.busy_s == pytest.approx(settled + done.at - 4.0)


def test_an_aborted_turn_is_never_reported_and_its_key_is_free_at_once() -> None:
    one = engine()
    one.add(0.0, Request(key="a", context_tokens=10, output_tokens=50))
    one.advance(0.1)
    assert one.abort(0.1, "a") == 10
    assert one.abort(0.1, "a") is None
    one.add(0.1, Request(key="a", context_tokens=14, output_tokens=2))
    (done,) = drain(one)
    assert done.output_tokens == 2
    assert done.cached_tokens == 12
    assert (one.next_at(), one.kv_used, one.running, one.waiting) == (None, 0, 0, 0)


def test_an_engine_reports_tokens_every_half_second() -> None:
    one = engine()
    one.add(0.0, Request(key="a", context_tokens=10, output_tokens=500))
    at: dict[float, int] = {}
    for half in (0.5, 1.0, 1.5, 2.0, 2.5):
        twin = engine()
        twin.add(0.0, Request(key="a", context_tokens=10, output_tokens=500))
        at[half] = twin.abort(half, "a") or 0
    assert at[2.5] > at[0.5] > 10
    reported = {
        hundredths / 100: one.reported_tokens(hundredths / 100)["a"]
        for hundredths in range(50, 299)
    }
    for now, count in reported.items():
        # the step under way, and the pace of a growing context
        assert abs(count - at[now // 0.5 * 0.5]) <= 2
    one.suspend(3.0)
    one.advance(3.1)
    assert one.reported_tokens(3.4)["a"] == one.reported_tokens(3.1)["a"] == one.abort(3.4, "a")


def test_a_call_first_processes_earlier_steps() -> None:
    one = engine()
    one.add(0.0, Request(key="a", context_tokens=10, output_tokens=5))
    one.add(100.0, Request(key="b", context_tokens=10, output_tokens=5))
    assert one.next_at() is not None
    first, second = drain(one)
    assert first.at < 1.0
    assert 100.0 < second.at < 101.0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request(key="live", context_tokens=1, output_tokens=1),
            "key must be unique among live requests, got 'live' again",
        ),
        (
            Request(key="a", context_tokens=30, output_tokens=12),
            r"must fit the KV cache \(40 tokens\), got a request of up to 41",
        ),
        (Request(key="a", context_tokens=1, output_tokens=0), "output_tokens must be at least 1"),
        (
            Request(key="a", context_tokens=1, output_tokens=1, shared_tokens=2),
            "shared ones among them",
        ),
    ],
)
def test_refuses_requests_that_cannot_run(request_: Request, message: str) -> None:
    one = engine(kv_tokens=43)
    one.add(0.0, Request(key="live", context_tokens=1, output_tokens=1))
    with pytest.raises(ValueError, match=message):
        one.add(0.0, request_)
