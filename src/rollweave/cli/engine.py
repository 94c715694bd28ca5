"""`rollweave engine`: serves the embedded engine over HTTP, outside a run."""

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from rich.markup import escape

from rollweave.cli.console import err, out
from rollweave.cli.fleet import Joining, agent_for
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.clients.remote_prefill import RemotePrefill
from rollweave.engine.clients.server import EngineServer
from rollweave.engine.coserving.offer import Offer
from rollweave.io import hub
from rollweave.io.child import child_of
from rollweave.io.extras import command
from rollweave.io.http.guard import Guard, kept_token
from rollweave.io.http.listening import ADDRESS, Access, listening
from rollweave.io.locked_folders import temporary_folder
from rollweave.io.machine import describe_computation, gpu_memory
from rollweave.io.reading import read_json
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.front import ServingFront
from rollweave.runtime.hosts.agent import HostAgent, Permissions
from rollweave.runtime.hosts.hosts import devices as gpus
from rollweave.runtime.signals import on_ending_signals
from rollweave.schema.address import parse_address
from rollweave.schema.errors import ConfigError, EngineError, EngineLostError, HostError
from rollweave.schema.hosts import JOIN_S
from rollweave.schema.serving import EngineSpec, LendSpec
from rollweave.weights.checkpoint import read_shape

SOCKET_BYTES = 104
"""Maximum length of a Unix socket's path on any system."""

START_S = 300.0
"""Maximum seconds to read a checkpoint: a large checkpoint on a slow disk takes
minutes.
"""

DTYPES = ("float32", "bfloat16", "float16")
"""Number formats that the embedded engine computes in."""

REPLY_S = 60.0
"""Maximum seconds to read the engine's state, which waits for the end of a step."""

SHUTDOWN_S = 1.0
"""Maximum seconds for the end of requests that are under way when the engine ends."""

TAKE_BACK = signal.SIGUSR1
"""Signal by which an operator takes a lent engine back."""

RETURN_S = 2.0
"""Maximum seconds for a run to return an engine that is taken back. The engine then
leaves the run in any case.
"""

OBSERVE_S = 1.0
"""Seconds between two looks at the load of an engine that is lent."""

REPORT_S = 10.0
"""Maximum seconds between two reports of the load to the run."""

RESOURCE = "serving"
TTFT_MS, TPOT_MS = 500.0, 150.0
"""Defaults of the options of `--lend`."""

MODULE = "rollweave.runtime.entrypoints.engine"
"""Program of the engine's process."""

TOKEN_FILE = Path("rollweave") / "engine.token"
"""File with the token of all engines that this user starts, relative to the user's
state directory. `--token-file` names another file.
"""


