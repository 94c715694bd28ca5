"""The process of one worker: it executes the calls that `runtime/roles/group` sends.

Invariants: calls are executed one after the other, in the order in which they arrive,
except for those of methods that are registered with `beside`; every call is answered
once; the process does not outlive its parent (`io/parent.py`).
"""

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from rollweave.envs.foreign import text_of
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.roles.values import MethodCodec
from rollweave.runtime.roles.worker import Worker, declarations
from rollweave.schema.roles import (
    CONSTRUCTION,
    CallMethod,
    Raised,
    Returned,
    RoleCommand,
    StartWorker,
    StopWorker,
    StoreOpened,
)

_decode = decoder_of(RoleCommand)


def serve_worker(load: Callable[[str], type[Worker]]) -> None:
    """Serve one worker in this process until `StopWorker`, or the end of the parent.

    `load` returns the class that a reference names.
    """
    for stream in (sys.stdout, sys.stderr):  # both are the log of this process
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _WorkerProcess(Parent.from_arguments()).run(load)


class _WorkerProcess:
    """Connects the parent with the worker, as whose `Ranks` it also serves."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._commands: queue.SimpleQueue[CallMethod | StopWorker] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.address = ""

    def announce(self, store: str) -> None:
        self._parent.send(encode(StoreOpened(address=store)))

    def store(self) -> str:
        return self._stores.get()

    def run(self, load: Callable[[str], type[Worker]]) -> None:
        start = _decode(self._parent.receive())
        self.address = start.address
        self._parent.listen(self._on_frame)
        made: list[Worker] = []

        def construct() -> msgspec.Raw:
            made.append(self._made(load, start))
            return msgspec.Raw(encode(None))

        self._answer(CONSTRUCTION, construct)
        calls = Calls(made[0]) if made else None
        while isinstance(command := self._commands.get(), CallMethod):
            if calls is not None:  # without a worker, the parent ends this process
                self._call(calls, command)
        if made:
            made[0].close()

    def _made(self, load: Callable[[str], type[Worker]], start: StartWorker) -> Worker:
        """Make the worker; its attributes are set before its constructor runs."""
        kind = load(start.worker)
        worker = kind.__new__(kind)
        worker.rank, worker.world_size = start.rank, start.world_size
        worker.hardware, worker.devices = start.hardware, start.devices
        worker._ranks = self
        args, kwargs = constructor_codec(kind).decode(start.arguments)
        worker.__init__(*args, **kwargs)  # type: ignore[misc]
        return worker

    def _on_frame(self, payload: bytes) -> None:
        command = _decode(payload)
        if isinstance(command, StoreOpened):
            self._stores.put(command.address)
        else:
            self._commands.put(command)

    def _call(self, calls: "Calls", command: CallMethod) -> None:
        def execute() -> None:
            self._answer(command.call, lambda: calls.execute(command))

        if calls.beside(command.method):
            threading.Thread(target=execute, name=command.method, daemon=True).start()
        else:
            execute()

    def _answer(self, call: int, execute: Callable[[], msgspec.Raw]) -> None:
        """Answer a call with its result, or with the exception that it raises."""
        self._parent.send(encode(answer_to(call, execute)))


def answer_to(call: int, execute: Callable[[], msgspec.Raw]) -> Returned | Raised:
    """Execute a call, and return its result, or the exception that it raises."""
    try:
        return Returned(call=call, value=execute())
    except Exception as error:
        traceback.print_exc()
        return Raised(
            call=call,
            kinds=tuple(kind.__name__ for kind in type(error).__mro__[:-1]),
            text=text_of(error),
            place=_place(error),
        )


class Calls:
    """The registered methods of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._declarations = declarations(type(worker))
        self._codecs = {name: method_codec(type(worker), name) for name in self._declarations}

    def beside(self, method: str) -> bool:
        return method in self._declarations and self._declarations[method].beside

    def execute(self, command: CallMethod) -> msgspec.Raw:
        """Execute a call, and return its encoded result. Raises what the method raises,
        and TypeError for arguments or a result that do not suit its annotations.
        """
        codec = self._codecs[command.method]
        args, kwargs = codec.decode(command.arguments)
        result: Any = getattr(self._worker, command.method)(*args, **kwargs)
        return codec.encode_result(result)


def method_codec(worker: type[Worker], name: str) -> MethodCodec:
    """Return the codec of a worker's method."""
    return MethodCodec(getattr(worker, name), name=f"{worker.__name__}.{name}", bound=True)


def constructor_codec(worker: type[Worker]) -> MethodCodec:
    """Return the codec of a worker's constructor."""
    return MethodCodec(worker, name=worker.__name__, bound=False)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
