"""The process that unpacks one archive of an image. It trusts neither the archive nor
the code that reads the archive.

`python -I -S … FOLDER BOUNDS OWNER` reads the archive from standard input and prints
`DONE`, or why it failed. Before it reads a byte it has new namespaces (mounts,
processes, network, and users if we are not root), the folder as its root, no
capability, no way to gain one, and the filter of system calls. Where the machine allows
no namespaces, the other restrictions still hold, and so do the invariants of
`io/unpacking.py` of Rollweave, even without any of that. Standard library alone.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys

from rollweave.io.boot import reset_signals
from rollweave.io.unpacking import FOLDER, MAGIC, Bounds, Refused, unpack
from rollweave_sandbox import kernel
from rollweave_sandbox.seccomp import bpf_filter
from rollweave_sandbox.stage import enter_user_namespace

MEMORY_BYTES = 1 << 30
"""Maximum address space of the process in bytes: archives may demand dictionaries of
gigabytes for decompression.
"""

DONE = b"unpacked"
"""Output after an archive was unpacked."""

_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)


def confine(folder: str, owner: int) -> int:
    """Give up access to everything but the folder. Returns a descriptor of the folder
    in the confined process; the caller's process waits.

    Both processes end with the process `owner`, which started us.
    """
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != owner:
        os._exit(1)
    for module in MAGIC.values():  # the folder, as the new root, has no modules
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _enter_namespaces():
        _become_first()
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount(folder, folder, flags=kernel.MS_BIND)
        kernel.pivot_root(folder)
        folder = "/"
    top = os.open(folder, FOLDER)
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    kernel.load_filter(bpf_filter())
    return top


def _become_first() -> None:
    """Continue as the first process of the new PID namespace, with which all other
    processes of the namespace end. The caller's process waits for the first process,
    and ends it on SIGTERM.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    worker = os.fork()
    if worker:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os._exit(0 if os.waitpid(worker, 0)[1] == 0 else 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _enter_namespaces() -> bool:
    """Enter new namespaces; return False if the machine does not allow them."""
    with contextlib.suppress(OSError):
        if os.getuid() == 0:
            kernel.unshare(_NAMESPACES)
        else:
            enter_user_namespace(_NAMESPACES)
        return True
    return False


def main() -> None:
    """Unpack as the arguments `FOLDER BOUNDS OWNER` say.

    The owner bounds how much of the output it reads.
    """
    reset_signals()
    os.umask(0o022)
    try:
        top = confine(sys.argv[1], int(sys.argv[3]))
        with open(0, "rb", closefd=False) as archive:
            unpack(archive, top, Bounds(**json.loads(sys.argv[2])))
        answer = DONE
    except MemoryError:
        answer = f"it takes more than {MEMORY_BYTES} bytes of memory to read".encode()
    except Exception as error:
        why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        answer = why.encode("ascii", "backslashreplace")
    os.write(1, answer)
    os._exit(0)
