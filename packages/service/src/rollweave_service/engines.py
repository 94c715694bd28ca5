"""The engines of a service: local engines, and engines that clients register by
address, with their tokens and backends.

Invariants: a registration is in the job database before the core learns of the engine,
so it survives a restart; an engine id is never used twice in the life of a process; an
address is registered at most once; tokens are in one file that only our user can read,
never in jobs.sqlite; a client of the service cannot make it connect to a host that
`rollweave serve --engine-host` does not admit, under any name.
"""

import asyncio
import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollweave.core.state import Engine as CoreEngine
from rollweave.core.state import EngineStatus as CoreEngineStatus
from rollweave.engine.clients.base import Generates
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.transport import OnRetry
from rollweave.io.disk import replace_file
from rollweave.io.hub import folder
from rollweave.io.reading import read_json
from rollweave.schema.address import Hosts, host_of, ip_address
from rollweave.schema.base import EngineId, as_json
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.events import EngineRegistered, EngineSlot, EngineWithdrawn
from rollweave_service.base import ClosedError, ConflictError, FullError, UnknownError, WorldPort
from rollweave_service.jobs import JobStore
from rollweave_service.messages import EngineRequest, EngineStatus

START_S = 300.0
"""Maximum seconds until a registered engine's first answer, for which it may have to
compile. After that the core retries.
"""

BackendFactory = Callable[[EngineRequest, str, OnRetry], Generates]
"""Makes the backend of a registered engine from its registration, its name and a
callback for failed attempts to reach it.
"""

PRIVATE_NETWORKS = Hosts.parse(
    ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
    field="hosts",
)
"""This host and private networks: where engines may be that clients register, unless
`rollweave serve --engine-host` says otherwise.
"""

RESOLVE_S = 2.0
"""Maximum seconds to resolve the name of a new engine's host. Each later connection is
checked again.
"""

REMOVED = "removed"
"""Status of a registered engine that failed too often."""

NAMED_ENGINES = 3
"""Maximum number of engines that one rollout's status names."""

MAX_ENGINES = 1024
"""Maximum number of engines that are registered at one time."""


def backend_factory(config: RunConfig, hosts: Hosts = PRIVATE_NETWORKS) -> BackendFactory:
    """Return the factory for engines on `hosts`, which serve the model of `config`, of
    any architecture.
    """
    directory = folder(config.model.path or "")

    def make_backend(request: EngineRequest, name: str, failed: OnRetry) -> Generates:
        try:
            vocab = vocab_size(directory)
        except ConfigError as error:
            raise EngineError(f"{name} cannot be used: {error}") from error
        spec = HttpSpec(
            name=name,
            url=request.address,
            vocab=vocab,
            dialect=request.dialect,
            slots=request.slots,
            kv_tokens=request.kv_tokens,
            token=request.token,
        )
        return HttpEngine(spec, start_s=START_S, on_retry=failed, hosts=hosts)

    return make_backend


def vocab_size(directory: Path) -> int:
    """Return the number of token ids that a model can sample, from its config.json.

    Raises ConfigError if the file does not define it.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{directory / 'config.json'} must define a vocab_size of at least 1, got {size!r:.100}"
        )
    return size


_Tokens = dict[str, str]


class EngineTokens:
    """The tokens of registered engines, by engine id.

    Changes raise DiskError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it is damaged."""
        self._path = path
        try:
            self._tokens = (
                msgspec.json.decode(path.read_bytes(), type=_Tokens) if path.exists() else {}
            )
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{path} must hold the tokens of registered engines: {type(error).__name__}"
            ) from error

    def get(self, engine_id: str) -> str:
        """Return an engine's token, or "" if it has none."""
        return self._tokens.get(engine_id, "")

    def put(self, engine_id: str, token: str) -> None:
        """Store an engine's token; an empty one removes the entry."""
        if token != self.get(engine_id):
            others = {name: value for name, value in self._tokens.items() if name != engine_id}
            self._write({**others, engine_id: token} if token else others)

    def _write(self, tokens: _Tokens) -> None:
        replace_file(self._path, msgspec.json.encode(tokens), mode=0o600)
        self._tokens = tokens


