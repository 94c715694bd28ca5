"""The process of `isolation = "process"`: `python -m rollweave.envs.worker`, started by
`envs/process.py`.

Its event loop runs between calls too, so an async environment may keep connections
alive. The parent's end is noticed on a thread of its own, also while an environment
hangs.
"""

import asyncio
from typing import assert_never

from rollweave.envs.boundary import GuardedEnv, scored
from rollweave.envs.words import (
    Act,
    Close,
    Done,
    Evaluate,
    Failed,
    Observed,
    Open,
    Reset,
    Scored,
    Setting,
    Stepped,
    WorkerCommand,
    WorkerReply,
)
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.config.sections import FaultsConfig
from rollweave.schema.errors import EnvError, RewardError


class Worker:
    """Answers commands. Holds at most one environment."""

    def __init__(self) -> None:
        self._env: GuardedEnv | None = None

    async def answer(self, command: WorkerCommand) -> WorkerReply:
        try:
            return await self._answer(command)
        except (EnvError, RewardError) as error:
            return Failed(error=str(error))

    async def _answer(self, command: WorkerCommand) -> WorkerReply:
        match command:
            case Open(setting=setting):
                self._env = GuardedEnv(
                    setting.env,
                    setting.options,
                    faults=_faults(setting),
                    seed=setting.seed,
                    block=True,
                )
                return Done()
            case Reset(task=task):
                return Observed(observation=await self._opened().reset(task))
            case Act(action=action, finish_reason=finish_reason):
                return Stepped(step=await self._opened().step(action, finish_reason=finish_reason))
            case Close():
                env, self._env = self._env, None
                if env is not None:
                    await env.close()
                return Done()
            case Evaluate(setting=setting, episode=episode):
                score = await scored(
                    setting.env,
                    setting.options,
                    episode,
                    faults=_faults(setting),
                    seed=setting.seed,
                )
                return Scored(score=score)
            case _:
                assert_never(command)

    def _opened(self) -> GuardedEnv:
        assert self._env is not None, "a command about an environment follows Open"
        return self._env


def _faults(setting: Setting) -> FaultsConfig:
    return FaultsConfig.model_validate(setting.faults)


async def serve(parent: Parent) -> None:
    """Answer the parent's commands for ever; its end ends the process."""
    decode, frames, worker = decoder_of(WorkerCommand), parent.queue(), Worker()
    while True:
        command = decode(await asyncio.to_thread(frames.get))
        parent.send(encode(await worker.answer(command)))


if __name__ == "__main__":
    asyncio.run(serve(Parent.from_arguments()))
