"""The parent's side of the process of Ray's driver (`driver_process`)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollweave.io.child import spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts.launchers import end
from rollweave_ray.messages import (
    AgentEnded,
    AgentPending,
    AgentReport,
    DriverAnswer,
    DriverCommand,
    DriverFailed,
    DriverReport,
    StopDriver,
)

_decode = decoder_of(DriverReport)


class RayDriver:
    """The process of Ray's driver. This process itself does not connect to Ray, which
    would end it with its node.

    The first report is the `answer`, or `DriverFailed` if the process is lost before;
    `on_report` receives further ones, and `on_lost` why a driver that has answered is
    lost.
    """

    def __init__(
        self,
        *,
        name: str,
        log: Path,
        command: DriverCommand,
        on_report: Callable[[AgentReport], None] = lambda _: None,
        on_lost: Callable[[str], None],
    ) -> None:
        """Start the process, and send it its first command."""
        self._answer: asyncio.Future[DriverAnswer] = asyncio.get_running_loop().create_future()
        self._on_report, self._on_lost = on_report, on_lost
        self._closing = False
        self._process = spawn(
            name=name,
            module="rollweave_ray.driver_process",
            log=log,
            env={},
            on_frame=self._on_frame,
            on_gone=self._on_gone,
        )
        self.send(command)

    async def answer(self, within_s: float) -> DriverAnswer:
        """Return the answer to the first command, or a failure after `within_s`
        seconds.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self._answer
        except TimeoutError:
            return DriverFailed(error=f"no answer in {within_s:g} s")

    def send(self, command: DriverCommand) -> None:
        """Send a further command."""
        self._process.send(encode(command))

    async def close(self, within_s: float) -> None:
        """Ask the process to end, and kill it if it does not."""
        self._closing = True
        self.send(StopDriver())
        await end([self._process], within_s)

    def _on_frame(self, payload: bytes) -> None:
        match _decode(payload):
            case AgentPending() | AgentEnded() as report:
                self._on_report(report)
            case answer if not self._answer.done():
                self._answer.set_result(answer)

    def _on_gone(self, reason: str) -> None:
        if not self._answer.done():
            self._answer.set_result(DriverFailed(error=reason))
        elif not self._closing:
            self._on_lost(reason)
