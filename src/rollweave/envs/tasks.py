"""The task domains of a run: draws their tasks, opens their environments, scores their episodes.

Invariants: a task depends on `(run.seed, domain, index, split)` alone; held-out tasks come from splits of their own, those of
the final evaluation from another than those that choose a checkpoint.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollweave.codec.chat import ChatCodec
from rollweave.codec.conversation import scripted
from rollweave.core.evaluation import FINAL_TASKS_FROM
from rollweave.envs.base import Episode, Observation, Score, Split, Step, mix, new_task
from rollweave.envs.boundary import RAISED, GuardedEnv, scored
from rollweave.envs.process import ProcessEnv, Workers, score_in_process
from rollweave.envs.registry import check_options, is_handler, resolve
from rollweave.envs.words import Setting
from rollweave.policy.mixture import next_domain
from rollweave.schema.base import TaskId
from rollweave.schema.chat import Message
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError, EnvError, RollweaveError
from rollweave.schema.sections import FaultsConfig, TaskConfig
from rollweave.schema.work import Purpose, Task, TokenSequence


class OpenedEnv(Protocol):
    """An environment, wherever it runs. Its caller limits the time of every call by cancelling it."""

    async def reset(self, task: Task) -> Observation:
        """Begin the task. Raises EnvError."""

    async def step(self, action: str) -> Step:
        """Take the agent's words. Raises EnvError."""

    async def close(self) -> None:
        """Free what it holds. Raises EnvError."""

    def kill(self) -> None:
        """Free it at once, without waiting; harmless after `close`."""


class Worlds:
    """Opens environments and scores episodes of one task domain."""

    def __init__(self, config: TaskConfig, faults: FaultsConfig, workers: Workers) -> None:
        self._config, self._faults, self._workers = config, faults, workers

    async def open(self, task: Task, *, seed: int) -> OpenedEnv:
        """A fresh environment for `task`. `seed` decides injected faults. Raises EnvError."""
        config = self._config
        if config.isolation == "process":
            return ProcessEnv(self._workers, self._setting(seed))
        return InlineEnv(GuardedEnv(config.env, config.options, faults=self._faults, seed=seed, block=False))

    async def score(self, episode: Episode, *, seed: int) -> Score:
        """The reward of an ended episode. Raises RewardError."""
        config = self._config
        if config.isolation == "process" and hasattr(resolve(config.env), "score"):
            return await score_in_process(self._workers, self._setting(seed), episode)
        return await scored(config.env, config.options, episode, faults=self._faults, seed=seed)

    def _setting(self, seed: int) -> Setting:
        config = self._config
        return Setting(env=config.env, options=config.options, faults=self._faults.model_dump(), seed=seed)


class InlineEnv:
    """An environment on the caller's event loop. A call that blocks blocks the loop; nothing can be killed here."""

    def __init__(self, env: GuardedEnv) -> None:
        self._env = env

    async def reset(self, task: Task) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: str) -> Step:
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()

    def kill(self) -> None:
        """What it holds is freed when it is collected."""


