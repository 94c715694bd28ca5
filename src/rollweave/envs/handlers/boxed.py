"""What handlers with a sandbox share: the sandbox is freed before the reward, and the
agent is to blame if it is spoiled.
"""

from rollweave.envs.base import Score
from rollweave.sandbox.base import Sandbox
from rollweave.schema.errors import SandboxSpoiledError


class Boxed:
    """To be derived from. Whoever starts `_sandbox` leaves its end to this."""

    _sandbox: Sandbox | None = None

    async def close(self) -> None:
        """Free the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.stop(grace_s=0.0)

    def kill(self) -> None:
        """Free it at once."""
        if self._sandbox is not None:
            self._sandbox.kill()

    async def run_exception(self, error: BaseException) -> Score | None:
        """Return reward 0 if the agent's code spoiled the sandbox, else None: other
        failures say nothing about the agent.
        """
        return Score(reward=0.0, success=False) if isinstance(error, SandboxSpoiledError) else None

    async def eval_exception(self, error: BaseException) -> Score | None:
        """Judge as for `run`, because code that the agent left runs here, too."""
        return await self.run_exception(error)