@dataclass(frozen=True, kw_only=True)
class EngineAccess(Access):
    """The address of an engine's server and the clients that it admits. A generated
    token is kept in `token_file`.
    """

    token_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The part of requests that the engine computes: whole requests, prompts only
    (`prefill_only`), or only the tokens after the prompts, which the engine at
    `prefill_at` computes.
    """

    prefill_at: str | None = None
    prefill_only: bool = False


WHOLE = Phase()


def phase_of(prefill_at: str | None, *, prefill_only: bool) -> Phase:
    """Return the phase that these options describe."""
    if prefill_at is None:
        return Phase(prefill_only=prefill_only)
    if prefill_only:
        raise ConfigError(f"--prefill-at must be given without --prefill-only, got {prefill_at}")
    try:
        return Phase(prefill_at=parse_address(prefill_at, field="--prefill-at"))
    except ValueError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Lending:
    """The run that borrows the engine's slack, and the latencies in milliseconds that
    the engine's own clients are promised. `tpot_ms` is None for an engine that computes
    prompts only. `beside` is the socket of another server that has these clients.
    """

    joining: Joining
    ttft_ms: float
    tpot_ms: float | None
    beside: str = ""


def lending_to(
    controller: str | None,
    *,
    secret_file: Path | None = None,
    resource: str | None = None,
    join_s: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    phase: Phase = WHOLE,
    beside: Path | None = None,
) -> Lending | None:
    """Return the loan that these options describe; None without an address. An option
    that is None takes its default.
    """
    if controller is None:
        for name, value in (
            ("--secret-file", secret_file),
            ("--resource", resource),
            ("--join-s", join_s),
            ("--ttft-ms", ttft_ms),
            ("--tpot-ms", tpot_ms),
            ("--beside", beside),
        ):
            if value is not None:
                raise ConfigError(f"{name} must be given with --lend, got {value} alone")
        return None
    if beside is not None and phase != WHOLE:
        raise ConfigError(f"--beside must be given without options of phases, got {beside}")
    if phase.prefill_only and tpot_ms is not None:
        raise ConfigError(
            f"--tpot-ms must be left out with --prefill-only, which samples no second token, "
            f"got {tpot_ms:g}"
        )
    resource = RESOURCE if resource is None else resource
    if not resource or "=" in resource:
        raise ConfigError(f"--resource must be a name without =, got {resource!r}")
    joining = Joining(
        controller=controller,
        name=f"{socket.gethostname()}-{os.getpid()}",
        address=None,
        secret_file=secret_file,
        labels=[f"{resource}=1"],
        join_s=JOIN_S if join_s is None else join_s,
        option="--lend",
    )
    return Lending(
        joining=joining,
        ttft_ms=TTFT_MS if ttft_ms is None else ttft_ms,
        tpot_ms=None if phase.prefill_only else TPOT_MS if tpot_ms is None else tpot_ms,
        beside="" if beside is None else str(beside.absolute()),
    )


def engine(
    spec: EngineSpec,
    access: EngineAccess,
    lending: Lending | None = None,
    phase: Phase = WHOLE,
    template: Path | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. The file `template` takes the place of the
    checkpoint's chat template.

    Raises ConfigError for wrong options or a wrong checkpoint, and EngineLostError.
    """
    name, checkpoint = spec.model, hub.folder(hub.fetched(spec.model, field="CHECKPOINT"))
    # an agent changes the working directory, and engines exchange KV only if their
    # checkpoints have the same path
    spec = msgspec.structs.replace(spec, model=str(checkpoint.absolute()))
    _check(spec)  # report wrong input before a process starts
    beside = "" if lending is None else lending.beside
    codec = None if beside else _codec(Path(spec.model), template)
    if access.token_file is not None and (access.no_token or access.token_env is not None):
        raise ConfigError("--token-file must be given without --token-env and --no-token")
    token_given = access.check()
    file = access.token_file or _state_directory() / TOKEN_FILE
    token = None if access.no_token else token_given or kept_token(file)
    if token is None:
        notice = "no token: every program of every user on this host has access"
    elif token_given is not None:
        notice = f"token: the value of ${access.token_env}"
    else:
        notice = f"token: {token} (stored in {file})"
    if lending is None:
        asyncio.run(_serve(spec, codec, access, token, notice, phase))
        return
    for name, value in (("--ttft-ms", lending.ttft_ms), ("--tpot-ms", lending.tpot_ms)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be positive and finite, got {value:g}")
    with temporary_folder("rollweave-lending-") as folder:
        path = str(folder / "socket")
        if len(os.fsencode(path)) > SOCKET_BYTES:
            raise ConfigError(
                f"TMPDIR must leave room for a socket's path of {SOCKET_BYTES} bytes, got {path}"
            )
        lend = LendSpec(
            socket=path,
            ttft_s=lending.ttft_ms / 1e3,
            tpot_s=math.inf if lending.tpot_ms is None else lending.tpot_ms / 1e3,
            beside=beside,
        )
        permissions = Permissions(lent=lend.socket)
        agent = agent_for(dataclasses.replace(lending.joining, permissions=permissions))
        lent = msgspec.structs.replace(spec, lend=lend)
        if beside:
            command("check_beside", "engine --beside")(lent, name)
        asyncio.run(_serve(lent, codec, access, token, notice, phase, agent))


def _check(spec: EngineSpec) -> None:
    if spec.dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {spec.dtype!r}")
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", spec.device) is None:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {spec.device!r}")
    read_shape(Path(spec.model))
    if spec.device not in ("auto", "cpu"):
        try:
            gpu_memory(spec.device)
        except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
            raise ConfigError(
                f"--device must be a device of this machine, got {spec.device}: {error}"
            ) from error


