"""Bench `service`: engines of known pace, agents with real commands, ablations that
differ in one property, ratios by rounds.
"""

import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import Child
from packages.service.benchmarks import pools
from packages.service.benchmarks.ablations import JOBS, WANTED, Round, Trainer, Variant, figures_of
from packages.service.benchmarks.bash_env import (
    COMMANDS,
    DIGITS,
    SANDBOXES,
    TERMINALS,
    BashEnv,
)
from packages.service.benchmarks.bench import added
from packages.service.benchmarks.slot_engines import KEY_TOKENS, Slots, engine_index, turn_tokens
from packages.service.benchmarks.staged_env import seconds
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.probe import Logprobs
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.serving import FinishReason, GenerateRequest, Sampling
from rollweave_service.messages import MemberStatus, RolloutRequest, RolloutStatus
from tests.support.sandboxes import needs

# Engines of known pace.


async def test_slots_are_limited_and_their_use_is_counted() -> None:
    slots, most = Slots(2), 0

    async def turn(seconds: float) -> float:
        nonlocal most
        holding = asyncio.ensure_future(slots.hold(seconds))
        while not holding.done():
            most = max(most, slots.occupied)
            await asyncio.sleep(0)
        return holding.result()[1]

    durations = await asyncio.gather(*(turn(0.01 * number) for number in range(1, 6)))
    assert (most, slots.occupied) == (2, 0)
    assert slots.busy_s == pytest.approx(sum(durations), abs=0.01)
    cancelled = asyncio.ensure_future(slots.hold(60.0))
    await asyncio.sleep(0)
    assert slots.occupied == 1
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert slots.occupied == 0


def request(tokens: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id="r", tokens=tokens, sampling=Sampling(**sampling))


@given(
    tokens=st.lists(st.integers(0, 99), min_size=1, max_size=30).map(tuple),
    allowed=st.lists(st.integers(10, 20), max_size=4).map(tuple),
    stop=st.lists(st.integers(18, 22), max_size=2).map(tuple),
    most=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_a_turn_keeps_to_its_request_and_depends_on_its_context_alone(
    tokens: tuple[int, ...], allowed: tuple[int, ...], stop: tuple[int, ...], most: int, seed: int
) -> None:
    sampled, finish = turn_tokens(
        request(tokens, allowed=allowed, stop_token_ids=stop, max_tokens=most, seed=seed)
    )
    assert 1 <= len(sampled) <= most
    words = sampled[:-1] if finish is FinishReason.STOP else sampled
    assert not set(words) & set(stop) or not set(allowed) - set(stop)
    assert set(words) <= set(allowed) or not set(allowed) - set(stop)
    assert finish is FinishReason.LENGTH or sampled[-1] == stop[0]
    assert turn_tokens(
        request(tokens, allowed=allowed, stop_token_ids=stop, max_tokens=most, seed=seed + 1)
    ) == (sampled, finish)


@given(
    start=st.lists(st.integers(0, 99), min_size=KEY_TOKENS, max_size=KEY_TOKENS),
    more=st.lists(st.integers(0, 99)),
)
def test_a_conversation_stays_on_its_engine(start: list[int], more: list[int]) -> None:
    assert engine_index(tuple(start), 4) == engine_index((*start, *more), 4)


TOKEN_MS = 1.0


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Any]]:
    with Child("packages.service.benchmarks.slot_engines", "2", "1", str(TOKEN_MS)) as child:
        yield json.loads(child.line)


