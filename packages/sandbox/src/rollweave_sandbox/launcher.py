"""The owner of a supervisor: it starts the supervisor, requests sandboxes from it, and
receives the reasons for their ends.

Invariants: one thread starts the supervisor and sends to it, and lives as long as the
supervisor, because a process can die with the thread that made it; every requested
sandbox is tracked until it is gone; after `close` no process and no folder is left.
"""

import asyncio
import compileall
import contextlib
import itertools
import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollweave.io import locked_folders
from rollweave.sandbox.base import SandboxSpec
from rollweave.schema.errors import SandboxError, SandboxLostError
from rollweave_sandbox.cgroups import remove_all_stale
from rollweave_sandbox.folders import copy_folder
from rollweave_sandbox.rootfs import image_layers
from rollweave_sandbox.sources import main_of

HERE = Path(__file__).parent

SUPERVISOR = "rollweave_sandbox.supervisor"

PREFIX = "rollweave-sandboxes-"
"""Prefix of the names of a launcher's folders."""

MESSAGE_BYTES = 1 << 17
"""Maximum size of a message in bytes, and of one read."""

PRIVATE_BYTES = 1 << 17
"""Maximum size in bytes of the private part of a request, which only the sandbox's
process reads.
"""

END_S = 10.0
"""Seconds within which a supervisor must end all its sandboxes."""

ERROR_BYTES = 4096
"""Maximum number of bytes quoted from the errors that a sandbox wrote before it was
ready.
"""


SUPERVISOR_GONE, CLOSED = "the supervisor of the sandboxes is gone", "closed"
"""Reasons for the end of all sandboxes of a launcher."""

ENDINGS = frozenset({"stop", "kill"})
"""Requests that end a sandbox."""


