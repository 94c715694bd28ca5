"""A service for tests, with the real pipeline, real HTTP, and echo engines as
processes. It runs in a thread, or as a program that a test can kill.

The program is `python -m packages.service.tests.rollout_service CONFIG PORT
[registered]`; it prints its address.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from rollweave.io.http.listening import Access
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import dumps, load
from rollweave.schema.config.root import RunConfig
from rollweave_service import launch
from rollweave_service.engines import BackendFactory, backend_factory
from rollweave_service.messages import EngineRequest
from rollweave_service.service import Service
from tests.support.fake_runs import FAKES, ROOT, make_config
from tests.support.forking import Forked

WAIT_S = 60.0


def service_config(directory: Path, **sections: Any) -> RunConfig:
    """Return a configuration with port 0, the game of `tests.support.game` and two echo
    engines.
    """
    run = {"name": "service", **sections.pop("run", {})}
    return make_config(directory, run=run, **sections)


def no_engine(request: EngineRequest, name: str, *_: object) -> NoReturn:
    raise OSError(f"{name}: nobody is at {request.address}")


class Observer:
    def __init__(self) -> None:
        self.addresses: queue.Queue[tuple[str, str | None, Callable[[bool], None]]] = queue.Queue()
        self.warnings: list[Warn] = []

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self.addresses.put((address, token, stop))

    def on_warning(self, command: Warn) -> None:
        self.warnings.append(command)

    def on_stopping(self, drain: bool) -> None:
        pass


class Serving:
    """A service in a thread; without a token, unless `no_token` is False.

    `stop` ends it, waits, and raises its error.
    """

    def __init__(
        self, config: RunConfig, *, make_backend: BackendFactory = no_engine, **access: Any
    ) -> None:
        self.observer = Observer()
        self._error: BaseException | None = None
        self._make_backend = make_backend
        self.service: Service
        self._options = {
            name: access.pop(name) for name in ("unsandboxed", "registered") if name in access
        }
        self._access = Access(**{"port": 0, "no_token": "token_env" not in access, **access})
        self.token: str | None = None
        self._thread = threading.Thread(target=self._serve, args=(config,), name="service")
        self._thread.start()
        while True:
            try:
                self.address, self.token, self._stop = self.observer.addresses.get(timeout=0.2)
                return
            except queue.Empty:
                if not self._thread.is_alive():
                    self.stop()
                    raise AssertionError("the service ended before it was ready") from None

    def _serve(self, config: RunConfig) -> None:
        try:
            launch.serve(
                config,
                observer=self.observer,
                make_backend=self._make_backend,
                programs=FAKES,
                on_service=self._on_service,
                access=self._access,
                **self._options,
            )
        except BaseException as error:
            self._error = error

    def _on_service(self, service: Service) -> None:
        self.service = service

    def ask_to_stop(self, *, drain: bool = False) -> None:
        self._stop(drain)

    def stop(self, *, drain: bool = False) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop is over
                self._stop(drain)
        self.wait()

    def wait(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the service does not end"
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def serving(
    config: RunConfig, *, make_backend: BackendFactory = no_engine, **flags: bool
) -> Iterator[Serving]:
    service = Serving(config, make_backend=make_backend, **flags)
    try:
        yield service
    finally:
        service.stop()


class Program:
    """A service in another process, which may open at most `files` files."""

    def __init__(
        self,
        config: RunConfig,
        *,
        files: int | None = None,
        port: int = 0,
        registered: bool = False,
    ) -> None:
        file = Path(config.run.dir) / "given.toml"
        file.write_text(dumps(config))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        limit = ["prlimit", f"--nofile={files // 2}:{files}"] if files is not None else []
        command = [
            *limit,
            sys.executable,
            "-m",
            "packages.service.tests.rollout_service",
            str(file),
            str(port),
            *(["registered"] if registered else []),
        ]
        with (Path(config.run.dir) / "stderr").open("wb") as stderr:
            self.process = Forked(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        if not self.address:
            self.kill()
            raise AssertionError("the service ended before it was ready")

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    def terminate(self) -> int:
        self.process.terminate()
        return self._ended()

    def _ended(self) -> int:
        """Return the exit code. A service that does not end in time is killed, so that
        no later test inherits it.
        """
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


if __name__ == "__main__":

    class Printing(Observer):
        def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
            print(address, flush=True)

    given = load(sys.argv[1])
    launch.serve(
        given,
        observer=Printing(),
        make_backend=backend_factory(given),
        programs=FAKES,
        access=Access(port=int(sys.argv[2]), no_token=True),
        registered="registered" in sys.argv[3:],
    )
