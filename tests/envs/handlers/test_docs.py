"""The handler in the documentation works as described."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollweave.envs.base import Split, payload_of
from rollweave.envs.handlers.base import Endpoint, Job, Tool
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.schema.chat import Message, ToolCall
from tests.support.sandboxes import needs

PAGE = Path(__file__).parents[3] / "docs" / "HANDLERS.md"


class Adder:
    """An agent that adds with bash."""

    turns_left = 9

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        if messages[-1].role == "tool":
            return Message(role="assistant", content=messages[-1].content)
        numbers = re.findall(r"\d+", messages[0].content)
        command = f'{{"command": "echo $(({"+".join(numbers)}))"}}'
        return Message(
            role="assistant", content="", tool_calls=(ToolCall(name="bash", arguments=command),)
        )

    async def endpoint(self) -> Endpoint:
        raise NotImplementedError


async def test_the_documented_handler_works() -> None:
    needs("zygote")
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"__name__": "my_agent"}
    exec(block[1], names)
    task = names["Sums"].make_task(index=1, seed=2, split=Split.TRAIN, options={})
    sandboxes, handler = Sandboxes("zygote"), names["Sums"]()
    try:
        await handler.init(Job(task=task, seed=3, sandboxes=sandboxes))
        await handler.run(Adder())
        await handler.close()
        assert (await handler.eval()).success
        assert handler.final_result()["answer"].strip() == str(sum(payload_of(task)["numbers"]))
    finally:
        await sandboxes.close()
