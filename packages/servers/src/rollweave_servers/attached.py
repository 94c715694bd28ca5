"""Servers that a user has started with our plug-in, one of which an engine leases.

Invariants: such a server is never ended or signaled from here; what it must be is
checked before it is leased; one engine of one run uses it at a time, since all its
requests carry the token of the lease (`plugin/rollweave_leases.py`); the lease is
renewed for as long as the engine lives, whatever else it does.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from rollweave.engine.clients.transport import read_bounded
from rollweave.io.loop_thread import run_apart
from rollweave.schema.base import as_json
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.serving import EngineSpec
from rollweave_servers.process import settings_of

PROTOCOL = 1
"""Version of the plug-in's routes, as in `plugin/rollweave_leases.py`."""

ABOUT, LEASE, RELEASE = "/rollweave/about", "/rollweave/lease", "/rollweave/release"

HEALTH = "/health"
"""The route that renews the lease, as any with its token does."""

RENEW_S = 5.0
"""Seconds between two renewals of a lease, which lasts for 30 s: an engine that maps,
verifies and loads a large model sends no other request for minutes.
"""

CALL_S = 10.0
"""Maximum seconds for one of these calls."""

ANSWER_BYTES = 1 << 20
"""Maximum number of bytes of an answer to one of these calls."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
"""Seconds until the servers are tried again, doubled each time, up to the maximum."""

LEASE_SHARE = 0.8
"""Share of an engine's time to start in which it leases a server."""

ERROR_CHARS = 300
"""Maximum number of characters of a server's message in an error."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
)
"""Values of a model's config.json by which another model is recognized."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """A server, as the plug-in describes it. `unreadable` is why it cannot read the
    memory of this process, and `holder` the engine that leases it; "" if there is none.
    """

    protocol: int
    version: str = ""
    model: str = ""
    architectures: tuple[str, ...] = ()
    sizes: dict[str, int | bool] = {}
    dtype: str = ""
    context: int = 0
    logprobs: str = ""
    slots: int = 0
    policy: str = ""
    chunked_prefill: bool = False
    kv_tokens: int = 0
    prefix_cache: bool = False
    device: str = ""
    transfer: str = ""
    grammars: str = ""
    constrains_reasoning: bool = False
    preempts: bool = False
    deterministic: bool = False
    replicas: int = 1
    routes: tuple[str, ...] = ()
    holder: str = ""
    unreadable: str = ""


class Lease(msgspec.Struct, frozen=True):
    token: str


Rule = tuple[str, object, object, bool]
"""The name of what a server must have, what it must be, what it is, and whether that is
enough.
"""


class LeasedKind(Protocol):
    """The differences between the kinds of servers that can be leased. `name` is its
    name in errors, `leased_routes` are those that it must have.
    """

    name: str
    leased_routes: tuple[str, ...]

    def rules(self, about: About, spec: EngineSpec) -> Iterator[Rule]:
        """Yield what a server of this kind must be beside what all must be."""


class UnreachableError(EngineError):
    """A server does not answer, or another engine leases it: this may change."""


class AttachedServer:
    """The lease of the server at `url`, of the kind `name`; `token` is that of the
    lease.
    """

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        *,
        preempts: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name, self.url, self.token, self._sleep = name, url, token, sleep
        self.preempts = preempts
        self._given_up = asyncio.Event()

    def on_ready(self) -> None:
        """Do nothing: the server is its owner's."""

    async def ended(self) -> str:
        """Renew the lease until the engine gives the server up, then end it. That the
        server has ended shows in its health alone.
        """
        renewing = asyncio.create_task(self._renew(), name="renew the lease")
        try:
            await self._given_up.wait()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(EngineError):
            await _call(self._name, self.url, RELEASE, self.token, {})
        return f"{self._name} at {self.url} was given up"

    async def _renew(self) -> None:
        """Renew the lease again and again. A call that fails has no consequence: the
        next one follows, and the engine's requests show the loss of the server.
        """
        while True:
            await self._sleep(RENEW_S)
            with contextlib.suppress(EngineError):
                await _call(self._name, self.url, HEALTH, self.token)

    def kill(self) -> None:
        """Give the server up, which keeps running. This does not wait."""
        self._given_up.set()


async def attach(kind: LeasedKind, spec: EngineSpec) -> AttachedServer:
    """Lease one of the servers of this engine, and wait until one is free.

    Raises EngineError if one of them cannot be this engine, or if none is free in time.
    """
    settings, trouble = settings_of(spec), dict[str, str]()
    pause_s, limit_s = FIRST_PAUSE_S, LEASE_SHARE * settings.start_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                for url in settings.addresses:
                    try:
                        return await _lease(kind, url, spec)
                    except UnreachableError as error:
                        trouble[url] = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
    reasons = "; ".join(f"{url}: {reason}" for url, reason in trouble.items())
    raise EngineError(
        f"no {kind.name} server was free within {limit_s:g} s: {reasons or 'no answer'}"
    )


async def _lease(kind: LeasedKind, url: str, spec: EngineSpec) -> AttachedServer:
    settings, name = settings_of(spec), kind.name
    about = await _suitable(kind, url, spec)
    holder = f"{settings.holder} {spec.id}"
    answer = await _call(name, url, LEASE, settings.token, {"holder": holder}, may_conflict=True)
    try:
        token = msgspec.json.decode(answer, type=Lease).token
        return AttachedServer(name, url, token, preempts=about.preempts)
    except msgspec.DecodeError:
        other = about.holder or "another engine"
        raise UnreachableError(f"it is leased by {other}") from None


