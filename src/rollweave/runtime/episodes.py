"""Make the driver of one attempt from its domain's environment or handler, its agent's
codec and sampling, and the run's seed.

Invariant: resources that attempts share, sandboxes, their images and the endpoint for
agent programs, are opened when the first attempt needs them, and closed by `close`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from rollweave.engine.server_kinds import kind_of
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.envs.registry import is_handler, resolve
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import AgentConfig, ChatCodec
from rollweave.rollout.driver import Driver
from rollweave.rollout.env_episode import EnvEpisode
from rollweave.rollout.gateway.server import GatewayListener
from rollweave.rollout.handler_episode import HandlerEpisode
from rollweave.rollout.rewards import DomainRewards, Rewards
from rollweave.rollout.teacher import Teach, Teacher
from rollweave.runtime.pump import RunClock
from rollweave.sandbox.provider import Images, Peers, provider
from rollweave.schema.base import copied
from rollweave.schema.commands import StartInit
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import SandboxConfig
from rollweave.schema.images import GrantImage, ImageWait
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.serving import Sampling
from rollweave.schema.work import Decoding, Purpose


def image_opener(
    config: SandboxConfig,
    *,
    clock: Callable[[], float],
    peers: Peers | None = None,
    run_id: str = "",
) -> Callable[[], Images]:
    """Return a function that opens the images of this process."""
    here = Path.cwd()
    return lambda: provider(config.backend).images(
        config.mirror, clock=clock, here=here, peers=peers, run=run_id
    )


class Episodes:
    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        source: TaskSource,
        clock: RunClock,
        *,
        run_id: str,
        deployed: Mapping[str, str] = MappingProxyType({}),
        peers: Peers | None = None,
    ) -> None:
        """`peers` are the other hosts of the run, if any. `deployed` is as in
        `rollout/rewards.py`.

        Raises ConfigError for a reward whose function or token is missing.
        """
        self._config, self._model_dir, self._source, self._clock = config, model_dir, source, clock
        self._sandboxes = Sandboxes(
            config.sandbox.backend,
            warm=config.sandbox.warm,
            images=image_opener(config.sandbox, clock=clock.now, peers=peers, run_id=run_id),
        )
        self._tasks = {task.name: task for task in config.tasks}
        self._taught = {name for name in self._tasks if config.distills(name)}
        teacher = config.teacher
        self._teacher = (
            None
            if teacher is None
            else Teacher(teacher, clock=clock.now, start_s=config.watchdog.start_s)
        )
        self._rewards = Rewards(
            config,
            run_id,
            threads=source.threads,
            clock=clock.now,
            start_s=config.watchdog.start_s,
            deployed=deployed,
        )

    def make(self, command: StartInit) -> Driver:
        name = command.task.tag
        agent = _with_decoding(self._agent_config(name, command.purpose), command.decoding)
        seed = self._config.run.seed if command.decoding.seed is None else command.decoding.seed
        task = self._tasks[name]
        if not is_handler(task.env):
            return EnvEpisode(
                command,
                provider=self._source.provider(name),
                agent=agent,
                seed=seed,
                clock=self._clock.now,
            )
        return HandlerEpisode(
            command,
            make=lambda: resolve(task.env)(**copied(task.options)),
            agent=agent,
            seed=seed,
            clock=self._clock.now,
            sandboxes=self._sandboxes,
            listener=self._listener,
        )

    def teacher(self, command: StartInit) -> Teach | None:
        """Return what asks the teacher about the attempt; None if it learns from
        none.
        """
        taught = command.purpose is Purpose.TRAIN and command.task.tag in self._taught
        return self._teacher.teach if taught and self._teacher is not None else None

    def rewards_of(self, domain: str) -> DomainRewards | None:
        """Return the rewards of a task domain beside its environment's, if any."""
        return self._rewards.of(domain)

    def service_waits(self) -> tuple[ServiceWait, ...]:
        """Return the waits of this process for services: the teacher and rewards."""
        teacher = None if self._teacher is None else self._teacher.wait()
        return (*(() if teacher is None else (teacher,)), *self._rewards.waits())

    async def close(self) -> None:
        """Close what attempts shared, and the environments' processes, after the last
        attempt.
        """
        await self._source.close()
        if self._teacher is not None:
            await self._teacher.close()
        await self._rewards.close()
        if "_listener" in self.__dict__:
            await self._listener.close()
        await self._sandboxes.close()

    def image_waits(self) -> tuple[ImageWait, ...]:
        """Return the images that attempts wait for."""
        return self._sandboxes.image_waits()

    def on_image_granted(self, message: GrantImage) -> None:
        """Take the controller's answer to a question about an image."""
        self._sandboxes.on_granted(message)

    @functools.cached_property
    def _codec(self) -> ChatCodec:
        return ChatCodec.from_directory(self._model_dir, self._config.model.template_arguments)

    @functools.cached_property
    def _listener(self) -> GatewayListener:
        kinds = [kind_of(group.server) for group in self._config.engines if group.server]
        unable = [kind.name for kind in kinds if not kind.constrains]
        return GatewayListener(
            self._codec,
            model=self._config.run.name,
            unconstrained=f"{unable[0]} engines cannot constrain answers" if unable else "",
        )

    @functools.cache  # noqa: B019 (one object a run)
    def _agent_config(self, name: str, purpose: Purpose) -> AgentConfig:
        rollout, codec = self._config.rollout, self._codec
        words = self._source.allowed_words(name)
        training = purpose is not Purpose.EVAL
        sampling = Sampling(
            temperature=rollout.temperature if training else self._config.eval.temperature,
            top_p=rollout.top_p if training else 1.0,
            stop_token_ids=codec.stop_token_ids,
            stop=codec.stop,
            allowed=(*codec.single_token_ids(words), *codec.stop_token_ids) if words else (),
        )
        return AgentConfig(codec=codec, sampling=sampling)


def _with_decoding(agent: AgentConfig, decoding: Decoding) -> AgentConfig:
    """Replace the configured sampling parameters by those that the request names."""
    changes = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(decoding, name)) is not None
    }
    return (
        dataclasses.replace(agent, sampling=msgspec.structs.replace(agent.sampling, **changes))
        if changes
        else agent
    )
