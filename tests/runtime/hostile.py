"""Agent programs that attack what all attempts of a run share, for whole runs."""

from typing import Any

from openai import AsyncOpenAI, BadRequestError

from rollweave.envs.base import Options, Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Agent, Job
from rollweave.schema.work import Task
from tests.runtime.mortal_engine import DEADLY

KINDS = ("plain", "deadly", "grammar")
"""What the programs of a task do, by its index."""

GRAMMARS = ("a?" * 40_000, "a?" * 16_000)
"""A pattern that is too long, and one that takes too long to compile."""


class Hostile:
    """A handler whose program begins with an attack, and goes on with plain turns."""

    def __init__(self) -> None:
        self._kind = ""
        self._refusals: list[str] = []

    async def init(self, job: Job) -> None:
        self._kind, self._good = payload_of(job.task)["kind"], bool(job.seed % 2)

    async def run(self, agent: Agent) -> None:
        endpoint = await agent.endpoint()
        async with AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.token, max_retries=0
        ) as client:
            messages: list[Any] = [{"role": "user", "content": f"This is {self._kind}."}]
            for pattern in GRAMMARS if self._kind == "grammar" else ():
                try:
                    await client.chat.completions.create(
                        model="any", messages=messages, extra_body={"guided_regex": pattern}
                    )
                except BadRequestError as error:
                    self._refusals.append(f"{error.param}: {error.message}")
            if self._kind == "deadly":
                messages[0]["content"] = DEADLY
            for _ in range(2):
                answer = await client.chat.completions.create(model="any", messages=messages)
                said = answer.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "?"},
                ]

    async def eval(self) -> Score:
        return Score(reward=float(self._good), success=True)

    def final_result(self) -> dict[str, Any]:
        return {"kind": self._kind, "refusals": self._refusals}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        return new_task(seed=index, kind=KINDS[index % len(KINDS)])