class SandboxHandle:
    """A sandbox that was requested from the supervisor."""

    def __init__(self, name: str, channel: socket.socket, errors: int, writes: int) -> None:
        self.id, self.channel = name, channel
        self.pid = 0
        self.writes = writes
        """Descriptor of the folder that has the sandbox's writes; -1 without such a
        folder.
        """
        self.has_root = True
        """True if the folder of `writes` has the whole root, with no layers below it.
        """
        self.why = ""
        """Reason for its end, once it is gone."""
        self.ending = False
        """True once its owner has requested its end; the sandbox may still live for a
        moment.
        """
        self.gone = asyncio.Event()
        self.staged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done = asyncio.Event()
        """Set when the last request that has an answer is done, and when the sandbox is
        gone.
        """
        self.on_gone: Callable[[], None] = lambda: None
        self._errors = errors

    def errors(self) -> str:
        """Return the errors written so far; later errors are discarded."""
        if self._errors < 0:
            return ""
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self._errors, False)
            return os.read(self._errors, ERROR_BYTES).decode(errors="replace").strip()
        return ""

    def close_errors(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def close_writes(self) -> None:
        if self.writes >= 0:
            os.close(self.writes)
            self.writes = -1


class Launcher:
    """Starts one supervisor, the `main` of a module, and sends requests to it.

    All calls belong to the event loop's thread.
    """

    def __init__(self, *, module: str = SUPERVISOR) -> None:
        self._module = module
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-launcher")
        self._ids = itertools.count(1)
        self._handles: dict[str, SandboxHandle] = {}
        self._opening: asyncio.Task[None] | None = None
        self._layers: dict[tuple[str, str], asyncio.Task[str]] = {}
        """Layers by the folder of the host that they contain, and its path in the
        layer.
        """
        self._lost = ""
        # Sandboxes of root have other uids: the path to their root must be open to all
        # users, as /run is.
        self._parents = (
            "/run" if os.getuid() == 0 else tempfile.gettempdir(),
            tempfile.gettempdir(),
        )
        (self._base, lock), (self._snapshots, other) = (
            locked_folders.create(parent, PREFIX) for parent in self._parents
        )
        self._locks = (lock, other)
        os.chmod(self._base, 0o711)
        # A launcher that is never closed, or never opened, leaves no folder behind.
        self._remove = weakref.finalize(self, _remove, (self._base, self._snapshots), self._locks)

    @property
    def root(self) -> str:
        """Path at which a sandbox's own process, and no other process, sees its root
        mounted.
        """
        return f"{self._base}/place/root"

    @property
    def support(self) -> str:
        """Folder that has boot.py and the server, compiled.

        The folder exists once the first sandbox is being launched.
        """
        return f"{self._base}/support"

    async def launch(
        self,
        *,
        limits: dict[str, float],
        contained: bool,
        drop: bool,
        writes: int = -1,
        **sandbox_request: Any,
    ) -> SandboxHandle:
        """Request a sandbox and wait until its first program is about to run. `writes`
        is the descriptor of SandboxHandle, which closes it.

        Only the process that becomes the sandbox reads `sandbox_request` (arguments,
        environment, root), not the supervisor, whose memory every later sandbox
        inherits. Raises SandboxError.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(
                self._open(), name="open a supervisor"
            )
        await asyncio.shield(self._opening)
        if self._lost:
            raise SandboxLostError(self._lost)
        name = str(next(self._ids))
        request = {
            "do": "start",
            "id": name,
            "limits": limits,
            "contained": contained,
            "drop": drop,
        }
        private = json.dumps(sandbox_request).encode()
        if len(private) > PRIVATE_BYTES:
            raise SandboxError(
                f"a sandbox's arguments and environment must have at most {PRIVATE_BYTES} bytes, "
                f"got {len(private)}"
            )
        own_end, child_end = socket.socketpair()
        errors_r, errors_w = os.pipe()
        handle = self._handles[name] = SandboxHandle(name, own_end, errors_r, writes)
        private_file = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            try:
                os.write(private_file, private)
                await self._send(
                    json.dumps(request).encode(), child_end.fileno(), errors_w, private_file
                )
            finally:
                child_end.close()
                os.close(errors_w)
                os.close(private_file)
            await handle.staged
        except BaseException:
            self.post(handle, "kill")
            own_end.close()
            handle.close_errors()
            raise
        return handle

    def post(self, handle: SandboxHandle, what: str, **more: object) -> None:
        """Send the supervisor a request about a sandbox, unless the sandbox is gone."""
        if not handle.gone.is_set() and not self._lost:
            handle.ending = handle.ending or what in ENDINGS
            message = json.dumps({"do": what, "id": handle.id, **more}).encode()
            with contextlib.suppress(RuntimeError):  # the thread was shut down
                self._thread.submit(self._send_now, message, ())

    async def ask(self, handle: SandboxHandle, what: str) -> None:
        """Post a request, and wait until it is done or the sandbox is gone."""
        if not handle.gone.is_set():
            handle.done.clear()
            self.post(handle, what)
            await handle.done.wait()

    def folder(self) -> Path:
        """Make a folder that is removed with the supervisor."""
        return Path(tempfile.mkdtemp(prefix="kept-", dir=self._snapshots))

    async def layers_of(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Return the layers of a sandbox that begins with its image and folder. The
        folder is copied when the first sandbox needs it. Raises ConfigError,
        SandboxError.
        """
        below = image_layers(spec)
        if not spec.folder:
            return below
        key = (spec.folder, spec.workdir)
        task = self._layers.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            layer = str(self.folder())
            task = self._layers[key] = asyncio.get_running_loop().create_task(
                asyncio.to_thread(_layer, *key, layer), name=f"copy {spec.folder}"
            )
        return (await asyncio.shield(task), *below)

    async def close(self) -> None:
        """End the supervisor and its sandboxes; return when none of their processes and
        files is left.
        """
        await asyncio.gather(*self._layers.values(), return_exceptions=True)
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if not self._opening.cancelled() and self._opening.exception() is None:
                died = bool(self._lost)
                await self._close_supervisor()
                if died:  # the supervisor could not remove its control groups
                    await asyncio.to_thread(remove_all_stale)
        await asyncio.to_thread(self._remove)
        self._thread.shutdown(wait=False)

    # --- within ---

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        for parent in dict.fromkeys(self._parents):
            await asyncio.to_thread(locked_folders.remove_stale, parent, PREFIX)
        await asyncio.to_thread(_populate, Path(self._base))
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = await loop.run_in_executor(self._thread, self._spawn, child_end)
        loop.add_reader(self._socket, self._readable)

    def _spawn(self, child_end: socket.socket) -> "subprocess.Popen[bytes]":
        arguments = [
            str(child_end.fileno()),
            str(os.getpid()),
            f"{self._base}/place",
            self._base,
            self._snapshots,
        ]
        with child_end:
            return subprocess.Popen(
                [sys.executable, "-I", "-c", main_of(self._module, forget=True), *arguments],
                stdin=subprocess.DEVNULL,
                env={},
                pass_fds=(
                    child_end.fileno(),
                    *self._locks,
                ),  # the supervisor keeps the folders locked, and removes them if we die
                start_new_session=True,
            )

    async def _send(self, message: bytes, *fds: int) -> None:
        sending = asyncio.get_running_loop().run_in_executor(
            self._thread, self._send_now, message, fds
        )
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait([sending])  # the descriptors are in use until they are sent
            raise

    def _send_now(self, message: bytes, fds: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, as the reader sees
            socket.send_fds(self._socket, [message], fds)

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose(SUPERVISOR_GONE)
            return
        message = json.loads(data)
        handle = self._handles.get(message["id"])
        if handle is None:
            for fd in fds:
                os.close(fd)
            return
        match message["event"]:
            case "staged":
                handle.pid, handle.has_root = message["pid"], message["has_root"]
                handle.writes = fds[0] if fds else handle.writes
                if not handle.staged.done():
                    handle.staged.set_result(None)
            case "failed":
                handle.why = message["why"]
            case "done":
                handle.done.set()
            case "gone":
                self._gone(handle, message["why"])

    def _gone(self, handle: SandboxHandle, why: str) -> None:
        self._handles.pop(handle.id, None)
        handle.why = handle.why or why
        handle.close_writes()
        handle.gone.set()
        handle.done.set()
        if not handle.staged.done():
            handle.staged.set_exception(
                SandboxLostError(
                    f"the sandbox did not start: {handle.why} {handle.errors()}".strip()
                )
            )
            handle.staged.exception()  # retrieved, because the caller may have been cancelled
        handle.on_gone()

    def _lose(self, why: str) -> None:
        self._lost = why
        asyncio.get_running_loop().remove_reader(self._socket)
        for handle in list(self._handles.values()):
            self._gone(handle, why)

    async def _close_supervisor(self) -> None:
        for handle in self._handles.values():
            handle.ending = True
        self._socket.shutdown(socket.SHUT_WR)
        try:
            await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if not self._lost:
            self._lose(CLOSED)
        self._socket.close()


def _populate(base: Path) -> None:
    """Make a folder to mount roots on, and a copy of the server, which is compiled
    because no sandbox can store compiled modules.
    """
    (base / "place").mkdir()
    support = base / "support"
    shutil.copytree(
        HERE / "inside", support / "inside", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(HERE / "boot.py", support)
    compileall.compile_dir(
        support, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )


def _layer(folder: str, at: str, layer: str) -> str:
    copy_folder(folder, layer, at)
    return layer


def _remove(folders: Sequence[str], locks: Sequence[int]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for lock in locks:
        os.close(lock)
