"""The workers of one role as a group: they start together, are called as one, and end
together.

Invariants: the results of a call are in the order of its ranks; a call returns or
raises, `WorkerError` if its method raised and `WorkerLostError` otherwise; if a worker
is lost, or silent beyond a deadline, all are killed, and every later call raises;
`lost` is done, with the reason, once any worker has ended, also by `kill` or `close`.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollweave.core.policy.waiting import Wait
from rollweave.io.child import ChildProcess, Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.roles.serving import method_codec
from rollweave.runtime.roles.worker import Worker, declarations
from rollweave.schema.roles import (
    CONSTRUCTION,
    Arguments,
    CallMethod,
    DeclaredMethod,
    Raised,
    Returned,
    RoleReport,
    StartWorker,
    StopWorker,
    StoreOpened,
    WorkerError,
    WorkerFailure,
    WorkerLostError,
)

CLOSE_S = 5.0
"""Maximum seconds for workers to end after they were asked to: an interpreter that has
imported torch needs seconds to shut down.
"""

ALONE_S = 15.0
"""Maximum seconds between the failure of one rank and the answers of the others, if
they share a process group: ranks that take longer wait in a collective operation.
"""

CONSTRUCTION_S = 1.0
"""Maximum seconds to wait for the other constructors after one has raised: the failure
of another may be the cause.
"""

_decode = decoder_of(RoleReport)
_decode_methods = decoder_of(dict[str, DeclaredMethod])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """The place of one worker: `spawn` starts its process on the host with this
    address, where it has `hardware` and `devices`.
    """

    spawn: Spawn
    address: str = "127.0.0.1"
    hardware: str = ""
    devices: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False, kw_only=True)
class _Call:
    """A call that was sent to some ranks."""

    what: str
    since: float
    done: asyncio.Future[None]
    pending: set[int]
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    failures: dict[int, WorkerFailure] = dataclasses.field(default_factory=dict)
    decode: Callable[[msgspec.Raw], Any]
    failure_of: Callable[[Any], str]
    alone: asyncio.TimerHandle | None = None
    """Timer that ends the call if one rank has failed and the others do not answer."""


def _as_sent(value: msgspec.Raw) -> msgspec.Raw:
    """Return the result of a class that this process does not import."""
    return value


def _no_failure(_: Any) -> str:
    return ""


class WorkerGroup:
    """One process per rank, at each of `places`.

    `worker` is the class; its processes import the class at `reference`. All calls
    belong to the event loop's thread.
    """

    def __init__(
        self,
        name: str,
        worker: type[Worker] | None,
        *,
        places: Sequence[WorkerPlace],
        logs: Path,
        reference: str = "",
        arguments: Arguments | None = None,
        alone: tuple[int, int] | None = None,
    ) -> None:
        """Start the workers. The only worker of a group is `alone` the rank of these,
        of so many, that the others know nothing of. Raises OSError.
        """
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._first, self.world_size = alone or (0, len(places))
        self._codecs = (
            {}
            if worker is None
            else {method: method_codec(worker, method) for method in declarations(worker)}
        )
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._calls: dict[int, _Call] = {}
        self._next = CONSTRUCTION
        self._closing = False
        self._met = False
        """True once rank 0 has opened the store at which the ranks meet."""
        self._children: list[ChildProcess] = []
        self._construction = self._new_call(
            "the constructor", range(len(places)), decode=_decode_methods
        )
        try:
            for rank, place in enumerate(places):
                self._children.append(self._start(rank, place, logs))
        except OSError:
            self.kill()
            raise
        for rank, place in enumerate(places):
            start = StartWorker(
                worker=reference,
                rank=self._first + rank,
                world_size=self.world_size,
                joins=alone is None,
                address=place.address,
                hardware=place.hardware,
                devices=place.devices,
                arguments=arguments or Arguments(),
            )
            self._children[rank].send(encode(start))

    def _start(self, rank: int, place: WorkerPlace, logs: Path) -> ChildProcess:
        name = f"{self.name}-{self._first + rank}"
        return place.spawn(
            name=name,
            log=logs / f"{name}.log",
            on_frame=lambda payload: self._on_message(rank, payload),
            on_gone=lambda reason: self.lose(rank, reason),
        )

    def calls_of(self, rank: int) -> int:
        """Return the number of calls that a rank has not answered."""
        return sum(rank in call.pending for call in self._calls.values())

    def waits(self) -> list[Wait]:
        """Return the calls that are not answered, each with the ranks that owe an
        answer.
        """
        return [
            Wait(
                component=self.name,
                what=f"{call.what} on rank {self._names(call.pending)}",
                since=call.since,
            )
            for call in self._calls.values()
            if call.pending
        ]

    def _names(self, ranks: set[int]) -> str:
        return ", ".join(str(self._first + rank) for rank in sorted(ranks))

    async def ready(self, within_s: float) -> dict[str, DeclaredMethod]:
        """Wait until all workers are constructed, and return their registered methods.

        Raises `WorkerError` if a constructor raised, and `WorkerLostError`.
        """
        await self._result(self._construction, within_s)
        methods: dict[str, DeclaredMethod] = self._construction[1].values[0]
        return methods

    def argument(
        self, method: str, parameter: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the argument of a call for a parameter. Raises TypeError."""
        return self._codecs[method].argument(parameter, args, kwargs)

    def encode(self, method: str, *args: Any, **kwargs: Any) -> Arguments:
        """Encode arguments of a method. Raises TypeError if they do not fit its
        parameters, or cannot be sent.
        """
        return self._codecs[method].encode(args, kwargs)

    async def call(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        *,
        within_s: float | None = None,
        failure_of: Callable[[Any], str] = _no_failure,
    ) -> list[Any]:
        """Call a method on the ranks that are keys of `arguments`, and return the
        results in their order.

        `failure_of` returns the error that a result reports, or "". Raises
        `WorkerError`, also for results that are not of the annotated type, and
        `WorkerLostError`.
        """
        self._must_live()
        number, call = self._new_call(
            f"{method}()",
            arguments,
            decode=self._codecs[method].decode_result if self._codecs else _as_sent,
            failure_of=failure_of,
        )
        payload, former = b"", None
        for rank, encoded in arguments.items():
            if encoded is not former:
                former = encoded
                payload = encode(CallMethod(call=number, method=method, arguments=encoded))
            self._children[rank].send(payload)
        await self._result((number, call), within_s)
        return [call.values[rank] for rank in arguments]

    async def close(self) -> None:
        """Ask the workers to end, and kill those that do not."""
        if not self.lost.done():
            self._closing = True
            payload = encode(StopWorker())
            for child in self._children:
                child.send(payload)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.gather(*(child.gone() for child in self._children))
        self.kill()
        await asyncio.gather(*(child.gone() for child in self._children))

    def kill(self) -> None:
        """Kill all workers, without waiting; `lost` follows."""
        for child in self._children:
            child.kill()

    def lose(self, rank: int, reason: str) -> None:
        """Give up all workers because of one."""
        if not self.lost.done():
            self.lost.set_result(f"{self.name} rank {self._first + rank}: {reason}")
            for call in list(self._calls.values()):
                _settle(call)
        if not self._closing:
            self.kill()

    def _must_live(self) -> None:
        if self.lost.done():
            raise WorkerLostError(self.lost.result())

    def _new_call(
        self,
        what: str,
        ranks: "Sequence[int] | Mapping[int, Any]",
        *,
        decode: Callable[[msgspec.Raw], Any],
        failure_of: Callable[[Any], str] = _no_failure,
    ) -> tuple[int, _Call]:
        number, self._next = self._next, self._next + 1
        call = self._calls[number] = _Call(
            what=what,
            since=self._loop.time(),
            done=self._loop.create_future(),
            pending=set(ranks),
            decode=decode,
            failure_of=failure_of,
        )
        return number, call

    async def _result(self, numbered: tuple[int, _Call], within_s: float | None) -> None:
        """Wait for the answers to a call."""
        number, call = numbered
        try:
            async with asyncio.timeout(within_s):
                await call.done
        except TimeoutError:
            silent = min(call.pending)
            self.lose(silent, f"did not answer {call.what} within {within_s:g} s")
        finally:
            _settle(call)
            del self._calls[number]
        if call.pending:
            raise WorkerLostError(self.lost.result())
        if call.failures:
            raise WorkerError(self.name, [call.failures[rank] for rank in sorted(call.failures)])

    def _on_message(self, rank: int, payload: bytes) -> None:
        message = _decode(payload)
        if isinstance(message, StoreOpened):
            self._met = True
            for child in self._children[1:]:
                child.send(payload)
            return
        call = self._calls.get(message.call)
        if call is None or rank not in call.pending:
            return  # the caller no longer waits for it
        if isinstance(message, Returned):
            try:
                call.values[rank] = call.decode(message.value)
                error = call.failure_of(call.values[rank])
            except TypeError as problem:
                error = str(problem)
                call.failures[rank] = WorkerFailure(
                    rank=self._first + rank, kinds=("TypeError",), text=error
                )
        else:
            failure = call.failures[rank] = _failure(self._first + rank, message)
            error = f"{failure.kind}: {failure.text}"
        call.pending.discard(rank)
        if not call.pending:
            _settle(call)
        elif error and call.alone is None:
            self._await_others(message.call, call, rank, error)

    def _await_others(self, number: int, call: _Call, rank: int, error: str) -> None:
        """Bound the time until the others answer, now that one rank has failed."""
        if number == CONSTRUCTION:
            call.alone = self._loop.call_later(CONSTRUCTION_S, _give_up, call)
        elif self._met:
            call.alone = self._loop.call_later(ALONE_S, self.lose, rank, f"failed alone: {error}")


def _give_up(call: _Call) -> None:
    """End a call with the failures so far."""
    call.pending.clear()
    _settle(call)


def _settle(call: _Call) -> None:
    if call.alone is not None:
        call.alone.cancel()
    if not call.done.done():
        call.done.set_result(None)


def _failure(rank: int, raised: Raised) -> WorkerFailure:
    return WorkerFailure(
        rank=rank, kinds=raised.kinds, text=raised.text, place=raised.place, rule=raised.rule
    )
