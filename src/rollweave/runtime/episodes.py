"""Make the driver of one attempt from its domain's environment or handler, its agent's
codec and sampling, and the run's seed. The images of the sandboxes in one process, and
the messages about them between a rollout worker and the controller.

Invariant: resources that attempts share, sandboxes, their images and the endpoint for
agent programs, are opened when the first attempt needs them, and closed by `close`.
"""

import asyncio
import dataclasses
import functools
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from rollweave.engine.servers.kinds import kind_of
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
from rollweave.sandbox.base import Backend
from rollweave.sandbox.blobs import BlobServer
from rollweave.sandbox.image_cache import ImageCache, Lease
from rollweave.sandbox.image_supply import ImageExchange, ImageSupply
from rollweave.schema.base import copied
from rollweave.schema.commands import StartInit
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import SandboxConfig
from rollweave.schema.errors import ImageError
from rollweave.schema.images import (
    AskImage,
    GrantImage,
    HoldImage,
    ImagePeer,
    ImageReport,
    ImageWait,
    MissImage,
)
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.serving import Sampling
from rollweave.schema.work import Decoding, Purpose

CACHE_SHARE = 0.5
"""Maximum share of its file system that the images of a host have."""

TOKEN_BYTES = 32
"""Random bytes of the token that peers present."""


def cache_folder() -> Path:
    """Return this host's folder of images."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if caches.startswith("/") else Path.home() / ".cache", "rollweave", "images")


class RemoteExchange:
    """The exchange of images with other hosts: a worker asks the controller for
    sources, and serves its images on `address`, unless that is "".
    """

    def __init__(self, report: Callable[[ImageReport], None], *, host: str, address: str) -> None:
        self._report, self._host, self._address = report, host, address
        self._asked: dict[str, asyncio.Future[GrantImage]] = {}
        self._server: BlobServer | None = None
        self._peer: ImagePeer | None = None

    async def ask(self, key: str, *, alone: bool) -> GrantImage:
        answer: asyncio.Future[GrantImage] = asyncio.get_running_loop().create_future()
        self._asked[key] = answer
        self._report(AskImage(key=key, alone=alone))
        try:
            return await answer
        finally:
            del self._asked[key]

    def hold(self, key: str, digest: str) -> None:
        self._report(HoldImage(key=key, digest=digest, peer=self._peer))

    def miss(self, key: str) -> None:
        self._report(MissImage(key=key))

    def on_granted(self, message: GrantImage) -> None:
        """Pass on the controller's answer; one that comes too late is given back."""
        answer = self._asked.get(message.key)
        if answer is not None and not answer.done():
            answer.set_result(message)
        elif message.origin:
            self._report(MissImage(key=message.key))

    def serve(self, cache: ImageCache) -> None:
        """Serve the images of the cache to other hosts. Raises ImageError."""
        if not self._address:
            return
        token = secrets.token_hex(TOKEN_BYTES)
        try:
            self._server = cache.serve(self._address, token)
        except OSError as error:
            raise ImageError(
                f"the address of host {self._host} must be one on which it can listen, got "
                f"{self._address}: {error.strerror or error}"
            ) from error
        self._server.__enter__()
        self._peer = ImagePeer(host=self._host, url=self._server.url, token=token)

    async def close(self) -> None:
        """Stop serving."""
        server, self._server, self._peer = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.__exit__)


class Images:
    """The images of one process (an `ImagePort`). The cache is opened when the first
    image is needed.
    """

    def __init__(
        self,
        config: SandboxConfig,
        *,
        clock: Callable[[], float],
        exchange: RemoteExchange | None = None,
        run_id: str = "",
    ) -> None:
        self._config, self._clock, self._exchange = config, clock, exchange
        self._run_id = run_id
        self._here = Path.cwd()
        self._supply: ImageSupply | None = None

    async def find(self, text: str) -> Lease | None:
        return await self._opened().find(text)

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        return await self._opened().take(text, backend)

    def waits(self) -> tuple[ImageWait, ...]:
        """Return the images that are being waited for."""
        return () if self._supply is None else self._supply.waits()

    async def close(self) -> None:
        """End all that is under way, and release all images."""
        if self._supply is not None:
            await self._supply.close()
        if self._exchange is not None:
            await self._exchange.close()

    def _opened(self) -> ImageSupply:
        """Return the supply. Raises ImageError if the cache cannot be opened."""
        if self._supply is None:
            folder, mirror = cache_folder(), self._config.mirror
            exchange: ImageExchange | None = self._exchange
            try:
                folder.mkdir(parents=True, exist_ok=True)
                limit_bytes = int(CACHE_SHARE * shutil.disk_usage(folder).total)
                cache = ImageCache(folder, limit_bytes=limit_bytes, mirror=mirror)
                if self._exchange is not None:
                    self._exchange.serve(cache)
            except OSError as error:
                raise ImageError(
                    f"XDG_CACHE_HOME must have a directory to write to, got {folder}: "
                    f"{error.strerror or error}"
                ) from error
            self._supply = ImageSupply(
                cache,
                mirror=mirror,
                exchange=exchange,
                clock=self._clock,
                here=self._here,
                run=self._run_id,
            )
        return self._supply


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
        images: Images | None = None,
    ) -> None:
        """`images` are those of this process; by default, of a run on this host
        alone. `deployed` is as in `rollout/rewards.py`.

        Raises ConfigError for a reward whose function or token is missing.
        """
        self._config, self._model_dir, self._source, self._clock = config, model_dir, source, clock
        self._images = images or Images(config.sandbox, clock=clock.now, run_id=run_id)
        self._sandboxes = Sandboxes(
            config.sandbox.backend, warm=config.sandbox.warm, images=self._images
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
        await self._images.close()

    def image_waits(self) -> tuple[ImageWait, ...]:
        """Return the images that attempts wait for."""
        return self._images.waits()

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
