"""The boundary between user code and Rollweave: the only place where the user code's
exceptions and malformed values are detected.

Invariant: what passes is an `Observation`, `Step` or `Score` of the right types with
finite numbers; everything else becomes an `EnvError` or `RewardError` that says what
was wrong. The caller's cancellation passes through.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar

import msgspec
import xxhash

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.registry import resolve
from rollweave.envs.threads import (
    Caller,
    call_inline,
    describe_error,
    running_task,
    text_of,
    type_name,
)
from rollweave.schema.base import copied
from rollweave.schema.errors import EnvError, Interrupted, RewardError, RollweaveError
from rollweave.schema.text import shortened, valid, valid_tree
from rollweave.schema.work import Task

T = TypeVar("T", Observation, Step)
N = TypeVar("N", Observation, Step, Score)

USER_EXCEPTIONS = (BaseException,)
"""Exceptions that user code may raise. Ctrl-C raises no KeyboardInterrupt here: the run
handles signals in its event loop, and as a last resort raises `Interrupted`, which is
not caught.
"""

CONVERSION_ERRORS = (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError)
"""Exceptions that the conversion of a malformed value may raise."""

LARGEST_REWARD = 1e12
"""Maximum absolute reward: rewards are squared and summed, partly in float32, and
larger rewards would overflow.
"""

SHOWN = 80
"""Maximum characters of a malformed value that an error quotes."""

LEAST_CHARS, CHARS_PER_TOKEN = 1 << 20, 16
"""The characters in the messages of one answer are limited to `CHARS_PER_TOKEN` for
each token of the task's limit, but at least to `LEAST_CHARS`. Tokenizing takes a second
for each megabyte, during which all trajectories wait.
"""

REASON_CHARS = 1000
"""Maximum length of a score's reason that is kept unchanged."""

KEY_CHARS = 1024
"""Maximum length of a `state_key` that is kept unchanged; every turn repeats its key.
"""


class GuardedEnv:
    """A user's environment whose construction, calls and results are checked.

    All methods raise `EnvError` and nothing else.
    """

    def __init__(self, name: str, options: Options, *, via: Caller = call_inline) -> None:
        try:
            env = resolve(name)(**copied(dict(options)))
        except Interrupted:
            raise
        except USER_EXCEPTIONS as error:
            raise EnvError(describe_error("making the environment", error)) from error
        self._takes_finish_reason = takes_finish_reason(env)
        self._env, self._via = env, via
        self._most_chars = LEAST_CHARS

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        self._most_chars = max(LEAST_CHARS, CHARS_PER_TOKEN * task.limits.max_tokens)
        observation = _checked(await self._called("reset", task), Observation, "reset")
        if not observation.messages:
            raise EnvError("reset must return at least one message, got none")
        self._check_size(observation, "reset")
        return observation

    async def step(self, action: str, *, finish_reason: str = "stop") -> Step:
        """Apply the agent's message.

        `finish_reason` says how the message ended, and is passed on if the
        environment's `step` has a parameter of this name.
        """
        more = {"finish_reason": finish_reason} if self._takes_finish_reason else {}
        step = _checked(await self._called("step", action, **more), Step, "step")
        if not abs(step.reward) <= LARGEST_REWARD:  # also refuses NaN
            raise EnvError(
                f"step must return a finite reward, at most {LARGEST_REWARD:g}, got {step.reward}"
            )
        if not step.done and not step.messages:
            raise EnvError(
                "step must return at least one message while the episode is not done, got none"
            )
        self._check_size(step, "step")
        return step

    async def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        await self._called("close")

    def _check_size(self, answer: Observation | Step, method: str) -> None:
        size = sum(len(message.content) for message in answer.messages)
        if size > self._most_chars:
            raise EnvError(
                f"{method} must return messages of at most {self._most_chars} "
                f"characters, got {size}"
            )

    async def _called(self, method: str, *arguments: Any, **more: Any) -> Any:
        async def call() -> Any:
            if method == "close" and getattr(self._env, "close", None) is None:
                return None
            return await self._via(partial(getattr(self._env, method), **more), *arguments)

        return await _guarded(call(), method, EnvError)


def takes_finish_reason(env: Any) -> bool:
    """Return whether the environment's `step` has a parameter `finish_reason`."""
    try:
        return "finish_reason" in inspect.signature(env.step).parameters
    except USER_EXCEPTIONS:
        # There is no `step`, as its first call will report, or it has no signature.
        return False


