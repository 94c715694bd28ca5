"""A running sandbox: the channel to its server, and requests about its processes to the
supervisor. All back ends share this class.
"""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rollweave.sandbox.base import (
    MIB,
    ExecResult,
    Reply,
    SandboxSpec,
    Snapshot,
    check_snapshot_paths,
)
from rollweave.schema.errors import (
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxSpoiledError,
)
from rollweave_sandbox.channel import Channel
from rollweave_sandbox.folders import FOLDER_BYTES
from rollweave_sandbox.inside.frames import BODY_BYTES, FrameError
from rollweave_sandbox.launcher import CLOSED, SUPERVISOR_GONE, Launcher, SandboxHandle
from rollweave_sandbox.layers import Copy, LayerError, closing_fd, copy_selected, opened_folder
from rollweave_sandbox.rootfs import image_layers
from rollweave_sandbox.stage import ensure_folder
from rollweave_sandbox.supervisor import ENDED, KILLED, OVERDUE, STOPPED
from rollweave_sandbox.tunnel import tunnel

START_S = 20.0
"""Maximum seconds until a server answers: an interpreter's start on a loaded
machine.
"""

FILE_S = 10.0
"""Maximum seconds for reading or writing a part of a file, which is in memory."""

PART_BYTES = BODY_BYTES // 2
"""Size in bytes of the parts in which a large file is read or written."""

EXIT_S = 1.0
"""Maximum seconds from the end of a server's socket to the end of its process."""

WATCHED = ("processes", "memory_bytes", "disk_bytes", "cpu_s", "wall_s")
"""Limits that the supervisor enforces on all processes together."""

OUTSIDE = (STOPPED, KILLED, OVERDUE, SUPERVISOR_GONE, CLOSED)
"""Reasons for the end of a sandbox that the code in it did not cause. After the
sandbox's start, all other ends are caused by the code.
"""

MOUNTED = frozenset(("dev", "proc", "sys", "run/rollweave"))
"""Folders that are made for every sandbox and are not part of a snapshot."""


