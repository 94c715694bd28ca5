"""Methods of workers that a serverless platform executes in their place (RollArt §5.2,
Listing 1).
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollweave.engine.clients.responses import ResponseError, parse
from rollweave.io.http.guard import server_token
from rollweave.io.loop_thread import LoopThread
from rollweave.rollout.http_service import HttpService, ServiceError
from rollweave.runtime.roles.worker import GRACE_S, URL_S, Declaration
from rollweave.schema.rollouts import PAYLOAD_BYTES

BYTES = (bytes, bytearray, memoryview)
"""Types that would be sent as text in base64."""


class _Answer(msgspec.Struct, frozen=True):
    result: Any


class UrlMethod:
    """A method that a serverless platform executes at a URL (RollArt §5.2).

    A call is a POST of JSON with `method` ("Class.method"), `key` and `arguments`, by
    the names of the parameters. The platform must answer with status 200 and
    `{"result": VALUE}`. Keys, retries, the sizes of requests and the number of calls
    at once are those of the URL of a reward (`HttpService`).
    """

    def __init__(
        self, name: str, declaration: Declaration, result: Callable[[Any], msgspec.Raw]
    ) -> None:
        """`result` encodes a result, and raises TypeError for one of another type.
        Raises ConfigError for a token that is not set, or is no printable ASCII.
        """
        self._name, self._result, self._loop = name, result, LoopThread(f"calls of {name}")
        self._timeout_s = declaration.timeout_s or URL_S
        variable = declaration.token_env
        self._service = HttpService(
            name,
            declaration.url,
            answer="result",
            token=server_token(variable) if variable else "",
            variable=variable,
            timeout_s=self._timeout_s,
            clock=time.monotonic,
            payload_bytes=PAYLOAD_BYTES,
            callers=("call waits", "calls wait"),
        )
        self._loop.start()

    def execute(self, arguments: Mapping[str, Any]) -> msgspec.Raw:
        """Execute a call, and return its encoded result. Raises ServiceError if there
        is none in time, and TypeError for arguments that JSON does not have, such as
        bytes and NaN. Any thread may call.
        """
        try:
            json.dumps(msgspec.to_builtins(arguments, builtin_types=BYTES), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{self._name}: the arguments must be JSON: {error}") from None
        return self._loop.call(self._ask(arguments))

    def close(self) -> None:
        """Close all connections."""
        self._loop.call(self._service.close())
        self._loop.stop()

    async def _ask(self, arguments: Mapping[str, Any]) -> msgspec.Raw:
        key = uuid.uuid4().hex
        body = {"method": self._name, "key": key, "arguments": arguments}
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S / 2):
                return await self._service.ask("", body, key=key, read=self._read)
        except TimeoutError:
            raise ServiceError(f"{self._name}: too many calls wait for it") from None

    def _read(self, answer: bytes) -> msgspec.Raw:
        try:
            return self._result(parse(answer, _Answer).result)
        except TypeError as error:
            raise ResponseError(f'its answer must be {{"result": VALUE}}: {error}') from error
