"""Environments of the package verifiers, by the names of their own packages.

An environment of verifiers brings its data set, its rubric, its tools and its
conversation, and runs its rollouts itself. It asks its model through a `Client`: here
this is the agent of the attempt (`verifiers_agent.py`), so that every
token is sampled and recorded by the run.

Invariants: a failed reward function is a failure, never a reward of 0; an environment
is loaded once in a process and shared by its attempts, as verifiers does it; its code
runs on an event loop in a thread, so that a tool that blocks delays only attempts of
such environments.
"""

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rollweave.envs.base import Options, Score, Split, new_task, payload_of, split_of
from rollweave.envs.handlers.base import Agent, Job
from rollweave.envs.jsonl import shuffled
from rollweave.envs.threads import text_of, type_name
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError, EnvError, RewardError
from rollweave.schema.work import Task

T = TypeVar("T")

INSTALL = 'pip install "verifiers>=0.3,<0.4"'

SOLVED = 0.5
"""Reward from which an attempt is a success, unless the environment has a
`pass_threshold`.
"""

MODEL = "rollweave"
"""Name of the model in the requests of an environment."""

_loading = threading.Lock()

_failures: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "failures", default=None
)
"""The reward functions that failed in this scoring."""


class Verifiers:
    """The environment that `verifiers.load_environment(id, **arguments)` returns.

    Training draws from its data set, evaluations from its evaluation data set; without
    one, two eighths of the data set are held out. The reward is its rubric's, and an
    attempt is a success from its `pass_threshold`.
    """

    def __init__(self, *, id: str, arguments: Options | None = None) -> None:
        self._env = _environment(id, json.dumps(arguments or {}, sort_keys=True))
        self._row: dict[str, Any] = {}
        self._state: Any = None
        self._ended: asyncio.Event | None = None

    async def init(self, job: Job) -> None:
        self._row = payload_of(job.task)["row"]

    async def run(self, agent: Agent) -> None:
        """Run the environment's rollout. Raises EnvError if it ended with an error."""
        from rollweave_envs.verifiers_agent import AgentClient

        client = AgentClient(agent, asyncio.get_running_loop())
        self._ended = asyncio.Event()
        self._state = await _in_loop(
            self._env.rollout(self._row, client, MODEL, {}), ended=self._ended
        )
        error = self._state.get("error")
        if error is not None:
            raise EnvError(f"the rollout ended with {_described(error)}")

    async def close(self) -> None:
        """Wait until the environment has cleaned up after a cancelled rollout."""
        if self._ended is not None:
            await self._ended.wait()

    async def eval(self) -> Score:
        """Score by the environment's rubric. Raises RewardError."""
        failures = await _in_loop(self._score())
        if failures:
            raise RewardError("; ".join(failures))
        reward = float(self._state["reward"])
        return Score(reward=reward, success=reward >= getattr(self._env, "pass_threshold", SOLVED))

    async def _score(self) -> list[str]:
        failures = list[str]()
        _failures.set(failures)
        try:
            await self._env.rubric.score_rollout(self._state)
        finally:
            await self._env.rubric.cleanup(self._state)
        return failures

    def final_result(self) -> dict[str, Any]:
        """Return the rubric's metrics, and the condition that ended the rollout."""
        if self._state is None:
            return {}
        return {
            "metrics": self._state.get("metrics") or {},
            "stop_condition": self._state.get("stop_condition"),
        }

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next row of the split. Raises ConfigError."""
        name, arguments = options["id"], json.dumps(options.get("arguments") or {}, sort_keys=True)
        rows = _rows(name, arguments, split)
        epoch, place = divmod(index, len(rows))
        order = shuffled(tuple(range(len(rows))), mix(seed, split, epoch))
        return new_task(seed=mix(seed, split, index), row=json.loads(rows[order[place]]))


@functools.lru_cache(64)
def _load(name: str, arguments: str) -> Any:
    verifiers = _package()
    # An environment would replace the run's signal handlers.
    environments: Any = importlib.import_module("verifiers.envs.environment")
    environments.signal = types.SimpleNamespace(**{**vars(signal), "signal": _install_nothing})
    try:
        env = verifiers.load_environment(name, **json.loads(arguments))
    except Exception as error:  # of the package, or of the environment
        raise ConfigError(f"options.id {name!r} must load: {_described(error)}") from error
    _check(name, env)
    _watch(env.rubric)
    return env


def _environment(name: str, arguments: str) -> Any:
    """Return the environment, which one thread loads. Raises ConfigError."""
    with _loading:
        return _load(name, arguments)


def _package() -> Any:
    """Return the package verifiers. Raises ConfigError if it is missing or of another
    version.
    """
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(f"verifiers cannot be imported: {error} ({INSTALL})") from error
    if not hasattr(package, "load_environment"):
        raise ConfigError(
            "verifiers must have load_environment, as versions from 0.3 to below 0.4 have with "
            f"all that they require ({INSTALL}), got {getattr(package, '__version__', package)}"
        )
    return package


def _install_nothing(*arguments: Any) -> None:
    """Take the place of `signal.signal` in verifiers."""


def _check(name: str, env: Any) -> None:
    """Refuse environments that cannot work attempt by attempt. Raises ConfigError."""
    kind = type(env).__name__
    if getattr(env, "requires_group_rollouts", False):
        raise ConfigError(
            f"options.id {name!r} must score each rollout alone, got a {kind} whose rubric scores "
            "groups; docs/REWARDS.md has comparisons of a group by a judge"
        )
    if getattr(env, "provides_advantages", False):
        raise ConfigError(
            f"options.id {name!r} must leave advantages to [algorithm], got a {kind} whose rubric "
            "computes them"
        )
    if getattr(env, "message_type", "chat") != "chat":
        raise ConfigError(
            f"options.id {name!r} must converse in chat messages, got a {kind} of message_type "
            f"{env.message_type!r}"
        )


def _watch(rubric: Any) -> None:
    """Note the failures of the rubric's reward functions, which verifiers takes for
    rewards of 0.
    """
    members = getattr(rubric, "env_map", None)
    for member in [
        *getattr(rubric, "rubrics", ()),
        *(env.rubric for env in (members or {}).values()),
    ]:
        _watch(member)
    rubric.funcs = [
        _noting(function) if weight else function
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        with _noted(function):
            value = function(*arguments, **named)
        return awaited(value) if inspect.isawaitable(value) else value

    async def awaited(value: Awaitable[Any]) -> Any:
        with _noted(function):
            return await value

    return called


@contextlib.contextmanager
def _noted(function: Callable[..., Any]) -> Any:
    try:
        yield
    except Exception as error:
        failures = _failures.get()
        if failures is not None:
            name = getattr(function, "__name__", type_name(function))
            failures.append(f"the reward function {name} raised {_described(error)}")
        raise


@functools.lru_cache(16)
def _rows(name: str, arguments: str, split: Split) -> tuple[str, ...]:
    """Return the rows of a split, as JSON. Raises ConfigError."""
    env = _environment(name, arguments)
    with _loading:
        env.build_dataset()
        env.build_eval_dataset()
    held_out = env.eval_dataset if split is not Split.TRAIN else None
    dataset = env.dataset if held_out is None else held_out
    if dataset is None:
        raise ConfigError(f"options.id {name!r} must have a data set to train on, got none")
    divided = env.eval_dataset is None
    rows = tuple(
        text
        for text in (_json(name, place, row) for place, row in enumerate(dataset))
        if not divided or split_of(text) is split
    )
    if not rows:
        raise ConfigError(
            f"options.id {name!r} must have rows for split {split}, its data set of "
            f"{len(dataset)} has none"
        )
    return rows


def _json(name: str, place: int, row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"options.id {name!r} must have rows of JSON values: row {place}: {error}"
        ) from error


def _described(error: BaseException) -> str:
    """Return the error with its causes, each text once."""
    texts = list[str]()
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type_name(cause)}: {text_of(cause)}".removesuffix(": ")
        if not any(text_of(cause) and text_of(cause) in said for said in texts):
            texts.append(text)
        cause = cause.__cause__
    return ", from ".join(texts)


async def _in_loop(call: Coroutine[Any, Any, T], *, ended: asyncio.Event | None = None) -> T:
    """Await code of verifiers on its own event loop; `ended` is set when it has ended,
    which after a cancellation is later than this call does.
    """
    ours = asyncio.get_running_loop()

    async def awaited() -> T:
        try:
            return await call
        finally:
            if ended is not None:
                with contextlib.suppress(RuntimeError):  # our loop is closed
                    ours.call_soon_threadsafe(ended.set)

    with _loading:
        loop = _loop(os.getpid())
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), loop))


@functools.lru_cache(1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of verifiers in this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"verifiers-{pid}", daemon=True).start()
    return loop
