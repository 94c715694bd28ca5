"""The process of one worker: it executes the calls that `runtime/roles/group` sends.

Invariants: calls are executed one after the other, in the order in which they arrive,
except for those of methods that are registered with `beside`; every call is answered
once; the process does not outlive its parent (`io/parent.py`).

Arguments and results are encoded by the annotations of a method (`envs/roles.py`).
Frames between hosts are not signed (`docs/SECURITY.md`): were values pickles, whatever
can write to the network between hosts could run code in the controller. Structs,
dataclasses, tuples and other types that `msgspec` knows keep their type if the method
is annotated with it.
"""

import importlib.machinery
import importlib.util
import inspect
import os
import queue
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollweave.envs import registry
from rollweave.envs.roles import VARIABLE, WITHIN, decoder, encoded, encoded_arguments
from rollweave.envs.threads import text_of
from rollweave.io.parent import Parent
from rollweave.io.wire import FRAME_BYTES, decoder_of, encode
from rollweave.runtime.roles.worker import Declaration, Worker, check_worker, declarations
from rollweave.schema.errors import ConfigError
from rollweave.schema.roles import (
    CONSTRUCTION,
    Arguments,
    CallMethod,
    DeclaredMethod,
    Raised,
    Returned,
    RoleCommand,
    StartWorker,
    StopWorker,
    StoreOpened,
)

if TYPE_CHECKING:
    from rollweave.runtime.roles.url_methods import UrlMethod

CALL_BYTES = FRAME_BYTES - (1 << 16)
"""Maximum size of the arguments of a call, and of its result."""


