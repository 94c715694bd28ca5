"""One attempt driven by an `AgentHandler`: what `episode.py` is for an `Env`.

Invariants: the handler's code has the limits of an environment: `init`, `eval`, and
each silence between two turns of `run` take at most `step_s`, all together at most the
active time of the attempt; a stage is a task of its own, so one that does not end when
it is cancelled holds up nobody; turns follow each other, also where an agent program
asks for several at once; every token comes from the session's recorder, whether the
handler asked or a program at the endpoint.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollweave.envs.base import Score, mix
from rollweave.envs.boundary import RAISED, checked_score
from rollweave.envs.foreign import running_task, type_name, what_happened
from rollweave.envs.handlers.base import AgentHandler, Endpoint, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.rollout.budget import Budget, EpisodeStopError
from rollweave.rollout.chat.conversation import PLAN_TOKENS
from rollweave.rollout.driver import Speech, TurnPort
from rollweave.rollout.gateway.dialogue import Ask, RequestError
from rollweave.rollout.gateway.door import Door
from rollweave.rollout.gateway.sessions import Session, SessionLimits, Turn
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.errors import EngineError, Interrupted, RollweaveError
from rollweave.schema.packing import DEPTH, is_deep
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.text import valid, valid_tree
from rollweave.schema.work import BLAME_OF, TRAINABLE, StopReason, TokenSequence, Trajectory

T = TypeVar("T")

CANCEL_S = 2.0
"""Seconds that a stage has to end once it is cancelled, before it is left behind; also
what a hook for errors may take.
"""

RESULT_BYTES = 1 << 20
"""Of what `final_result` gives, as JSON: beyond that it is a file's business."""

FOR_EVER_S = 1e9
"""A turn's time is bounded by the pipeline, which does not count its queueing."""


