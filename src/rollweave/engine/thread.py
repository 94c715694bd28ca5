"""The thread of an engine, and the mailbox by which other threads reach its core.

Commands are posted from any thread, and never wait for a computation: they are executed
in the order in which they were posted, all pending ones before each step. The thread
sleeps while there is nothing to compute. Replies are called on this thread, except for
those to heartbeats. A failure of the thread itself is reported as `EngineFatal`, after
which nothing more is answered.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import assert_never

import msgspec
import torch

from rollweave.engine.batching import StepWork
from rollweave.engine.core import EngineCore
from rollweave.io.machine import device_named
from rollweave.schema.serving import (
    Abort,
    Add,
    Beat,
    Beating,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    ExportKv,
    ImportKv,
    Load,
    LoadCheckpoint,
    ReleaseKv,
    Rerank,
    Resume,
    Sampled,
    Shutdown,
    Stage,
    Stats,
    Suspend,
)


class Activity:
    """The current work of an engine's thread, which alone calls `begin` and `end`, and
    its duration: another thread answers heartbeats with them, so that a long step is
    distinguished from a lost process.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._current: tuple[str, float] | None = None

    def begin(self, doing: str) -> None:
        """Record that the thread begins to do this."""
        self._current = doing, self._clock()

    def end(self) -> None:
        """Record that the thread has nothing to do, or begins something else soon."""
        self._current = None

    def beating(self) -> Beating:
        """Return the answer to a heartbeat, on any thread."""
        current = self._current
        if current is None:
            return Beating()
        doing, since = current
        return Beating(doing=doing, for_s=self._clock() - since)


class Mailbox:
    """Holds what a core is to execute between two steps: commands, and calls of
    functions, which must not raise. Mailboxes can share a `wake` condition, which is
    notified of each item.
    """

    def __init__(self, wake: threading.Condition | None = None) -> None:
        self.wake = wake or threading.Condition()
        self._items: deque[EngineCommand | Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: EngineCommand | Callable[[], None]) -> None:
        """Queue a command or a call, from any thread."""
        with self.wake:
            self._items.append(item)
            self.wake.notify()

    def execute(self, core: EngineCore) -> bool:
        """Execute all items, among them the masks for the next step. Return False after
        `Shutdown`.
        """
        core.texts.wait()
        with self.wake:
            items = list(self._items)
            self._items.clear()
        return all(_execute(item, core) for item in items)


def _execute(item: EngineCommand | Callable[[], None], core: EngineCore) -> bool:
    if callable(item):
        core.doing("a call between two steps")
        item()
        return True
    core.doing(f"command {type(item).__name__}")
    match item:
        case Add(request=request, report_s=report_s):
            core.submit(request, report_s=report_s)
        case Abort(id=id):
            core.abort(id)
        case Rerank(id=id, rank=rank):
            core.rerank(id, rank)
        case Suspend(release=release):
            core.reply(core.suspend(release=release))
        case Resume():
            core.resume()
        case Stage(manifest=manifest):
            core.staging.start(manifest)
        case Load(manifest=manifest):
            core.load(manifest)
        case LoadCheckpoint():
            core.load_checkpoint(item)
        case Stats():
            core.reply(Sampled(stats=core.stats()))
        case ExportKv():
            core.exchange.start_export(item)
        case ImportKv():
            core.exchange.start_import(item)
        case ReleaseKv(id=id):
            core.exchange.release(id)
        case Shutdown():
            return False
        case Beat():
            raise AssertionError("it was answered when it was posted")
        case _:
            assert_never(item)
    return True


class EngineThread:
    """An engine that computes on the thread that calls `run`, which blocks until
    `Shutdown` or a fatal error. `post` may be called before, during and after it.

    `watch` is called on that thread with the work of every step and its seconds.
    """

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        watch: Callable[[StepWork, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._activity = Mailbox(), Activity(clock)
        self.core = EngineCore(
            spec,
            reply,
            between_steps=self._mailbox.post,
            doing=self._activity.begin,
            watch=watch,
            clock=clock,
        )

    def post(self, command: EngineCommand) -> None:
        """Queue a command. A heartbeat is answered at once."""
        if isinstance(command, Beat):
            self.core.reply(
                msgspec.structs.replace(self._activity.beating(), kv_used=self.core.kv_used)
            )
        else:
            self._mailbox.post(command)

    def run(self) -> None:
        """Build the engine, reply `Ready`, and serve.

        Replies `EngineFatal` if building or serving fails.
        """
        core, mailbox = self.core, self._mailbox
        try:
            if device_named(core.spec.device).type == "cpu":
                torch.set_num_threads(core.spec.threads)
            core.reply(core.build())
            with torch.inference_mode(), closing(core):
                self._await_item()
                while mailbox.execute(core):
                    if not core.has_work or not core.step():
                        self._await_item()
        except Exception as error:
            core.reply(EngineFatal(error=f"{type(error).__name__}: {error}"))

    def _await_item(self) -> None:
        self._activity.end()
        with self._mailbox.wake:
            self._mailbox.wake.wait_for(lambda: len(self._mailbox))
