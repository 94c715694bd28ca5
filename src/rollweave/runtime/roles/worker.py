"""The base class of workers, and the declarations of their methods (RollArt §5.2,
Listing 1).

A worker is an object in a process that a `Cluster` starts. Only its registered methods
can be called from the controller.
"""

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rollweave.schema.address import parse_url
from rollweave.schema.errors import ConfigError

if TYPE_CHECKING:
    from rollweave.train.distributed import RankGroup

Mode = Literal["execute_all", "execute_each", "execute_one", "execute_first"]

MODES: tuple[str, ...] = typing.get_args(Mode)

TAG = "tag_name"
"""Parameter of a method with `hw_mapping` that names the domain of a call."""

DEFAULT = "default"
"""Key of the hardware of all domains that have no other."""

URL_S = 60.0
"""Maximum seconds of a call of a URL, unless the method is registered with a limit."""

GRACE_S = 10.0
"""Seconds after that limit until the worker that calls the URL counts as lost."""

_DECLARATION = "_rollweave_declaration"

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """The way in which the controller calls a method. The worker passes a call on to
    the `url`, if there is one, with the token in the environment variable `token_env`.
    """

    mode: Mode | None = None
    timeout_s: float | None = None
    beside: bool = False
    affinity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    serverless: bool = False
    url: str = ""
    token_env: str = ""

    @property
    def called(self) -> Mode:
        """The declared mode, or the default."""
        return self.mode or ("execute_one" if self.affinity or self.url else "execute_all")

    @property
    def limit_s(self) -> float | None:
        """Maximum seconds in which a worker answers; None if the caller decides."""
        return (self.timeout_s or URL_S) + GRACE_S if self.url else self.timeout_s