class RunningSandbox:
    """Implements `base.Sandbox`. Made by `started`."""

    def __init__(
        self,
        spec: SandboxSpec,
        launcher: Launcher,
        handle: SandboxHandle,
        *,
        requested_spec: SandboxSpec | None,
        below: tuple[str, ...],
        contained: bool,
    ) -> None:
        self.id, self.spec, self.ready_s, self.workdir = handle.id, spec, 0.0, spec.workdir
        self._launcher, self._handle, self._requested_spec, self._below = (
            launcher,
            handle,
            requested_spec or spec,
            below,
        )
        self._channel = Channel(handle.channel)
        self._keeping = asyncio.Lock()
        self._killed, self._spoiled, self._contained = False, "", contained
        handle.on_gone = self._channel.close

    @property
    def ended(self) -> str:
        return self._handle.why if self._handle.gone.is_set() else ""

    @property
    def pid(self) -> int:
        """Host pid of its first process."""
        return self._handle.pid

    @property
    def channel(self) -> Channel:
        return self._channel

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        try:
            if not self._handle.ending:
                reply = await self._channel.call(action, body, timeout_s=timeout_s, **args)
                # Programs may be killed before the server that reports their result.
                if not self._handle.ending:
                    return reply
        except FrameError as error:  # nothing was sent
            raise SandboxRefusedError(f"{action}: {error}") from error
        except SandboxLostError as error:
            # The socket ends a moment before its process is reaped, which gives the
            # reason. A server that broke the protocol is killed.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._handle.gone.wait(), EXIT_S)
            self.kill(spoiled=f"its server: {error}")
        await self._handle.gone.wait()
        raise self._lost_error()

    async def exec(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        reply = await self.call(
            "exec",
            stdin,
            timeout_s=timeout_s,
            argv=argv,
            cwd=cwd or self.spec.workdir,
            env=self.spec.environment() | (env or {}),
            output_limit=self.spec.limits.output_bytes,
        )
        try:
            split = reply.header["split"]
            fields = {
                name: reply.header[name] for name in ("rc", "timed_out", "truncated", "seconds")
            }
            return msgspec.convert(
                {**fields, "stdout": reply.body[:split], "stderr": reply.body[split:]}, ExecResult
            )
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            self.kill(spoiled=f"it sent an invalid result: {error}")
            await self._handle.gone.wait()
            raise self._lost_error() from error

    async def read(self, path: str, *, limit: int = MIB) -> bytes:
        if limit <= PART_BYTES:
            return (await self.call("read", timeout_s=FILE_S, path=path, limit=limit)).body
        data = bytearray()
        while True:
            reply = await self.call(
                "read", timeout_s=FILE_S, path=path, offset=len(data), limit=PART_BYTES
            )
            data += reply.body
            if len(data) > limit:
                raise SandboxRefusedError(f"path must have at most {limit} bytes: {path}")
            if len(reply.body) < PART_BYTES:
                return bytes(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        if len(data) <= PART_BYTES:
            await self.call("write", data, timeout_s=FILE_S, path=path, mode=mode)
            return
        part = secrets.token_hex(8)
        for offset in range(0, len(data), PART_BYTES):
            body, last = data[offset : offset + PART_BYTES], offset + PART_BYTES >= len(data)
            await self.call(
                "write",
                body,
                timeout_s=FILE_S,
                path=path,
                mode=mode,
                part=part,
                offset=offset,
                last=last,
            )

    async def snapshot(self, *, only: Sequence[str] = (), at: str = "") -> Snapshot:
        check_snapshot_paths(only, at)
        if self._handle.gone.is_set():
            raise self._lost_error()
        if self._handle.writes < 0:
            raise SandboxError("this kind of sandbox has no separate layer to store")
        below = () if self._handle.has_root else self._below
        async with self._keeping:
            await self._launcher.ask(self._handle, "freeze")
            try:
                folder = str(self._launcher.folder())
                writes, limit_bytes = os.dup(self._handle.writes), self.spec.limits.disk_bytes
                limit_bytes += FOLDER_BYTES if self.spec.folder else 0
                if only:
                    workdir = self._requested_spec.workdir
                    written = await asyncio.to_thread(
                        _copy_selected, writes, below, folder, workdir, only, at, limit_bytes
                    )
                else:
                    written = await asyncio.to_thread(_copy_all, writes, folder, limit_bytes)
            except (LayerError, PermissionError) as error:
                raise SandboxSpoiledError(f"no snapshot: {error}") from error
            except OSError as error:
                raise SandboxError(f"no snapshot: {error}") from error
            finally:
                self._launcher.post(self._handle, "thaw")
        return Snapshot(
            spec=self._requested_spec,
            layers=(folder, *(image_layers(self._requested_spec) if only else below)),
            bytes=written,
        )

    def tunnel(self, url: str) -> contextlib.AbstractAsyncContextManager[str]:
        return tunnel(self, url)

    async def stop(self, grace_s: float = 2.0) -> None:
        self._launcher.post(self._handle, "stop", grace_s=grace_s)
        await self._handle.gone.wait()

    def kill(self, *, spoiled: str = "") -> None:
        if not self._killed:
            self._killed, self._spoiled = True, spoiled
        self._launcher.post(self._handle, "kill")

    def _lost_error(self) -> SandboxLostError:
        """Return the error with the reason for the sandbox's end. The error's type says
        whether the code inside caused the end.
        """
        why = self._handle.why
        if why == KILLED and self._spoiled:
            return SandboxSpoiledError(f"the sandbox is gone: {self._spoiled}")
        # Nothing inside a PID namespace can signal its first process.
        signaled = self._contained and why.startswith(f"{ENDED} -")
        kind = SandboxLostError if why in OUTSIDE or signaled else SandboxSpoiledError
        return kind(f"the sandbox is gone: {why}")


async def started(
    spec: SandboxSpec,
    launcher: Launcher,
    *,
    requested_spec: SandboxSpec | None = None,
    below: tuple[str, ...] = (),
    writes: int = -1,
    contained: bool = True,
    drop: bool = True,
    **request: Any,
) -> RunningSandbox:
    """Launch a sandbox and wait until its server answers. Raises SandboxError.

    `requested_spec` is the caller's specification if `spec` is an adapted copy.
    `writes` is a descriptor of the folder of the sandbox's writes if no root is staged
    for the sandbox. `contained` says that the sandbox's processes end with the first
    process, and `drop` that a supervisor run by root gives the sandbox a separate uid.
    """
    began = time.perf_counter()
    limits = {name: getattr(spec.limits, name) for name in WATCHED}
    handle = await launcher.launch(
        limits=limits, contained=contained, writes=writes, drop=drop, **request
    )
    sandbox = RunningSandbox(
        spec, launcher, handle, requested_spec=requested_spec, below=below, contained=contained
    )
    try:
        await sandbox.call("ping", timeout_s=START_S)
        # No command has run yet: all present processes are the sandbox's own.
        await launcher.ask(handle, "ready")
    except SandboxError as error:
        sandbox.kill()
        await handle.gone.wait()
        raise SandboxError(
            f"the sandbox did not start: {error}. {handle.errors()}".strip()
        ) from error
    except BaseException:
        sandbox.kill()
        raise
    finally:
        handle.close_errors()
    sandbox.ready_s = time.perf_counter() - began
    return sandbox


def _copy_all(writes: int, folder: str, limit_bytes: int) -> int:
    """Copy all writes to `folder`; return the number of bytes. Closes `writes`."""
    copy = Copy(limit_bytes=limit_bytes, skip=MOUNTED)
    with closing_fd(writes), opened_folder(folder) as target:
        copy.run(writes, target)
    return copy.bytes


def _copy_selected(
    writes: int,
    below: Sequence[str],
    folder: str,
    workdir: str,
    only: Sequence[str],
    at: str,
    limit_bytes: int,
) -> int:
    """Copy like `_copy_all`, but only the paths `only` of the work folder. `below` has
    the folders of the layers below the writes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(closing_fd(writes))
        layers = [stack.enter_context(opened_folder(path)) for path in reversed(below)]
        top = stack.enter_context(opened_folder(folder))
        target = stack.enter_context(closing_fd(ensure_folder(top, at)))
        return copy_selected([*layers, writes], workdir, target, only, limit_bytes=limit_bytes)