class Handled:
    """`make` makes the handler; `speech` and `sandboxes` belong to its domain, `seed`
    is the run's, `door` the world's.
    """

    def __init__(
        self,
        command: StartInit,
        *,
        make: Callable[[], AgentHandler],
        speech: Speech,
        seed: int,
        clock: Callable[[], float],
        sandboxes: Sandboxes,
        door: Door,
    ) -> None:
        self._command, self._limits = command, command.task.limits
        self._make, self._speech, self._clock = make, speech, clock
        self._sandboxes, self._door = sandboxes, door
        self._seed = mix(seed, command.trajectory_id, command.attempt)
        self._budget = Budget(self._limits, clock)
        self._handler: AgentHandler | None = None
        self._port: TurnPort | None = None
        self._agent: _Agent | None = None
        self._speaking = asyncio.Lock()
        self._stage_task: asyncio.Task[Any] | None = None
        self._deadline: asyncio.Timeout | None = None
        self._left_s = 0.0  # active time when the deadline was set
        self._working_since = 0.0
        self._asked = 0
        self._stop: EpisodeStopError | None = None  # from the pipeline, while the agent was asked
        self._saved: Score | None = None  # by `run_exception`
        self._sequences: tuple[TokenSequence, ...] = ()
        self._engine = ""
        self.turns = self.prompt_tokens = 0
        self.plan: tuple[int, ...] = ()
        self.reward = 0.0
        self.result = ""
        self.stop_reason = StopReason.FINISHED

    @property
    def budget_s(self) -> float:
        """Active seconds that are left."""
        return self._budget.left_s

    @property
    def eval_s(self) -> float:
        """Seconds that the reward took."""
        return self._budget.eval_s

    # The three stages.

    async def init(self) -> None:
        """Make the handler, and let it make ready. Raises `EpisodeStopError`."""
        started = self._clock()
        try:
            await self._stage(
                self._init, "init", hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR
            )
        except EpisodeStopError as stop:
            await self._told("init_exception", stop)
            raise
        finally:
            self._budget.init_s += self._clock() - started

    async def _init(self) -> None:
        self._handler = self._make()
        await self._handler.init(
            Job(task=self._command.task, seed=self._seed, sandboxes=self._sandboxes)
        )

    async def run(self, port: TurnPort) -> StopReason:
        """Let it run until it returns, or its agent may say nothing more.

        Raises `EpisodeStopError`.
        """
        self._port = port
        session_id = f"{self._command.trajectory_id}-{self._command.attempt}"
        limits = SessionLimits(
            calls=self._limits.max_turns,
            concurrent=1 << 16,
            tokens=self._limits.max_turns * self._limits.max_turn_tokens,
            context=self._limits.max_tokens,
            turn_tokens=self._limits.max_turn_tokens,
            turn_s=FOR_EVER_S,
        )
        sampling = _seeded(self._speech.sampling, self._seed)
        gateway = self._door.gateway
        gateway.open(
            session_id, generate=self._speak, limits=limits, sampling=sampling, pinned=True
        )
        session = gateway.session(session_id)
        self._agent = _Agent(session, self._door, max_turns=limits.calls)
        self._working_since = self._clock()
        try:
            await self._stage(
                self._run, "run", hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR
            )
        except EpisodeStopError as stop:
            if self._stop is not None:
                raise self._stop from None
            if session.exhausted is None:
                self._saved = await self._told("run_exception", stop)
                if self._saved is None:
                    raise
        finally:
            await session.ended()
            self._budget.env_s += self._clock() - self._working_since
            self._sequences = gateway.close(session_id).sequences
        if self._stop is not None:  # the handler made light of it
            raise self._stop
        if not self._sequences and session.refused:
            raise EpisodeStopError(
                StopReason.ENV_ERROR,
                f"the first prompt does not fit into max_tokens: {session.refused}",
            )
        if not self._sequences:
            raise EpisodeStopError(
                StopReason.ENV_ERROR,
                "run must ask the agent at least once, and returned without asking",
            )
        return session.exhausted or StopReason.FINISHED

    async def _run(self) -> None:
        assert self._agent is not None, "run makes its agent first"
        await self._handled.run(self._agent)

    async def score(self) -> Score:
        """The reward. Raises `EpisodeStopError`."""
        started = self._clock()
        try:
            if self._saved is None:
                hang, failure = StopReason.REWARD_HANG, StopReason.REWARD_ERROR
                try:
                    self._saved = await self._stage(self._eval, "eval", hang=hang, failure=failure)
                except EpisodeStopError as stop:
                    self._saved = await self._told("eval_exception", stop)
                    if self._saved is None:
                        raise
            return self._saved
        finally:
            self._budget.eval_s += self._clock() - started
            self._keep()

    async def _eval(self) -> Score:
        return checked_score(await self._handled.eval(), "eval", success=None)

    async def close(self) -> None:
        """Free what `init` took."""
        await _apart(self._close)

    async def _close(self) -> None:
        close = getattr(self._handler, "close", None)
        if close is not None:
            await close()

    def kill(self) -> None:
        """Free it now."""
        with contextlib.suppress(*RAISED):
            kill = getattr(self._handler, "kill", None)
            if kill is not None:
                kill()

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """What came of the attempt, as it is stored. The reward comes later."""
        self.stop_reason = reason
        if reason not in TRAINABLE:
            self._keep()
        command = self._command
        return Trajectory(
            id=command.trajectory_id,
            group_id=command.group_id,
            task=command.task,
            attempt=command.attempt,
            initiated_version=command.initiated_version,
            sequences=self._sequences,
            reward=None,
            stop_reason=reason,
            blame=BLAME_OF[reason],
            engine=self._engine,
            timing=self._budget.timing(),
            error=error,
            result=self.result,
        )

    # The handler's code.

    @property
    def _handled(self) -> AgentHandler:
        assert self._handler is not None, "init comes first"
        return self._handler

    async def _stage(
        self, call: Callable[[], Awaitable[T]], what: str, *, hang: StopReason, failure: StopReason
    ) -> T:
        """Await a stage under the limits.

        Raises `EpisodeStopError`; its cause is what the stage raised, if it did.
        """
        task = self._stage_task = _begun(call, f"{what} {self._command.trajectory_id}")
        try:
            async with asyncio.timeout(None) as self._deadline:
                self._rearm()
                await asyncio.wait([task])
        except TimeoutError:
            raise self._budget.late(self._left_s, hang=hang, what=what) from None
        finally:
            self._deadline = None
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CANCEL_S)
        if task.cancelled():
            raise EpisodeStopError(failure, f"{what} raised CancelledError")
        error = task.exception()
        if error is not None:
            cause = error.raised if type(error) is _RaisedError else error
            raise EpisodeStopError(failure, what_happened(what, cause)) from cause
        found: T = task.result()
        return found

    def _rearm(self) -> None:
        """The handler works from now on."""
        self._working_since = self._clock()
        if self._deadline is not None:
            self._left_s = max(0.0, self._budget.left_s)
            self._deadline.reschedule(
                asyncio.get_running_loop().time() + min(self._limits.step_s, self._left_s)
            )

    async def _told(self, hook: str, stop: EpisodeStopError) -> Score | None:
        """Tell the handler of a failed stage; a score, if it says that the failure was
        the agent's doing.
        """

        async def told() -> Any:
            call = getattr(self._handler, hook, None)
            return None if call is None else await call(stop.__cause__ or stop)

        try:
            async with asyncio.timeout(CANCEL_S):  # also where the active time ran out
                found = await _apart(told)
            return None if found is None else checked_score(found, hook, success=None)
        except (Interrupted, GeneratorExit, asyncio.CancelledError):
            raise
        except RAISED as error:
            cause = error.raised if type(error) is _RaisedError else error
            raise EpisodeStopError(
                stop.reason, f"{stop}; then {what_happened(hook, cause)}"
            ) from cause

    def _keep(self) -> None:
        """Ask for what else is to be kept."""
        try:
            call = getattr(self._handler, "final_result", None)
            if call is None:
                return
            said = valid(json.dumps(call(), allow_nan=False, ensure_ascii=False))
            if (size := len(said.encode())) > RESULT_BYTES:
                raise ValueError(
                    f"final_result must be at most {RESULT_BYTES} bytes as JSON, got {size}"
                )
            if is_deep(json.loads(said)):
                raise ValueError(f"final_result must be at most {DEPTH} levels deep")
        except RAISED as error:
            said = json.dumps({"error": what_happened("final_result", error)}, ensure_ascii=False)
        self.result = said

    # The agent's turns.

    async def _speak(
        self, session: str, tokens: tuple[int, ...], sampling: Sampling
    ) -> GenerateResult:
        """A turn of the pipeline: it has one of an attempt at a time."""
        del session
        async with self._speaking:
            assert self._port is not None, "turns are taken in run"
            number, self._asked = self._asked, self._asked + 1
            asked = self._clock()
            self._budget.env_s += asked - self._working_since
            self._port.stepped(f"step {number}", self._working_since, asked)
            if self._deadline is not None:
                self._deadline.reschedule(None)
            try:
                answer = await self._port.turn(number, tokens, sampling)
            except EpisodeStopError as stop:
                self._stop = stop
                if self._stage_task is not None:
                    self._stage_task.cancel()
                raise EngineError(str(stop)) from stop
            except asyncio.CancelledError:
                # or an agent that asks and leaves would have no end
                self._budget.env_s += self._clock() - asked
                raise
            finally:
                self._rearm()
            return self._taken(answer.result, answer.engine_id, asked, len(tokens))

    def _taken(
        self, result: GenerateResult, engine: str, asked: float, context: int
    ) -> GenerateResult:
        if result.text_only:
            raise EngineError("the engine gives text only: a handler's turns need its tokens")
        self._engine = engine
        self._budget.took_turn(asked, result.generate_s)
        if not self.turns:
            self.prompt_tokens, self.plan = context, result.tokens[:PLAN_TOKENS]
        self.turns += 1
        return result


