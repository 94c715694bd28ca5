"""The process of `isolation = "process"`: `python -m rollweave.envs.isolated`, started
by `envs/process.py`.

Its event loop runs between calls too, so an async environment may keep connections
alive. A separate thread detects the parent's end, even while an environment hangs.
"""

import asyncio
from typing import assert_never

from rollweave.envs.boundary import GuardedEnv, score_episode
from rollweave.envs.protocol import (
    Act,
    Close,
    Done,
    EnvCommand,
    EnvReply,
    EnvSpec,
    Evaluate,
    Failed,
    Observed,
    Open,
    Reset,
    Scored,
    Stepped,
)
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.config.run import Faults
from rollweave.schema.errors import EnvError, RewardError


class IsolatedEnv:
    """Answers commands about the environment of this process, of which there is at most
    one at a time.
    """

    def __init__(self) -> None:
        self._env: GuardedEnv | None = None

    async def answer(self, command: EnvCommand) -> EnvReply:
        try:
            return await self._answer(command)
        except (EnvError, RewardError) as error:
            return Failed(error=str(error))

    async def _answer(self, command: EnvCommand) -> EnvReply:
        match command:
            case Open(spec=spec):
                self._env = GuardedEnv(
                    spec.env,
                    spec.options,
                    faults=_faults(spec),
                    seed=spec.seed,
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
            case Evaluate(spec=spec, episode=episode):
                score = await score_episode(
                    spec.env,
                    spec.options,
                    episode,
                    faults=_faults(spec),
                    seed=spec.seed,
                )
                return Scored(score=score)
            case _:
                assert_never(command)

    def _opened(self) -> GuardedEnv:
        assert self._env is not None, "a command about an environment follows Open"
        return self._env


def _faults(spec: EnvSpec) -> Faults:
    return Faults.model_validate(spec.faults)


async def serve(parent: Parent) -> None:
    """Answer the parent's commands forever; the parent's end ends the process."""
    decode, frames, env = decoder_of(EnvCommand), parent.queue(), IsolatedEnv()
    while True:
        command = decode(await asyncio.to_thread(frames.get))
        parent.send(encode(await env.answer(command)))


if __name__ == "__main__":
    asyncio.run(serve(Parent.from_arguments()))
