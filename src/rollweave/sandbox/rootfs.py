"""What a sandbox's root is made of, for the host's image and for folders: a description that `stage.py` mounts.

Invariant: wherever rollweave is installed, no sandbox sees it: its handlers have the right answers of their tasks.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rollweave
from rollweave.sandbox.argv import SUPPORT
from rollweave.sandbox.base import HOME, HOST, LOOPBACK, SandboxSpec
from rollweave.sandbox.stage import Root

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Beside /usr: links into it, or on older systems folders of their own."""

_ETC = ("alternatives", "ssl", "ca-certificates", "pki")
"""What programs need of /etc to start and to check certificates. Nothing of the host's users, network or secrets."""


def layers_of(spec: SandboxSpec) -> tuple[str, ...]:
    """Folders below the writes of a sandbox that begins with its image."""
    return () if spec.image == HOST else (spec.image,)


def root_of(spec: SandboxSpec, *, support: str, layers: tuple[str, ...]) -> dict[str, Any]:
    """The request's `root` for `stage.Root`; `layers` as `layers_of` gives them, or a snapshot has them."""
    binds, links = _host() if spec.image == HOST else ([], [])
    return asdict(
        Root(
            layers=[*layers],
            binds=[*binds, (support, SUPPORT)],
            links=links,
            files=_files(spec),
            folders=[HOME, spec.workdir],
            hidden=_hidden(binds),
            disk_bytes=spec.limits.disk_bytes,
        )
    )


def python_of(spec: SandboxSpec) -> str:
    """The interpreter of its server: ours, as far as the host's image has it, or the image's."""
    return sys.executable if spec.image == HOST else "python3"


def _host() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    binds = [("/usr", "/usr")]
    links = []
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            binds.append((path, path))
    binds += [(path, path) for name in _ETC if os.path.isdir(path := f"/etc/{name}")]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not prefix.startswith("/usr/") and prefix != "/usr":
            binds.append((prefix, prefix))
    return binds, links


def _hidden(binds: list[tuple[str, str]]) -> list[str]:
    """Where the host's folders show rollweave itself."""
    package = os.path.dirname(os.path.realpath(rollweave.__file__))
    seen = [(os.path.realpath(source), where) for source, where in binds]
    return list(
        dict.fromkeys(
            os.path.join(where, os.path.relpath(package, source)) for source, where in seen if package.startswith(f"{source}/")
        )
    )


def _files(spec: SandboxSpec) -> dict[str, str]:
    files: dict[str, str] = {}
    if spec.image == HOST:
        files = {
            "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:{HOME}:/bin/bash\n",
            "/etc/group": "root:x:0:\nagent:x:1000:\n",
            "/etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n{spec.env.get(LOOPBACK, '127.0.0.1')} {spec.hostname}\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        }
        files |= {path: Path(path).read_text() for path in ("/etc/ld.so.conf",) if Path(path).is_file()}
    if spec.network and Path("/etc/resolv.conf").is_file():
        files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
    return files
