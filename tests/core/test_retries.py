"""Retries: a failure that may pass is retried, and the same bug never runs a third
time.
"""

import itertools
import random
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from rollweave.core.policy.retry import MIN_BROKEN_TASKS, is_broken
from rollweave.core.state import Stage
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.work import StopReason, Task
from tests.support.core import config
from tests.support.random_world import World


class Broken(World):
    """A world in which every environment start of group g1 fails with the errors in
    `words`; nothing else fails.
    """

    def __init__(self, reason: StopReason, words: str) -> None:
        super().__init__(config(steps=2, rollout={"retries": 5}), seed=3)
        self.reason, self.words = reason, words
        self.counted = itertools.count()
        self.attempts: dict[str, int] = {}

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartInit) and command.group_id == "g1":
            self.attempts[command.trajectory_id] = command.attempt + 1
            error = self.words.format(number=next(self.counted))
            key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
            self.later(e.TrajectoryEnded(**key, stop_reason=self.reason, error=error))
        else:
            super().execute(command)


@pytest.mark.parametrize(
    ("reason", "words", "attempts"),
    [
        (StopReason.ENV_ERROR, "reset raised KeyError: 'map'", 2),
        (StopReason.ENV_ERROR, "reset raised OSError: port {number} is taken", 6),
        (StopReason.ENV_ERROR, "", 6),
        (StopReason.ENV_HANG, "starting did not answer within 60 s", 6),
    ],
)
def test_the_same_failure_twice_is_not_retried(
    reason: StopReason, words: str, attempts: int
) -> None:
    world = Broken(reason, words)
    world.run()
    assert set(world.attempts.values()) == {attempts}
    assert world.finish.error == ""
    said = f"{reason}: {words}" if words else str(reason)
    assert world.core.state.last_failure == said or "{number}" in words


class Refusing(World):
    """A world whose engines refuse every turn, with these words."""

    def __init__(self, words: str) -> None:
        super().__init__(config(steps=2), seed=3)
        self.words = words

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartTurn):
            key = {
                name: getattr(command, name)
                for name in ("trajectory_id", "attempt", "turn", "dispatch")
            }
            self.later(e.TurnFailed(**key, error=self.words))
        else:
            super().execute(command)


def test_a_run_whose_turns_all_fail_ends_with_the_failure_of_a_turn() -> None:
    world = Refusing("tokens must be in [0, 10), got 1 to 12")
    world.run()
    assert world.finish.error.endswith(
        "last failure: engine_failure: tokens must be in [0, 10), got 1 to 12"
    )


@pytest.mark.parametrize(
    ("tasks", "failed", "under_way", "broken"),
    [
        *((5, 40, 0, False), (6, 6, 0, True), (6, 6, 6, True), (6, 6, 7, False)),
        *((6, 20, 19, True), (20, 20, 21, False)),
    ],
)
def test_code_is_broken_if_more_attempts_fail_than_may_still_succeed(
    tasks: int, failed: int, under_way: int, broken: bool
) -> None:
    assert is_broken(tasks=tasks, failed=failed, under_way=under_way) is broken


class BrokenFromTheStart(World):
    """A world whose rewards fail with the words of `error`, given the task's group and
    the number of the failure. If it `works`, the first of each domain has a value.
    """

    def __init__(
        self, error: Callable[[str, int], str], *, works: bool = False, groups: int = 32
    ) -> None:
        changes = {"retries": 1, "groups_per_step": groups, "group_size": 2}
        super().__init__(config(steps=2, rollout=changes), seed=3)
        self.error, self.works, self.failed = error, works, 0

    def execute(self, command: c.Command) -> None:
        if not isinstance(command, c.StartEval):
            super().execute(command)
            return
        group = self.core.state.trajectories[command.trajectory_id].group_id
        stats = self.core.state.domains[self.core.state.groups[group].name]
        if self.works and Stage.EVAL not in stats.passed:
            super().execute(command)
        else:
            self.failed += 1
            key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
            error = self.error(group, self.failed)
            self.later(e.RewardFailed(**key, stop_reason=StopReason.REWARD_ERROR, error=error))