def register(
    *, mode: Mode | None = None, timeout_s: float | None = None, beside: bool = False
) -> Callable[[F], F]:
    """Make a worker's method callable from the controller.

    With mode "execute_all", the default, every rank gets the same arguments, and the
    result is a list in the order of ranks. With "execute_each", every argument is a
    sequence with one element for each rank, and the result is such a list, too. With
    "execute_one", the worker with the fewest calls in progress executes the call; with
    "execute_first", the first rank does. The result is then that of the method.

    With `hw_mapping`, the mode applies to the ranks with the hardware of the call's
    domain, and "execute_one" is the default.

    A call takes at most `timeout_s` seconds, by default as many as the `Cluster`
    allows. A worker executes one call after the other, except those of a method with
    `beside`, which run at once, on separate threads.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")

    def declare(method: F) -> F:
        return _declared(method, mode=mode, timeout_s=timeout_s, beside=beside)

    return declare


def register_serverless(
    *, url: str = "", token_env: str = "", timeout_s: float | None = None
) -> Callable[[F], F]:
    """Make a worker's method callable from the controller, and have it executed on Ray
    Serve in place of the workers (RollArt §5.2).

    There are as many instances of the class there as there are calls at once, and none
    without calls. Any of them executes a call, so the method must not depend on what
    others have left in the object. The result is that of the method. A call takes at
    most `timeout_s` seconds, by default as many as the `Cluster` allows, with the
    start of an instance.

    With `url`, the platform there executes the method in place of Ray Serve: the worker
    with the fewest calls in progress passes a call on (`UrlMethod` of
    `runtime/roles/url_methods`), within `URL_S` seconds by default. The environment
    variable `token_env` has the bearer token of the platform.
    """
    if token_env and not url:
        raise ValueError(f"token_env must be left out without url, got {token_env!r}")
    url = parse_url(url) if url else ""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")

    def declare(method: F) -> F:
        if not url:
            return _declared(method, serverless=True, timeout_s=timeout_s)
        return _declared(method, url=url, token_env=token_env, beside=True, timeout_s=timeout_s)

    return declare


def hw_mapping(hw_affinity: Mapping[str, str]) -> Callable[[F], F]:
    """Route the calls of a method by their argument `tag_name` to the workers whose
    hardware suits that domain (RollArt §5.2).

    `hw_affinity` maps domains to hardware; "default" stands for all other domains. If
    no worker has that hardware, all workers are suitable. One of the suitable workers
    executes the call, unless the method is registered with another mode.
    """

    def declare(method: F) -> F:
        if TAG not in inspect.signature(method).parameters:
            raise TypeError(f"{method.__qualname__} must have a parameter {TAG} for hw_mapping")
        return _declared(method, affinity=dict(hw_affinity))

    return declare


def declarations(worker: type) -> dict[str, Declaration]:
    """Return the registered methods of a class."""
    declared: dict[str, Declaration] = {}
    for name in dir(worker):
        declaration = getattr(inspect.getattr_static(worker, name), _DECLARATION, None)
        if isinstance(declaration, Declaration):
            declared[name] = declaration
    return declared


def check_worker(worker: object) -> None:
    """Raise ConfigError for what is no class of workers, or declares what is
    impossible.
    """
    if not (isinstance(worker, type) and issubclass(worker, Worker)):
        raise ConfigError(f"worker must be a subclass of Worker, got {worker!r:.100}")
    for name, declaration in declarations(worker).items():
        method = f"{worker.__name__}.{name}"
        if inspect.iscoroutinefunction(inspect.getattr_static(worker, name)):
            raise ConfigError(f"{method} must not be async: its worker has no event loop")
        if declaration.affinity and declaration.called == "execute_each":
            raise ConfigError(f"{method} must not have both hw_mapping and mode execute_each")
        elsewhere = declaration.serverless or declaration.url
        if elsewhere and (declaration.affinity or declaration.mode):
            raise ConfigError(
                f"{method} must not have register_serverless and another declaration: it is "
                "executed by no worker"
            )


def _declared(method: F, **changes: Any) -> F:
    """Change the declaration of a method. The two decorators may be in any order."""
    former: Declaration = getattr(method, _DECLARATION, Declaration())
    setattr(method, _DECLARATION, dataclasses.replace(former, **changes))
    return method


class Ranks(Protocol):
    """Lets the workers of a role find each other."""

    @property
    def address(self) -> str:
        """The address of this host."""

    def announce(self, store: str) -> None:
        """Report the address of the store that rank 0 has opened."""

    def store(self) -> str:
        """Wait for that address."""


class Worker:
    """The base of all workers: subclass it, and register methods.

    The constructor runs in the worker's process, with the arguments of the `Cluster`.
    These attributes are set before. A worker that is made without a `Cluster` is the
    only one of its role.
    """

    rank: int = 0
    """Rank of the worker, from 0."""
    world_size: int = 1
    """Number of workers."""
    hardware: str = ""
    """Hardware that was requested for it and that it has; "" if none was requested."""
    devices: tuple[int, ...] = ()
    """Its GPUs, as the host numbers them. It sees no others, and numbers them from 0.
    """

    _ranks: Ranks | None = None

    def close(self) -> None:
        """Release what the worker holds; called once before its process ends in
        order.
        """

    def join_ranks(self, device: str | None = None) -> "RankGroup":
        """Join the other workers in a process group of `torch.distributed`.

        All of them must call it, in the constructor or in a method with mode
        "execute_all". Tensors on a GPU go through NCCL, all others through Gloo.
        `device` is as in `model.device`; by default it is the first of the worker's
        GPUs, or the CPU if it has none.
        """
        from rollweave.io.machine import device_named
        from rollweave.train.distributed import join_ranks, join_store, open_store

        chosen = device_named(device or ("cuda" if self.devices else "cpu"))
        address = address_of(self)
        if self.rank == 0:
            store, where = open_store(address)
            if self._ranks is not None:
                self._ranks.announce(where)
        else:
            assert self._ranks is not None, "one of several workers has a process"
            store = join_store(self._ranks.store())
        return join_ranks(self.rank, self.world_size, store=store, device=chosen, address=address)


def address_of(worker: Worker) -> str:
    """Return the address of a worker's host by which other hosts reach it."""
    return worker._ranks.address if worker._ranks is not None else "127.0.0.1"
