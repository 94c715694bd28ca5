"""The games themselves: maps, rules, opponents, rewards."""

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.envs.base import Message, Split, Step, new_task, payload_of
from rollweave.envs.frozenlake import (
    FROZEN,
    FrozenLake,
    SlowLake,
    _held_out_maps,
    _random_map,
    solvable,
)
from rollweave.envs.games import Calculator, Nim
from rollweave.schema.errors import ConfigError

DEFAULT = new_task(map=["SFFF", "FHFH", "FFFH", "HFFG"])


def lake(*actions: str) -> list[Step]:
    env = FrozenLake()
    env.reset(DEFAULT)
    return [env.step(action) for action in actions]


def content(messages: Sequence[Message]) -> str:
    (message,) = messages
    return message.content


def test_lake_describes_the_map() -> None:
    first = FrozenLake().reset(DEFAULT)
    assert (
        content(first.messages)
        == " hole=b2 hole=d2 hole=d3 hole=a4 at=a1 left=wall down=ice right=ice up=wall"
    )
    down, up, bump, bad = lake("<down>", "<up>", " <up>\n", "up")
    assert content(down.messages) == " at=a2 left=wall down=ice right=hole up=seen"
    assert (
        content(up.messages)
        == content(bump.messages)
        == " at=a1 left=wall down=seen right=ice up=wall"
    )
    expected = (-0.1, " invalid at=a1 left=wall down=seen right=ice up=wall")
    assert (bad.reward, content(bad.messages)) == expected
    assert up.state_key == bump.state_key == bad.state_key != first.state_key


def test_lake_ends_at_the_goal_and_in_a_hole() -> None:
    *way, end = lake("<down>", "<down>", "<right>", "<down>", "<right>", "<right>")
    assert [(step.reward, step.done) for step in way] == [(0.0, False)] * 5
    assert end == Step.of(" goal", reward=1.0, done=True, success=True)
    assert content(way[-1].messages) == " at=c4 left=seen down=wall right=goal up=ice"
    assert lake("<down>", "<right>")[-1] == Step.of(" fell", done=True, success=False)


def test_two_agents_on_one_map_are_independent() -> None:
    one, other = FrozenLake(), FrozenLake()
    one.reset(DEFAULT)
    one.step("<down>")
    other.reset(DEFAULT)
    assert content(other.step("<up>").messages).startswith(" at=a1 ")
    assert content(one.step("<left>").messages).startswith(" at=a2 ")


def walkable(rows: Sequence[str]) -> bool:
    """Decide it by repeated spreading, which is slow and obvious."""
    reached = {(0, 0)}
    for _ in range(16):
        reached |= {
            (row + a, column + b)
            for row, column in reached
            for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))
            if 0 <= row + a < 4 and 0 <= column + b < 4 and rows[row + a][column + b] != "H"
        }
    return (3, 3) in reached


def test_a_map_is_solvable_if_a_path_exists() -> None:
    rng = random.Random(0)
    outcomes = Counter()
    for _ in range(500):
        cells = [rng.choice("FH") for _ in range(16)]
        cells[0], cells[15] = "S", "G"
        rows = tuple("".join(cells[at : at + 4]) for at in range(0, 16, 4))
        outcomes[solvable(rows)] += 1
        assert solvable(rows) == walkable(rows)
    assert min(outcomes.values()) > 30


def test_held_out_maps_are_all_different_and_more_likely_ones_come_first() -> None:
    maps = _held_out_maps(5, Split.TEST)
    assert all(map(walkable, maps))
    assert len(maps) == len(set(maps)) > 400
    assert maps != _held_out_maps(6, Split.TEST)
    assert not set(maps) & set(_held_out_maps(5, Split.VALIDATION))
    holes = ["".join(rows).count("H") for rows in maps]
    assert sum(holes[:100]) < sum(holes[-100:]) - 100


def test_training_maps_have_gymnasiums_density_of_ice() -> None:
    rng = random.Random(0)
    drawn = [_random_map(rng) for _ in range(400)]
    assert all(walkable(rows) and (rows[0][0], rows[3][3]) == ("S", "G") for rows in drawn)
    ice = sum("".join(rows).count("F") for rows in drawn) / (400 * 14)
    assert FROZEN < ice < FROZEN + 0.08  # a little more, because hopeless maps are drawn again


def test_only_training_tasks_may_start_at_another_cell() -> None:
    def starts(split: Split) -> Counter[int]:
        tasks = [
            FrozenLake.make_task(index=index, seed=0, split=split, options={})
            for index in range(200)
        ]
        return Counter(payload_of(task).get("start", 0) for task in tasks)

    assert 100 < starts(Split.TRAIN)[0] < 180
    assert len(starts(Split.TRAIN)) > 8
    assert starts(Split.TEST) == {0: 200}


async def test_a_slow_lake_takes_a_log_normal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("rollweave.envs.frozenlake.asyncio", SimpleNamespace(sleep=sleep))
    for options in ({"latency_s": 2.0, "latency_sigma": 0.0}, {"latency_s": 0.0}):
        env = SlowLake(**options, maps="fixed")
        env.reset(DEFAULT)
        assert content((await env.step("<down>")).messages).startswith(" at=a2 ")
    assert slept == pytest.approx([2.0])


def calculate(
    *actions: str, question: tuple[int, str, int] = (3, "-", 5)
) -> list[tuple[str, float, bool, bool | None]]:
    env = Calculator(largest=9, operators="+-*")
    env.reset(new_task(question=question))
    steps = [env.step(action) for action in actions]
    return [
        ("".join(m.content for m in step.messages), step.reward, step.done, step.success)
        for step in steps
    ]


