"""OpenAI's and Anthropic's own clients, as their documentation writes programs with
them, against a gateway.

Each program asks for the sum of two numbers with a tool, complete and streamed. It
works if the tool was called, the program has the answer, and the recording is
token-exact, in one sequence.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic

from benchmarks.agents.feature_requests import TOOLS
from benchmarks.agents.features import Cell, Outcome
from benchmarks.agents.scripted import CALL, CALLS, Scripted, scripted
from rollweave.schema.work import SequenceCause

QUESTION: Final = "What is 2 + 3?"
ANSWER: Final = "It is 5."
LONGEST: Final = 300
"""Maximum number of characters of an error that is shown."""


class Sum(pydantic.BaseModel):
    """An answer of a given form."""

    sum: int


@dataclass
class Adder:
    """A tool that remembers what it was asked."""

    added: list[tuple[int, int]] = field(default_factory=list)

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.added.append((a, b))
        return a + b


Run = Callable[[Scripted, Adder, bool], Awaitable[str]]
Ask = Callable[[Scripted], Awaitable[Any]]


@dataclass(frozen=True)
class Program:
    """A program. `run` returns its last answer; `form` a `Sum` of an answer in that
    form; `two` asks for two answers at once.
    """

    name: str
    run: Run
    form: Ask | None = None
    two: Ask | None = None


def _openai(gateway: Scripted) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.access.token, max_retries=0)


async def _openai_chat(gateway: Scripted, tool: Adder, streamed: bool) -> str:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    async with _openai(gateway) as client:
        while True:
            asked = {"model": "any", "messages": history, "tools": TOOLS["chat"]}
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return str(message.content)
            for call in message.tool_calls:
                result = tool.add(**json.loads(call.function.arguments))
                history.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def _openai_chat_form(gateway: Scripted) -> Any:
    history: Any = [{"role": "user", "content": QUESTION}]
    async with _openai(gateway) as client:
        answer = await client.chat.completions.parse(
            model="any", messages=history, response_format=Sum
        )
        return answer.choices[0].message.parsed


async def _openai_chat_two(gateway: Scripted) -> Any:
    history: Any = [{"role": "user", "content": QUESTION}]
    async with _openai(gateway) as client:
        return await client.chat.completions.create(model="any", messages=history, n=2)


async def _openai_responses(gateway: Scripted, tool: Adder, streamed: bool) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with _openai(gateway) as client:
        while True:
            asked = {"model": "any", "input": items, "tools": TOOLS["responses"]}
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    response = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            for call in calls:
                result = str(tool.add(**json.loads(call.arguments)))
                output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
                items.append(output)


async def _openai_responses_form(gateway: Scripted) -> Any:
    async with _openai(gateway) as client:
        answer = await client.responses.parse(model="any", input=QUESTION, text_format=Sum)
        return answer.output_parsed


async def _anthropic(gateway: Scripted, tool: Adder, streamed: bool) -> str:
    from anthropic import AsyncAnthropic

    history: list[Any] = [{"role": "user", "content": QUESTION}]
    url = gateway.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=gateway.access.token) as client:
        messages: Any = client.messages
        while True:
            asked = {"model": "any", "max_tokens": 400, "messages": history}
            asked["tools"] = TOOLS["messages"]
            if streamed:
                async with messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await messages.create(**asked)
            history.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return str(message.content[0].text)
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": f"{tool.add(**use.input)}",
                }
                for use in uses
            ]
            history.append({"role": "user", "content": results})


PROGRAMS: Final = (
    Program("openai (chat)", _openai_chat, _openai_chat_form, _openai_chat_two),
    Program("openai (responses)", _openai_responses, _openai_responses_form),
    Program("anthropic", _anthropic),
)


async def try_program(program: Program) -> dict[str, Cell]:
    """Return what came of each feature that the program has."""
    cells = {
        "tools": await _episode(program, streamed=False),
        "tools, streamed": await _episode(program, streamed=True),
        "parallel calls": await _episode(program, streamed=False, says=CALLS),
    }
    if program.form is not None:
        async with scripted('{"sum": 5}') as gateway:
            cells["JSON schema"] = await _asked(
                program.form(gateway), lambda answer: _is_constrained(gateway, answer)
            )
    if program.two is not None:
        async with scripted(ANSWER) as gateway:
            cells["n of 2"] = await _asked(program.two(gateway), lambda _: False)
    return cells


async def _episode(program: Program, *, streamed: bool, says: str = CALL) -> Cell:
    """Let the program add with its tool."""
    tool = Adder()
    async with scripted(says, ANSWER) as gateway:
        try:
            answer = await program.run(gateway, tool, streamed)
        except Exception as error:
            return _refusal(error)
        wrong = _wrong(gateway)
    if answer != ANSWER:
        wrong = f"the program has the answer {answer!r:.80}"
    if sorted(tool.added) != ([(2, 3), (4, 3)] if says == CALLS else [(2, 3)]):
        wrong = f"the tool was called with {tool.added}"
    return Cell(outcome=Outcome.FAILED if wrong else Outcome.WORKS, detail=wrong)


def _wrong(gateway: Scripted) -> str:
    """Return what is wrong with the recording, or ""."""
    sequences, prompts = gateway.sequences(), gateway.script.prompts
    starts = [sequence.tokens[: turn.start] for sequence in sequences for turn in sequence.turns]
    if sorted(starts) != sorted(prompts):
        return f"{len(prompts)} turns do not follow their prompts in {sequences}"
    causes = [sequence.origin.cause for sequence in sequences if sequence.origin is not None]
    return "" if causes == [SequenceCause.FIRST] else f"its sequences are {causes}"


def _is_constrained(gateway: Scripted, answer: Any) -> bool:
    constraint = gateway.script.samplings[-1].constraint
    return isinstance(answer, Sum) and answer.sum == 5 and constraint is not None


async def _asked(asking: Awaitable[Any], honored: Callable[[Any], bool]) -> Cell:
    try:
        answer = await asking
    except Exception as error:
        return _refusal(error)
    return Cell(outcome=Outcome.WORKS if honored(answer) else Outcome.IGNORED)


def _refusal(error: BaseException) -> Cell:
    """Return the cell of a program that raised: it was refused if the error has the
    form of a refusal.
    """
    text = f"{type(error).__name__}: {error}"
    named = ", got " in text or "must be" in text
    return Cell(outcome=Outcome.REFUSED if named else Outcome.FAILED, detail=text[:LONGEST])
