"""Our engine with blocking calls: on a thread, with all commands, and in a child
process as in a run.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from rollweave.engine.batching import StepWork
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.thread import EngineThread
from rollweave.io.child import child_of
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    Add,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    EngineStats,
    Generated,
    GenerateRequest,
    GenerateResult,
    KvRefused,
    LoadFailed,
    Ready,
    Sampled,
    Shutdown,
    StageFailed,
    Stats,
)

PATIENCE_S = 600.0
"""Maximum seconds to wait for one reply; a hung engine then raises instead of hanging
the bench.
"""

Reply = TypeVar("Reply", bound=EngineReply)


class Harness:
    """An engine's loop on a thread."""

    ready: Ready
    """Return the engine's description of itself."""

    def __init__(
        self, spec: EngineSpec, *, watch: Callable[[StepWork, float], None] | None = None
    ) -> None:
        """`watch` is called with every step, on the engine's thread."""
        self._replies: queue.Queue[EngineReply] = queue.Queue()
        self._loop = EngineThread(spec, self._replies.put, watch=watch)
        self._done: dict[str, GenerateResult] = {}
        self._thread = threading.Thread(target=self._loop.run, name="bench-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.ready = self.expect(Ready)
        return self

    def __exit__(self, *_: object) -> None:
        self.post(Shutdown())
        self._thread.join()

    def post(self, *commands: EngineCommand) -> None:
        for command in commands:
            self._loop.post(command)

    def expect(self, kind: type[Reply]) -> Reply:
        """Return the next reply of this kind; earlier results are kept.

        Raises EngineError for a failing or silent engine.
        """
        while True:
            try:
                reply = self._replies.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise EngineError(
                    f"the engine did not answer with {kind.__name__} in {PATIENCE_S} s"
                ) from None
            if isinstance(reply, EngineFatal | LoadFailed | StageFailed | KvRefused):
                raise EngineError(reply.error)
            if isinstance(reply, Generated):
                self._done[reply.result.id] = reply.result
            if isinstance(reply, kind):
                return reply

    def stats(self) -> EngineStats:
        self.post(Stats())
        return self.expect(Sampled).stats

    def results(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Return the results of added requests.

        Raises EngineError for one that is an error.
        """
        results = []
        for request in requests:
            while request.id not in self._done:
                self.expect(Generated)
            results.append(self._done.pop(request.id))
        for result in results:
            if result.error:
                raise EngineError(result.error)
        return results

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.post(*(Add(request=request) for request in requests))
        return self.results(requests)


class ProcessHarness:
    """The engine in a child process, over the same backend as in a run.

    It belongs to the thread that enters it.
    """

    def __init__(self, spec: EngineSpec, *, log: Path) -> None:
        self._spec, self._log = spec, log
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.__enter__()
        try:
            self._client = self._runner.run(self._open())
        except BaseException:
            self._runner.close()  # the event loop's end takes the child along
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Generate. Raises EngineError where the engine refuses or is lost."""
        return self._runner.run(self._generate(requests))

    async def _open(self) -> EngineClient:
        model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model_ready.set_result(None)
        threads = {
            "OMP_NUM_THREADS": str(self._spec.threads),
            "MKL_NUM_THREADS": str(self._spec.threads),
        }
        spawn = child_of("rollweave.runtime.entrypoints.engine", env=threads)
        link = in_process(self._spec, spawn=spawn, log=self._log, model_ready=model_ready)
        client = EngineClient(self._spec.id, link, start_s=PATIENCE_S, reply_s=PATIENCE_S)
        await client.ready()
        return client

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return await asyncio.gather(*(self._client.generate(request) for request in requests))
