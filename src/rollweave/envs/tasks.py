"""The task domains of a run: draws their tasks, opens their environments, scores their
episodes; and user functions, named by the configuration, that decide what is trained on
(`core/policy/experience.Rule`).

Invariants: a task depends on `(run.seed, domain, index, split)` alone; held-out tasks
come from separate splits, one for the choice of a checkpoint and another for the final
evaluation.
"""

import functools
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from rollweave.core.policy.experience import Rule
from rollweave.core.policy.redundancy import next_domain
from rollweave.envs.base import Episode, Observation, Score, Split, Step, new_task
from rollweave.envs.boundary import CONVERSION_ERRORS, USER_EXCEPTIONS, GuardedEnv, score_episode
from rollweave.envs.process import EnvProcesses, EnvSpec, ProcessEnv, score_in_process
from rollweave.envs.registry import check_options, is_handler, load, resolve
from rollweave.envs.threads import (
    EnvThread,
    EnvThreads,
    call_inline,
    describe_error,
    needs_thread,
    type_name,
)
from rollweave.sandbox.base import HOST, is_reference
from rollweave.schema.base import TaskId, copied, mix
from rollweave.schema.chat import Message
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, EnvError, RewardError, RollweaveError
from rollweave.schema.text import valid_tree
from rollweave.schema.work import Purpose, Task


class OpenedEnv(Protocol):
    """An open environment with any isolation.

    Its caller limits the time of every call by cancelling it.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task. Raises EnvError."""

    async def step(self, action: str, *, finish_reason: str = "stop") -> Step:
        """Apply the agent's message. Raises EnvError."""

    async def close(self) -> None:
        """Release its resources. Raises EnvError."""

    def kill(self) -> None:
        """Release them immediately, without waiting; harmless after `close`."""


class DomainEnvProvider:
    """Opens environments and scores episodes of one task domain."""

    def __init__(self, config: TaskConfig, processes: EnvProcesses, threads: EnvThreads) -> None:
        self._config, self._processes, self._threads = config, processes, threads

    async def open(self, task: Task) -> OpenedEnv:
        """Open a new environment for `task`. Raises EnvError."""
        config = self._config
        if config.isolation == "process":
            return ProcessEnv(self._processes, self._spec())
        kind = resolve(config.env)
        if not needs_thread(kind):
            return InlineEnv(GuardedEnv(config.env, config.options))
        thread = self._threads.lease(f"environment {config.env}")
        make = functools.partial(GuardedEnv, config.env, config.options, via=thread.via)
        # Construct the environment where it is reset: if `reset` is async, the
        # constructor may need the event loop as well.
        try:
            env = (
                make()
                if inspect.iscoroutinefunction(kind.reset)
                else await thread.run("__init__", make)
            )
        except BaseException:
            thread.release()
            raise
        return InlineEnv(env, thread)

    async def score(self, episode: Episode) -> Score:
        """Return the reward of an ended episode. Raises RewardError."""
        config = self._config
        hook = getattr(resolve(config.env), "score", None)
        if config.isolation == "process" and hook is not None:
            return await score_in_process(self._processes, self._spec(), episode)
        score = functools.partial(score_episode, config.env, config.options, episode)
        if hook is None or inspect.iscoroutinefunction(hook):
            return await score(via=call_inline)
        try:
            thread = self._threads.lease(f"environment {config.env}")
        except EnvError as error:
            raise RewardError(str(error)) from error
        try:
            return await score(via=thread.via)
        finally:
            thread.release()

    def _spec(self) -> EnvSpec:
        return EnvSpec(env=self._config.env, options=self._config.options)


class InlineEnv:
    """An environment in this process. Its async methods run on the event loop; its
    plain methods run on `thread`, if there is one.

    Nothing can be killed here: a plain method that does not return in time is
    abandoned, with its thread.
    """

    def __init__(self, env: GuardedEnv, thread: EnvThread | None = None) -> None:
        self._env, self._thread = env, thread

    async def reset(self, task: Task) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: str, *, finish_reason: str = "stop") -> Step:
        return await self._env.step(action, finish_reason=finish_reason)

    async def close(self) -> None:
        if self._thread is None:
            await self._env.close()
        elif not self._thread.has_abandoned:
            try:
                await self._env.close()
            finally:
                self._thread.release()

    def kill(self) -> None:
        """Release the thread; the environment's resources are released when it is
        garbage-collected.
        """
        if self._thread is not None:
            self._thread.release()


