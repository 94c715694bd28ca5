"""Agent programs of the field, each as its documentation writes it, against a gateway.

Each program asks for the sum of two numbers with a tool, complete and streamed. A
program whose package is not installed cannot be run; `Program.package` names it.
"""

import asyncio
import contextlib
import importlib.util
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic

from benchmarks.agents.features import TOOLS
from benchmarks.agents.scripted import Scripted

QUESTION: Final = "What is 2 + 3?"


class Sum(pydantic.BaseModel):
    """An answer of a given form."""

    sum: int


@dataclass
class Adder:
    """A tool that remembers what it was asked."""

    added: list[tuple[int, int]] = field(default_factory=list)

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.added.append((a, b))
        return a + b


Run = Callable[[Scripted, Adder, bool], Awaitable[str]]
Ask = Callable[[Scripted], Awaitable[Any]]


@dataclass(frozen=True)
class Program:
    """An agent program. `run` returns its last answer; `form` a `Sum` of an answer in
    that form; `two` asks for two answers at once. `rewrites` holds whether it resends
    its history in other words when it is complete (False) and when it is streamed
    (True).
    """

    name: str
    package: str
    run: Run
    form: Ask | None = None
    two: Ask | None = None
    rewrites: tuple[bool, ...] = ()
    says: tuple[str, ...] = ()
    """The agent's texts in place of a call and an answer in plain text."""

    @property
    def installed(self) -> bool:
        """True if its package can be imported."""
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec(self.package) is not None
        return False


def _root(gateway: Scripted) -> str:
    """Return the URL that Anthropic's clients take."""
    return gateway.base_url.removesuffix("/v1")


# OpenAI's and Anthropic's own clients.


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
    async with _openai(gateway) as client:
        history = [{"role": "user", "content": QUESTION}]
        answer = await client.chat.completions.parse(
            model="any", messages=history, response_format=Sum
        )
        return answer.choices[0].message.parsed


async def _openai_chat_two(gateway: Scripted) -> Any:
    history = [{"role": "user", "content": QUESTION}]
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
    async with AsyncAnthropic(base_url=_root(gateway), api_key=gateway.access.token) as client:
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
                    "content": str(tool.add(**use.input)),
                }
                for use in uses
            ]
            history.append({"role": "user", "content": results})


# OpenAI's agents SDK.


def _sdk(gateway: Scripted, api: str, **options: Any) -> Any:
    import agents

    agents.set_tracing_disabled(True)
    kind: Any = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }[api]
    model = kind(model="any", openai_client=_openai(gateway))
    return agents.Agent(name="adder", instructions="Add.", model=model, **options)


def _sdk_run(api: str) -> Run:
    async def run(gateway: Scripted, tool: Adder, streamed: bool) -> str:
        import agents

        agent = _sdk(gateway, api, tools=[agents.function_tool(tool.add)])
        if not streamed:
            return str((await agents.Runner.run(agent, QUESTION)).final_output)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return run


def _sdk_form(api: str) -> Ask:
    async def ask(gateway: Scripted) -> Any:
        import agents

        agent = _sdk(gateway, api, output_type=Sum)
        return (await agents.Runner.run(agent, QUESTION)).final_output

    return ask


# LangChain and LangGraph.


def _chat_openai(gateway: Scripted, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="any",
        base_url=gateway.base_url,
        api_key=gateway.access.token,
        max_retries=0,
        **options,
    )


async def _last_of(graph: Any, streamed: bool) -> str:
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    if not streamed:
        return str((await graph.ainvoke(asked))["messages"][-1].content)
    state: Any = None
    async for mode, part in graph.astream(asked, stream_mode=["messages", "values"]):
        state = part if mode == "values" else state
    return str(state["messages"][-1].content)


async def _langchain(gateway: Scripted, tool: Adder, streamed: bool) -> str:
    from langchain.agents import create_agent

    model = _chat_openai(gateway, streaming=streamed)
    return await _last_of(create_agent(model, tools=[tool.add]), streamed)


async def _langchain_form(gateway: Scripted) -> Any:
    model = _chat_openai(gateway).with_structured_output(Sum, method="json_schema")
    return await model.ainvoke(QUESTION)


async def _langchain_two(gateway: Scripted) -> Any:
    return await _chat_openai(gateway, n=2).ainvoke(QUESTION)