class TaskSource:
    """The domains of a run. Raises ConfigError for an environment that does not exist or does not take its options."""

    def __init__(self, config: RunConfig, *, logs: Path | None = None) -> None:
        """`logs`: where worker processes write what they print; by default into the run's directory."""
        self._seed = config.run.seed
        self._domains = {task.name: task for task in config.tasks}
        for task in config.tasks:
            check_options(task.env, task.options)
            if task.isolation == "process" and is_handler(task.env):
                raise ConfigError(f"tasks.isolation must be inline for a handler, got process for {task.name!r}")
        self.workers = Workers(logs if logs is not None else (Path(config.run.dir) / config.run.name / "logs").absolute())
        self._worlds = {task.name: Worlds(task, config.faults, self.workers) for task in config.tasks}

    async def close(self) -> None:
        """End all worker processes."""
        await self.workers.close()

    def draw(self, name: str, index: int, purpose: Purpose) -> Task:
        """Task number `index` of domain `name`. Raises EnvError where the environment's `make_task` fails."""
        domain = self._domain(name)
        split = Split.TRAIN
        if purpose is Purpose.EVAL:
            split = Split.TEST if index >= FINAL_TASKS_FROM else Split.VALIDATION
            index = index - FINAL_TASKS_FROM if split is Split.TEST else index
        seed = mix(self._seed, name)
        hook = getattr(resolve(domain.env), "make_task", None)
        try:
            made = (
                new_task(seed=mix(seed, split, index))
                if hook is None
                else hook(index=index, seed=seed, split=split, options=domain.options)
            )
        except RollweaveError:
            raise
        except RAISED as error:
            raise EnvError(f"{name}: make_task raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Task):
            raise EnvError(f"{name}: make_task must return a Task, got {type(made).__name__}")
        task_id = TaskId(f"{name}-{split}-{index}")
        task = msgspec.structs.replace(made, id=task_id, env=domain.env, tag=name, limits=domain.limits)
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task)  # as the journal will
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise EnvError(f"{name}: make_task must return a Task that can be written down: {error}") from error

    def asked(self, name: str, *, payload: str, seed: int) -> Task:
        """A task of domain `name` that somebody brings along: `payload` is JSON that its environment reads."""
        domain, digest = self._domain(name), mix(seed, payload)
        return Task(
            id=TaskId(f"{name}-asked-{digest:x}"), env=domain.env, seed=seed, payload=payload, tag=name, limits=domain.limits
        )

    def worlds(self, name: str) -> Worlds:
        """Where the environments of domain `name` live."""
        self._domain(name)
        return self._worlds[name]

    def words(self) -> tuple[str, ...]:
        """The words of all domains, for a tokenizer from scratch."""
        return tuple(dict.fromkeys(word for name in self._domains for word in self._strings(name, "words")))

    def allowed_words(self, name: str) -> tuple[str, ...]:
        """The action grammar of domain `name`; empty where there is none."""
        return self._strings(name, "allowed_words")

    def transcripts(self, codec: ChatCodec, *, seed: int) -> Iterator[TokenSequence]:
        """Scripted conversations for the warm-up, without end, from the domains in proportion to their `warmup_weight`.

        Raises ConfigError where a domain has none.
        """
        rng, names = random.Random(mix(seed, "transcripts")), list(self._domains)
        hooks = {name: getattr(resolve(domain.env), "transcript", None) for name, domain in self._domains.items()}
        for name, hook in hooks.items():
            if hook is None:
                raise ConfigError(f"warmup.steps must be 0 where an environment has no transcript(), got {name!r}")
        weights = [(name, self._domains[name].warmup_weight) for name in names]
        drawn: dict[str, int] = {}
        while True:
            name = next_domain(weights, drawn)
            drawn[name] = drawn.get(name, 0) + 1
            said: Sequence[Message] = hooks[name](random.Random(rng.getrandbits(64)), self._domains[name].options)  # type: ignore[misc]
            yield scripted(codec, said)

    def _domain(self, name: str) -> TaskConfig:
        if name not in self._domains:
            raise ConfigError(f"task domain must be one of {', '.join(self._domains)}, got {name!r}")
        return self._domains[name]

    def _strings(self, name: str, method: str) -> tuple[str, ...]:
        domain = self._domain(name)
        hook: Any = getattr(resolve(domain.env), method, None)
        said: Any = () if hook is None else hook(domain.options)
        found = () if isinstance(said, str) else tuple(said)
        wrong = [said] if isinstance(said, str) else [word for word in found if not isinstance(word, str) or not word]
        if wrong:
            raise ConfigError(
                f"{method} of environment {domain.env!r} must return a list of non-empty strings, got {wrong[0]!r}"
            )
        return found
