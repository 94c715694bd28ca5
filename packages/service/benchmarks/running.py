"""A rollout service in a thread of a bench."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Self, TypeVar

from rollweave.engine.clients.transport import OnRetry
from rollweave.io.http.listening import Access
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs
from rollweave_service import launch
from rollweave_service.messages import EngineRequest, RolloutRequest, RolloutStatus
from rollweave_service.service import Service

T = TypeVar("T")


class Running:
    """A service in a thread; `call` runs a coroutine on its event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="service")
        self._error: BaseException | None = None

    def _serve(self) -> None:
        try:
            launch.serve(
                self._config,
                observer=self,
                make_backend=_no_backend,
                programs=Programs(),
                on_service=self._on_service,
                access=Access(port=0, no_token=True),
            )
        except BaseException as error:
            self._error = error
        finally:
            self._up.set()

    def _on_service(self, service: Service) -> None:
        self.service, self.loop = service, asyncio.get_running_loop()

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self.address, self._stop = address, stop
        self._up.set()

    def on_warning(self, command: Warn) -> None:
        raise AssertionError(f"no warning is expected: {command}")

    def on_stopping(self, drain: bool) -> None:
        """Do nothing: no caller needs it."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(False)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Run a rollout in process."""
        (status,) = await self.service.rollouts.submit([request])
        while status.state != "done":
            status = await self.service.rollouts.wait(status.id, 60.0)
        return status


def _no_backend(request: EngineRequest, name: str, failed: OnRetry) -> NoReturn:
    raise AssertionError(f"no engine registers in this bench: {name} at {request.address}")
