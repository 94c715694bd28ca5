"""Bench `scheduling`: the workload is the same for all variants, engines keep their
pace, and a journal is read as it happened.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.sim.benchmarks.scheduling import long_tasks
from packages.sim.benchmarks.scheduling.bench import VariantRun, figures_of, over
from packages.sim.benchmarks.scheduling.long_tasks import ACTION_WORDS, MOST_TURNS, LongTask
from packages.sim.benchmarks.scheduling.paced_engine import Pacer, StepPace
from packages.sim.benchmarks.scheduling.rollouts import (
    LOGPROB_TOLERANCE,
    Rollout,
    Sample,
    mismatches,
    read_rollouts,
)
from packages.sim.benchmarks.scheduling.router import config as router_config
from packages.sim.benchmarks.scheduling.router import turn_seconds
from packages.sim.benchmarks.scheduling.variants import (
    FULL,
    MIGRATING,
    OURS,
    QUICK,
    QUICK_VARIANTS,
    VARIANTS,
    config,
)
from packages.sim.tests.scripted_simulation import Scripted
from rollweave.core.policy.scheduling import scheduling
from rollweave.engine.batching import StepWork
from rollweave.envs.base import Split, Step
from rollweave.record.journal import Replay
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema import serving as s
from rollweave.schema.base import TrajectoryId
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import StepTime
from tests.support.simulation import one_domain

# The workload.


async def no_sleep(_: float) -> None:
    """Return at once."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools answer without a latency."""
    monkeypatch.setattr(long_tasks, "asyncio", SimpleNamespace(sleep=no_sleep))


def step_of(env: LongTask, action: str) -> Step:
    """Return the result of a step, which waits for nothing."""
    try:
        env.step(action).send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a step waits for its latency alone")