async def check_engine_host(hosts: Hosts, address: str) -> None:
    """Raise ConfigError if the service must not connect to the host in `address`.

    A name that cannot be resolved now passes: every connection is checked again.
    """
    host = host_of(address)
    if hosts.admits_name(host):
        return
    addresses = [host] if ip_address(host) else []
    if not addresses:
        try:
            async with asyncio.timeout(RESOLVE_S):
                entries = await asyncio.get_running_loop().getaddrinfo(
                    host, None, type=socket.SOCK_STREAM
                )
            addresses = sorted({str(entry[4][0]) for entry in entries})
        except (OSError, UnicodeError, TimeoutError):
            return
    if refused := [ip for ip in addresses if not hosts.admits_ip(ip)]:
        raise ConfigError(
            "address must be on a host that --engine-host of the service admits, got "
            f"{host!r} at {', '.join(refused)}"
        )


class EngineRegistry:
    """Registers, withdraws and lists engines. `warn` reports a problem of an engine."""

    def __init__(
        self,
        world: WorldPort,
        *,
        jobs: JobStore,
        tokens: EngineTokens,
        warn: Callable[[Warn], None],
    ) -> None:
        self._world, self._jobs, self._tokens, self._warn = world, jobs, tokens, warn
        self._requests: dict[EngineId, EngineRequest] = {}
        # engines whose registration, or withdrawal, the core has not handled yet
        self._joining: set[EngineId] = set()
        self._withdrawing: set[EngineId] = set()
        self._next_number = 0
        self._problems: dict[str, str] = {}  # engine → its latest problem
        self._unreachable: dict[EngineId, str] = {}  # engine → the reason that was logged last

    def restore(self) -> None:
        """Register again what the job database lists. Call once the world runs."""
        for name, blob in self._jobs.engines():
            engine_id = EngineId(name)
            try:
                request = msgspec.json.decode(blob, type=EngineRequest)
            except msgspec.ValidationError as error:  # it was stored under other rules
                self._jobs.erase_engine(engine_id)
                self._forget(engine_id)
                self._warn(
                    Warn(component=engine_id, message=f"its registration is discarded: {error}")
                )
            else:
                self._add(engine_id, msgspec.structs.replace(request, token=self._tokens.get(name)))

    def request_of(self, engine_id: EngineId) -> EngineRequest | None:
        """Return the registration of an engine; None for a local one."""
        return self._requests.get(engine_id)

    def register(self, request: EngineRequest) -> EngineStatus:
        """Use this engine from now on. If its address is already registered with the
        same settings, nothing changes.

        With other settings the engine is replaced: turns under way end under the former
        settings, and new turns wait for the new ones. Raises ClosedError and FullError.
        """
        if self._world.closed:
            raise ClosedError("the service is shutting down")
        for engine_id, known in list(self._requests.items()):
            if known.address != request.address:
                continue
            if known == request and self._exists(engine_id):
                return self._status(engine_id)
            if self._exists(engine_id):
                self._withdraw(engine_id, drain=True)
            else:  # the engine failed too often, and was removed
                self._forget(engine_id)
        registered = filter(is_registered, self._world.state.engines)
        if len({*self._requests, *registered}) >= MAX_ENGINES:
            raise FullError(f"at most {MAX_ENGINES} engines may be registered; withdraw one first")
        engine_id = EngineId(f"x{self._next_number}")
        self._tokens.put(engine_id, request.token)
        self._jobs.add_engine(engine_id, as_json(msgspec.structs.replace(request, token="")))
        self._add(engine_id, request)
        return self._status(engine_id)

    def withdraw(self, engine_id: EngineId, *, drain: bool, force: bool = False) -> None:
        """Withdraw the engine: when its turns are done (`drain`), or at once.

        Raises UnknownError, and ConflictError for the last engine that serves, unless
        `force` is given.
        """
        if engine_id not in self._world.state.engines and engine_id not in self._requests:
            raise UnknownError(f"no engine has the id {engine_id!r:.100}")
        if not force and [engine.id for engine in self.serving()] == [engine_id]:
            raise ConflictError(
                f"the engine must not be the last one that serves, got {engine_id}: register "
                "another one and wait until it serves, or give force=true to let rollouts wait "
                "for an engine"
            )
        self._withdraw(engine_id, drain=drain)

    def statuses(self) -> list[EngineStatus]:
        """List all engines, local ones first.

        One that failed too often is `removed` until it is registered again.
        """
        return [self._status(engine_id) for engine_id in self._known()]

    def serving(self) -> list[CoreEngine]:
        """Return the engines that accept turns and are not being withdrawn."""
        engines = self._world.state.engines.values()
        return [
            engine for engine in engines if _serves(engine) and engine.id not in self._withdrawing
        ]

    def waits_for(self) -> str:
        """Return why rollouts wait; "" if an engine serves."""
        if self.serving():
            return ""
        problems = [
            f"{engine_id}: {self._problems.get(engine_id, 'starting')}"
            for engine_id in self._known()[:NAMED_ENGINES]
        ]
        return "no engine serves" + (
            f" ({'; '.join(problems)})" if problems else ": none is registered"
        )

    # Problems.

    def note_warning(self, warning: Warn) -> None:
        """Remember a warning about an engine as its latest problem."""
        if warning.component in self._known():
            self._problems[warning.component] = warning.message

    def note_unreachable(
        self, engine_id: EngineId, reason: str, attempts: int, next_s: float
    ) -> None:
        """Note a failed attempt to reach a registered engine that has not answered yet.

        Warns if the reason is new. The next attempt follows after `next_s` seconds.
        """
        if engine_id not in self._requests:
            return
        if self._unreachable.get(engine_id) != reason:
            self._unreachable[engine_id] = reason
            address = self._requests[engine_id].address
            self._warn(
                Warn(
                    component=engine_id,
                    message=f"unreachable at {address}: {reason}; it will be tried again",
                )
            )
        times = "once" if attempts == 1 else f"{attempts} times"
        self._problems[engine_id] = f"unreachable: {reason}, tried {times}, next in {next_s:g} s"

    # One engine.

    def _known(self) -> list[EngineId]:
        return [*dict.fromkeys((*self._world.state.engines, *self._requests))]

    def _exists(self, engine_id: EngineId) -> bool:
        return engine_id in self._world.state.engines or engine_id in self._joining

    def _add(self, engine_id: EngineId, request: EngineRequest) -> None:
        self._requests[engine_id] = request
        self._next_number = max(self._next_number, int(engine_id.removeprefix("x")) + 1)
        self._joining.add(engine_id)
        event = EngineRegistered(engine=EngineSlot(id=engine_id))
        self._world.post(event, functools.partial(self._joining.discard, engine_id))

    def _withdraw(self, engine_id: EngineId, *, drain: bool) -> None:
        self._forget(engine_id)
        self._withdrawing.add(engine_id)
        event = EngineWithdrawn(engine_id=engine_id, drain=drain)
        self._world.post(event, functools.partial(self._withdrawing.discard, engine_id))

    def _forget(self, engine_id: EngineId) -> None:
        self._jobs.remove_engine(engine_id)
        self._tokens.put(engine_id, "")
        self._requests.pop(engine_id, None)
        self._problems.pop(engine_id, None)
        self._unreachable.pop(engine_id, None)

    def _status(self, engine_id: EngineId) -> EngineStatus:
        engine = self._world.state.engines.get(engine_id)
        request = self._requests.get(engine_id)
        known: dict[str, Any] = {"status": "starting" if self._exists(engine_id) else REMOVED}
        if engine is not None:
            known = {
                "status": engine.status.value,
                "version": engine.version,
                "slots": engine.abilities.max_slots,
                "running": len(engine.active),
                "draining": engine.draining,
                "restarts": engine.failures.restarts,
            }
        serves = engine is not None and _serves(engine)
        return EngineStatus(
            id=engine_id,
            address=request.address if request is not None else "",
            reason="" if serves else self._problems.get(engine_id, ""),
            **known,
        )


def is_registered(engine_id: EngineId) -> bool:
    """Return whether a client registered the engine; False for a local process."""
    return engine_id.startswith("x")


def _serves(engine: CoreEngine) -> bool:
    return engine.status is CoreEngineStatus.SERVING and not engine.departing