@pytest.mark.extended
async def test_slot_engines_act_as_engines(engines: dict[str, Any]) -> None:
    """Each engine has one slot; as one they have two, and the turns of either are
    counted in the joint statistics.
    """
    spec = {"name": "e", "vocab": 100}
    one = HttpEngine(HttpSpec(url=engines["engines"][0], **spec))
    both = HttpEngine(HttpSpec(url=engines["fixed"], **spec))
    try:
        assert ((await one.ready()).max_slots, (await both.ready()).max_slots) == (1, 2)
        assert one._logprobs is Logprobs.SAMPLED, "every option of a request is supported"
        before = (await both.stats()).busy_s
        began = time.monotonic()
        results = await asyncio.gather(
            *(one.generate(GenerateRequest(id=str(at), tokens=(5, at))) for at in range(4))
        )
        occupied = sum(result.generate_s for result in results)
        assert occupied <= time.monotonic() - began, "one slot gives the turns one after another"
        tokens = sum(len(result.tokens) for result in results)
        assert tokens * TOKEN_MS / 1000 <= (await both.stats()).busy_s - before <= occupied
    finally:
        await one.close()
        await both.close()


def test_a_child_that_does_not_start_is_an_error() -> None:
    with (
        Child("packages.service.benchmarks.slot_engines") as child,
        pytest.raises(RuntimeError, match="slot_engines ended with 1 before it was ready"),
    ):
        _ = child.line


# The agents.


@pytest.mark.parametrize("terminal", TERMINALS)
@pytest.mark.extended
async def test_every_command_does_something_in_either_terminal(terminal: Any) -> None:
    needs("zygote")
    if terminal == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    async with SANDBOXES.opened():
        env = BashEnv(terminal=terminal)
        payload = json.dumps({"number": 42, "turns": len(COMMANDS)})
        try:
            first = await env.reset(work.Task(id=TaskId("t"), env="", seed=0, payload=payload))
            assert first.messages[0].content.endswith(f"{DIGITS[0]}{DIGITS[4]}{DIGITS[2]}")
            steps = [await env.step(word) for word in COMMANDS]
        finally:
            await env.close()
    assert [step.done for step in steps] == [False] * (len(COMMANDS) - 1) + [True]


# The trainer.


