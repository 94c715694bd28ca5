"""What an agent handler is: it drives one attempt at a task, with whatever the agent
needs around it (ProRL Agent §3.1).

An `Env` (`envs/base.py`) answers words with words, and is the simpler thing to write. A
handler is the general form: it may hold a sandbox, give the agent tools, or run an
agent program of somebody else's. It is single use: made from the options of its
`[[tasks]]` entry, then `init`, `run`, `close` and `eval` are awaited, each once and in
this order.

Beyond `init`, `run` and `eval` everything is optional:

- `async close()`: free what `init` took, sandboxes above all; before `eval`. `kill()`:
  at once, without waiting. Both may find `init` half done.
- `async init_exception(error)`, `run_exception(error)`, `eval_exception(error)`: the
  stage raised. What the last two return as a `Score` is the attempt's reward: the
  failure was the agent's doing. None: it was not, and nothing is trained on.
- `final_result() -> dict`: what else is to be kept, as JSON: a patch, a test report.
  Asked for at the end, whatever that was.
- class methods `make_task`, `words`, `transcript`, `allowed_words`, as an `Env` has
  them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollweave.envs.base import Score
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import StopReason, Task


class LimitError(RollweaveError):
    """The agent may say nothing more: its turns or its context are used up.

    Let it pass out of `run`; what was said counts.
    """

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `init` is given.

    `seed` differs from attempt to attempt; `sandboxes` are the world's, and outlive the
    attempt.
    """

    task: Task
    seed: int
    sandboxes: Sandboxes


class Endpoint(Struct, frozen=True, kw_only=True):
    """Where a program finds the agent: `OPENAI_BASE_URL` and `OPENAI_API_KEY`.

    `sandbox/tunnel.py` brings it into a sandbox.
    """

    url: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Something that the agent may call.

    `parameters` is a JSON schema of an object; `call` gets what fits it.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[str]]


class Agent(Protocol):
    """The agent in one attempt.

    Whatever it says is sampled by the run's engines, and recorded token by token.
    """

    @property
    def turns_left(self) -> int:
        """How often it may speak yet."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        """Its next message, given all messages before it. Where it calls tools, that is
        in `tool_calls`.

        Messages that go on where an earlier call ended join its sequence. Calls at the
        same time wait for each other. Raises LimitError; ValueError where the chat
        template refuses the messages, or shows no tools; EngineError after `run`.
        """

    async def endpoint(self) -> Endpoint:
        """OpenAI's chat API for a program that speaks with the agent by itself, until
        `run` ends (`docs/GATEWAY.md`).
        """


class AgentHandler(Protocol):
    """Drives one attempt.

    What is raised ends it: a failure of the environment, unless it is `LimitError`.
    """

    async def init(self, job: Job) -> None:
        """Make ready: start the sandbox, write the files."""

    async def run(self, agent: Agent) -> None:
        """Let the agent work until it is done."""

    async def eval(self) -> Score:
        """The reward, after `close`: what is needed for it has been kept by `run`, or
        is started afresh.
        """