def turns_of(index: int, words: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return the number of an episode's turns and its observations, for an agent that
    repeats these words.
    """
    env = LongTask()
    task = LongTask.make_task(index=index, seed=5, split=Split.TRAIN, options={})
    read = [env.reset(task).messages[0].content]
    for turn in range(MOST_TURNS):
        step = step_of(env, words[turn % len(words)])
        read += [message.content for message in step.messages]
        if step.done:
            assert step.reward == 1.0
            return turn + 1, read
    raise AssertionError("an episode has at most MOST_TURNS turns")


@given(
    index=st.integers(0, 10_000),
    words=st.lists(st.sampled_from(ACTION_WORDS), min_size=1, max_size=4).map(tuple),
)
def test_equal_words_give_equal_episodes(index: int, words: tuple[str, ...]) -> None:
    assert turns_of(index, words) == turns_of(index, words)
    assert turns_of(index, words)[0] == turns_of(index, (words[0], "", "other"))[0], (
        "the first words alone decide the length"
    )


def test_lengths_have_a_long_tail_and_differ_within_a_group() -> None:
    groups = [sorted(turns_of(index, (word,))[0] for word in ACTION_WORDS) for index in range(100)]
    every = sorted(length for group in groups for length in group)
    assert every[-1] == MOST_TURNS
    assert every[len(every) * 99 // 100] > 6 * every[len(every) // 2]
    assert sum(group[0] < group[-1] for group in groups) > 80


# The paced engine.


WORK = st.tuples(*[st.integers(0, 60)] * 4)
"""Prompt tokens, the tokens before them, decoding sequences, and the tokens before
each.
"""


def amounts_of(prompt: int, before: int, decode: int, context: int) -> StepWork:
    return StepWork(
        prompt, prompt * before + prompt * (prompt + 1) // 2, decode, decode * (1 + context)
    )


@given(one=WORK, more=WORK)
def test_a_step_with_more_work_takes_no_less(one: tuple[int, ...], more: tuple[int, ...]) -> None:
    pace = StepPace()
    longer = amounts_of(*(a + b for a, b in zip(one, more, strict=True)))
    assert pace.step_s(longer) >= pace.step_s(amounts_of(*one)) > 0


def generated(finish: s.FinishReason) -> s.Generated:
    return s.Generated(
        result=s.GenerateResult(id=finish, tokens=(1,), logprobs=(0.0,), versions=(), finish=finish)
    )


def test_results_leave_when_the_padded_step_is_over() -> None:
    sent: list[s.EngineReply | float] = []
    pacer = Pacer(sent.append, sleep=sent.append)
    amounts, late = StepWork(0, 0, 2, 100), StepWork(0, 0, 1, 10)
    pacer.reply(generated(s.FinishReason.LENGTH))
    pacer.reply(generated(s.FinishReason.STOP))
    pacer.reply(s.Suspended(in_flight=1))
    pacer.reply(generated(s.FinishReason.ABORTED))
    assert sent == [s.Suspended(in_flight=1), generated(s.FinishReason.ABORTED)], (
        "what is no step's result waits for none"
    )
    pacer.watch(amounts, 0.001)
    assert sent[2] == pytest.approx(StepPace().step_s(amounts) - 0.001)
    assert sent[3:] == [generated(s.FinishReason.LENGTH), generated(s.FinishReason.STOP)]
    pacer.watch(late, 5.0)
    assert sent[5:] == [0.0], "a step that took longer is not padded, and nothing is sent twice"


def test_the_engine_reports_the_paced_profile() -> None:
    sent: list[s.EngineReply] = []
    measured = (
        StepTime(batch=1, seconds=1e-4, context=100),
        StepTime(batch=2, seconds=9.0, context=100),
    )
    Pacer(sent.append).reply(
        s.Ready(version=-1, kv_total_tokens=1, max_slots=2, max_context=3, profile=measured)
    )
    (ready,) = sent
    assert isinstance(ready, s.Ready)
    expected = [StepPace().step_s(StepWork(0, 0, 1, 100)), 9.0]
    assert [point.seconds for point in ready.profile] == expected
    assert (ready.max_slots, ready.max_context) == (2, 3)


# Reading of a run.


def test_a_journal_is_read_as_it_happened(tmp_path: Path) -> None:
    assert Scripted(one_domain("sync"), tmp_path / "run").run().error == ""
    made = load(tmp_path / "run" / "config.toml", [])
    rollouts = read_rollouts(tmp_path / "run" / "journal.bin", made)
    events = list(Replay(tmp_path / "run" / "journal.bin", made))
    taken = [
        index
        for index, (_, _, commands) in enumerate(events)
        if any(isinstance(x, c.TrainStep) for x in commands)
    ]
    assert len(rollouts) == len(taken) == made.run.steps
    for rollout, start, end in zip(rollouts, [0, *taken], taken, strict=False):
        within = events[start : end + 1]
        done = [event for _, event, _ in within if isinstance(event, e.TurnDone)]
        given_at = [
            now
            for now, _, commands in within
            for command in commands
            if isinstance(command, c.StartTurn)
        ]
        over_at = [now for now, event, _ in within if isinstance(event, e.TrajectoryEnded)]
        assert rollout.turns == len(done)
        assert rollout.tokens == sum(event.output_tokens for event in done)
        assert rollout.makespan_s == pytest.approx(over_at[-1] - given_at[0])
        assert 0 <= rollout.tail_queue_s <= rollout.queue_s
        assert 0 < rollout.tail_tokens <= rollout.tokens


def test_a_journal_of_other_decisions_is_refused(tmp_path: Path) -> None:
    assert Scripted(one_domain("sync"), tmp_path / "run").run().error == ""
    other = load(tmp_path / "run" / "config.toml", ["rollout.max_running=3"])
    with pytest.raises(ConfigError, match="must replay to the recorded decisions"):
        read_rollouts(tmp_path / "run" / "journal.bin", other)


def test_differences_are_counted() -> None:
    ids = [TrajectoryId(name) for name in "abcd"]
    ours = {name: Sample(tokens=(1, 2), logprobs=(0.0, -1.0)) for name in ids[:3]}
    assert mismatches(ours, dict(ours)) == 0
    near, far = -1.0 - LOGPROB_TOLERANCE / 2, -1.0 - 2 * LOGPROB_TOLERANCE
    assert mismatches(ours, ours | {ids[0]: Sample(tokens=(1, 2), logprobs=(0.0, near))}) == 0
    assert mismatches(ours, ours | {ids[0]: Sample(tokens=(1, 2), logprobs=(0.0, far))}) == 1
    assert mismatches(ours, ours | {ids[1]: Sample(tokens=(1, 3), logprobs=(0.0, -1.0))}) == 1
    assert mismatches(ours, ours | {ids[1]: Sample(tokens=(1,), logprobs=(0.0,))}) == 1
    assert mismatches(ours, ours | {ids[3]: ours[ids[0]]}) == 1
    assert mismatches({}, ours) == 3


# Figures.


def run(makespan_s: float, tail_s: float, *, token: int = 1) -> VariantRun:
    random.seed(0)
    predictions = tuple((float(left), left + random.randint(-3, 3)) for left in range(1, 20))
    rollout = Rollout(
        makespan_s=makespan_s,
        tail_queue_s=tail_s,
        tail_tokens=9,
        tail_turns=3,
        queue_s=tail_s,
        tokens=20,
        turns=5,
        predictions=predictions,
    )
    counted = (
        "predictions",
        "predictions_late",
        "awaited_s",
        "plans",
        "preemptions",
        "migrations",
        "migrations_failed",
        "moved_tokens",
        "exposed_s",
    )
    line: dict[str, Any] = {
        "cached_tokens": 30,
        "context_tokens": 40,
        "scheduling": dict.fromkeys(counted, 2),
    }
    line["engines"] = {name: {"busy_s": 3.0, "steps": 1000} for name in ("e0", "e1")}
    line["predictor"] = {"mean_ms": 1.5, "p99_ms": 4.0}
    words = {TrajectoryId("a"): Sample(tokens=(token,), logprobs=(-0.5,))}
    return VariantRun(
        rollouts=(rollout, msgspec.structs.replace(rollout, makespan_s=2 * makespan_s)),
        lines=(line, line),
        samples=words,
    )


def test_figures_are_complete() -> None:
    runs = {variant: [run(4.0, 3.0), run(6.0, 3.0)] for variant in VARIANTS} | {
        OURS: [run(2.0, 1.0), run(4.0, 1.0)]
    }
    conditions: dict[str, Any] = {}
    figures = figures_of(runs, conditions)
    others = [variant for variant in VARIANTS if variant != OURS]
    for variant in others:
        assert figures[f"makespan_over_{variant}"] == pytest.approx(1.75), (
            "pairs of the same step: 2, 2, 1.5, 1.5"
        )
        assert figures[f"tail_queueing_over_{variant}"] == 3.0
    assert figures["migration_token_mismatches"] == 0
    assert figures["prediction_exposed_ms"] == 2000.0
    assert figures[f"plans_{OURS}"] == 2.0
    assert figures["predictions_late"] == 1.0
    assert figures[f"migration_exposed_ms_{OURS}"] == 2000.0
    assert figures["prefix_hit_fcfs"] == 0.75
    assert figures["real_step_ms"] == pytest.approx(3.0)
    correlation = figures["prediction_correlation"]
    assert isinstance(correlation, float)
    assert 0.8 < correlation < 1
    moved = figures_of(
        runs | {variant: [run(2.0, 1.0, token=7)] * 2 for variant in MIGRATING}, conditions
    )
    assert moved["migration_token_mismatches"] == 2 * len(MIGRATING)


def test_a_ratio_to_zero_is_none() -> None:
    assert over([run(4.0, 3.0)], [run(2.0, 0.0)], "tail_queue_s") is None
    assert over([run(4.0, 0.0)], [run(2.0, 3.0)], "tail_queue_s") == 0.0


def test_variants_are_complete() -> None:
    configs = {variant: config(variant, FULL, seed=0, directory="runs") for variant in VARIANTS}
    made = {variant: scheduling(one.rollout, one.ablation) for variant, one in configs.items()}
    priorities = ("fcfs", "round_robin", "shortest_first", "longest_first")
    assert [made[variant].priority for variant in priorities] == [*priorities]
    assert len({made[variant].placement for variant in priorities}) == 1
    assert {"least_load", "pinned", "partition"} <= {how.placement for how in made.values()}
    assert [made[variant].migration for variant in MIGRATING] == ["rank", "rank", "gain"]
    assert set(QUICK_VARIANTS) <= set(VARIANTS)
    assert QUICK.groups < FULL.groups


# The core alone.


def test_turns_of_the_core_are_timed() -> None:
    seconds_of_turns = turn_seconds(router_config(trajectories=64, engines=4), turns=200)
    assert len(seconds_of_turns) >= 200
    assert all(seconds > 0 for seconds in seconds_of_turns)
