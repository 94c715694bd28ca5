"""An agent program that reads its turns as streams, for whole runs with engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from packages.sim.benchmarks.phases.reading_tasks import Reading
from rollweave.envs.base import Options, Score, Split
from rollweave.envs.handlers.base import Agent, Job
from rollweave.schema.work import Task

TURNS = 2


class Streaming:
    """A handler that reads `TURNS` turns, after a text of `words` words each. It writes
    what it has read to a file in the folder `log`, a line for each turn, and its result
    has the whole texts.
    """

    def __init__(self, *, words: int, log: str) -> None:
        self._reading, self._log = Reading(words=words), Path(log)
        self._read: list[str] = []

    async def init(self, job: Job) -> None:
        self._first = self._reading.reset(job.task)
        self._path = self._log / f"{job.task.seed}-{job.seed}"

    async def run(self, agent: Agent) -> None:
        endpoint, text = await agent.endpoint(), self._first.messages[0].content
        messages: list[Any] = []
        async with AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.token, max_retries=0
        ) as client:
            for _ in range(TURNS):
                messages.append({"role": "user", "content": text})
                self._read.append("")
                chunks = await client.chat.completions.create(
                    model="any", messages=messages, stream=True
                )
                async for chunk in chunks:
                    if chunk.choices:
                        self._read[-1] += chunk.choices[0].delta.content or ""
                        self._path.write_text("\n".join(self._read))
                self._path.write_text("\n".join([*self._read, ""]))
                messages.append({"role": "assistant", "content": self._read[-1]})
                text = (await self._reading.step("")).messages[0].content

    async def eval(self) -> Score:
        return Score(reward=1.0, success=True)

    def final_result(self) -> dict[str, Any]:
        return {"read": self._read}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        return Reading.make_task(index=index, seed=seed, split=split, options=options)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return Reading.words(options)

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return Reading.allowed_words(options)
