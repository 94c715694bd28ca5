"""The display shows a run's progress, no more often than a person can read it."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rollweave.cli import progress
from tests.support.properties import examples


def step(number: int, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "step",
        "step": number,
        "at": 10.0 + number,
        "success": {"lake": 0.5, "nim": 0.25},
        "reward": {"lake": 0.4, "nim": -0.1},
        "staleness": {"0": 3, "2": 1},
        "tokens_per_s": 1234.0,
        "idle": {"engines": {"busy": 3.0, "window": 1.0}, "trainer": {"busy": 1.0, "batch": 3.0}},
        "engines": {"e0": {"running": 7, "waiting": 2}},
    }
    return line | changes


def evaluation(**changes: Any) -> dict[str, Any]:
    line = {
        "kind": "evaluation",
        "step": 4,
        "at": 20.0,
        "final": False,
        "success": {"lake": 0.75},
        "reward": {"lake": 0.7},
        "episodes": {"lake": 64},
        "failed": {},
    }
    return line | changes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plain(text: io.StringIO, clock: Clock) -> progress.Plain:
    return progress.Plain(Console(file=text, width=200), name="lake", steps=10, clock=clock)


def test_a_step_is_one_line_with_everything(plain: progress.Plain, text: io.StringIO) -> None:
    plain.line(step(2))
    assert text.getvalue() == (
        "step 3/10 | 12 s | success lake 0.50, nim 0.25 | reward lake 0.40, nim -0.10 | staleness "
        "0.50 (max 2) | 1,234 tokens/s | busy: engines 75%, trainer 25%\n"
    )


def test_shows_a_step_every_few_seconds_and_the_last_one_always(
    plain: progress.Plain, text: io.StringIO, clock: Clock
) -> None:
    for number in range(4):
        plain.line(step(number))
        clock.now += progress.PLAIN_EVERY_S / 2
    plain.line(step(9))
    expected = ["step 1/10", "step 3/10", "step 10/10"]
    assert [line.split(" |")[0] for line in text.getvalue().splitlines()] == expected


def test_shows_every_evaluation(plain: progress.Plain, text: io.StringIO) -> None:
    plain.line(evaluation())
    plain.line(evaluation(final=True, failed={"lake": 2}))
    plain.line(evaluation(final=True, distinct={"lake": 25}))
    plain.line(evaluation(failed={"lake": 1}, last_failure="env_error: reset failed:\nno map"))
    assert text.getvalue().splitlines() == [
        "evaluation at step 4: success 0.75 over 64 episodes of the validation split",
        "final evaluation at step 4: success 0.75 over 64 episodes of the test split, 2 episodes failed",
        "final evaluation at step 4: success 0.75 over 64 episodes of 25 tasks of the test split",
        "evaluation at step 4: success 0.75 over 64 episodes of the validation split, 1 episodes "
        "failed (last: env_error: reset failed: no map)",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_that_only_evaluates_names_its_subject(is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, width=110, force_terminal=is_terminal, color_system=None)
    with progress.display(console, name="lake at step 25", steps=0) as shown:
        shown.line({**evaluation(final=True), "step": 0})
    expected = "evaluation of lake at step 25: success 0.75 over 64 episodes of the test split\n"
    assert expected in text.getvalue()
    assert "step 0" not in text.getvalue()


def test_prints_every_named_wait(plain: progress.Plain, text: io.StringIO) -> None:
    for seconds in (10, 20, 40, 80):
        message = f"waiting {seconds} s for relay r1: fetching"
        plain.line({"kind": "waiting", "component": "relay r1", "message": message})
    assert text.getvalue().count("for relay r1: fetching") == 4


def test_limits_the_warnings_of_a_component(plain: progress.Plain, text: io.StringIO) -> None:
    for number in range(20):
        plain.line({"kind": "warning", "component": "engine e0", "message": f"lost {number}"})
    plain.line({"kind": "warning", "component": "disk", "message": "full [bold]"})
    printed = text.getvalue().splitlines()
    assert len(printed) == progress.WARNINGS_SHOWN + 2
    assert printed[-1] == "warning: disk: full [bold]"


def test_shows_rewards_of_tasks_without_success(plain: progress.Plain, text: io.StringIO) -> None:
    both = {"reward": {"lake": 0.7, "maze": -0.25}, "episodes": {"lake": 64, "maze": 64}}
    plain.line(evaluation(success={}))
    plain.line(evaluation(**both))
    plain.line(step(4, success={}))
    evaluations, mixed, trained = text.getvalue().splitlines()
    assert (
        evaluations == "evaluation at step 4: reward 0.70 over 64 episodes of the validation split"
    )
    assert (
        mixed
        == "evaluation at step 4: success lake 0.75, reward maze -0.25 over 128 episodes of the "
        "validation split"
    )
    assert "success" not in trained
    assert "reward lake 0.40, nim -0.10" in trained


def test_a_terminal_shows_rewards_of_tasks_without_success() -> None:
    text = io.StringIO()
    console = Console(file=text, width=110, force_terminal=True, color_system=None)
    with progress.Terminal(console, name="my run", steps=10) as terminal:
        terminal.line(step(2, success={"lake": 0.5}))
        console.print(terminal.draw())
    printed = text.getvalue()
    assert "success 0.50" in printed
    assert "reward -0.10" in printed


def test_shows_turns_that_were_cut(plain: progress.Plain, text: io.StringIO) -> None:
    plain.line(step(2, turns=200, cut_turns={"lake": 30, "nim": 20}))
    plain.line(step(9, turns=200, cut_turns={}))
    first, last = text.getvalue().splitlines()
    assert first.endswith("50 of 200 turns (25.0%) cut at max_turn_tokens: lake, nim")
    assert "cut" not in last
    console = Console(file=text, width=110, force_terminal=True, color_system=None)
    with progress.Terminal(console, name="my run", steps=10) as terminal:
        terminal.line(step(2, turns=100, cut_turns={"nim": 20}))
        console.print(terminal.draw())
    assert "20 of 100 turns (20.0%) cut at max_turn_tokens: nim" in text.getvalue()


def test_shows_that_a_target_was_reached(plain: progress.Plain, text: io.StringIO) -> None:
    plain.line(evaluation(target_reached=True))
    assert text.getvalue().endswith(
        "the validation split; eval.stop_at is reached, training ends here\n"
    )


def test_ignores_unknown_lines(plain: progress.Plain, text: io.StringIO) -> None:
    plain.line({"kind": "something new"})
    assert text.getvalue() == ""


def test_a_terminal_shows_step_success_idle_and_warnings(text: io.StringIO) -> None:
    console = Console(file=text, width=110, force_terminal=True, color_system=None)
    with progress.Terminal(console, name="my run", steps=10) as terminal:
        terminal.phase("training")
        terminal.line(step(2))
        terminal.line(evaluation())
        terminal.line({"kind": "warning", "component": "engine e0", "message": "lost"})
        console.print(terminal.draw())
    printed = text.getvalue()
    for expected in (
        "my run",
        "step 3/10",
        "training",
        "success 0.50",
        "1,234 tokens/s",
        "7 generating, 2 waiting",
    ):
        assert expected in printed
    for expected in (
        "0.50 (max 2)",
        "busy 75%  window 25%",
        "busy 25%  batch 75%",
        "engine e0: lost",
        "0.75",
    ):
        assert expected in printed


def test_the_display_fits_the_console(text: io.StringIO) -> None:
    assert isinstance(progress.display(Console(file=text), name="run", steps=1), progress.Plain)
    assert isinstance(
        progress.display(Console(file=text, force_terminal=True), name="run", steps=1),
        progress.Terminal,
    )


@given(st.lists(st.floats(0, 1), max_size=200))
@settings(max_examples=examples(50))
def test_a_sparkline_is_as_long_as_the_values_until_it_must_average(values: list[float]) -> None:
    line = progress.sparkline(values)
    assert len(line) == min(len(values), progress.CURVE_POINTS)
    if values and len(set(values)) == 1:
        assert len(set(line)) == 1


def test_a_sparkline_rises_with_its_values() -> None:
    assert progress.sparkline([0.0, 0.5, 1.0]) == "▁▅█"