class _Agent:
    """`handlers.base.Agent` over a session."""

    def __init__(self, session: Session, door: Door, *, max_turns: int) -> None:
        self._session, self._door, self._max_turns = session, door, max_turns
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
        ask = Ask(
            model="",
            messages=tuple(map(_valid, messages)),
            tools=tuple(declared(tool) for tool in tools),
            reads_calls=bool(tools),
            max_tokens=max_tokens,
        )
        try:
            async with self._session.turn(
                ask, ("chat", next(self._numbers)), repeated=False
            ) as turn:
                return await self._said(turn)
        except RequestError as error:
            if self._session.exhausted is not None:
                raise LimitError(self._session.exhausted, str(error)) from error
            if error.status == 400:
                raise ValueError(str(error)) from error
            raise EngineError(str(error)) from error

    async def _said(self, turn: Turn) -> Message:
        assert turn.task is not None, "a turn is under way from the start"
        await asyncio.wait([turn.task])
        if turn.error is not None:
            raise turn.error
        self._session.deliver(turn)
        assert turn.message is not None, "a turn without error has a message"
        return turn.message

    async def endpoint(self) -> Endpoint:
        url = await self._door.url()
        return Endpoint(url=f"{url}/s/{self._session.id}/v1", token=self._session.token)


class _RaisedError(RollweaveError):
    """The handler raised what must not reach the event loop, or would be taken for our
    own.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(type_name(raised))
        self.raised = raised


async def _apart(call: Callable[[], Awaitable[T]]) -> T:
    """Await it as a task of its own: where it does not end when we are cancelled, it is
    left behind.
    """
    task = _begun(call, "hook")
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
    if task.cancelled():  # its own doing: were it ours, we had not come here
        raise _RaisedError(asyncio.CancelledError())
    return task.result()


def _begun(call: Callable[[], Awaitable[T]], name: str) -> asyncio.Task[T]:
    """Call the handler's code in a new task.

    Asyncio reports no exception of it, even if we no longer wait for the task.
    """
    task = asyncio.create_task(_contained(call), name=name)
    task.add_done_callback(_read)
    return task


def _read(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _contained(call: Callable[[], Awaitable[T]]) -> T:
    task = running_task()
    try:
        return await call()
    except (Interrupted, Exception, asyncio.CancelledError):
        raise
    except GeneratorExit as error:
        if running_task() is not task:  # Python closes this coroutine
            raise
        raise _RaisedError(error) from error
    except BaseException as error:
        raise _RaisedError(error) from error


def declared(tool: Tool) -> str:
    """Return the tool as the chat template gets it: JSON in the form of OpenAI's API."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return valid(json.dumps({"type": "function", "function": function}, ensure_ascii=False))


def _valid(message: Message) -> Message:
    """Raise ValueError for anything that is not a message."""
    return msgspec.convert(valid_tree(msgspec.to_builtins(message)), Message)


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        allowed=sampling.allowed,
        seed=seed,
    )
