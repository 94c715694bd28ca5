"""Makes the driver of one attempt: its domain's environment or handler, the way its
agent speaks, the run's seed.

Invariant: what attempts share, sandboxes and the door for agent programs, begins when
one needs it, and ends with `close`.
"""

import dataclasses
import functools
from pathlib import Path

import msgspec

from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.envs.registry import is_handler, resolve
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.driver import Driver, Speech
from rollweave.rollout.episode import Episode
from rollweave.rollout.gateway.door import Door
from rollweave.rollout.handled import Handled
from rollweave.runtime.clock import RunClock
from rollweave.schema.commands import StartInit
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import Sampling
from rollweave.schema.work import Decoding, Purpose


class Episodes:
    def __init__(
        self, config: RunConfig, model_dir: Path, source: TaskSource, clock: RunClock
    ) -> None:
        self._config, self._model_dir, self._source, self._clock = config, model_dir, source, clock
        self._sandboxes = Sandboxes(config.sandbox.backend, warm=config.sandbox.warm)
        self._tasks = {task.name: task for task in config.tasks}

    def make(self, command: StartInit) -> Driver:
        name = command.task.tag
        speech = _as_asked(self._speech(name, command.purpose), command.decoding)
        seed = self._config.run.seed if command.decoding.seed is None else command.decoding.seed
        task = self._tasks[name]
        if not is_handler(task.env):
            return Episode(
                command,
                worlds=self._source.worlds(name),
                speech=speech,
                seed=seed,
                clock=self._clock.now,
            )
        return Handled(
            command,
            make=lambda: resolve(task.env)(**task.options),
            speech=speech,
            seed=seed,
            clock=self._clock.now,
            sandboxes=self._sandboxes,
            door=self._door,
        )

    async def close(self) -> None:
        """End what attempts shared, the environments' processes too; after the last of
        them.
        """
        await self._source.close()
        if "_door" in self.__dict__:
            await self._door.close()
        await self._sandboxes.close()

    @functools.cached_property
    def _codec(self) -> ChatCodec:
        return ChatCodec.from_directory(self._model_dir)

    @functools.cached_property
    def _door(self) -> Door:
        return Door(self._codec, model=self._config.run.name)

    @functools.cache  # noqa: B019 (one object a run)
    def _speech(self, name: str, purpose: Purpose) -> Speech:
        rollout, codec = self._config.rollout, self._codec
        words = self._source.allowed_words(name)
        training = purpose is not Purpose.EVAL
        sampling = Sampling(
            temperature=rollout.temperature if training else self._config.eval.temperature,
            top_p=rollout.top_p if training else 1.0,
            top_k=rollout.top_k if training else 0,
            stop_token_ids=codec.stop_token_ids,
            stop=codec.stop,
            allowed=(*codec.words(words), *codec.stop_token_ids) if words else (),
        )
        return Speech(codec=codec, sampling=sampling)


def _as_asked(speech: Speech, decoding: Decoding) -> Speech:
    """With what was asked for in the place of the service's own."""
    asked = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(decoding, name)) is not None
    }
    return (
        dataclasses.replace(speech, sampling=msgspec.structs.replace(speech.sampling, **asked))
        if asked
        else speech
    )
