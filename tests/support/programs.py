"""A scripted agent in the form that handlers receive, and scoring functions for
tests.
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollweave.envs.base import Score
from rollweave.envs.handlers.base import AgentHandler, Endpoint, Job, Tool
from rollweave.envs.handlers.program import Outcome, Program
from rollweave.envs.handlers.sandboxes import StartsSandboxes
from rollweave.rollout.gateway.server import Gateway
from rollweave.schema.base import TaskId
from rollweave.schema.chat import Message
from rollweave.schema.work import Task, Unreadable
from tests.support.scripted_gateway import Client, Script, gateway

HERE = __name__ + ":"


class Scripted:
    """Implements as much of `handlers.base.Agent` as programs need."""

    turns_left = 10

    def __init__(self, client: Client) -> None:
        self._client, self.unreadable = client, ""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        raise NotImplementedError

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        self.unreadable = unreadable
        return Endpoint(url=self._client.base_url, token=self._client.access.token)


@contextlib.asynccontextmanager
async def scripted(script: Script, **session: Any) -> AsyncIterator[tuple[Gateway, Scripted]]:
    async with gateway(script, session=session) as (gateway_, client):
        yield gateway_, Scripted(client)


def job(sandboxes: StartsSandboxes, **payload: Any) -> Job:
    return Job(
        task=Task(id=TaskId("t"), env="program", seed=1, payload=json.dumps(payload)),
        seed=1,
        sandboxes=sandboxes,
    )


async def lived(handler: AgentHandler, job: Job, agent: Any) -> Score:
    """Run a complete attempt."""
    await handler.init(job)
    try:
        await handler.run(agent)
    finally:
        assert isinstance(handler, Program)
        await handler.close()
    return await handler.eval()


def agent_program(source: str) -> list[str]:
    """Return a program with OpenAI's client: `say(text)` returns the agent's answer,
    `task` is its task.
    """
    return ["python", "-c", PRELUDE + source]


PRELUDE = """
import json, os, sys, openai
client, task = openai.OpenAI(max_retries=0), json.load(open("task.json"))
def say(text):
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content
"""

CLIENT = ["openai"]
"""The packages of `agent_program`."""

PYTHON = sys.executable


def by_answer(outcome: Outcome) -> float:
    """Score whether the program printed the answer, which it could not know."""
    return float(outcome.stdout.strip() == outcome.task["answer"])


async def by_files(outcome: Outcome) -> Score:
    return Score(
        reward=float(len(outcome.outputs)), success=outcome.outputs.get("made.txt") == "made\n"
    )


def broken(outcome: Outcome) -> float:
    raise KeyError("no such field")


NOT_CALLABLE = 3
