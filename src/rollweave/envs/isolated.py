"""The process of `isolation = "process"`: `python -m rollweave.envs.isolated`, started
by `envs/process.py`.

User code runs on the main thread, where signal handlers work: async methods run on its
event loop, and plain methods while no event loop runs, as in a script. The event loop
runs between calls too, so an async environment may keep connections alive. A separate
thread detects the parent's end, even while an environment hangs.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, assert_never

from rollweave.envs.boundary import GuardedEnv, score_episode
from rollweave.envs.process import (
    Act,
    Close,
    Done,
    EnvCommand,
    EnvReply,
    EnvSpec,
    Evaluate,
    Failed,
    Observed,
    Open,
    Reset,
    Scored,
    Stepped,
)
from rollweave.envs.registry import resolve
from rollweave.envs.threads import Caller, awaited, call_inline, needs_thread, text_of
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import ConfigError, EnvError, RewardError

T = TypeVar("T")


class MainThread:
    """The event loop of this thread, which stops for each plain call."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._call: Callable[[], None] | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, with the plain calls that it makes by `via`."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():
            self._loop.run_forever()
            call, self._call = self._call, None
            if call is not None:
                call()
        return task.result()

    async def via(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a user's method, plain or async, and return its result."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        answer: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

        def call() -> None:
            try:
                answer.set_result((method(*arguments), None))
            except StopIteration as error:  # a coroutine cannot raise it
                answer.set_result((None, RuntimeError(f"StopIteration: {text_of(error)}")))
            except BaseException as error:
                answer.set_result((None, error))

        self._call = call
        self._loop.stop()
        value, error = await answer
        if error is not None:
            raise error
        return await awaited(value)


class IsolatedEnv:
    """Answers commands about the environment of this process, which holds at most one
    environment at a time. `via` calls plain methods that may block.
    """

    def __init__(self, via: Caller) -> None:
        self._via = via
        self._env: GuardedEnv | None = None

    async def answer(self, command: EnvCommand) -> EnvReply:
        try:
            return await self._answer(command)
        except (EnvError, RewardError) as error:
            return Failed(error=str(error))

    async def _answer(self, command: EnvCommand) -> EnvReply:
        match command:
            case Open(spec=spec):
                self._env = await self._opened_by(spec)
                return Done()
            case Reset(task=task):
                return Observed(observation=await self._opened().reset(task))
            case Act(action=action, finish_reason=finish_reason):
                return Stepped(step=await self._opened().step(action, finish_reason=finish_reason))
            case Close():
                env, self._env = self._env, None
                if env is not None:
                    await env.close()
                return Done()
            case Evaluate(spec=spec, episode=episode):
                score = await score_episode(spec.env, spec.options, episode, via=self._via)
                return Scored(score=score)
            case _:
                assert_never(command)

    async def _opened_by(self, spec: EnvSpec) -> GuardedEnv:
        """Construct the environment. Raises EnvError."""
        kind = _kind(spec.env)
        via = self._via if kind is None or needs_thread(kind) else call_inline

        def make() -> GuardedEnv:
            return GuardedEnv(spec.env, spec.options, via=via)

        # If `reset` is async, the constructor may need the event loop as well.
        is_async = kind is not None and inspect.iscoroutinefunction(kind.reset)
        return make() if is_async else await via(make)

    def _opened(self) -> GuardedEnv:
        assert self._env is not None, "a command about an environment follows Open"
        return self._env


def _kind(name: str) -> type[Any] | None:
    """Return the class of the environment; None if there is no such class."""
    try:
        return resolve(name)
    except ConfigError:  # as making the environment will report
        return None


def serve(parent: Parent) -> None:
    """Answer the parent's commands forever; the parent's end ends the process."""
    decode, frames, main = decoder_of(EnvCommand), parent.queue(), MainThread()
    env = IsolatedEnv(main.via)
    while True:
        command = decode(main.run(asyncio.to_thread(frames.get)))
        parent.send(encode(main.run(env.answer(command))))


if __name__ == "__main__":
    serve(Parent.from_arguments())
