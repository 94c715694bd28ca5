"""The active time of an attempt: every second is of one kind, and each call ends at the
first of its two limits.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.rollout.driver import Budget, EpisodeStopError
from rollweave.schema.errors import EnvError
from rollweave.schema.work import Limits, StopReason, Timing
from tests.support.properties import examples
from tests.support.virtual_time import run_virtually

SECONDS = st.integers(0, 36).map(lambda quarters: quarters / 4)


@settings(max_examples=examples(150))
@given(
    spent=st.lists(
        st.tuples(st.sampled_from(["init_s", "env_s", "eval_s", "turn"]), SECONDS, SECONDS),
        max_size=8,
    )
)
def test_every_second_is_of_one_kind(spent: list[tuple[str, float, float]]) -> None:
    now = 100.25
    budget = Budget(Limits(time_s=50.0), lambda: now)
    used = dict.fromkeys(["init_s", "env_s", "eval_s", "generate_s", "queue_s"], 0.0)
    for kind, seconds, passed in spent:
        if kind == "turn":  # an engine may count more than has passed here
            requested_at, now = now, now + passed
            budget.charge_turn(requested_at, seconds)
            used["generate_s"] += seconds
            used["queue_s"] += max(0, passed - seconds)
        else:
            setattr(budget, kind, getattr(budget, kind) + seconds)
            used[kind] += seconds
    active_s = sum(used.values()) - used["queue_s"]
    assert budget.remaining_s == 50.0 - active_s
    assert budget.timing() == Timing(
        init_s=used["init_s"],
        run_s=used["generate_s"] + used["env_s"],
        queue_s=used["queue_s"],
        generate_s=used["generate_s"],
        env_s=used["env_s"],
    )


FAILURES = [None, EnvError("broken"), TimeoutError("its own"), ValueError("x" * 20_000)]


@settings(max_examples=examples(250))
@given(
    used_s=st.integers(0, 2),
    time_s=st.integers(1, 4),
    step_s=st.integers(1, 4),
    takes_s=st.integers(0, 5).map(lambda half: half - 0.5),
    failure=st.sampled_from(FAILURES),
)
def test_a_call_ends_at_the_first_of_its_limits(
    used_s: int, time_s: int, step_s: int, takes_s: float, failure: Exception | None
) -> None:
    async def call() -> str:
        if takes_s > 0:
            await asyncio.sleep(takes_s)
        if failure is not None:
            raise failure
        return "answer"

    async def limited() -> tuple[object, float]:
        loop = asyncio.get_running_loop()
        budget = Budget(Limits(time_s=time_s, step_s=step_s), loop.time)
        budget.env_s = used_s
        try:
            answer: object = await budget.run_limited(
                call(), hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR, what="step 3"
            )
        except EpisodeStopError as stop:
            answer = stop
        assert budget.remaining_s == time_s - used_s, "the caller charges the time"
        return answer, loop.time()

    answer, took_s = run_virtually(limited())
    left_s = max(0, time_s - used_s)
    limit_s = min(step_s, left_s)
    assert took_s == min(limit_s, max(0.0, takes_s))
    in_time = takes_s < 0 or takes_s < limit_s  # what does not wait needs no time
    if in_time and failure is None:
        assert answer == "answer"
        return
    assert isinstance(answer, EpisodeStopError)
    assert len(str(answer)) < 10_000
    if in_time:
        assert answer.reason is StopReason.ENV_ERROR
        assert str(answer).startswith("step 3: ")
        assert ("TimeoutError: its own" in str(answer)) is isinstance(failure, TimeoutError)
    elif left_s < step_s:
        expected = (StopReason.TIME_BUDGET, f"the active time of {time_s} s ran out in step 3")
        assert (answer.reason, str(answer)) == expected
    else:
        assert answer.reason == StopReason.ENV_HANG
        assert str(answer) == f"step 3 did not answer within {step_s} s"


def test_a_cancelled_call_is_cancelled() -> None:
    async def cancelled() -> None:
        budget = Budget(Limits(), lambda: 0.0)
        call = budget.run_limited(
            asyncio.sleep(1), hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR, what="a step"
        )
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(cancelled())
