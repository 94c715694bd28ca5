"""An instance of a reward function on a serverless platform: what Ray Serve starts when
there are requests, and ends when there are none.

Invariants: requests with the same key are computed once by one instance; a function
that fails answers with status 422 and the reason, never with a number.
"""

import asyncio
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from rollweave.envs.threads import EnvThreads
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.reward_sources import PAYLOAD_BYTES, FunctionReward, RewardCall
from rollweave.runtime.hosts.user_files import unpack
from rollweave.schema.config.sections import RewardConfig
from rollweave.schema.packing import as_json
from rollweave.schema.serverless import DeployedFunction

REMEMBERED = 10_000
"""Maximum number of answers that an instance remembers by their keys."""

UNPROCESSABLE = 422
"""Status of a request that would fail again: no client repeats it."""


class RewardApp:
    """Computes the rewards of one function, at most one at a time for each request that
    Ray Serve lets through.
    """

    def __init__(self, deployed: DeployedFunction, archive: bytes, digest: bytes) -> None:
        """Unpack the user's modules. Raises HostError."""
        folder = Path(tempfile.mkdtemp(prefix="rollweave-reward-"))
        unpack(archive, digest, folder)
        sys.path.insert(0, str(folder))
        config = RewardConfig(
            name=deployed.reward, function=deployed.function, timeout_s=deployed.timeout_s
        )
        self._function = FunctionReward(config, threads=EnvThreads())
        self._answers: OrderedDict[str, asyncio.Future[tuple[int, bytes]]] = OrderedDict()

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette."""
        from starlette.responses import Response

        status, body = await self.answer(await request.body())
        return Response(body, status_code=status, media_type="application/json")

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a `RewardCall` in JSON."""
        if len(body) > PAYLOAD_BYTES:
            return 413, b"too long"
        try:
            call = msgspec.json.decode(body, type=RewardCall)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        known = self._answers.get(call.key)
        if known is None:
            known = self._answers[call.key] = asyncio.ensure_future(self._compute(call))
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return await asyncio.shield(known)

    async def _compute(self, call: RewardCall) -> tuple[int, bytes]:
        try:
            return 200, as_json({"reward": await self._function.reward(call.finished)})
        except EpisodeStopError as error:
            return UNPROCESSABLE, str(error).encode()