class MethodCodec:
    """Encodes and decodes the arguments and results of one method, or of a class."""

    def __init__(self, function: Callable[..., Any], *, name: str, bound: bool) -> None:
        """If `bound`, the first parameter is the object itself."""
        self.name = name
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if bound else 0 :]
        self._signature = signature.replace(parameters=parameters)
        self._hints = _hints(
            inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
        )
        self._positional = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        kinds = {parameter.kind: parameter.name for parameter in parameters}
        self._others = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._keywords = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def argument(self, parameter: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of a parameter, or its default. Raises TypeError."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[parameter]

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Encode the arguments of a call. Raises TypeError if they do not suit the
        method, or cannot be sent.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        arguments = encoded_arguments(bound.args, bound.kwargs, self.name)
        size = sum(map(_size, (*arguments.args, *arguments.kwargs.values())))
        self._must_fit(size, "the arguments")
        return arguments

    def decode(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        """Decode the arguments of a call. Raises TypeError for an argument
        that is not of its annotated type.
        """
        args = [
            self._decoded(raw, self._at(place), f"argument {place}")
            for place, raw in enumerate(arguments.args)
        ]
        kwargs = {
            name: self._decoded(raw, name if name in self._hints else self._keywords, name)
            for name, raw in arguments.kwargs.items()
        }
        return args, kwargs

    def named(self, arguments: Arguments) -> dict[str, Any]:
        """Return the arguments by the names of their parameters. Raises TypeError."""
        args, kwargs = self.decode(arguments)
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def encode_result(self, value: Any) -> msgspec.Raw:
        """Encode a result. Raises TypeError."""
        raw = encoded(value, f"{self.name}: the result")
        self._must_fit(_size(raw), "the result")
        return raw

    def encode_foreign(self, value: Any) -> msgspec.Raw:
        """Encode a result that no method has returned. Raises TypeError, also if it is
        not of the annotated type.
        """
        raw = self.encode_result(value)
        self.decode_result(raw)
        return raw

    def decode_result(self, raw: msgspec.Raw) -> Any:
        """Decode a result. Raises TypeError."""
        return self._decoded(raw, "return", "the result")

    def _must_fit(self, size: int, what: str) -> None:
        if size > CALL_BYTES:
            raise TypeError(f"{self.name}: {what} must have at most {CALL_BYTES} bytes")

    def _at(self, place: int) -> str:
        if place < len(self._positional):
            return self._positional[place].name
        return self._others

    def _decoded(self, raw: msgspec.Raw, parameter: str, what: str) -> Any:
        hint = self._hints.get(parameter, Any)
        try:
            return decoder(hint).decode(raw)
        except (msgspec.DecodeError, ValueError) as error:
            raise TypeError(f"{self.name}: {what}: {error}") from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations; none if they cannot be evaluated."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # names that exist only for type checkers
        return {}
    return hints


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


JUDGE = "judge"
"""Reference of the class of the engines of judges."""

SCRIPT_MODULE = "__rollweave_script__"
"""Name under which a script is imported; as `__main__` it would start its workers
again.
"""


def load(reference: str) -> type[Worker]:
    """Return the class at "package.module:Class" or "path/of/script.py:Class".

    Raises ConfigError, and the exceptions of the script.
    """
    if reference == JUDGE:  # ours: it runs where the user's code does not
        from rollweave.runtime.roles.judge import JudgeEngine

        return JudgeEngine
    path, _, name = reference.rpartition(":")
    if "/" in path:
        _import_script(Path(path))
        path = SCRIPT_MODULE
    worker: type[Worker] = registry.load(f"{path}:{name}", what="worker")
    return worker


def _import_script(path: Path) -> None:
    """Import a script, with its folder on the import path, as when Python runs it."""
    sys.path.insert(0, str(path.parent.absolute()))
    loader = importlib.machinery.SourceFileLoader(SCRIPT_MODULE, str(path.absolute()))
    spec = importlib.util.spec_from_loader(SCRIPT_MODULE, loader)
    assert spec is not None, "there is a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module
    loader.exec_module(module)


class UnfitClassError(ConfigError):
    """The class of a role of a run breaks the rule, which follows the word "must"."""

    def __init__(self, rule: str, text: str = "") -> None:
        super().__init__(text)
        self.rule = rule


def _class_of_run(load: Callable[[str], type[Worker]], reference: str) -> type[Worker]:
    """Return the class of a role of a run. Raises UnfitClassError."""
    rule = "be importable"
    try:
        kind = load(reference)
        rule = "be a class of workers"
        check_worker(kind)
    except ConfigError as error:
        raise UnfitClassError(rule, str(error).removeprefix("worker: ")) from error
    declared = declarations(kind)
    if not declared:
        raise UnfitClassError("have a method with @register")
    if other := [name for name, one in declared.items() if one.affinity or one.serverless]:
        rule = f"register {other[0]} by `register`, or by `register_serverless` with a url"
        raise UnfitClassError(rule)
    return kind


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
        self.address, self._joins = "", True

    def announce(self, store: str) -> None:
        if not self._joins:
            raise RuntimeError(
                "the workers of a role of a run cannot join_ranks, since each is restarted alone: "
                "give one worker several gpus, or start a Cluster"
            )
        self._parent.send(encode(StoreOpened(address=store)))

    def store(self) -> str:
        if not self._joins:
            self.announce("")
        return self._stores.get()

    def run(self, load: Callable[[str], type[Worker]]) -> None:
        start = _decode(self._parent.receive())
        self.address, self._joins = start.address, start.joins
        self._parent.listen(self._on_frame)
        made: list[tuple[Worker, Calls]] = []

        def construct() -> msgspec.Raw:
            worker = self._made(load, start)
            made.append((worker, Calls(worker)))
            return msgspec.Raw(encode(_declared(type(worker))))

        self._answer(CONSTRUCTION, construct)
        while isinstance(command := self._commands.get(), CallMethod):
            if made:  # without a worker, the parent ends this process
                self._call(made[0][1], command)
        for worker, calls in made:
            calls.close()
            worker.close()

    def _made(self, load: Callable[[str], type[Worker]], start: StartWorker) -> Worker:
        """Make the worker; its attributes are set before its constructor runs."""
        if start.joins:
            kind = load(start.worker)
            check_worker(kind)
        else:
            os.environ[VARIABLE] = WITHIN  # also for the processes that it starts
            kind = _class_of_run(load, start.worker)
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
            rule=error.rule if isinstance(error, UnfitClassError) else "",
        )


class Calls:
    """The registered methods of a worker."""

    def __init__(self, worker: Worker) -> None:
        """Raises ConfigError as `UrlMethod` does."""
        self._worker = worker
        self._declarations = declarations(type(worker))
        self._codecs = {name: method_codec(type(worker), name) for name in self._declarations}
        self._urls = {
            name: _at_url(self._codecs[name], one)
            for name, one in self._declarations.items()
            if one.url
        }

    def close(self) -> None:
        """Close all connections."""
        for method in self._urls.values():
            method.close()

    def beside(self, method: str) -> bool:
        return method in self._declarations and self._declarations[method].beside

    def execute(self, command: CallMethod) -> msgspec.Raw:
        """Execute a call, and return its encoded result. Raises what the method raises,
        and TypeError for arguments or a result that do not suit its annotations.
        """
        codec = self._codecs[command.method]
        if command.method in self._urls:
            return self._urls[command.method].execute(codec.named(command.arguments))
        args, kwargs = codec.decode(command.arguments)
        result: Any = getattr(self._worker, command.method)(*args, **kwargs)
        return codec.encode_result(result)


def _at_url(codec: MethodCodec, declaration: Declaration) -> "UrlMethod":
    # most workers need no HTTP client
    from rollweave.runtime.roles.url_methods import UrlMethod

    return UrlMethod(codec.name, declaration, codec.encode_foreign)


def _declared(worker: type[Worker]) -> dict[str, DeclaredMethod]:
    return {
        name: DeclaredMethod(mode=one.called, timeout_s=one.limit_s, beside=one.beside)
        for name, one in declarations(worker).items()
    }


def method_codec(worker: type[Worker], name: str) -> MethodCodec:
    """Return the codec of a worker's method."""
    return MethodCodec(getattr(worker, name), name=f"{worker.__name__}.{name}", bound=True)


def constructor_codec(worker: type[Worker]) -> MethodCodec:
    """Return the codec of a worker's constructor."""
    return MethodCodec(worker, name=worker.__name__, bound=False)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