async def _langgraph(gateway: Scripted, tool: Adder, streamed: bool) -> str:
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = _chat_openai(gateway, streaming=streamed).bind_tools([tool.add])

    async def agent(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([tool.add]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return await _last_of(graph.compile(), streamed)


# Pydantic AI.


def _pydantic_model(gateway: Scripted, api: str) -> Any:
    if api == "messages":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=_root(gateway), api_key=gateway.access.token)
        return AnthropicModel("any", provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    kind: Any = openai.OpenAIChatModel if api == "chat" else openai.OpenAIResponsesModel
    return kind("any", provider=OpenAIProvider(openai_client=_openai(gateway)))


def _pydantic(api: str) -> Run:
    async def run(gateway: Scripted, tool: Adder, streamed: bool) -> str:
        from pydantic_ai import Agent

        agent: Any = Agent(_pydantic_model(gateway, api), tools=[tool.add])
        if not streamed:
            return str((await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as result:
            return str(await result.get_output())

    return run


def _pydantic_form(api: str) -> Ask:
    async def ask(gateway: Scripted) -> Any:
        from pydantic_ai import Agent, NativeOutput

        agent: Any = Agent(_pydantic_model(gateway, api), output_type=NativeOutput(Sum))
        return (await agent.run(QUESTION)).output

    return ask


# smolagents.


def _smolagents(kind: str) -> Run:
    async def run(gateway: Scripted, tool: Adder, streamed: bool) -> str:
        import smolagents

        model: Any = smolagents.OpenAIServerModel(
            model_id="any", api_base=gateway.base_url, api_key=gateway.access.token
        )

        def add(a: int, b: int) -> int:
            return tool.add(a, b)

        add.__doc__ = Adder.add.__doc__
        agent: Any = getattr(smolagents, kind)(
            tools=[smolagents.tool(add)],
            model=model,
            stream_outputs=streamed,
            verbosity_level=smolagents.LogLevel.OFF,
            max_steps=4,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it streams
            return str(await asyncio.to_thread(agent.run, QUESTION))

    return run


# LiteLLM.


def _litellm_options(gateway: Scripted, route: str) -> dict[str, Any]:
    url = gateway.base_url if route == "openai" else _root(gateway)
    return {"model": f"{route}/any", "api_base": url, "api_key": gateway.access.token}


def _litellm(route: str) -> Run:
    async def run(gateway: Scripted, tool: Adder, streamed: bool) -> str:
        import litellm

        history: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer: Any = await litellm.acompletion(
                messages=history,
                tools=TOOLS["chat"],
                stream=streamed,
                **_litellm_options(gateway, route),
            )
            if streamed:
                chunks = [chunk async for chunk in answer]
                answer = litellm.stream_chunk_builder(chunks, messages=history)
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return str(message.content)
            for call in message.tool_calls:
                result = str(tool.add(**json.loads(call.function.arguments)))
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return run


def _litellm_form(route: str) -> Ask:
    async def ask(gateway: Scripted) -> Any:
        import litellm

        answer: Any = await litellm.acompletion(
            messages=[{"role": "user", "content": QUESTION}],
            response_format=Sum,
            **_litellm_options(gateway, route),
        )
        return Sum.model_validate_json(answer.choices[0].message.content)

    return ask


CODE_SAYS: Final = (
    "I add.\n<code>\nprint(add(2, 3))\n</code>",
    '<code>\nfinal_answer("It is 5.")\n</code>',
)

SMOLAGENTS_SAYS: Final = (
    '{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    '{"name": "final_answer", "arguments": {"answer": "It is 5."}}\n</tool_call>',
)

PROGRAMS: Final[tuple[Program, ...]] = (
    Program(
        "openai (chat)",
        "openai",
        _openai_chat,
        _openai_chat_form,
        _openai_chat_two,
    ),
    Program(
        "openai (responses)",
        "openai",
        _openai_responses,
        _openai_responses_form,
    ),
    Program("anthropic", "anthropic", _anthropic),
    *(
        Program(f"openai-agents ({api})", "agents", _sdk_run(api), _sdk_form(api))
        for api in ("responses", "chat")
    ),
    Program(
        "langchain",
        "langchain_openai",
        _langchain,
        _langchain_form,
        _langchain_two,
    ),
    Program("langgraph", "langgraph", _langgraph),
    *(
        Program(
            f"pydantic-ai ({api})",
            "pydantic_ai",
            _pydantic(api),
            None if api == "messages" else _pydantic_form(api),  # it does not offer it
        )
        for api in ("chat", "responses", "messages")
    ),
    Program(
        "smolagents",
        "smolagents",
        _smolagents("ToolCallingAgent"),
        rewrites=(False, True),
        says=SMOLAGENTS_SAYS,
    ),
    Program("smolagents (code)", "smolagents", _smolagents("CodeAgent"), says=CODE_SAYS),
    Program("litellm (openai)", "litellm", _litellm("openai"), _litellm_form("openai")),
    Program(
        "litellm (anthropic)",
        "litellm",
        _litellm("anthropic"),
        rewrites=(True,),  # it fills the empty text before a streamed call
    ),
)
