"""Plans depend on their arguments alone, families have the papers' figures, and traces
are read strictly.
"""

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.schema.errors import ConfigError
from rollweave.schema.work import StopReason
from rollweave_sim import families
from rollweave_sim.families import FAMILIES
from rollweave_sim.workload import Drawn, Plan, TurnPlan, Ungrouped, Workload, workload

NAMES = [
    *("swe", "webshop", "frozenlake", "alfworld", "gem-math", "gem-game", "coding", "search"),
    *("math", "dapo-math", "tool-calling"),
]


def outputs(plan: Plan) -> int:
    return sum(turn.output_tokens for turn in plan.turns)


def plans_of(work: Workload, *, tasks: int, members: int, seed: int = 1) -> list[list[Plan]]:
    return [
        [work.plan(index=i, member=m, attempt=0, seed=seed) for m in range(members)]
        for i in range(tasks)
    ]


# Families.

PINNED = (244, [(86, 114), (302, 123), (110, 0)])


def test_every_family_of_the_papers_exists_and_names_its_source() -> None:
    assert list(FAMILIES) == NAMES
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.source.startswith(("RollArt", "Heddle", "Laminar", "ROSE"))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_depends_on_its_arguments_alone(name: str) -> None:
    keys = [
        {"index": i, "member": m, "attempt": a, "seed": s}
        for i in range(6)
        for m in range(3)
        for a in (0, 1)
        for s in (0, 9)
    ]
    first = [workload(name).plan(**key) for key in keys]
    again = [workload(name).plan(**key) for key in reversed(keys)]
    assert first == again[::-1]
    assert len({msgspec.json.encode(plan) for plan in first}) == len(keys)  # and on each of them


def test_a_seed_gives_pinned_plans() -> None:
    plan = workload("tool-calling").plan(index=7, member=3, attempt=1, seed=11)
    assert (
        plan.prompt_tokens,
        [(turn.output_tokens, turn.observation_tokens) for turn in plan.turns],
    ) == PINNED


@pytest.mark.parametrize("name", NAMES)
def test_plans_keep_the_bounds_of_their_family(name: str) -> None:
    family = FAMILIES[name]
    least, most = family.turns
    for group in plans_of(workload(name), tasks=60, members=8):
        assert len({plan.prompt_tokens for plan in group}) == 1  # one task, one prompt
        for plan in group:
            if plan.fails_in:
                assert (plan.turns, plan.stop in (StopReason.ENV_ERROR, StopReason.ENV_HANG)) == (
                    (),
                    True,
                )
                continue
            followed = sum(turn.output_tokens + turn.observation_tokens for turn in plan.turns)
            assert 1 <= plan.prompt_tokens <= family.prompt.high
            assert 1 <= len(plan.turns) <= most
            assert followed <= family.max_response
            assert plan.prompt_tokens + followed <= family.max_context
            assert all(
                turn.output_tokens >= 1 and 0 <= turn.env_s <= family.env_s.high
                for turn in plan.turns
            )
            assert 0 <= plan.init_s <= family.init_s.high
            assert 0 <= plan.reward_s <= family.reward_s.high
            assert (plan.reward, plan.success) in ((0.0, False), (1.0, True))
            if plan.stop is StopReason.FINISHED:
                assert least <= len(plan.turns)
                assert plan.turns[-1].observation_tokens == 0
                assert (plan.turns[-1].env_s == 0) == family.answers
            else:
                full = (
                    family.max_response == followed
                    or family.max_context == plan.prompt_tokens + followed
                )
                assert (plan.stop, plan.success, full) == (StopReason.MAX_TOKENS, False, True)


@pytest.mark.parametrize(
    ("room", "expected", "stop"),
    [
        (
            31,
            [(10, 5, 2.0), (10, 5, 2.0), (1, 0, 0.0)],
            StopReason.MAX_TOKENS,
        ),  # cut in the agent's words
        (28, [(10, 5, 2.0), (10, 3, 2.0)], StopReason.MAX_TOKENS),  # cut within an observation
        (40, [(10, 5, 2.0), (10, 5, 2.0), (10, 0, 0.0)], StopReason.MAX_TOKENS),
        (41, [(10, 5, 2.0), (10, 5, 2.0), (10, 0, 2.0)], StopReason.FINISHED),
    ],
)
def test_a_plan_is_cut_where_a_live_episode_runs_out_of_tokens(
    room: int, expected: list[tuple[int, int, float]], stop: StopReason
) -> None:
    def always(value: float) -> families.LogNormal:
        return families.around(value, sigma=0.0, high=value)

    family = msgspec.structs.replace(
        FAMILIES["frozenlake"],
        turns=(3, 3),
        output=always(10),
        observation=always(5),
        env_s=always(2.0),
        max_response=room,
        init_error_rate=0.0,
    )
    plan = Drawn(family).plan(index=0, member=0, attempt=0, seed=0)
    assert [
        (turn.output_tokens, turn.observation_tokens, turn.env_s) for turn in plan.turns
    ] == expected
    assert plan.stop is stop