def _state_directory() -> Path:
    """Return the user's directory for the state of programs (XDG base directories)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


async def _serve(
    spec: EngineSpec,
    codec: TextCodec | None,
    access: EngineAccess,
    token: str | None,
    notice: str,
    phase: Phase,
    agent: HostAgent | None = None,
) -> None:
    # signals cancel this future
    ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    model_ready.set_result(None)
    with (
        temporary_folder("rollweave-engines-") as scratch,
        on_ending_signals(ending.cancel),
    ):
        log = scratch / "engine.log"
        link = in_process(spec, spawn=child_of(MODULE), log=log, model_ready=model_ready)
        backend = EngineClient("the engine", link, start_s=START_S, reply_s=REPLY_S)
        try:
            err.print(f"[dim]loading {spec.model}[/]")
            if spec.dtype != "float32":
                on_gpu = spec.device.startswith("cuda") or (spec.device == "auto" and gpus())
                text = describe_computation(spec.dtype, "cuda" if on_gpu else "cpu")
                err.print(f"[dim]{text}[/]", soft_wrap=True)
            ready = asyncio.ensure_future(backend.ready())
            await _first(ready, ending)
            if not ready.done():
                ready.cancel()
                return
            slots, context = ready.result().max_slots, ready.result().max_context
            guard = Guard(token=token, hosts=(access.host, *access.names))
            async with (
                _prompts(phase, backend, token) as prompts,
                listening(
                    _application(
                        EngineServer(
                            backend,
                            model=spec.model,
                            prompts=prompts,
                            prompts_only=phase.prefill_only,
                        ),
                        codec,
                        context,
                    ),
                    access.host,
                    access.port,
                    guard=guard,
                    shutdown_s=SHUTDOWN_S,
                    names=ADDRESS,
                ) as address,
            ):
                what = "the state beside the server of" if codec is None else "serving"
                text = f"{what} {spec.model} at {address}, {slots} requests at once"
                out.print(escape(text), soft_wrap=True)
                out.print(escape(notice), soft_wrap=True)
                async with _lent(agent, backend):
                    await _first(backend.lost, ending)
            if backend.lost.done():
                raise EngineLostError(backend.lost.result())
        finally:
            await backend.close()


@contextlib.asynccontextmanager
async def _lent(agent: HostAgent | None, backend: EngineClient) -> AsyncIterator[None]:
    """Lend to the run of the agent's controller. The run's end, or a refusal, is
    reported and has no other consequence. `TAKE_BACK` ends the loan immediately.
    """
    offer, recalled = Offer(), asyncio.Event()

    async def lend(agent: HostAgent) -> None:
        try:
            await agent.run()
            err.print("the loan is over: the engine still serves", soft_wrap=True)
        except Exception as error:
            why = str(error) if isinstance(error, HostError) else f"{type(error).__name__}: {error}"
            err.print(f"the engine is not lent, and still serves: {why}", markup=False)

    if agent is None:
        yield
        return
    task = asyncio.create_task(lend(agent), name="lend")
    watching = asyncio.create_task(_report_load(agent, backend, offer), name="report the load")

    async def end_loan(agent: HostAgent) -> None:
        """Have the run return the engine, which takes a moment, and leave the run."""
        await recalled.wait()
        offer.recall()
        if agent.report(offer.state()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETURN_S):
                    await _returned(backend)
        if task.cancel():
            err.print("the engine is taken back, and still serves", soft_wrap=True)

    ending = asyncio.create_task(end_loan(agent), name="take the engine back")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(TAKE_BACK, recalled.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(TAKE_BACK)
        for each in (task, watching, ending):
            each.cancel()
        await asyncio.gather(task, watching, ending, return_exceptions=True)


async def _returned(backend: EngineClient) -> None:
    """Return once no run computes in the engine."""
    while True:
        lending = (await backend.stats()).lending
        if lending is None or not lending.lent:
            return
        await asyncio.sleep(OBSERVE_S / 10)


async def _report_load(agent: HostAgent, backend: EngineClient, offer: Offer) -> None:
    """Tell the run how much of the engine serving uses, until the engine is lost."""
    reported, reported_at = None, -math.inf
    while not backend.lost.done():
        now = time.monotonic()
        try:
            offer.observe(now, await backend.stats())
        except EngineError:
            return  # the engine is lost, which is reported elsewhere
        state = offer.state()
        changes = (state.takes, state.recalled)
        if changes != reported or now - reported_at > REPORT_S:
            reported, reported_at = changes, now
            agent.report(state)
        await asyncio.sleep(OBSERVE_S)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _codec(directory: Path, template: Path | None) -> TextCodec:
    """Return the checkpoint's codec: of its chat template, if there is a template that
    grows by appending, else of plain text. A given `template` must grow by appending.
    """
    try:
        return ChatCodec.from_directory(directory, template=template)
    except OSError as error:
        raise ConfigError(f"--chat-template must be a file that can be read: {error}") from error
    except ConfigError as error:
        if template is not None:
            raise
        err.print(f"no chat is served: {error}", markup=False, soft_wrap=True)
        return TextCodec.of_checkpoint(directory)


@contextlib.asynccontextmanager
async def _prompts(
    phase: Phase, backend: EngineClient, token: str | None
) -> AsyncIterator[RemotePrefill | None]:
    """Yield the source of the prompts' KV if another engine computes prompts, else
    None.
    """
    if phase.prefill_at is None:
        yield None
        return

    def report(text: str) -> None:
        err.print(text, markup=False, soft_wrap=True)

    async with RemotePrefill(
        phase.prefill_at, token=token, engine=backend, report=report
    ) as prompts:
        yield prompts


def _application(server: EngineServer, codec: TextCodec | None, context: int) -> web.Application:
    app = server.application()
    if codec is None:  # another server has the clients
        return app
    settings = read_json(Path(server.model) / "tokenizer_config.json")
    ServingFront(server, codec, context=context, tokenizer=settings).add_to(app)
    return app
