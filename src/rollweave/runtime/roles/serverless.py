"""Calls of the serverless methods of a role, which instances on Ray Serve execute
(`runtime/roles/app.py`).

Invariant: a call returns, or raises `WorkerError`, within its limit; the workers of the
role do not end because of it.
"""

import asyncio
import uuid

import msgspec

from rollweave.engine.clients.responses import ResponseError
from rollweave.io.wire import encode
from rollweave.rollout.http_service import HttpService, ServiceError
from rollweave.runtime.roles.serving import method_codec
from rollweave.runtime.roles.worker import Worker
from rollweave.schema.roles import (
    Arguments,
    CallMethod,
    Raised,
    Returned,
    WorkerError,
    WorkerFailure,
)
from rollweave.schema.rollouts import PAYLOAD_BYTES

UNAVAILABLE = "ServiceError"
"""Kind of the failure of a call that no instance has answered."""

_decode: "msgspec.msgpack.Decoder[Returned | Raised]" = msgspec.msgpack.Decoder(Returned | Raised)


def _read(answer: bytes) -> Returned | Raised:
    try:
        return _decode.decode(answer)
    except msgspec.DecodeError as error:
        raise ResponseError(f"its answer must be a result: {error}") from error


class ServerlessMethods:
    """The methods of role `name` at `url`."""

    def __init__(self, name: str, worker: type[Worker], url: str) -> None:
        self._name, self._worker, self._url = name, worker, url
        self._services: dict[float, HttpService] = {}

    async def call(self, method: str, arguments: Arguments, *, within_s: float) -> object:
        """Call a method, and return its result. Raises WorkerError and TypeError."""
        service = self._service(within_s)
        body = encode(CallMethod(call=1, method=method, arguments=arguments))
        try:
            report = await service.ask("", body, key=uuid.uuid4().hex, read=_read)
        except ServiceError as error:
            report = Raised(call=1, kinds=(UNAVAILABLE,), text=str(error))
        if isinstance(report, Returned):
            return method_codec(self._worker, method).decode_result(report.value)
        failure = WorkerFailure(rank=0, kinds=report.kinds, text=report.text, place=report.place)
        raise WorkerError(f"{self._name}.{method} on Ray Serve:", [failure])

    def _service(self, within_s: float) -> HttpService:
        """Return the service for calls with this limit."""
        if within_s not in self._services:
            self._services[within_s] = HttpService(
                f"role {self._name}",
                self._url,
                answer="result",
                token="",
                timeout_s=within_s,
                clock=asyncio.get_running_loop().time,
                payload_bytes=PAYLOAD_BYTES,
                callers=("call waits", "calls wait"),
            )
        return self._services[within_s]

    async def close(self) -> None:
        """Close all connections."""
        for service in self._services.values():
            await service.close()
