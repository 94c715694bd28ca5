"""What a client of OpenAI's chat API may ask for, as JSON to nouns: strict, and every refusal names field, rule and value.

Invariant: a field that would change what is sampled is obeyed or refused, never ignored. Fields that change nothing here
(`user`, `metadata`, `store`…) and those that clients echo from replies are let pass.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollweave.schema.base import Noun
from rollweave.schema.chat import Message, Role, ToolCall
from rollweave.schema.errors import RollweaveError


class RequestError(RollweaveError):
    """What the client asks for cannot be had. The rest is OpenAI's error object and its HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Ask(Noun, frozen=True, kw_only=True):
    """A request in our words. None means that the client leaves it to us. `tools` are JSON, one declaration each.

    `call` is the tool that has to be called, "" for any; None where the agent is free. Its words are calls where `reads_calls`.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    call: str | None = None
    reads_calls: bool = False
    one_call: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Function(_Lenient):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class _Call(_Lenient):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Part(_Lenient):
    type: Literal["text"]
    text: str


class _Message(_Lenient):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: None = None
    audio: None = None


class _Declared(_Lenient):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    # May be put into the agent's mouth, so it must not be able to spell a special token.
    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")


class _Tool(_Lenient):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    type: Literal["function"]
    function: _Declared


class _Named(_Lenient):
    name: str = Field(min_length=1)


class _Choice(_Lenient):
    type: Literal["function"]
    function: _Named


class _StreamOptions(_Lenient):
    include_usage: bool = False


class _Format(_Lenient):
    type: Literal["text"]


StopText = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
MAX_STOPS = 16


class _Chat(_Lenient):
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # What would change the tokens and is not built.
    n: Literal[1] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: _Format | None = None
    functions: None = None
    function_call: None = None
    audio: None = None


def parse_chat(body: bytes) -> Ask:
    """A chat request's body. Raises RequestError (400)."""
    try:
        chat = _Chat.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    tools = tuple(json.dumps(tool.model_dump(exclude_unset=True), ensure_ascii=False) for tool in chat.tools or ())
    names = [tool.function.name for tool in chat.tools or ()]
    call = _forced(chat, names)
    if chat.top_logprobs and not chat.logprobs:
        raise _bad("logprobs", "must be true where top_logprobs is more than 0", chat.logprobs)
    if chat.top_logprobs and chat.temperature != 0:
        raise _bad("top_logprobs", "must be 0 unless temperature is 0: only the sampled token's is known", chat.top_logprobs)
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    return Ask(
        model=chat.model,
        messages=tuple(_message(message, place) for place, message in enumerate(chat.messages)),
        tools=tools,
        call=call,
        reads_calls=bool(tools) and chat.tool_choice != "none",
        one_call=chat.parallel_tool_calls is False,
        max_tokens=chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens,
        temperature=chat.temperature,
        top_p=chat.top_p,
        seed=chat.seed,
        stop=stop,
        logprobs=bool(chat.logprobs),
        top_logprobs=chat.top_logprobs or 0,
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and chat.stream_options.include_usage,
    )


def _forced(chat: _Chat, names: list[str]) -> str | None:
    """The tool that must be called, as `Ask.call` has it."""
    choice = chat.tool_choice
    if isinstance(choice, _Choice):
        if choice.function.name not in names:
            raise _bad("tool_choice.function.name", f"must be one of the tools {names}", choice.function.name)
        return choice.function.name
    if choice == "required" and not names:
        raise _bad("tools", "must hold a tool where tool_choice is 'required'", names)
    return "" if choice == "required" else None


def _message(message: _Message, place: int) -> Message:
    content = message.content
    role: Role = "system" if message.role == "developer" else message.role
    if content is None and role != "assistant":
        raise _bad(f"messages.{place}.content", "must be text", None)
    if message.tool_calls and role != "assistant":
        raise _bad(f"messages.{place}.tool_calls", "must be those of an assistant", role)
    if role == "tool" and message.tool_call_id is None:
        raise _bad(f"messages.{place}.tool_call_id", "must name the call that the tool answers", None)
    return Message(
        role=role,
        content=content if isinstance(content, str) else "".join(part.text for part in content or ()),
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _bad(param: str, rule: str, value: object) -> RequestError:
    return RequestError(400, f"{param} {rule}, got {value!r:.80}", param=param)


def _refusal(error: ValidationError) -> RequestError:
    """The first thing that is wrong. A union reports every branch; the deepest tells what was meant."""
    problem = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or part in _FIELDS]
    name = ".".join(path) or "body"
    value = "" if problem["type"] == "json_invalid" else f", got {problem['input']!r:.80}"
    return RequestError(400, f"{name}: {problem['msg']}{value}", param=name if path else None)


_MODELS = (_Chat, _Message, _Part, _Call, _Function, _Tool, _Declared, _Choice, _Named, _StreamOptions, _Format)
_FIELDS = {name for model in _MODELS for name in model.model_fields}
"""Names that stand in a request: pydantic's locations also hold those of a union's branches."""