def test_draws_have_the_stated_means_and_tails() -> None:
    def env_s(name: str, tasks: int) -> list[float]:
        plans = [
            plan for group in plans_of(workload(name), tasks=tasks, members=4) for plan in group
        ]
        return [turn.env_s for plan in plans for turn in plan.turns if turn.env_s]

    io = env_s("frozenlake", 200)
    assert statistics.mean(io) == pytest.approx(families.IO_S, rel=0.05)
    assert 0.5 < max(io) <= families.IO_MAX_S
    assert statistics.mean(env_s("search", 200)) == pytest.approx(1.42, rel=0.1)
    assert statistics.mean(env_s("swe", 50)) == pytest.approx(0.44, rel=0.1)
    lengths = sorted(
        outputs(plan)
        for group in plans_of(workload("dapo-math"), tasks=1500, members=2)
        for plan in group
    )
    median, tail = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
    assert tail / median == pytest.approx(10, rel=0.15)  # Laminar §2.2
    turns = Counter(
        len(plan.turns)
        for group in plans_of(workload("tool-calling"), tasks=400, members=4)
        for plan in group
    )
    assert set(turns) == set(range(1, 10))
    share = 1 - (1 - families.SWE_INIT_HANG_RATE) ** families.SWE_BATCH
    assert share == pytest.approx(7 / 60)  # RollArt §8


def test_members_of_a_task_are_correlated_but_differ() -> None:
    pairs = [
        [math.log(outputs(plan)) for plan in group]
        for group in plans_of(workload("dapo-math"), tasks=1500, members=2)
    ]
    alike = statistics.correlation([a for a, _ in pairs], [b for _, b in pairs])
    assert alike == pytest.approx(0.5, abs=0.07)
    hard = [a for a, _ in pairs]
    lucky = [group[1].success for group in plans_of(workload("dapo-math"), tasks=1500, members=2)]
    assert (
        statistics.mean(a for a, good in zip(hard, lucky, strict=True) if not good)
        > statistics.mean(hard) + 0.1
    )


def test_resets_fail_and_hang_at_the_rates_of_the_family() -> None:
    family = msgspec.structs.replace(FAMILIES["swe"], init_error_rate=0.1, init_hang_rate=0.2)
    plans = [plan for group in plans_of(Drawn(family), tasks=500, members=4) for plan in group]
    share = {
        stop: count / len(plans)
        for stop, count in Counter(plan.stop for plan in plans if plan.fails_in).items()
    }
    assert share == {
        StopReason.ENV_ERROR: pytest.approx(0.1, abs=0.03),
        StopReason.ENV_HANG: pytest.approx(0.2, abs=0.03),
    }
    assert {plan.init_s for plan in plans if plan.stop is StopReason.ENV_HANG} == {
        families.INIT_TIMEOUT_S
    }
    assert any(family_plan.fails_in == "" for family_plan in plans)


def test_another_attempt_is_another_plan_of_the_same_task() -> None:
    first, second = (
        workload("math").plan(index=3, member=0, attempt=attempt, seed=0) for attempt in (0, 1)
    )
    assert first != second
    assert first.prompt_tokens == second.prompt_tokens


# Names.


def test_refuses_unknown_workloads_with_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"workload must be one of swe, .* got 'tool-caling'; did you mean 'tool-calling'\?",
    ):
        workload("tool-caling")
    for name in ("", "a" * 5000, "\0"):
        with pytest.raises(ConfigError, match="workload must be one of"):
            workload(name)
    with pytest.raises(ConfigError, match=r"must contain a run's journal\.bin"):
        workload(str(tmp_path))
    with pytest.raises(ConfigError, match="workload must be a readable file"):
        workload(str(tmp_path / "none.jsonl"))


# Traces.

LINE = {
    "prompt_tokens": 100,
    "init_s": 1.5,
    "turns": [[20, 5, 0.5], [30, 0, 0]],
    "reward_s": 0.25,
    "reward": 1,
}


def trace(path: Path, *lines: Any) -> str:
    file = path / "trace.jsonl"
    file.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(file)


def test_a_line_is_a_plan(tmp_path: Path) -> None:
    plan = workload(trace(tmp_path, LINE, "")).plan(index=5, member=2, attempt=1, seed=3)
    turns = (
        TurnPlan(output_tokens=20, observation_tokens=5, env_s=0.5),
        TurnPlan(output_tokens=30, observation_tokens=0, env_s=0.0),
    )
    assert plan == Plan(
        prompt_tokens=100, init_s=1.5, turns=turns, reward_s=0.25, reward=1.0, success=True
    )


def test_the_stop_reason_places_a_failure(tmp_path: Path) -> None:
    stops = ["max_turns", "env_hang", "reward_error"]
    lines = [LINE | {"stop": stop, "success": False, "group": stop} for stop in stops] + [
        LINE | {"stop": "env_error", "turns": [], "group": 9}
    ]
    work = workload(trace(tmp_path, *lines))
    plans = [work.plan(index=i, member=0, attempt=0, seed=0) for i in range(4)]
    assert [(plan.stop, plan.fails_in) for plan in plans] == [
        ("max_turns", ""),
        ("env_hang", "run"),
        ("reward_error", "eval"),
        ("env_error", "init"),
    ]
    assert [plan.success for plan in plans] == [False, False, False, True]