async def _suitable(kind: LeasedKind, url: str, spec: EngineSpec) -> About:
    """Return what a server is, which can be this engine. Raises as `describe` does, and
    EngineError if it cannot.
    """
    about = await describe(kind.name, url, settings_of(spec).token)
    if problem := objection(kind, about, spec):
        raise EngineError(f"{kind.name} at {url} {problem}")
    return about


async def describe(name: str, url: str, token: str) -> About:
    """Ask a server of the kind `name` what it is, and whether it reads the memory of
    this process.

    Raises UnreachableError if it does not answer, else EngineError.
    """
    with _sample() as sample:
        answer = await _call(name, url, ABOUT, token, sample)
    try:
        return msgspec.json.decode(answer, type=About)
    except msgspec.DecodeError as error:
        raise EngineError(f"{name} at {url} must have Rollweave's plug-in: {error}") from error


@contextlib.contextmanager
def _sample() -> Iterator[dict[str, str]]:
    """Hold random bytes in memory that published weights would have, and yield their
    location and digest.
    """
    content = secrets.token_bytes(4096)
    with open(os.memfd_create("sample", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(content)
        location = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield {"location": location, "sha256": hashlib.sha256(content).hexdigest()}


def objection(kind: LeasedKind, about: About, spec: EngineSpec) -> str:
    """Return why a server cannot be this engine, as a rule and the value that breaks
    it; "" if it can.
    """
    if about.protocol != PROTOCOL:
        return f"must have version {PROTOCOL} of Rollweave's plug-in, got version {about.protocol}"
    if lacking := [route for route in kind.leased_routes if route not in about.routes]:
        return f"must have the routes {', '.join(lacking)}, got version {about.version} without"
    rules: tuple[Rule, ...] = (
        *_sizes(about, Path(spec.model)),
        ("--dtype", spec.dtype, about.dtype, about.dtype == spec.dtype),
        *kind.rules(about, spec),
        ("prefix caching", spec.prefix_cache, about.prefix_cache, _prefixes(about, spec)),
        at_least("a KV cache", spec.kv_tokens, about.kv_tokens),
    )
    for name, wanted, actual, kept in rules:
        if not kept:
            return f"must have {name} {_shown(wanted)}, got {_shown(actual)}"
    if about.unreadable:
        return (
            "must be on the host of its engine's process, under the same user, and read its "
            "memory, where the weights are (for a server on another host, start `rollweave host` "
            f"there), got {about.unreadable:.200}"
        )
    return ""


def _sizes(about: About, model: Path) -> Iterator[Rule]:
    """Yield the values by which the server's model differs from the run's."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{model}/config.json: {error}") from error
    own = list(config.get("architectures") or about.architectures)
    served = list(about.architectures)
    yield "a model of architecture", ", ".join(own), ", ".join(served), own == served
    text = config.get("text_config", config)
    for name in SIZES:
        wanted, there = text.get(name), about.sizes.get(name)
        if wanted is not None and there is not None:
            yield f"a model with {name}", wanted, there, wanted == there


def _prefixes(about: About, spec: EngineSpec) -> bool:
    return about.prefix_cache or not spec.prefix_cache


def at_least(name: str, wanted: int, actual: int) -> Rule:
    """Return the rule that a number must not be below another."""
    return name, f"of at least {wanted}", actual, actual >= wanted


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


async def _call(
    name: str,
    url: str,
    path: str,
    token: str,
    body: dict[str, Any] | None = None,
    *,
    may_conflict: bool = False,
) -> bytes:
    """Call a route of the server, by GET if there is no `body`, and return its answer.
    Raises UnreachableError if the server does not answer, else EngineError.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session,
            session.request(
                "GET" if body is None else "POST",
                url + path,
                data=None if body is None else as_json(body),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                allow_redirects=False,
            ) as response,
        ):
            answer = await read_bounded(response, ANSWER_BYTES)
    except TimeoutError:
        raise UnreachableError(f"it did not answer within {CALL_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    if response.status == 200 or (may_conflict and response.status == 409):
        return answer
    if response.status in (401, 403):
        raise EngineError(f"{name} at {url} must accept the token that is given, got a refusal")
    text = answer[:ERROR_CHARS].decode(errors="replace")
    raise EngineError(
        f"{name} at {url} must have Rollweave's plug-in, got status {response.status}: {text}"
    )


def check_servers(kind: LeasedKind, spec: EngineSpec) -> list[About]:
    """Check that each server of a group can be an engine with these settings, and is
    not leased by another run. Raises ConfigError, whose text is the broken rule.
    """

    async def ask() -> list[About]:
        settings, servers = settings_of(spec), list[About]()
        for url in settings.addresses:
            try:
                about = await _suitable(kind, url, spec)
            except UnreachableError as error:
                raise EngineError(f"{kind.name} at {url} must answer, got {error}") from error
            if about.holder and not about.holder.startswith(f"{settings.holder} "):
                raise EngineError(
                    f"{kind.name} at {url} must be free, got a lease of {about.holder}"
                )
            servers.append(about)
        return servers

    try:
        return run_apart(ask())
    except EngineError as error:
        raise ConfigError(str(error)) from error
