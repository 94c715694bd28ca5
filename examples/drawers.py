"""An agent that learns which command to type: a number lies in one of four drawers, and
bash runs what the agent says.

Small enough to be learned from random weights in minutes, and real: a shell in a new
sandbox for every attempt.
"""

import random
from collections.abc import Sequence

from rollweave import (
    Agent,
    Bash,
    Job,
    Message,
    Options,
    SandboxSpec,
    Score,
    Split,
    Task,
    mix,
    new_task,
    payload_of,
)

DRAWERS = ("red", "green", "blue", "gray")
COMMANDS = ("cat", "ls", "rm", "echo")


class Drawers:
    async def init(self, job: Job) -> None:
        task = payload_of(job.task)
        self._drawer, self._number = task["drawer"], task["number"]
        self._box = await job.sandboxes.start(SandboxSpec())
        await self._box.write(self._drawer, self._number.encode())

    async def run(self, agent: Agent) -> None:
        request = Message(role="user", content=f"read {self._drawer}")
        reply = await agent.chat([request])
        self._result = await Bash(self._box).run(reply.content)

    async def close(self) -> None:
        await self._box.stop(grace_s=0.0)

    def kill(self) -> None:
        self._box.kill()

    async def eval(self) -> Score:
        right = self._result.output.strip() == self._number
        return Score(reward=float(right), success=right)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        rng = random.Random(mix(seed, split, index))
        return new_task(drawer=rng.choice(DRAWERS), number=str(rng.randrange(10**6)))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return ("read", *COMMANDS, *DRAWERS)

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Show any command on any drawer: the format, not the answer."""
        return (
            Message(role="user", content=f"read {rng.choice(DRAWERS)}"),
            Message(role="assistant", content=f"{rng.choice(COMMANDS)} {rng.choice(DRAWERS)}"),
        )