class TaskSource:
    """The task domains of a run."""

    def __init__(
        self, config: RunConfig, *, logs: Path | None = None, imported: bool = True
    ) -> None:
        """Import the environments, now or, without `imported`, when they are first
        used. The processes of environments write their output to files in `logs`, by
        default in the run directory.

        Raises ConfigError for an environment that does not exist or does not accept its
        options.
        """
        self._seed = config.run.seed
        self._domains = {task.name: task for task in config.tasks}
        for task in config.tasks if imported else ():
            check_options(task.env, task.options)
            if task.isolation == "process" and is_handler(task.env):
                raise ConfigError(
                    f"tasks.isolation must be inline for a handler, got process for {task.name!r}"
                )
        self.processes = EnvProcesses(
            logs
            if logs is not None
            else (Path(config.run.dir) / config.run.name / "logs").absolute()
        )
        self.threads = EnvThreads()
        self._providers = {
            task.name: DomainEnvProvider(task, self.processes, self.threads)
            for task in config.tasks
        }

    async def close(self) -> None:
        """End all processes of environments, and all threads except those whose calls
        do not return.
        """
        self.threads.close()
        await self.processes.close()

    def draw(self, name: str, index: int, purpose: Purpose) -> Task:
        """Return task number `index` of domain `name`.

        Raises EnvError if the environment's `make_task` fails.
        """
        domain = self._domain(name)
        split = Split.TRAIN
        if purpose is Purpose.EVAL:
            split = Split.TEST if index >= FINAL_TASKS_FROM else Split.VALIDATION
            index = index - FINAL_TASKS_FROM if split is Split.TEST else index
        seed = mix(self._seed, name)
        hook = getattr(resolve(domain.env), "make_task", None)
        try:
            task = (
                new_task(seed=mix(seed, split, index))
                if hook is None
                else hook(index=index, seed=seed, split=split, options=copied(domain.options))
            )
        except RollweaveError:
            raise
        except USER_EXCEPTIONS as error:
            raise EnvError(f"{name}: {describe_error('make_task', error)}") from error
        if not isinstance(task, Task):
            raise EnvError(f"{name}: make_task must return a Task, got {type_name(task)}")
        task_id = TaskId(f"{name}-{split}-{index}")
        task = msgspec.structs.replace(
            task, id=task_id, env=domain.env, tag=name, limits=domain.limits
        )
        try:
            plain = valid_tree(msgspec.to_builtins(task))
            # Encode as the journal does.
            return msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Task)
        except CONVERSION_ERRORS as error:
            raise EnvError(
                f"{name}: make_task must return a Task that can be written down: {error}"
            ) from error

    def task_of(self, name: str, *, payload: str, seed: int) -> Task:
        """Return a task of domain `name` with a payload from outside, which is JSON for
        the domain's environment.
        """
        domain, digest = self._domain(name), mix(seed, payload)
        return Task(
            id=TaskId(f"{name}-asked-{digest:x}"),
            env=domain.env,
            seed=seed,
            payload=payload,
            tag=name,
            limits=domain.limits,
        )

    def provider(self, name: str) -> DomainEnvProvider:
        """Return the provider of the environments of domain `name`."""
        self._domain(name)
        return self._providers[name]

    def words(self) -> tuple[str, ...]:
        """Return the words of all domains, for a tokenizer from scratch."""
        return tuple(
            dict.fromkeys(word for name in self._domains for word in self._strings(name, "words"))
        )

    def allowed_words(self, name: str) -> tuple[str, ...]:
        """Return the action grammar of domain `name`; empty if there is none."""
        return self._strings(name, "allowed_words")

    def transcripts(self, *, seed: int) -> Iterator[Sequence[Message]]:
        """Yield scripted conversations for the warm-up, endlessly, from the domains in
        turn.

        Raises ConfigError if a domain has none.
        """
        rng, names = random.Random(mix(seed, "transcripts")), list(self._domains)
        hooks: dict[str, Any] = {}
        for name, domain in self._domains.items():
            hooks[name] = getattr(resolve(domain.env), "transcript", None)
            if hooks[name] is None:
                raise ConfigError(
                    f"env must have transcript() if warmup.steps is set, {domain.env} has none"
                )
        weights = [(name, 1.0) for name in names]
        drawn: dict[str, int] = {}
        while True:
            name = next_domain(weights, drawn)
            drawn[name] = drawn.get(name, 0) + 1
            options = copied(self._domains[name].options)
            yield hooks[name](random.Random(rng.getrandbits(64)), options)

    def _domain(self, name: str) -> TaskConfig:
        if name not in self._domains:
            raise ConfigError(
                f"task domain must be one of {', '.join(self._domains)}, got {name!r}"
            )
        return self._domains[name]

    def _strings(self, name: str, method: str) -> tuple[str, ...]:
        domain = self._domain(name)
        hook: Any = getattr(resolve(domain.env), method, None)
        value: Any = () if hook is None else hook(copied(domain.options))
        words = () if isinstance(value, str) else tuple(value)
        wrong = (
            [value]
            if isinstance(value, str)
            else [word for word in words if not isinstance(word, str) or not word]
        )
        if wrong:
            raise ConfigError(
                f"{method} of environment {domain.env!r} must return a list of non-empty strings, "
                f"got {wrong[0]!r:.80}"
            )
        return words


def images_of(env: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the images of a handler's sandboxes that are known before the run: the
    images that its class method `images` lists, or its option `image`. Raises
    ConfigError, and what `images` raises.
    """
    if not is_handler(env):
        return ()
    method = getattr(resolve(env), "images", None)
    if method is not None:
        return tuple(image for image in method(copied(options)) if image != HOST)
    image = options.get("image")
    return (image,) if isinstance(image, str) and is_reference(image) else ()


def named(config: RunConfig) -> list[tuple[str, str]]:
    """Return the settings that name a function, with its `package.module:function`."""
    name = config.buffer.sample
    return [("buffer.sample", name)] if ":" in name else []


def rule(name: str) -> Rule:
    """Return the function.

    Raises ConfigError if it cannot be imported, or cannot be called with the buffer and
    a version, or has an attribute `measures` that is not true or false.
    """
    what = f"function {name!r}"
    function = load(name, what=what)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else type(function).__name__
        raise ConfigError(f"{what} must be a function, got {kind}")
    try:
        inspect.signature(function).bind((), 0)
    except TypeError as error:
        raise ConfigError(f"{what} must take the experiences and the version: {error}") from error
    except ValueError:  # a function written in C has no signature
        pass
    measures = getattr(function, "measures", False)
    if not isinstance(measures, bool):
        raise ConfigError(f"{what} must have measures True or False, got {measures!r}")
    return cast(Rule, function)


def rules_of(config: RunConfig) -> dict[str, Rule]:
    """Return the functions by name. Raises ConfigError with a line for each setting
    whose function is invalid.
    """
    rules: dict[str, Rule] = {}
    errors = []
    for setting, name in named(config):
        try:
            rules[name] = rule(name)
        except ConfigError as error:
            errors.append(f"{setting}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))
    return rules