def test_calculator() -> None:
    assert calculate(
        "<tool> 3 - 5</tool>", "<tool>3-5</tool>", "<tool>5*9</tool>", "<answer> -2</answer>"
    ) == [
        (" result -2", 0.2, False, None),
        (" result -2", 0.0, False, None),
        (" result 45", 0.0, False, None),
        ("", 1.0, True, True),
    ]
    another, first, again = calculate("<tool>5*9</tool>", "<tool>3-5</tool>", "<tool>3-5</tool>")
    assert (another[1], first[1], again[1]) == (0.0, 0.2, 0.0)
    assert calculate("<answer>2</answer>") == [("", 0.0, True, False)]
    for bad in (
        "",
        "7",
        "<tool>3-</tool>",
        "<tool>10-5</tool>",
        "<tool>3-5</tool><answer>-2</answer>",
        "<answer>x</answer>",
    ):
        assert calculate(bad) == [(" error", -0.1, False, None)]


def test_calculator_transcripts_reveal_the_configured_share_of_answers() -> None:
    def solved(options: dict[str, Any]) -> float:
        replies = [Calculator.transcript(random.Random(number), options) for number in range(200)]
        right = 0
        for messages in replies:
            env = Calculator()
            left, operator, other = messages[0].content.replace(" =?", "").split()
            env.reset(new_task(question=(int(left), operator, int(other))))
            steps = [
                env.step(message.content) for message in messages if message.role == "assistant"
            ]
            right += steps[0].reward == 0.2 and steps[-1].success is True and len(steps) == 2
        return right / 200

    assert solved({"answers": 1.0}) == 1.0
    assert solved({"answers": 0.0}) < 0.25
    assert 0.45 < solved({}) < 0.7


def nim(
    pile: int, *actions: str, seed: int = 0, **options: Any
) -> list[tuple[str, float, bool, bool | None]]:
    env = Nim(**options)
    env.reset(new_task(seed=seed, pile=pile))
    steps = [env.step(action) for action in actions]
    return [(content(step.messages), step.reward, step.done, step.success) for step in steps]


def test_nim() -> None:
    assert nim(3, "<take-3>") == [(" won", 1.0, True, True)]
    assert nim(3, "<take-2>", skill=1.0) == [(" lost", 0.0, True, False)]
    assert nim(7, "<take-1>", skill=1.0) == [(" pile=4", 0.0, False, None)]
    assert nim(2, "<take-3>", "take 1", "<take-4>") == [(" invalid pile=2", -0.1, False, None)] * 3


def test_nims_opponent_has_its_skill() -> None:
    after = Counter(nim(7, "<take-1>", seed=seed)[0][0] for seed in range(600))
    # Of a pile of 6 the winning move leaves 4: always with skill 0.3, else one time in
    # three.
    assert abs(after[" pile=4"] / 600 - (0.3 + 0.7 / 3)) < 0.06
    assert set(after) == {" pile=5", " pile=4", " pile=3"}


def test_perfect_play_beats_the_opponent_from_every_pile_that_can_be_won() -> None:
    for pile in range(1, 16):
        if pile % 4 == 0:
            continue
        for seed in range(20):
            env = Nim(skill=1.0)
            messages = env.reset(new_task(seed=seed, pile=pile)).messages
            while True:
                step = env.step(f"<take-{int(content(messages).split('=')[1]) % 4}>")
                if step.done:
                    break
                messages = step.messages
            assert step.success


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        (FrozenLake, {"maps": "huge"}, "options.maps must be random or fixed, got 'huge'"),
        (Calculator, {"largest": 51}, "options.largest must be from 1 to 50, got 51"),
        (Calculator, {"largest": 0}, "options.largest must be from 1 to 50, got 0"),
        (Calculator, {"operators": ""}, "options.operators must be some of .*, got ''"),
        (Calculator, {"answers": -0.1}, "options.answers must be from 0 to 1, got -0.1"),
        (Nim, {"smallest": 0}, "options.smallest must be 1 to largest"),
        (Nim, {"largest": 41}, "largest to 40, got 4 and 41"),
        (Nim, {"skill": 1.1}, "options.skill must be from 0 to 1, got 1.1"),
        (Calculator, {"operators": "+/"}, r"options.operators must be some of \+-\*, got '\+/'"),
        (Calculator, {"answers": 2}, "options.answers must be from 0 to 1, got 2"),
        (Nim, {"smallest": 9, "largest": 8}, "options.smallest must be 1 to largest"),
        (Nim, {"skill": -1}, "options.skill must be from 0 to 1, got -1"),
    ],
)
def test_refuses_invalid_game_options(kind: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kind(**options)


def test_options_may_be_at_their_limits() -> None:
    for largest, answers in ((1, 0.0), (50, 1.0)):
        options = {"largest": largest, "answers": answers, "operators": "*"}
        words = Calculator.words(options)
        assert (words[7], words[-1]) == (" *", f" {largest**2}")
        assert len(words) == len(set(words))
    assert Nim.words({"smallest": 40, "largest": 40, "skill": 1})[39:41] == [" pile=40", "<take-1>"]
    for options in ({}, {"smallest": 3, "largest": 5, "skill": 0}):
        piles = {
            payload_of(Nim.make_task(index=index, seed=1, split=Split.TRAIN, options=options))[
                "pile"
            ]
            for index in range(200)
        }
        assert piles == set(range(options.get("smallest", 4), options.get("largest", 15) + 1))