class Client:
    """A client whose rollouts finish in the order of their numbers, except the last
    ones of a step, which never do; it records the cancelled ones.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: dict[str, int] = {}
        """Number of requests at the time of each cancellation."""

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        self.asked.append(request.id)
        number = int(request.id.rpartition("-")[2])
        try:
            if number % JOBS >= WANTED:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled[request.id] = len(self.asked)
            raise
        return RolloutStatus(
            id=request.id, handler=request.handler, state="done", members=(finished(number),)
        )

    async def health(self) -> dict[str, dict[str, Any]]:
        return {"http://here": {"init": 0, "run": 0}}


def finished(number: int) -> MemberStatus:
    """Return a rollout of two turns and three seconds of environments."""
    sequence = work.TokenSequence(
        tokens=(), segments=(), logprobs=(), turns=(work.TurnSpan(start=0, end=0),) * 2
    )
    result = work.Trajectory(
        id=TrajectoryId(str(number)),
        group_id=GroupId("g"),
        task=work.Task(id=TaskId("t"), env="", seed=0),
        attempt=0,
        initiated_version=0,
        sequences=(sequence,),
        reward=1.0,
        stop_reason=work.StopReason.FINISHED,
        blame=work.Blame.NONE,
        timing=work.Timing(env_s=3.0, generate_s=5.0),
    )
    return MemberStatus(
        id=result.id, stage="done", attempt=0, stop_reason="finished", result=result
    )


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.extended
async def test_unwanted_rollouts_are_cancelled_at_once_or_at_the_end(
    engines: dict[str, Any], cancels: bool
) -> None:
    client, left = Client(), JOBS - WANTED
    totals = await Trainer(client, Variant(cancels=cancels), engines["fixed"], "way").round(1, 2)
    assert client.asked == [f"way-{number}" for number in range(3 * JOBS, 6 * JOBS)], (
        "three steps: one warms up"
    )
    by_then = [JOBS, 2 * JOBS, 3 * JOBS] if cancels else [3 * JOBS] * 3
    assert sorted(client.cancelled.values()) == sorted(by_then * left)
    assert totals.jobs == 2 * WANTED
    assert totals.turns == 4 * WANTED
    assert totals.action_s == 6.0 * WANTED
    assert totals.wanted_slot_s == 10.0 * WANTED


# Figures.


def a_round(rate: float) -> Round:
    return Round(
        seconds=10.0,
        jobs=round(10 * rate),
        turns=100,
        action_s=2.0,
        wanted_slot_s=40.0,
        slot_s=60.0,
    )


def test_ratios_are_medians_of_rounds_and_a_missing_one_has_a_reason() -> None:
    conditions: dict[str, Any] = {}
    rounds = {
        "full": [a_round(4.0), a_round(6.0), a_round(2.0)],
        "no_balancing": [a_round(2.0), a_round(6.0), a_round(0.5)],
        "no_cleanup": [a_round(0.5), a_round(0.75), a_round(0.25)],
    }
    figures = figures_of(rounds, conditions)
    assert (figures["jobs_per_s_full"], figures["action_ms_full"]) == (4.0, 20.0)
    assert (figures["utilization_full"], figures["useful_utilization_full"]) == (0.75, 0.5)
    assert (figures["ablation_ratio_balancing"], figures["ablation_ratio_cleanup"]) == (2.0, 8.0)
    assert figures["ablation_ratio"] == pytest.approx(4.0)
    assert figures["ablation_ratio_bash"] is figures["jobs_per_s_no_bash"] is None
    assert "tmux is not installed" in conditions["ablation_ratio_bash"]


@pytest.mark.parametrize("workload", pools.WORKLOADS.values(), ids=pools.WORKLOADS.keys())
def test_pools_of_their_own_sizes_have_the_places_of_one_number(workload: pools.Workload) -> None:
    sizes = workload.sizes
    assert sum(sizes.values()) == pools.PLACES
    assert min(sizes.values()) >= 1
    assert (sizes["init"] > sizes["eval"]) == (workload.init_s > workload.eval_s)


def test_the_ratio_of_three_pools_to_one_is_a_median_of_rounds() -> None:
    seconds = {pools.ONE: (10.0, 20.0, 10.0), pools.THREE: (5.0, 5.0, 10.0)}
    rounds = {
        (name, variant): [
            pools.PoolRound(seconds=s, jobs=20, most={"init": 1, "run": 2, "eval": n})
            for n, s in enumerate(seconds[variant])
        ]
        for name in pools.WORKLOADS
        for variant in seconds
    }
    conditions: dict[str, Any] = {}
    figures = pools.pool_figures(rounds, conditions)
    assert figures["pools_per_s_slow_both_one"] == 2.0
    assert figures["pools_per_s_slow_both_three"] == 4.0
    assert figures["pools_ratio_slow_both"] == 2.0
    assert conditions["pools_most_slow_init_one"] == {"init": 1, "run": 2, "eval": 2}
    assert "48 places: one, max_running = 24" in conditions["pools"]


def test_a_staged_environment_takes_as_long_as_its_task_says() -> None:
    payloads = [{"number": n, "init_s": 2.0, "eval_s": 0.5} for n in range(400)]
    for stage, median in (("init", 2.0), ("eval", 0.5)):
        times = [seconds(payload, stage) for payload in payloads]
        assert statistics.median(times) == pytest.approx(median, rel=0.1)
        assert times == [seconds(payload, stage) for payload in payloads]


@given(
    times=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=50),
    more=st.floats(0, 10),
)
def test_added_latency_is_between_equal_percentiles(
    times: list[tuple[float, float]], more: float
) -> None:
    ours, theirs = [one for one, _ in times], [other for _, other in times]
    assert added(ours, ours, 0.99) == 0
    assert added(ours, [one + more for one in reversed(ours)], 0.5) == pytest.approx(more)
    assert added(ours, theirs, 1.0) == max(theirs) - max(ours)
