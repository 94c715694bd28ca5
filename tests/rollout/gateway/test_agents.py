"""A third-party agent program, unchanged: OpenAI's agents SDK with a tool, with a
scripted agent, then with a model trained on it; by the Responses API, which the SDK
uses by default, and by the chat API. Requires the extra `agents` (`pip
install -e .[test,agents]`); run with `pytest -m slow
tests/rollout/gateway/test_agents.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.work import TokenSequence
from tests.support.real_gateway import Turns, checkpoint, engine, logprob_error, served, teach
from tests.support.scripted_gateway import CALL, Script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUESTION = "What is 2 + 3?"


async def run(
    generate: Any, directory: Path, *, api: str, streamed: bool = False
) -> tuple[str, list[tuple[int, int]], TokenSequence]:
    """Return the agent's last message, the calls of its tool, and the recording."""
    agents = pytest.importorskip("agents", reason="needs the extra `agents`")
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api(api)
    added: list[tuple[int, int]] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        added.append((a, b))
        return a + b

    async with (
        served(generate, directory, "s") as (server, url, access),
        AsyncOpenAI(base_url=url + access["s"].path, api_key=access["s"].token) as openai,
    ):
        agents.set_default_openai_client(openai, use_for_tracing=False)
        agent = agents.Agent(
            name="adder",
            instructions="Add with the tool.",
            tools=[add],
            model="tiny",
            model_settings=agents.ModelSettings(temperature=0.0),
        )
        if streamed:
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, QUESTION)
        (sequence,) = server.close("s").sequences
    return result.final_output, added, sequence


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_the_agents_sdk_runs_unchanged_and_a_model_learns_from_the_recording(
    tmp_path: Path, api: str
) -> None:
    directory = checkpoint(tmp_path)
    script = Script([CALL, "It is 5."], codec=ChatCodec.from_directory(directory))
    answer, added, messages = await run(script, directory, api=api)
    assert (answer, added, len(messages.turns)) == ("It is 5.", [(2, 3)], 2)
    assert teach(directory, [messages]) < 0.01
    async with engine(directory) as tiny:
        for streamed in (False, True):
            answer, added, lived = await run(Turns(tiny), directory, api=api, streamed=streamed)
            assert (answer, added) == ("It is 5.", [(2, 3)])
            # Token for token what it was shown: prompts, the call, the tool's answer,
            # the last word.
            assert lived.tokens == messages.tokens
            assert lived.segments == messages.segments
            assert logprob_error(directory, lived) < 1e-3
