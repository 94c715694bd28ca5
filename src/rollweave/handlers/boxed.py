"""What handlers with a sandbox share: it is freed before the reward, and to go beyond its limits is the agent's doing."""

from rollweave.envs.base import Score
from rollweave.sandbox.base import Sandbox
from rollweave.schema.errors import SandboxLostError

OWN_DOING = ("limits.memory_bytes", "limits.processes", "limits.cpu_s")
"""Why a sandbox ends by what the code in it did. Wall time is none: a turn may have waited for an engine."""


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
        """No reward where the agent's code drove the sandbox beyond a limit; any other failure says nothing about it."""
        lost = isinstance(error, SandboxLostError) and any(limit in str(error) for limit in OWN_DOING)
        return Score(reward=0.0, success=False) if lost else None
