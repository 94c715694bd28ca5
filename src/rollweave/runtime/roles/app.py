"""An instance of a role on Ray Serve: it executes serverless methods of the class, one
call after the other, like a worker (RollArt §5.2, Listing 1).
"""

import asyncio
import os
from typing import Any

import msgspec

from rollweave.io.wire import encode
from rollweave.runtime.hosts.answers import Answer, Answers, UserModules
from rollweave.runtime.roles.loading import load
from rollweave.runtime.roles.serving import Calls, answer_to, constructor_codec
from rollweave.schema.roles import CallMethod
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from rollweave.schema.serverless import DeployedRole


class RoleApp:
    """Executes the methods of one role."""

    def __init__(self, role: DeployedRole, archive: bytes, digest: bytes) -> None:
        """Construct the worker. Raises HostError, ConfigError, and what the
        constructor raises.
        """
        self._modules = UserModules(archive, digest)
        os.chdir(self._modules.folder)  # a script is named by its path from there
        kind = load(role.reference)
        args, kwargs = constructor_codec(kind).decode(role.arguments)
        self._calls, self._answers = Calls(kind(*args, **kwargs)), Answers()
        # Once a client has given up on a call, Ray Serve sends the next one.
        self._one_at_a_time = asyncio.Lock()

    def __del__(self) -> None:
        """Remove the modules. Ray Serve calls this before it ends an instance."""
        self._modules.remove()

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette."""
        from starlette.responses import Response

        status, body = await self.answer(request.headers[IDEMPOTENCY_KEY], await request.body())
        return Response(body, status_code=status, media_type="application/octet-stream")

    async def answer(self, key: str, body: bytes) -> Answer:
        """Return the answer to a `CallMethod`: `Returned` or `Raised`."""
        try:
            command = msgspec.msgpack.decode(body, type=CallMethod)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return await self._answers.of(key, lambda: self._execute(command))

    async def _execute(self, command: CallMethod) -> Answer:
        async with self._one_at_a_time:
            answer = await asyncio.to_thread(
                answer_to, command.call, lambda: self._calls.execute(command)
            )
        return 200, encode(answer)