def test_groups_members_and_attempts_are_taken_in_order_and_wrap_around(tmp_path: Path) -> None:
    marks = [("a", 0), ("b", None), ("a", 1), ("a", 0), ("b", None), ("a", 5)]
    lines = [
        LINE
        | {"prompt_tokens": number + 1, "group": group}
        | ({} if member is None else {"member": member})
        for number, (group, member) in enumerate(marks)
    ]
    work = workload(trace(tmp_path, *lines))

    def marked(index: int, member: int, attempt: int = 0) -> int:
        return work.plan(index=index, member=member, attempt=attempt, seed=8).prompt_tokens - 1

    assert [marked(0, member) for member in range(4)] == [0, 2, 5, 0]
    assert [marked(0, 0, attempt) for attempt in range(3)] == [0, 3, 0]
    assert [marked(1, member) for member in range(3)] == [1, 4, 1]
    assert marked(2, 0) == 0


@pytest.mark.parametrize("count", [1, 2, 7, 8, 100])
def test_ungrouped_lines_are_used_evenly_and_at_most_once_per_task(count: int) -> None:
    plans = [
        Plan(prompt_tokens=n + 1, init_s=0, turns=(), reward_s=0, reward=0, success=False)
        for n in range(count)
    ]
    work, members = Ungrouped(plans), 7
    used = [
        [plan.prompt_tokens for plan in group]
        for group in plans_of(work, tasks=count, members=members)
    ]
    assert set(Counter(number for group in used for number in group).values()) == {members}
    assert all(len(set(group)) == min(count, members) for group in used)


def test_few_tasks_use_nearly_all_ungrouped_lines() -> None:
    plans = [
        Plan(prompt_tokens=n + 1, init_s=0, turns=(), reward_s=0, reward=0, success=False)
        for n in range(96)
    ]
    used = {
        plan.prompt_tokens
        for group in plans_of(Ungrouped(plans), tasks=12, members=8)
        for plan in group
    }
    assert len(used) > 80


PARTS, WHOLE = "[output tokens, observation tokens, seconds]", "must be a whole number from"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be a whole number from 1 to 10^9, got 0"),
        ({"prompt_tokens": True}, "prompt_tokens must be a whole number from 1 to 10^9, got True"),
        ({"init_s": -1}, "init_s must be a number of seconds, at least 0, got -1"),
        ({"init_s": "1"}, "init_s must be a number of seconds, at least 0, got '1'"),
        ({"reward_s": math.inf}, "reward_s must be a number of seconds, at least 0, got inf"),
        ({"reward": math.nan}, "reward must be a finite number, got nan"),
        ({"reward": 10**400}, "reward must be a finite number, got 1000"),
        ({"reward": None}, "reward must be a finite number, got None"),
        ({"turns": 3}, f"turns must be a list of {PARTS}, got 3"),
        ({"turns": []}, "turns must have at least one turn unless the environment fails to start"),
        ({"turns": [[1, 2, 3], [1, 2]]}, f"turns[1] must be {PARTS}, got [1, 2]"),
        ({"turns": [[0, 2, 3]]}, f"turns[0], output tokens, {WHOLE} 1 to 10^9, got 0"),
        ({"turns": [[1, 2.5, 3]]}, f"turns[0], observation tokens, {WHOLE} 0 to 10^9, got 2.5"),
        (
            {"turns": [[1, 2, -3]]},
            "turns[0], seconds, must be a number of seconds, at least 0, got",
        ),
        ({"stop": "surplus"}, "stop must be one of finished, max_turns, max_tokens, env_error"),
        ({"success": 1}, "success must be true or false, got 1"),
        ({"group": None}, "group must be a text or a whole number, got None"),
        ({"member": 1}, "group must be given where member is, got member 1"),
        ({"group": "a"}, "group must be given in every line or in none, got 'a'"),
        ({"tokens": 1}, "tokens is not a field, it must be one of prompt_tokens, init_s, turns"),
    ],
)
def test_an_error_names_file_line_field_rule_and_value(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    file = trace(tmp_path, LINE, "", LINE | line)
    with pytest.raises(ConfigError) as raised:
        workload(file)
    assert str(raised.value).startswith(f"{file}:3: {message}")


@pytest.mark.parametrize("missing", ["prompt_tokens", "init_s", "turns", "reward_s", "reward"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    file = trace(tmp_path, {name: value for name, value in LINE.items() if name != missing})
    with pytest.raises(ConfigError) as raised:
        workload(file)
    assert str(raised.value).startswith(f"{file}:1: {missing} must be")
    assert str(raised.value).endswith("got nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1: line must be a JSON object"),
        ("[]", ":1: line must be a JSON object, got []"),
        ("", "must have a line"),
    ],
)
def test_refuses_files_that_are_no_traces(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        workload(trace(tmp_path, text))
    assert message in str(raised.value)
