"""The interface by which a program runs its own roles (RollArt §5, Listing 2), on this
machine or on the hosts of a `[cluster]`.

A call blocks its thread; an event loop on another thread starts the workers and waits
for them. Invariant: after `close`, with which the `with` block ends, no process of the
cluster is left. A cluster that is still open when the program exits is closed then.
"""

import atexit
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import __main__
from rollweave.io.loop_thread import LoopThread
from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts.serverless import platform
from rollweave.runtime.roles.role import Role, RoleSpec, WorkerResources
from rollweave.runtime.roles.serving import constructor_codec
from rollweave.runtime.roles.worker import (
    DEFAULT,
    Declaration,
    Worker,
    check_worker,
    declarations,
)
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.config.loading import validated
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import did_you_mean

W = TypeVar("W", bound=Worker)

EXIT_S = 10.0
"""Maximum seconds by which an open cluster delays the exit of the program. Workers that
are left then end because their controller is gone.
"""


class Cluster(Generic[W]):
    """The workers of one role, which are called as one object: each registered method
    of the class `worker` is a method of the cluster.

    ``` with Cluster(MyWorker, 2) as workers: results = workers.method(argument) ```

    A call raises TypeError for arguments that do not fit the parameters of the method
    or cannot be sent, and `WorkerError` if the method raised. It raises
    `WorkerLostError` if the process or host of a worker is lost, or if a worker did not
    answer in time; all workers then end. Any thread may call.
    """

    def __init__(
        self,
        worker: type[W],
        resources: int | Sequence[WorkerResources] = 1,
        *,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        cluster: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        start_s: float = 300.0,
        directory: str | os.PathLike[str] = "runs",
    ) -> None:
        """Start the workers. Their ranks are in the order of `resources`, or
        `resources` is the number of workers without GPUs. Each is constructed with
        `arguments`.

        `cluster` has the settings of the section `[cluster]` of a run
        (`docs/CLUSTER.md`); without it, the workers run on this machine. The start
        takes at most `start_s` seconds; a call takes at most `timeout_s` unless its
        method is registered with another limit. The output of the workers is in
        `directory`/`name`/logs; `name` is by default that of the class, in lower case.

        Raises ConfigError for wrong settings, TypeError for arguments that do not suit
        the constructor, and `WorkerError` or `WorkerLostError`, as a call does, if
        workers cannot be constructed.
        """
        self.name = name or worker.__name__.lower()
        self._declarations = _declarations(worker)
        spec = RoleSpec(
            name=self.name,
            reference=_reference(worker),
            resources=_resources(resources),
            arguments=constructor_codec(worker).encode((), arguments or {}),
            timeout_s=_seconds("timeout_s", timeout_s),
            start_s=_seconds("start_s", start_s),
        )
        _check_affinities(self._declarations, spec.resources)
        run = RunDir((Path(directory) / self.name).absolute())
        self.logs = run.logs
        """The folder with the output of the workers."""
        self.world_size = len(spec.workers)
        """The number of workers."""
        settings = _cluster(cluster)
        self._closed = False
        self._loop = LoopThread(f"cluster {self.name}")
        self._loop.start()
        try:
            self._role = self._loop.call(_opened(spec, worker, settings, run))
        except BaseException:
            self._loop.stop()
            raise
        self._owner = os.getpid()
        atexit.register(self._close_at_exit)

    def close(self) -> None:
        """End the workers, in order if they can. A second call does nothing."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            try:
                self._loop.call(self._role.close())
            finally:
                self._loop.stop()

    def _close_at_exit(self) -> None:
        """Close the cluster in limited time.

        A fork of the program has no event loop, and leaves the cluster to its owner.
        """
        if not self._closed and os.getpid() == self._owner:
            self._closed = True
            with contextlib.suppress(TimeoutError):
                self._loop.call(self._role.close(), within_s=EXIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        declared: Mapping[str, Declaration] = self.__dict__.get("_declarations", {})
        if name not in declared:
            raise AttributeError(f"no method {name!r} is registered{did_you_mean(name, declared)}")

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                raise RuntimeError(f"{name}() must be called before the cluster is closed")
            return self._loop.call(self._role.call(name, args, kwargs))

        return call


async def _opened(
    spec: RoleSpec, worker: type[Worker], cluster: ClusterConfig | None, run: RunDir
) -> Role:
    role = Role(spec, worker, cluster, run)
    try:
        await role.open()
    except BaseException:
        await role.close()
        raise
    return role


def _declarations(worker: type[Worker]) -> dict[str, Declaration]:
    """Return the registered methods of a class. Raises ConfigError for wrong ones."""
    check_worker(worker)
    declared = declarations(worker)
    for name, declaration in declared.items():
        method = f"{worker.__name__}.{name}"
        if hasattr(Cluster, name) or name in ("name", "logs", "world_size"):
            raise ConfigError(f"{method} must have another name: {name} is one of Cluster's own")
        if declaration.serverless:
            platform(f"{method} with register_serverless")
    return declared


def _reference(worker: type[Worker]) -> str:
    """Return the reference by which processes find a class. Raises ConfigError if they
    cannot find it.
    """
    name = worker.__qualname__
    if "<locals>" in name:
        raise ConfigError(f"worker must be defined at the top level of a module, got {name}")
    if worker.__module__ != "__main__":
        return f"{worker.__module__}:{name}"
    if (spec := __main__.__spec__) is not None:  # python -m
        return f"{spec.name}:{name}"
    file = getattr(__main__, "__file__", None)
    if file is None:
        raise ConfigError(f"worker must be defined in a file, got {name} of an interactive session")
    path = Path(file).absolute()
    if path.is_relative_to(Path.cwd()):  # hosts may have it under another path
        path = Path(path.relative_to(Path.cwd()))
    return f"./{path}:{name}" if not path.is_absolute() else f"{path}:{name}"


def _resources(resources: int | Sequence[WorkerResources]) -> tuple[WorkerResources, ...]:
    needs = (
        (WorkerResources(workers=resources),) if isinstance(resources, int) else tuple(resources)
    )
    for one in needs:
        if not isinstance(one, WorkerResources):
            raise ConfigError(f"resources must be of class WorkerResources, got {one!r:.100}")
        if one.workers < 1:
            raise ConfigError(f"resources: workers must be at least 1, got {one.workers}")
        if one.devices < 0:
            raise ConfigError(f"resources: devices must be at least 0, got {one.devices}")
        if one.fallback and not one.hardware:
            raise ConfigError(f"resources: fallback needs hardware, got {one.fallback} alone")
    if not needs:
        raise ConfigError("resources must be of at least one worker, got none")
    return needs


def _check_affinities(
    declared: Mapping[str, Declaration], resources: Iterable[WorkerResources]
) -> None:
    """Raise ConfigError if the hardware of a domain is not among that of `resources`.

    `resources` without any hardware are fine: a program also runs where all hosts are
    alike.
    """
    offered = dict.fromkeys(name for one in resources for name in one.pools)
    for method, declaration in declared.items():
        for tag, hardware in declaration.affinity.items():
            if offered and hardware not in offered:
                where = "default" if tag == DEFAULT else f"domain {tag}"
                raise ConfigError(
                    f"{method}: hardware of {where} must be one of resources "
                    f"({', '.join(offered)}), got {hardware!r}"
                    f"{did_you_mean(hardware, offered)}"
                )


def _cluster(settings: Mapping[str, Any] | None) -> ClusterConfig | None:
    if settings is None:
        return None
    return validated(ClusterConfig, dict(settings), "argument cluster")


def _seconds(field: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{field} must be positive, got {value}")
    return value
