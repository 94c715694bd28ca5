"""A handler with a sandbox, for whole runs without a model: the agent replies, a
command runs, the agent replies.
"""

import asyncio
import contextlib
from typing import Any

from rollweave.envs.base import Score
from rollweave.envs.handlers.base import Agent, Job
from rollweave.sandbox.base import Sandbox, SandboxSpec
from rollweave.sandbox.tools import Bash
from rollweave.schema.chat import Message


class Boxed:
    """A handler whose `fault` happens between the two turns."""

    def __init__(self, *, fault: str = "") -> None:
        self._fault = fault
        self._box: Sandbox | None = None
        self._observed: dict[str, Any] = {}

    async def init(self, job: Job) -> None:
        if self._fault == "init":
            raise LookupError("broken on purpose")
        self._box = await job.sandboxes.start(SandboxSpec())

    async def run(self, agent: Agent) -> None:
        assert self._box is not None
        messages = [Message(role="user", content="go")]
        messages.append(await agent.chat(messages))
        match self._fault:
            case "run":
                raise LookupError("broken on purpose")
            case "lost":
                self._box.kill()
            case "flood":
                result = await Bash(self._box).run("yes | head -c 50000000", output_bytes=500)
                assert result.dropped_bytes > 49_000_000
                self._observed = {"shown": len(result.output)}
                messages.append(Message(role="user", content=str(len(result.output))))
                await agent.chat(messages)
                return
            case "hang":
                await Bash(self._box).run("sleep 1000", timeout_s=1000)
        result = await Bash(self._box).run("echo here; hostname")
        self._observed = {"git_patch": result.output}
        messages.append(Message(role="user", content=result.output.split()[0]))
        await agent.chat(messages)

    async def close(self) -> None:
        if self._box is not None:
            await self._box.stop()

    def kill(self) -> None:
        if self._box is not None:
            self._box.kill()

    async def eval(self) -> Score:
        assert self._box is None or self._box.ended, "the sandbox is freed before the reward"
        if self._fault == "eval":
            raise LookupError("broken on purpose")
        return Score(reward=1.0, success=True)

    def final_result(self) -> dict[str, Any]:
        return self._observed


class Impatient:
    """A handler that cancels its first call, at once or in the middle; needs no
    sandbox.
    """

    async def init(self, job: Job) -> None:
        self._wait_s = (job.seed % 4) * 0.002

    async def run(self, agent: Agent) -> None:
        go = Message(role="user", content="go")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await agent.chat([go])
        first = await agent.chat([go])
        await asyncio.gather(agent.chat([go, first, go]), agent.chat([first, go]))

    async def eval(self) -> Score:
        return Score(reward=self._wait_s)


class Imaged:
    """A handler whose sandbox has the image `image`, and whose result is its
    /etc/word.
    """

    def __init__(self, *, image: str) -> None:
        self._spec = SandboxSpec(image=image)
        self._word = ""

    async def init(self, job: Job) -> None:
        box = await job.sandboxes.start(self._spec)
        try:
            self._word = (await box.read("/etc/word")).decode()
        finally:
            await box.stop(grace_s=0.0)

    async def run(self, agent: Agent) -> None:
        await agent.chat([Message(role="user", content="go")])

    async def eval(self) -> Score:
        return Score(reward=1.0, success=True)

    def final_result(self) -> dict[str, Any]:
        return {"word": self._word}
