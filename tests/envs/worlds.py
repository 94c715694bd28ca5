"""Environments and configurations for the tests of this package."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.tasks import TaskSource
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Purpose, Task

HERE = f"{__name__}:"


def config(*tasks: dict[str, Any], seed: int = 0) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"name": "test", "seed": seed}, "model": {"path": "none"}, "tasks": tasks}
    )


def source(tmp_path: Path, *tasks: dict[str, Any], seed: int = 0) -> TaskSource:
    return TaskSource(config(*tasks, seed=seed), logs=tmp_path)


def draw(of: TaskSource, name: str, index: int = 0, purpose: Purpose = Purpose.TRAIN) -> Task:
    return of.draw(name, index, purpose)


def episode(
    task: Task, *actions: str, rewards: tuple[float, ...] = (), success: bool | None = None
) -> Episode:
    messages = tuple(Message(role="assistant", content=text) for text in actions)
    return Episode(task=task, messages=messages, rewards=rewards, success=success)


class Foreign(BaseException):
    """A BaseException, as in libraries that cancel by exceptions."""


class Nameless(type):
    """An exception whose class does not reveal its name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit(9)


class Untraceable(Exception, metaclass=Nameless):
    """An exception whose every attribute raises."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise SystemExit(9)

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise SystemExit(9)


class Unanswering(metaclass=Nameless):
    """A value whose every method raises."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt


class Unconvertible:
    def item(self) -> float:
        raise KeyboardInterrupt


class Echo:
    """Repeats the agent's message; ends at "end". Its attributes choose the words at
    which it misbehaves.
    """

    def __init__(self, *, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.closed = False

    def reset(self, task: Task) -> Observation:
        return Observation.of(f"{self.greeting} {task.seed}")

    def step(self, action: str) -> Any:
        if action in RAISED:
            raise RAISED[action]()
        if action in RETURNED:
            return RETURNED[action]()
        match action:
            case "die":
                os._exit(7)
            case "block":
                time.sleep(3600)
            case "spawn":
                return Step.of(str(subprocess.Popen(["sleep", "3600"]).pid))
        done = action == "end"
        return Step.of(f"you said {action}", reward=0.25, done=done, success=done or None)


class Listener(Echo):
    """Has a parameter for the finish reason of the agent's turn."""

    def step(self, action: str, finish_reason: str = "") -> Step:
        return Step.of(f"{action}: {finish_reason}")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class SpeechlessStop(StopIteration):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": lambda: KeyError("lost key"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "closed": lambda: GeneratorExit("not of ours"),
    "untraceable": lambda: Untraceable("x"),
    "base": lambda: Foreign("of another library"),
    "speechless": Speechless,
}
"""What a step of `Echo` raises, by the agent's message."""

RETURNED: dict[str, Callable[[], Any]] = {
    "unanswering": Unanswering,
    "unconvertible": lambda: Step.of("x", reward=Unconvertible()),  # type: ignore[arg-type]
    "none": lambda: None,
    "nan": lambda: Step.of("x", reward=float("nan")),
    "vast": lambda: Step.of("x", reward=-1e300),
    "wrong type": lambda: Step.of(3),  # type: ignore[arg-type]
    "wrong role": lambda: Step(messages=(Message(role="judge", content="x"),)),  # type: ignore[arg-type]
    "silent": Step,
    "numpy": lambda: Step.of("np", reward=np.float32(0.5), done=np.bool_(True)),  # type: ignore[arg-type]
    "list": lambda: Step(messages=[Message(role="user", content="a")]),  # type: ignore[arg-type]
    "unshowable": Unshowable,
}
"""What it returns."""

SCORES_RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": lambda: ValueError("bad"),
    "cancelled": asyncio.CancelledError,
    "stop": StopIteration,
    "stop speechless": SpeechlessStop,
    "closed": lambda: GeneratorExit("not of ours"),
}
SCORES: dict[str, Callable[[], Any]] = {
    "unanswering": Unanswering,
    "unconvertible": Unconvertible,
    "score": lambda: Score(reward=2.0, success=True),
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "numpy": lambda: np.float32(0.5),
    "true": lambda: True,
}
"""What the reward of `Scored` raises and returns."""


class AsyncEcho:
    """The same environment with coroutines, and resources that are released."""

    async def reset(self, task: Task) -> Observation:
        self.alive = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        return Observation.of("hello")

    async def step(self, action: str) -> Step:
        if action == "wait":
            await asyncio.Event().wait()
        if action == "closed":
            raise GeneratorExit("not of ours")
        await asyncio.sleep(0)
        return Step.of(f"alive: {not self.alive.done()}", done=action == "end")

    async def close(self) -> None:
        self.alive.cancel()


class Scored(Echo):
    """Its reward is the agent's first message."""

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Any:
        action = episode.actions()[0]
        if action in SCORES_RAISED:
            raise SCORES_RAISED[action]()
        if action == "block":
            time.sleep(3600)
        return SCORES[action]() if action in SCORES else 0.75


class AsyncScored(Echo):
    @classmethod
    async def score(cls, episode: Episode, options: Options) -> float:
        await asyncio.sleep(0)
        if "closed" in episode.actions():
            raise GeneratorExit
        return float(len(episode.messages))


class BadConstructor(Echo):
    def __init__(self) -> None:
        raise RuntimeError("no database")


class BadClose(Echo):
    def close(self) -> None:
        raise RuntimeError("cannot close")


class Mute(Echo):
    def reset(self, task: Task) -> Observation:
        return Observation(messages=())


class BadTask(Echo):
    @classmethod
    def make_task(cls, *, index: int, seed: int, split: str, options: Options) -> Any:
        if index > 1:
            raise SystemExit(4)
        if index:
            raise LookupError("no more tasks")
        return "a task"


class NoStep:
    def reset(self, task: Task) -> Observation:
        return Observation.of("x")


class GuessGym(gymnasium.Env[Any, Any]):
    """Guess a letter, as a gymnasium environment."""

    def __init__(self, text: bool = False) -> None:
        spaces = gymnasium.spaces
        self.action_space = spaces.Text(1, charset="abc") if text else spaces.Discrete(3, start=1)
        self.observation_space = spaces.Text(20)
        self.text = text

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, 4))
        return " guess", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = " abc".index(action) if self.text else int(action)
        right = guess == self.secret
        return (" right" if right else " wrong"), float(right), right, False, {}


GUESS = "RollweaveGuess-v0"
gymnasium.register(GUESS, entry_point=GuessGym)


class Alarmed:
    """Sets an alarm in every method, as libraries do that limit their own time; plain
    methods also run an event loop of their own.
    """

    def __init__(self) -> None:
        on_alarm()

    def reset(self, task: Task) -> Observation:
        return asyncio.run(self._reset())

    async def _reset(self) -> Observation:
        return Observation.of(on_alarm())

    def step(self, action: str) -> Step:
        return Step.of(on_alarm(), done=True)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> float:
        try:
            on_alarm()
        except ValueError as error:  # a library raises an error of its own
            raise RuntimeError("no limit of time") from error
        return 1.0


class AsyncAlarmed:
    async def reset(self, task: Task) -> Observation:
        asyncio.get_running_loop()
        return Observation.of(on_alarm())

    async def step(self, action: str) -> Step:
        return Step(done=True)


def on_alarm() -> str:
    """Return "rung" once an alarm has."""
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append("rung"))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while not rung:
        time.sleep(0.01)
    signal.signal(signal.SIGALRM, before)
    return rung[0]
