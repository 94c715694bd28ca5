"""The description of a sandbox's root, which `stage.py` mounts, for the host's image
and for folders.

Invariants: a sandbox on the host's image sees only what `host.py` lists of the host,
which is read-only, and nothing of Rollweave, whose handlers contain the right answers
of their tasks; no sandbox can write files that the dynamic linker or an interpreter
loads when a program starts.
"""

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollweave.sandbox.argv import SUPPORT
from rollweave.sandbox.base import HOME, HOST, LOOPBACK, SandboxSpec
from rollweave.sandbox.host import View, known_view, view_with
from rollweave.sandbox.stage import Root
from rollweave.schema.errors import SandboxError

_LINKER = ("/etc/ld.so.preload", "/etc/ld.so.cache")
"""Files that the dynamic linker reads before any program. They are empty in every root,
so that a snapshot cannot bring its own.
"""


def image_layers(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the layers of the image of a sandbox."""
    return () if spec.image == HOST else (spec.image,)


async def view_of(spec: SandboxSpec) -> View:
    """Return what the sandbox sees of the host. Raises ConfigError, SandboxError."""
    if spec.image != HOST:
        return View()
    known = known_view(spec.packages)
    if known is not None:
        return known
    try:
        return await asyncio.to_thread(view_with, spec.packages)
    except OSError as error:
        raise SandboxError(f"the packages of the sandbox cannot be provided: {error}") from error


def root_of(
    spec: SandboxSpec, view: View, *, support: str, layers: tuple[str, ...]
) -> dict[str, Any]:
    """Return the request's `root`, the fields of `stage.Root`. `layers` are the layers
    below the sandbox's writes.
    """
    return asdict(
        Root(
            layers=[*layers],
            binds=[*view.binds, (support, SUPPORT)],
            links=view.links,
            files=view.files | _files(spec),
            folders=[HOME, spec.workdir],
            hidden=view.hidden,
            disk_bytes=spec.limits.disk_bytes,
        )
    )


def python_of(spec: SandboxSpec) -> str:
    """Return the interpreter of a sandbox's server: ours for the host's image, else the
    image's own.
    """
    return sys.executable if spec.image == HOST else "python3"


def _files(spec: SandboxSpec) -> dict[str, str]:
    files: dict[str, str] = {}
    if spec.image == HOST:
        files = dict.fromkeys(_LINKER, "") | {
            "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
            f"agent:x:1000:1000:agent:{HOME}:/bin/bash\n",
            "/etc/group": "root:x:0:\nagent:x:1000:\n",
            "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n"
            f"{spec.env.get(LOOPBACK, '127.0.0.1')} {spec.hostname}\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        }
    if spec.network and Path("/etc/resolv.conf").is_file():
        files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
    return files
