"""One attempt driven by an `AgentHandler`: the counterpart of `env_episode.py` for an
`Env`.

Invariants: the handler's code has the limits of an environment: `init`, `eval`, and
each interval between two turns of `run` take at most `step_s`, and all together at most
the active time of the attempt; each stage is a separate task, so one that does not end
when it is cancelled blocks nothing; turns are sequential even if an agent program
requests several at once; every token comes from the session's recorder, whether the
handler or a program at the endpoint requested it.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.base import Score
from rollweave.envs.boundary import USER_EXCEPTIONS, checked_score
from rollweave.envs.handlers.base import AgentHandler, Endpoint, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import AttemptSandboxes, Sandboxes
from rollweave.envs.threads import describe_error, running_task, type_name
from rollweave.rollout.chat.codec import AgentConfig
from rollweave.rollout.driver import Budget, EpisodeStopError, TurnPort, record_of, report_delays
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.server import GatewayListener
from rollweave.rollout.gateway.sessions import Session, SessionLimits, Turn, new_token
from rollweave.schema.base import DEPTH, is_deep, mix
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.errors import EngineError, Interrupted, RollweaveError
from rollweave.schema.serving import FinishReason, GenerateResult, Sampling
from rollweave.schema.text import valid, valid_tree
from rollweave.schema.work import (
    TRAINABLE,
    Ignored,
    StopReason,
    TokenSequence,
    Trajectory,
    Unreadable,
)

T = TypeVar("T")

CANCEL_S = 2.0
"""Seconds that a stage has to end after its cancellation, before it is abandoned; also
the limit of an error hook.
"""

RESULT_BYTES = 1 << 20
"""Maximum size of `final_result` as JSON; larger output belongs in a file."""

UNLIMITED_S = 1e9
"""Time limit of a session's turn: none, since the pipeline bounds turns without
counting their queueing.
"""


class HandlerEpisode:
    """The `Driver` of an attempt with a handler.

    `make` creates the handler; `agent` and `sandboxes` belong to its domain, `seed` to
    the run, and `listener` to the world.
    """

    def __init__(
        self,
        command: StartInit,
        *,
        make: Callable[[], AgentHandler],
        agent: AgentConfig,
        seed: int,
        clock: Callable[[], float],
        sandboxes: Sandboxes,
        listener: GatewayListener,
    ) -> None:
        self._command, self._limits = command, command.task.limits
        self._make, self._agent_config, self._clock = make, agent, clock
        self._sandboxes = AttemptSandboxes(sandboxes, waiting=self._waiting)
        self._listener = listener
        self.on_delay: Callable[[], None] = lambda: None
        self._waits = 0
        """Number of waits under way whose time does not count."""
        self._waited_s = 0.0
        self._seed = mix(seed, command.trajectory_id, command.attempt)
        self._session_id = f"{command.trajectory_id}-{command.attempt}"
        self._token = new_token()
        self._budget = Budget(self._limits, clock)
        self._handler: AgentHandler | None = None
        self._port: TurnPort | None = None
        self._agent: _Agent | None = None
        self._turn_lock = asyncio.Lock()
        self._stage_task: asyncio.Task[Any] | None = None
        self._deadline: asyncio.Timeout | None = None
        self._allowed_s = 0.0  # active time when the deadline was set
        self._working_since = 0.0
        self._turns_requested = 0
        self._stop: EpisodeStopError | None = None  # raised by the pipeline in a turn
        self._score: Score | None = None  # may be set by `run_exception`
        self._sequences: tuple[TokenSequence, ...] = ()
        self._ignored: tuple[Ignored, ...] = ()
        self._engine = ""
        self.turns = self.prompt_tokens = 0
        self.conversation: tuple[Message, ...] = ()
        self._tools: tuple[str, ...] = ()
        self.reward = 0.0
        self.result = ""
        self.stop_reason = StopReason.FINISHED

    @property
    def budget_s(self) -> float:
        return self._budget.remaining_s

    @property
    def eval_s(self) -> float:
        return self._budget.eval_s

    # The three stages.

    async def init(self) -> None:
        """Create the handler and call its `init`. Raises `EpisodeStopError`."""
        started, waited_s = self._clock(), self._waited_s
        try:
            await self._stage(
                self._init, "init", hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR
            )
        except EpisodeStopError as stop:
            await self._call_hook("init_exception", stop)
            raise
        finally:
            self._budget.init_s += self._clock() - started - (self._waited_s - waited_s)

    async def _init(self) -> None:
        self._handler = self._make()
        await self._handler.init(
            Job(
                task=self._command.task,
                seed=self._seed,
                sandboxes=self._sandboxes,
                endpoint=self._endpoint,
            )
        )

    async def _endpoint(self) -> Endpoint:
        url = await self._listener.url()
        return Endpoint(url=f"{url}/s/{self._session_id}/v1", token=self._token)

    async def run(self, port: TurnPort) -> StopReason:
        """Run the handler until it returns or the agent has reached a limit.

        Raises `EpisodeStopError`.
        """
        self._port = port
        limits = SessionLimits(
            calls=self._limits.max_turns,
            concurrent=1 << 16,
            tokens=self._limits.max_turns * self._limits.max_turn_tokens,
            context=self._limits.max_tokens,
            turn_tokens=self._limits.max_turn_tokens,
            turn_s=UNLIMITED_S,
        )
        sampling = msgspec.structs.replace(self._agent_config.sampling, seed=self._seed)
        gateway = self._listener.gateway
        gateway.open(
            self._session_id,
            generate=self._generate,
            limits=limits,
            sampling=sampling,
            pinned=True,
            token=self._token,
        )
        session = gateway.session(self._session_id)
        self._agent = _Agent(session, self._endpoint, max_turns=limits.calls)
        self._working_since = self._clock()
        try:
            await self._stage(
                self._run, "run", hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR
            )
        except EpisodeStopError as stop:
            if self._stop is not None:
                raise self._stop from None
            if stop.reason is StopReason.IMAGE_ERROR:
                raise
            if session.exhausted is None:
                self._score = await self._call_hook("run_exception", stop)
                if self._score is None:
                    raise
        finally:
            await session.wait_closed()
            self._budget.env_s += self._clock() - self._working_since
            recording = gateway.close(self._session_id)
            self._sequences, self._ignored = recording.sequences, recording.ignored
            self.conversation, self._tools = session.conversation, session.tools
        if self._stop is not None:  # the handler ignored it
            raise self._stop
        if not self._sequences and session.context_error:
            raise EpisodeStopError(
                StopReason.ENV_ERROR,
                f"the first prompt does not fit into max_tokens: {session.context_error}",
            )
        if not self._sequences:
            raise EpisodeStopError(
                StopReason.ENV_ERROR,
                "run must ask the agent at least once, and returned without asking",
            )
        return session.exhausted or StopReason.FINISHED

    async def _run(self) -> None:
        assert self._agent is not None, "run makes its agent first"
        await self._open_handler.run(self._agent)

    async def score(self) -> Score:
        """Return the reward. Raises `EpisodeStopError`."""
        started, waited_s = self._clock(), self._waited_s
        try:
            if self._score is None:
                hang, failure = StopReason.REWARD_HANG, StopReason.REWARD_ERROR
                try:
                    self._score = await self._stage(self._eval, "eval", hang=hang, failure=failure)
                except EpisodeStopError as stop:
                    if stop.reason is StopReason.IMAGE_ERROR:
                        raise
                    self._score = await self._call_hook("eval_exception", stop)
                    if self._score is None:
                        raise
            return self._score
        finally:
            self._budget.eval_s += self._clock() - started - (self._waited_s - waited_s)
            self._store_result()

    async def _eval(self) -> Score:
        return checked_score(await self._open_handler.eval(), "eval", success=None)

    async def close(self) -> None:
        """Call the handler's `close`."""
        await _detachable(self._close)

    async def _close(self) -> None:
        close = getattr(self._handler, "close", None)
        if close is not None:
            await close()

    def kill(self) -> None:
        """Call the handler's `kill`."""
        with contextlib.suppress(*USER_EXCEPTIONS):
            kill = getattr(self._handler, "kill", None)
            if kill is not None:
                kill()

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """Return the attempt's record without a reward, which is stored later."""
        self.stop_reason = reason
        if reason not in TRAINABLE:
            self._store_result()
        return msgspec.structs.replace(
            record_of(self._command, reason, error),
            sequences=self._sequences,
            ignored=self._ignored,
            tools=self._tools,
            engine=self._engine,
            timing=self._budget.timing(),
            result=self.result,
        )

    # The handler's code.

    @property
    def _open_handler(self) -> AgentHandler:
        assert self._handler is not None, "init comes first"
        return self._handler

    async def _stage(
        self, call: Callable[[], Awaitable[T]], what: str, *, hang: StopReason, failure: StopReason
    ) -> T:
        """Await a stage under the limits.

        Raises `EpisodeStopError`, whose cause is the stage's exception, if any.
        """
        self._sandboxes.image_error = None
        task = self._stage_task = _start(call, f"{what} {self._command.trajectory_id}")
        try:
            async with asyncio.timeout(None) as self._deadline:
                self._rearm()
                await asyncio.wait([task])
        except TimeoutError:
            raise self._budget.timeout_error(self._allowed_s, hang=hang, what=what) from None
        finally:
            self._deadline = None
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CANCEL_S)
        if (task.cancelled() or task.exception()) and self._sandboxes.image_error is not None:
            raise EpisodeStopError(StopReason.IMAGE_ERROR, str(self._sandboxes.image_error))
        if task.cancelled():
            raise EpisodeStopError(failure, f"{what} raised CancelledError")
        error = task.exception()
        if error is not None:
            cause = _cause(error)
            raise EpisodeStopError(failure, describe_error(what, cause)) from cause
        value: T = task.result()
        return value

    def _rearm(self) -> None:
        """Restart the step limit: the handler works from now on."""
        self._working_since = self._clock()
        if self._deadline is not None:
            self._allowed_s = max(0.0, self._budget.remaining_s)
            self._deadline.reschedule(
                asyncio.get_running_loop().time() + min(self._limits.step_s, self._allowed_s)
            )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Stop the stage's clock, because it waits for what does not count as its
        time.
        """
        self._waits += 1
        if self._waits > 1:
            try:
                yield
            finally:
                self._waits -= 1
            return
        loop, deadline = asyncio.get_running_loop(), self._deadline
        ends_at = None if deadline is None else deadline.when()
        if deadline is not None:
            deadline.reschedule(None)
        began, since = loop.time(), self._clock()
        timer = asyncio.create_task(report_delays(self), name="report delays")
        try:
            yield
        finally:
            timer.cancel()
            self._waits -= 1
            waited_s = self._clock() - since
            self._waited_s += waited_s
            if not self._turn_lock.locked() and deadline is self._deadline:
                self._working_since += waited_s
                if deadline is not None and ends_at is not None:
                    deadline.reschedule(ends_at + loop.time() - began)

    async def _call_hook(self, hook: str, stop: EpisodeStopError) -> Score | None:
        """Report a failed stage to the handler; return a score if the handler
        attributes the failure to the agent.
        """

        async def called() -> Any:
            call = getattr(self._handler, hook, None)
            return None if call is None else await call(stop.__cause__ or stop)

        try:
            async with asyncio.timeout(CANCEL_S):  # also if the active time ran out
                score = await _detachable(called)
            return None if score is None else checked_score(score, hook, success=None)
        except (Interrupted, GeneratorExit, asyncio.CancelledError):
            raise
        except USER_EXCEPTIONS as error:
            cause = _cause(error)
            raise EpisodeStopError(
                stop.reason, f"{stop}; then {describe_error(hook, cause)}"
            ) from cause

    def _store_result(self) -> None:
        """Store the handler's `final_result`, with the reason of the reward."""
        try:
            call = getattr(self._handler, "final_result", None)
            final = {} if call is None else call()
            if self._score is not None and self._score.reason and isinstance(final, dict):
                final = {"reason": self._score.reason, **final}
            if call is None and not final:
                return
            result = valid(json.dumps(final, allow_nan=False, ensure_ascii=False))
            if (size := len(result.encode())) > RESULT_BYTES:
                raise ValueError(
                    f"final_result must be at most {RESULT_BYTES} bytes as JSON, got {size}"
                )
            if is_deep(json.loads(result)):
                raise ValueError(f"final_result must be at most {DEPTH} levels deep")
        except USER_EXCEPTIONS as error:
            result = json.dumps(
                {"error": describe_error("final_result", error)}, ensure_ascii=False
            )
        self.result = result

    # The agent's turns.

    async def _generate(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> GenerateResult:
        """Take a turn through the pipeline, which permits one per attempt at a time."""
        async with self._turn_lock:
            assert self._port is not None, "turns are taken in run"
            number = self._turns_requested
            self._turns_requested += 1
            requested_at = self._clock()
            self._budget.env_s += requested_at - self._working_since
            self._port.record_span(f"step {number}", self._working_since, requested_at)
            if self._deadline is not None:
                self._deadline.reschedule(None)
            try:
                answer = await self._port.turn(number, tokens, sampling, on_tokens)
            except EpisodeStopError as stop:
                self._stop = stop
                if self._stage_task is not None:
                    self._stage_task.cancel()
                raise EngineError(str(stop)) from stop
            except asyncio.CancelledError:
                # Charge the time, or an agent that requests turns and abandons them
                # would never run out of it.
                self._budget.env_s += self._clock() - requested_at
                raise
            finally:
                self._rearm()
            if answer.result.finish is FinishReason.REFUSED:  # no turn, but its time counts
                self._budget.env_s += self._clock() - requested_at
                return answer.result
            return self._accept(answer.result, answer.engine_id, requested_at, len(tokens))

    def _accept(
        self, result: GenerateResult, engine: str, requested_at: float, context: int
    ) -> GenerateResult:
        self._engine = engine
        self._budget.charge_turn(requested_at, result.generate_s)
        if not self.turns:
            self.prompt_tokens = context
        self.turns += 1
        return result


class _Agent:
    """Implements `handlers.base.Agent` over a gateway session."""

    def __init__(
        self, session: Session, endpoint: Callable[[], Awaitable[Endpoint]], *, max_turns: int
    ) -> None:
        self._session, self._endpoint, self._max_turns = session, endpoint, max_turns
        self._numbers = itertools.count()

    @property
    def turns_left(self) -> int:
        return max(0, self._max_turns - self._session.calls)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        if not messages:
            raise ValueError("messages must have at least one, got none")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        chat = ChatRequest(
            model="",
            messages=tuple(map(_valid, messages)),
            tools=tuple(declared(tool) for tool in tools),
            reads_calls=bool(tools),
            max_tokens=max_tokens,
            divides=False,
        )
        try:
            async with self._session.turn(
                chat, ("chat", next(self._numbers)), repeated=False
            ) as turn:
                return await self._message(turn)
        except RequestError as error:
            if self._session.exhausted is not None:
                raise LimitError(self._session.exhausted, str(error)) from error
            if error.status == 400:
                raise ValueError(str(error)) from error
            raise EngineError(str(error)) from error

    async def _message(self, turn: Turn) -> Message:
        assert turn.task is not None, "a turn has a task from the start"
        await asyncio.wait([turn.task])
        if turn.error is not None:
            raise turn.error
        self._session.deliver(turn)
        assert turn.message is not None, "a turn without error has a message"
        return turn.message

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        self._session.unreadable = unreadable
        return await self._endpoint()


class _RaisedError(RollweaveError):
    """The handler raised an exception that must not reach the event loop, or that would
    be mistaken for one of Rollweave.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(type_name(raised))
        self.raised = raised


def _cause(error: BaseException) -> BaseException:
    return error.raised if type(error) is _RaisedError else error


async def _detachable(call: Callable[[], Awaitable[T]]) -> T:
    """Await the call in a separate task, which is abandoned if it does not end when we
    are cancelled.
    """
    task = _start(call, "hook")
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
    if task.cancelled():  # by the code itself: our own cancellation would have been raised above
        raise _RaisedError(asyncio.CancelledError())
    return task.result()


def _start(call: Callable[[], Awaitable[T]], name: str) -> asyncio.Task[T]:
    """Call the handler's code in a new task.

    asyncio does not report the task's exception as unretrieved, even if nothing awaits
    the task.
    """
    task = asyncio.create_task(_contained(call), name=name)
    task.add_done_callback(_retrieve_exception)
    return task


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _contained(call: Callable[[], Awaitable[T]]) -> T:
    task = running_task()
    try:
        return await call()
    except (Interrupted, Exception, asyncio.CancelledError):
        raise
    except GeneratorExit as error:
        if running_task() is not task:  # Python is closing this coroutine
            raise
        raise _RaisedError(error) from error
    except BaseException as error:
        raise _RaisedError(error) from error


def declared(tool: Tool) -> str:
    """Return the tool's declaration for the chat template: JSON in the form of OpenAI's
    API.
    """
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return valid(json.dumps({"type": "function", "function": function}, ensure_ascii=False))


def _valid(message: Message) -> Message:
    """Return the message without invalid text. Raises ValueError for anything that is
    not a message.
    """
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return msgspec.convert(valid_tree(plain), Message)
