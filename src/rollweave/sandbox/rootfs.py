"""The description of a sandbox's root, for the host's image and for folders, which
`stage.py` mounts.

Invariants: no sandbox sees rollweave, regardless of where it is installed, because its
handlers contain the right answers of their tasks. On the host's image, no sandbox can
write files that the dynamic linker or an interpreter loads when a program starts.
"""

import functools
import itertools
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollweave.package import DIRECTORY
from rollweave.sandbox.argv import SUPPORT
from rollweave.sandbox.base import HOME, HOST, LOOPBACK, SandboxSpec
from rollweave.sandbox.stage import Root

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""System folders beside /usr: links into it, or on older systems separate folders."""

_ETC = ("alternatives", "ssl", "ca-certificates", "pki")
"""Entries of /etc that programs need to start and to check certificates.

They contain nothing about the host's users, network or secrets.
"""


_LINKER = ("/etc/ld.so.preload", "/etc/ld.so.cache")
"""Files that the dynamic linker reads before any program: empty in every root, so that
a snapshot cannot bring its own.
"""

_ALWAYS_VISIBLE = ("/tmp", "/etc", "/run", "/dev", "/proc", "/sys")
"""Folders that are never sealed, in addition to the home and the work folder."""


def layers_of(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the layers below the writes of a sandbox that begins with its image."""
    return () if spec.image == HOST else (spec.image,)


def root_of(spec: SandboxSpec, *, support: str, layers: tuple[str, ...]) -> dict[str, Any]:
    """Return the request's `root`, the fields of `stage.Root`. `layers` are those of
    `layers_of` or of a snapshot.
    """
    binds, links = _host() if spec.image == HOST else ([], [])
    return asdict(
        Root(
            layers=[*layers],
            binds=[*binds, (support, SUPPORT)],
            links=links,
            files=_files(spec),
            folders=[HOME, spec.workdir],
            hidden=[
                *_hidden(binds),
                *(_sealed(spec, [where for _, where in binds]) if spec.image == HOST else []),
            ],
            disk_bytes=spec.limits.disk_bytes,
        )
    )


def python_of(spec: SandboxSpec) -> str:
    """Return the interpreter of a sandbox's server: ours for the host's image, or the
    image's.
    """
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
    """Return the paths at which the host's folders show rollweave itself."""
    package = os.path.realpath(DIRECTORY)
    seen = [(os.path.realpath(source), where) for source, where in binds]
    return list(
        dict.fromkeys(
            os.path.join(where, os.path.relpath(package, source))
            for source, where in seen
            if package.startswith(f"{source}/")
        )
    )


def _sealed(spec: SandboxSpec, seen: list[str]) -> list[str]:
    """Return folders from which the interpreter imports but which do not exist in the
    sandbox: an agent's code would run there.

    Folders around or in the home and the work folder are left out, because an agent's
    own files belong there. A judge that runs among these files must use `python -I -S`.
    """
    own = (HOME, spec.workdir)
    there = (*seen, *(f"/{name}" for name in _SYSTEM), "/dev", "/proc", "/sys")
    outside = [
        path
        for path in import_folders()
        if not any(_below(path, where) for where in (*there, *own))
        and not any(_below(keep, path) for keep in (*own, *_ALWAYS_VISIBLE))
    ]
    return [
        path
        for path in outside
        if not any(path != other and _below(path, other) for other in outside)
    ]


@functools.cache
def import_folders(
    roots: tuple[str, ...] = (sys.prefix, sys.base_prefix, "/usr", "/usr/local"),
) -> tuple[str, ...]:
    """Return folders outside their own from which the interpreters below `roots` are
    configured to import, by `.pth` files and editable installs, whether they exist or
    not.
    """
    paths: dict[str, None] = {}
    patterns = [f"lib*/python3*/{name}-packages" for name in ("site", "dist")]
    for folder in itertools.chain.from_iterable(
        Path(root).glob(pattern) for root in roots for pattern in patterns
    ):
        for file in sorted(folder.glob("*.pth")):
            paths |= dict.fromkeys(_named_in(file))
        for file in sorted(folder.glob("*.dist-info/direct_url.json")):
            paths |= dict.fromkeys(_editable(file))
    return tuple(dict.fromkeys(os.path.normpath(path) for path in paths))


def _named_in(file: Path) -> Iterator[str]:
    """Yield the folders of a `.pth` file, as the module `site` reads it."""
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return  # nor can it be read inside
    for line in lines:
        if line.strip() and "\0" not in line and not line.startswith(("#", "import ", "import\t")):
            yield os.path.join(file.parent, line.rstrip())


def _editable(file: Path) -> Iterator[str]:
    """Yield the folder of an editable install (PEP 610), whose modules an import hook
    may find there.
    """
    try:
        origin = json.loads(file.read_text())
        url = urllib.parse.urlsplit(origin["url"])
        if url.scheme == "file" and origin.get("dir_info", {}).get("editable"):
            yield urllib.request.url2pathname(url.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # a file that pip did not write says nothing about imports


def _below(path: str, folder: str) -> bool:
    """Return whether the path is the folder, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


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
        files |= {
            path: Path(path).read_text() for path in ("/etc/ld.so.conf",) if Path(path).is_file()
        }
    if spec.network and Path("/etc/resolv.conf").is_file():
        files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
    return files
