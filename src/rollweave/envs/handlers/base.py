"""The interface of an agent handler, which drives one attempt at a task, with
everything that the agent needs around it (ProRL Agent §3.1).

An `Env` (`envs/base.py`) answers messages with messages, and is simpler to write. A
handler is the general form: it may hold a sandbox, give the agent tools, or run an
existing agent program. It is single use: constructed from the options of its
`[[tasks]]` entry; then `init`, `run`, `close` and `eval` are awaited, each once and in
this order.

Beyond `init`, `run` and `eval` everything is optional:

- `async close()`: releases what `init` acquired, above all sandboxes, before `eval`.
  `kill()`: releases the same immediately, without waiting. Both may be called after an
  incomplete `init`.
- `async init_exception(error)`, `run_exception(error)`, `eval_exception(error)`: called
  when the stage raised. If the agent caused the failure, the last two return a `Score`,
  which is the attempt's reward. None means that the agent did not cause the failure,
  and nothing is trained on.
- `final_result() -> dict`: further output to store, as JSON: a patch, a test report. It
  is called at the end, whatever the outcome.
- class methods `make_task`, `words`, `transcript`, `allowed_words`, as for an `Env`;
  `images(options) -> Iterable[str]`: the images of the handler's sandboxes, as far as
  they are known before the run, so that they are checked and their files reach every
  host. By default, the option `image` is the only image.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollweave.envs.base import Score
from rollweave.envs.handlers.sandboxes import StartsSandboxes
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import StopReason, Task, Unreadable


class LimitError(RollweaveError):
    """The agent has used up its turns or its context.

    Let it propagate out of `run`; the turns so far count.
    """

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Endpoint(Struct, frozen=True, kw_only=True):
    """The address of the agent for a program: `OPENAI_BASE_URL` and `OPENAI_API_KEY`.

    `Sandbox.tunnel` makes it reachable in a sandbox.
    """

    url: str
    token: str


async def no_endpoint() -> Endpoint:
    """Return the address of an attempt without an agent, at which nothing listens."""
    return Endpoint(url="http://127.0.0.1:1/v1", token="none")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The argument of `init`.

    `seed` differs between attempts; `sandboxes` starts sandboxes, also in `eval`;
    `endpoint` returns the address that `Agent.endpoint` will have, for programs that
    are configured before `run` and speak to the agent in it.
    """

    task: Task
    seed: int
    sandboxes: StartsSandboxes
    endpoint: Callable[[], Awaitable[Endpoint]] = no_endpoint


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the agent may call.

    `parameters` is a JSON schema of an object; `call` receives arguments that match it,
    and returns text.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[str]]


class Agent(Protocol):
    """The agent in one attempt.

    The run's engines sample all its messages, which are recorded token by token.
    """

    @property
    def turns_left(self) -> int:
        """Number of turns that the agent may still take."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        """Return the agent's next message, given all messages before it. Its tool calls
        are in `tool_calls`.

        Messages that continue an earlier call join its sequence. Concurrent calls wait
        for each other. Raises LimitError; ValueError if the chat template refuses the
        messages, or shows no tools; EngineError after `run`.
        """

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        """Return OpenAI's chat API for a program that converses with the agent itself,
        until `run` ends (`docs/GATEWAY.md`). Fields of its requests that neither the
        model nor its chat template can read are ignored and recorded, or refused if
        `unreadable` is "refuse".
        """


class AgentHandler(Protocol):
    """Drives one attempt.

    Any exception except `LimitError` ends the attempt as a failure of the environment.
    """

    async def init(self, job: Job) -> None:
        """Prepare the task: start the sandbox, write the files."""

    async def run(self, agent: Agent) -> None:
        """Let the agent work until it is done."""

    async def eval(self) -> Score:
        """Return the reward. `eval` is called after `close`, so it works with what
        `run` has stored, or starts another sandbox.
        """
