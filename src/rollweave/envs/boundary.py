"""Where the user's code ends and ours begins: the one place in which its failures and its garbage are found.

Invariant: what passes is an `Observation`, `Step` or `Score` of the right types with finite numbers; everything else becomes
an `EnvError` or `RewardError` that says what was wrong. The caller's cancellation passes through.
"""

import asyncio
import math
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.faults import Faulty, awaited, reward_fault
from rollweave.envs.registry import resolve
from rollweave.schema.errors import EnvError, RewardError, RollweaveError
from rollweave.schema.sections import FaultsConfig
from rollweave.schema.work import Task

T = TypeVar("T", Observation, Step)
N = TypeVar("N", Observation, Step, Score)

RAISED = (Exception, SystemExit, KeyboardInterrupt)
"""What the user's code may raise. A Ctrl-C is no KeyboardInterrupt here: the run takes signals in its event loop."""

LARGEST_REWARD = 1e12
"""Rewards are squared and summed, in float32 too: beyond this that overflows."""

SHOWN = 80
"""Characters of garbage that an error quotes."""


class GuardedEnv:
    """One environment of the user's, made, called and checked. All methods raise `EnvError` and nothing else."""

    def __init__(self, name: str, options: Options, *, faults: FaultsConfig, seed: int, block: bool) -> None:
        try:
            env = resolve(name)(**options)
        except RAISED as error:
            raise EnvError(what_happened("making the environment", error)) from error
        self._env = Faulty(env, faults, seed=seed, block=block)

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        observation = _checked(await self._called("reset", task), Observation, "reset")
        if not observation.messages:
            raise EnvError("reset must return at least one message, got none")
        return observation

    async def step(self, action: str) -> Step:
        """Take the agent's words."""
        step = _checked(await self._called("step", action), Step, "step")
        if not abs(step.reward) <= LARGEST_REWARD:  # nor is NaN
            raise EnvError(f"step must return a finite reward, at most {LARGEST_REWARD:g}, got {step.reward}")
        if not step.done and not step.messages:
            raise EnvError("step must return at least one message while the episode is not done, got none")
        return step

    async def close(self) -> None:
        """Free what `reset` took."""
        await self._called("close")

    async def _called(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._env, method)(*arguments)
        except asyncio.CancelledError as error:
            if _asked_to_cancel():
                raise
            raise EnvError(what_happened(method, error)) from error
        except RAISED as error:
            raise EnvError(what_happened(method, error)) from error


async def scored(name: str, options: Options, episode: Episode, *, faults: FaultsConfig, seed: int) -> Score:
    """The reward of an episode: what the class's `score` says, else the sum of the steps' rewards. Raises RewardError.

    A `score` that is not async runs on a thread of its own: rewards are often slow, and here they share the event loop.
    """
    try:
        reward_fault(faults, seed=seed)
        hook = getattr(resolve(name), "score", None)
        if hook is None:
            return Score(reward=math.fsum(episode.rewards), success=episode.success)
        found = await awaited(await _in_thread(lambda: hook(episode, options)))
    except asyncio.CancelledError as error:
        if _asked_to_cancel():
            raise
        raise RewardError(what_happened("score", error)) from error
    except RAISED as error:
        raise RewardError(what_happened("score", error)) from error
    return checked_score(found, "score", success=episode.success)


def checked_score(found: Any, method: str, *, success: bool | None) -> Score:
    """What `method` returned as a Score; a number's `success` is the given one. Raises RewardError."""
    found = _plain(found) if hasattr(found, "item") else found
    if isinstance(found, int | float):
        found = Score(reward=float(found), success=success)
    try:
        score = _typed(found, Score) if isinstance(found, Score) else None
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise RewardError(f"{method} must return a number or a Score: {error}") from error
    if score is None or not abs(score.reward) <= LARGEST_REWARD:
        raise RewardError(f"{method} must return a finite number, at most {LARGEST_REWARD:g}, or a Score, got {_short(found)}")
    return score


def _asked_to_cancel() -> bool:
    """Whether the caller cancels, or its time is up; otherwise the user's code raised CancelledError by itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _checked(value: Any, kind: type[T], method: str) -> T:
    if not isinstance(value, kind):
        raise EnvError(f"{method} must return {kind.__name__}, got {_short(value)}")
    try:
        return _typed(value, kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise EnvError(f"{method} must return {kind.__name__} of the right types: {error}") from error


def _typed(value: Any, kind: type[N]) -> N:
    """The noun with every field of its declared type: numpy's numbers become Python's, lists become tuples."""
    return msgspec.convert(msgspec.to_builtins(value, enc_hook=_plain), kind)


def _plain(value: Any) -> Any:
    """A Python number for a number of numpy or torch."""
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} is not supported")
    return value.item()


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def what_happened(method: str, error: BaseException) -> str:
    """The error and the last place in the code it came from."""
    if isinstance(error, RollweaveError):
        return f"{method}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    return f"{method} raised {type(error).__name__}: {text}{place}"


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` on a daemon thread: one that never returns keeps neither the loop nor the end of the process waiting."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = call()
        except StopIteration as raised:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {raised}")
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name="score", daemon=True).start()
    return await answer
