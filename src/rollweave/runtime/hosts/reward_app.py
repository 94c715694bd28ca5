"""An instance of a reward function on a serverless platform: what Ray Serve starts when
there are requests, and ends when there are none.

Invariant: a function that fails answers with status 422 and the reason, never with a
number.
"""

from typing import Any

import msgspec

from rollweave.envs.threads import EnvThreads
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import FunctionReward, RewardCall
from rollweave.runtime.hosts.answers import Answer, Answers, UserModules
from rollweave.schema.config.rewards import RewardConfig
from rollweave.schema.packing import as_json
from rollweave.schema.rollouts import PAYLOAD_BYTES
from rollweave.schema.serverless import DeployedFunction

UNPROCESSABLE = 422
"""Status of a request that would fail again: no client repeats it."""


class RewardApp:
    """Computes the rewards of one function."""

    def __init__(self, deployed: DeployedFunction, archive: bytes, digest: bytes) -> None:
        """Unpack the user's modules. Raises HostError."""
        self._modules = UserModules(archive, digest)
        config = RewardConfig(
            name=deployed.name, function=deployed.function, timeout_s=deployed.timeout_s
        )
        self._function = FunctionReward(config, threads=EnvThreads())
        self._answers = Answers()

    def __del__(self) -> None:
        """Remove the modules. Ray Serve calls this before it ends an instance."""
        self._modules.remove()

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette."""
        from starlette.responses import Response

        status, body = await self.answer(await request.body())
        return Response(body, status_code=status, media_type="application/json")

    async def answer(self, body: bytes) -> Answer:
        """Return the answer to a `RewardCall` in JSON."""
        if len(body) > PAYLOAD_BYTES:
            return 413, b"too long"
        try:
            call = msgspec.json.decode(body, type=RewardCall)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return await self._answers.of(call.key, lambda: self._compute(call))

    async def _compute(self, call: RewardCall) -> Answer:
        try:
            return 200, as_json({"reward": await self._function.reward(call.finished)})
        except EpisodeStopError as error:
            return UNPROCESSABLE, str(error).encode()
