"""The engine of a judge that a run starts itself (RollArt §3.1): a worker of a role
with the embedded engine and the server of its APIs, which only this process reaches.
"""

import http.client
import os
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from rollweave.engine.clients.server import EngineServer
from rollweave.engine.embedded import start_engine
from rollweave.io import hub
from rollweave.io.http.guard import JSON, Guard
from rollweave.io.http.listening import listening
from rollweave.io.loop_thread import LoopThread
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.front import ServingFront
from rollweave.runtime.hosts.hosts import LOOPBACK
from rollweave.runtime.roles.worker import Worker, register
from rollweave.schema.base import as_json


class JudgeEngine(Worker):
    """Answers chat completions with the model at `model`, a directory or a name on the
    hub, each within `timeout_s`. A process whose engine answers nothing for this long
    ends, and is replaced.
    """

    def __init__(self, model: str, timeout_s: float) -> None:
        """Raises ConfigError for a wrong model."""
        self._timeout_s, self._answered = timeout_s, 0.0
        place = hub.folder(hub.fetched(model, field="rewards.judge.model"))
        self._token, self._stack = secrets.token_urlsafe(16), AsyncExitStack()
        self._loop = LoopThread("judge")
        self._loop.start()
        self._address = self._loop.call(self._serve(model, place))

    async def _serve(self, model: str, place: Path) -> str:
        """Start the engine and its server, and return the server's address."""
        device, dtype = ("cuda", "bfloat16") if self.devices else ("cpu", "float32")
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        engine = start_engine(place, device=device, dtype=dtype, threads=threads)
        self._stack.push_async_callback(engine.close)
        context = (await engine.ready()).max_context
        server = EngineServer(engine, model=model)
        app = server.application()
        ServingFront(server, ChatCodec.from_directory(place), context=context).add_to(app)
        guard = Guard(token=self._token)
        url = await self._stack.enter_async_context(
            listening(app, str(LOOPBACK), 0, guard=guard, shutdown_s=1.0)
        )
        return urlsplit(url).netloc

    @register(mode="execute_one", beside=True)
    def complete(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a chat completion."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": JSON}
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        began = time.monotonic()
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            self._answered = time.monotonic()
            return answer.status, content
        except TimeoutError:
            text = f"the engine gave no answer within {self._timeout_s:g} s"
            if self._answered < began:  # nor any other answer meanwhile
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
            return 504, as_json({"error": {"message": text}})
        finally:
            connection.close()

    def close(self) -> None:
        """End the engine and its server."""
        self._loop.call(self._stack.aclose())
        self._loop.stop()