def test_a_run_whose_code_never_worked_ends_at_once_with_its_error() -> None:
    world = BrokenFromTheStart(lambda group, number: "reward raised NameError: x (reward.py:3)")
    world.run()
    assert " has been scored, and those at " in world.finish.error
    assert "failed in the same way: reward_error: reward raised NameError: x (reward.py:3)" in (
        world.finish.error
    )
    # two batches of groups, which end a run otherwise, have 64 groups of two, each of
    # which is tried twice
    assert world.failed < 96
    failed = [
        {failure.task for failure in stats.failed.values()}
        for stats in world.core.state.domains.values()
    ]
    assert max(map(len, failed)) >= MIN_BROKEN_TASKS


@pytest.mark.parametrize(
    "words",
    [
        "reward raised KeyError: '{group}' (/envs/reward.py:3)",
        "reward raised ValueError: no answer for {group}, which is new (/envs/reward.py:3)",
        "the prompt has 1{number} tokens, max_tokens is 512",
        "the scoring command ended with status 1: opened /tasks/{group}\n  line {number}\n"
        "FileNotFoundError: '/tasks/{group}.json'",
    ],
)
def test_errors_that_name_their_task_are_the_same_failure(words: str) -> None:
    world = BrokenFromTheStart(lambda group, number: words.format(group=group, number=number))
    world.run()
    assert "failed in the same way: reward_error: " in world.finish.error
    assert world.failed < 96


@pytest.mark.parametrize(
    ("error", "works"),
    [
        (lambda group, number: "reward raised NameError: x", True),
        (lambda group, number: f"reward raised OSError: x (reward.py:{number})", False),
    ],
    ids=["it has worked", "other errors"],
)
def test_code_that_has_worked_or_fails_in_many_ways_gets_its_two_batches(
    error: Callable[[str, int], str], works: bool
) -> None:
    world = BrokenFromTheStart(error, works=works, groups=8)
    world.run()
    assert "groups in a row failed" in world.finish.error


class Mixed(BrokenFromTheStart):
    """A world that draws `tasks` tasks again and again. The rewards of each domain fail
    until the domain has failed `failures` times, some of them for a second cause, each
    with other words. `judge` is a slow reference for the end of the run.
    """

    def __init__(self, *, tasks: int, failures: int, second: float) -> None:
        super().__init__(self.words, groups=8)
        self.draws, self.tasks = random.Random(3), tasks
        self.failures, self.second = failures, second
        self.history: list[tuple[str, str, str, int]] = []  # domain, trajectory, cause, task
        self.expected = False

    def words(self, group: str, number: int) -> str:
        cause = "KeyError" if self.draws.random() < self.second else "OSError"
        return f"reward raised {cause}: {number} of {group} (/envs/reward.py:3)"

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartEval):
            state = self.core.state
            name = state.groups[state.trajectories[command.trajectory_id].group_id].name
            self.works = sum(past[0] == name for past in self.history) >= self.failures
        super().execute(command)

    def later(self, event: e.Event, delay: float | None = None) -> None:
        if isinstance(event, e.GroupSubmitted):
            task = msgspec.structs.replace(event.task, seed=event.task.seed % self.tasks)
            event = msgspec.structs.replace(event, task=task)
        super().later(event, delay)

    def feed(self, event: e.Event) -> None:
        if isinstance(event, e.RewardFailed) and not self.core.state.error:
            self.expected = self.judge(event)
        super().feed(event)
        assert ("failed in the same way" in self.core.state.error) is self.expected

    def judge(self, event: e.RewardFailed) -> bool:
        state = self.core.state
        failed = state.trajectories.get(event.trajectory_id)
        if failed is None or failed.stage is not Stage.EVAL or failed.attempt != event.attempt:
            return False
        group = state.groups[failed.group_id]
        if group.name in state.domains and Stage.EVAL in state.domains[group.name].passed:
            return False
        cause = event.error.split()[2]
        task = cast(Task, group.task).seed
        self.history.append((group.name, failed.id, cause, task))
        last = {past[1]: past for past in self.history if past[0] == group.name}
        alike = [past for past in last.values() if past[2] == cause]
        begun = [
            one.id
            for one in state.trajectories.values()
            if one.stage in (Stage.INIT, Stage.RUN, Stage.EVAL_QUEUED, Stage.EVAL)
            and state.groups[one.group_id].name == group.name
            and one.id not in [past[1] for past in alike]
        ]
        return len({past[3] for past in alike}) >= MIN_BROKEN_TASKS and len(alike) >= len(begun)