async def score_episode(
    name: str, options: Options, episode: Episode, *, via: Caller = call_inline
) -> Score:
    """Return the reward of an episode: from the class's `score`, otherwise the sum of
    the steps' rewards. Raises RewardError.
    """

    async def scored() -> Any:
        hook = getattr(resolve(name), "score", None)
        if hook is None:
            return Score(reward=math.fsum(episode.rewards), success=episode.success)
        return await via(hook, episode, copied(options))

    return checked_score(await reward_from(scored(), "score"), "score", success=episode.success)


async def reward_from(call: Awaitable[Any], what: str) -> Any:
    """Await user code that computes a reward. Raises RewardError, which says that
    `what` raised the error.
    """
    return await _guarded(call, what, RewardError)


async def _guarded(call: Awaitable[Any], what: str, kind: type[RollweaveError]) -> Any:
    """Await user code, and turn what it raises into an error of this `kind`."""
    task = running_task()
    try:
        return await call
    except asyncio.CancelledError as error:
        if _asked_to_cancel():
            raise
        raise kind(describe_error(what, error)) from error
    except Interrupted:
        raise
    except USER_EXCEPTIONS as error:
        if _is_closing(error, task):
            raise
        raise kind(describe_error(what, error)) from error


def checked_score(value: Any, method: str, *, success: bool | None) -> Score:
    """Convert what `method` returned to a Score; `success` is that of a plain number.

    Raises RewardError.
    """
    try:
        value = _plain(value) if hasattr(value, "item") else value
        if isinstance(value, int | float):
            value = Score(reward=float(value), success=success)
        score = _typed(value, Score) if isinstance(value, Score) else None
    except Interrupted:
        raise
    except USER_EXCEPTIONS as error:  # also from the value's own methods
        raise RewardError(f"{method} must return a number or a Score: {_why(error)}") from error
    if score is None or not abs(score.reward) <= LARGEST_REWARD:
        raise RewardError(
            f"{method} must return a finite number, at most {LARGEST_REWARD:g}, or "
            f"a Score, got {_short(value)}"
        )
    return msgspec.structs.replace(score, reason=shortened(score.reason, REASON_CHARS))


def _asked_to_cancel() -> bool:
    """Return whether the caller cancelled, or its time is up. If not, user code raised
    CancelledError by itself.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _is_closing(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Return whether Python closes the coroutine of `task`, which awaits user code. If
    not, the user code raised GeneratorExit.
    """
    return issubclass(type(error), GeneratorExit) and (task is None or running_task() is not task)


def _checked(value: Any, kind: type[T], method: str) -> T:
    try:
        if isinstance(value, kind):
            return msgspec.structs.replace(_typed(value, kind), state_key=_key(value.state_key))
    except Interrupted:
        raise
    except USER_EXCEPTIONS as error:  # from the value's own methods, too
        raise EnvError(
            f"{method} must return {kind.__name__} of the right types: {_why(error)}"
        ) from error
    raise EnvError(f"{method} must return {kind.__name__}, got {_short(value)}")


def _key(key: str) -> str:
    """Return the key, or its digest if the key is too long or not valid text: only
    equality matters.
    """
    if len(key) <= KEY_CHARS and valid(key) == key:
        return key
    return xxhash.xxh3_128_hexdigest(key.encode(errors="surrogatepass"))


def _typed(value: Any, kind: type[N]) -> N:
    """Convert every field to its declared type: numpy's numbers to Python's, lists to
    tuples, and all text to valid text.
    """
    plain = msgspec.to_builtins(value, enc_hook=_plain, builtin_types=(bytes,))
    return msgspec.convert(valid_tree(plain), kind)


def _plain(value: Any) -> Any:
    """Convert a number of numpy or torch to a Python number."""
    if not hasattr(value, "item"):
        raise TypeError(f"{type_name(value)} is not supported")
    return value.item()


def _short(value: Any) -> str:
    try:
        text = "".join(repr(value))
    except USER_EXCEPTIONS:
        text = f"a {type_name(value)} that cannot be shown"
    return valid(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def _why(error: BaseException) -> str:
    """Describe the error that the conversion of a value raised. For a malformed value,
    the error's text suffices without the error's name.
    """
    text = text_of(error)
    return text if issubclass(type(error), CONVERSION_ERRORS) else f"{type_name(error)}: {text}"