NEVER = 10**6


@pytest.mark.parametrize(
    ("tasks", "failures", "second", "ends"),
    [
        *((100, NEVER, 0.0, True), (6, NEVER, 0.1, True), (5, NEVER, 0.0, False)),
        *((100, NEVER, 0.5, None), (100, 4, 0.0, False), (100, 12, 0.2, None)),
    ],
)
def test_a_run_ends_when_enough_of_its_tasks_have_failed_alike(
    tasks: int, failures: int, second: float, ends: bool | None
) -> None:
    """In each event, the core ends the run exactly if the slow reference does."""
    world = Mixed(tasks=tasks, failures=failures, second=second)
    world.start()
    while world.finish is None and world.handled < 400:
        world.step()
    assert world.expected is ends or ends is None
    assert len(world.history) > MIN_BROKEN_TASKS or failures < MIN_BROKEN_TASKS


class Flaky(World):
    """A world in which the first start of one environment of each group fails at once,
    and all others start, which takes longer.
    """

    def __init__(self) -> None:
        changes = {"groups_per_step": 8, "group_size": 4, "max_running": 64}
        super().__init__(config(steps=1, rollout=changes), seed=3)
        self.failed: set[str] = set()

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartInit) and command.group_id not in self.failed:
            self.failed.add(command.group_id)
            key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
            error = "reset raised OSError: address in use"
            reason = StopReason.ENV_ERROR
            self.later(e.TrajectoryEnded(**key, stop_reason=reason, error=error), 0.1)
        else:
            super().execute(command)

    def later(self, event: e.Event, delay: float | None = None) -> None:
        super().later(event, 2.0 if isinstance(event, e.EnvReady) else delay)


def test_failures_that_come_sooner_than_successes_do_not_end_the_run() -> None:
    """A task has failed in every group before any environment has started."""
    world = Flaky()
    world.run()
    assert world.finish.error == ""
    assert len(world.failed) >= MIN_BROKEN_TASKS


def test_one_bad_task_of_many_does_not_end_the_run() -> None:
    """All its members fail before any other attempt is scored."""
    world = Broken(StopReason.ENV_ERROR, "reset raised KeyError: 'map'")
    world.run()
    assert world.finish.error == ""


class BrokenStep(World):
    """A world whose environments fail at their first step, which a third of the
    attempts never get to: their only turn is cut.
    """

    def __init__(self, *, turns: int) -> None:
        changes = {"retries": 1, "groups_per_step": 32, "group_size": 2}
        super().__init__(config(steps=2, rollout=changes), seed=3)
        self.turns, self.started = turns, itertools.count()

    def execute(self, command: c.Command) -> None:
        if not isinstance(command, c.StartRun):
            super().execute(command)
            return
        cut = next(self.started) % 3 == 0
        self.later(
            e.TrajectoryEnded(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                stop_reason=StopReason.MAX_TOKENS if cut else StopReason.ENV_ERROR,
                turns=self.turns if cut else 1,
                tokens=3,
                error="" if cut else "step raised NameError: x",
            )
        )


@pytest.mark.parametrize("turns", [1, 2])
def test_an_attempt_whose_only_turn_was_cut_says_nothing_of_the_environment(turns: int) -> None:
    world = BrokenStep(turns=turns)
    world.start()
    while world.finish is None and world.handled < 3000:
        world.step()
    ended = world.finish is not None and "failed in the same way" in world.finish.error
    assert ended is (turns == 1)
