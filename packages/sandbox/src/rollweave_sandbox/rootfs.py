"""The root of a sandbox, which `stage.py` mounts, for the host's image and for folders.

On the host's image, the sandbox sees parts of this machine as an allow-list: programs,
libraries and headers of the system, the interpreter that runs Rollweave with its
standard library, and the packages that the specification names.

Invariants: a sandbox on the host's image sees only what is listed here of the host,
which is read-only, and nothing of Rollweave, whose handlers contain the right answers
of their tasks; below /usr, nothing else is seen or can be made; a folder of packages is
never seen as it is, but replaced by a folder with the files of the named packages;
every path is the same as on the host; no sandbox can write files that the dynamic
linker or an interpreter loads when a program starts.
"""

import asyncio
import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import site
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from rollweave.io.locked_folders import remove_leftovers, unfinished_folder
from rollweave.sandbox.base import HOME, HOST, SandboxSpec
from rollweave.schema.errors import SandboxError
from rollweave_sandbox.packages import FOLDERS, distributions, files_of, folder_of, stamp_of
from rollweave_sandbox.sources import DIRECTORIES
from rollweave_sandbox.stage import Root

LOOPBACK = "LOOPBACK"
"""Variable that names the exclusive loopback address of a sandbox."""

SUPPORT = "/run/rollweave"
"""Path at which a sandbox sees boot.py and the server."""

USR = "/usr"

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""System folders next to /usr: links into /usr, or on older systems separate folders.
"""

PARTS = (
    *("bin", "sbin", "include", "lib32", "lib64", "libx32", "lib/file", "lib/gcc"),
    *("lib/git-core", "lib/locale", "lib/terminfo", "libexec/coreutils", "libexec/gcc"),
    *("libexec/git-core", "share/awk", "share/ca-certificates", "share/git-core", "share/misc"),
    *("share/perl", "share/perl5", "share/terminfo", "share/zoneinfo"),
)
"""Folders of /usr that are seen where they exist, in addition to those of `_libraries`.
"""

ETC = (
    *("/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates"),
    *("/etc/pki/ca-trust/extracted", "/etc/pki/tls/certs", "/etc/crypto-policies"),
)
"""Folders of /etc that programs need to start and to check certificates. They contain
nothing about the host's users, network or secrets.
"""

SCRIPTS = "/usr/local/bin"
"""Folder of the programs of packages if the interpreter is the system's."""

BESIDE = re.compile(r"(?:\.\./){1,3}(bin/[^/]+|share/.+)")
"""Paths of a package's programs and data, which are outside the folder of packages."""

UNUSED_S = 30 * 24 * 3600.0
"""Seconds without use after which a folder of packages is removed."""

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

_LINKER = ("/etc/ld.so.preload", "/etc/ld.so.cache")
"""Files that the dynamic linker reads before any program. They are empty in every root,
so that a snapshot cannot bring its own.
"""


@dataclass
class View:
    """Parts of the host that a sandbox sees, as `stage.Root` has them."""

    binds: list[tuple[str, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    """Canonical names of the distributions whose files the view has."""


@dataclass
class _Content:
    """The content of the folders that are made for a view: files of the host, targets
    of links, texts, and empty folders, by the path at which a sandbox sees them.
    """

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def make(self, folder: Path) -> None:
        """Make the content in a folder, readable for every user."""
        parents = map(os.path.dirname, (*self.files, *self.links, *self.texts))
        for path in dict.fromkeys((*self.folders, *parents)):
            os.makedirs(f"{folder}{path}", exist_ok=True)
        for path, source in self.files.items():
            # Some records name files that are gone, or folders.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                _link_or_copy(source, f"{folder}{path}")
        for path, to in self.links.items():
            os.symlink(to, f"{folder}{path}")
        for path, text in self.texts.items():
            Path(f"{folder}{path}").write_text(text)
            os.chmod(f"{folder}{path}", 0o644)
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, 0o755)


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


_views: dict[tuple[str, ...], View] = {}


def known_view(packages: tuple[str, ...]) -> View | None:
    """Return the view with these packages if this process has made it and its folders
    still exist, else None.
    """
    view = _views.get(packages)
    return view if view and all(os.path.isdir(source) for source, _ in view.binds) else None


def view_with(packages: tuple[str, ...]) -> View:
    """Return what a sandbox with these packages sees. The first call for the packages
    on this host may take seconds, because their files are linked into a folder, or
    copied.

    Raises ConfigError for packages that cannot be seen (`packages.distributions`), and
    OSError.
    """
    view = known_view(packages)
    if view is None:
        view = _views[packages] = _made(packages)
    return view


def _made(packages: tuple[str, ...]) -> View:
    found = distributions(packages)
    libraries = _standard_libraries()
    view = _system(libraries)
    view.names = frozenset(found)
    prefixes = [path for path in _prefixes() if path != USR]
    content = _Content()
    for prefix in prefixes:
        _add_interpreter(content, prefix, libraries)
    places = _package_folders()
    made = [*prefixes, *places, *([] if sys.prefix in prefixes else [SCRIPTS])]
    content.folders += made
    folder = _kept(content, found.values(), made, places)
    view.hidden += _hidden(view.binds, made)
    for path in made:
        around = [other for other in made if other != path and _is_below(path, [other])]
        # A folder in another made folder is part of it, unless a folder of the host is
        # between.
        if not around or _is_below(path, libraries):
            view.binds.append((f"{folder}{path}", path))
    return view


def _system(libraries: list[str]) -> View:
    """Return the parts of the view that do not depend on packages."""
    view = View(hidden=[USR])
    parts = (*(f"/{name}" for name in SYSTEM), *(f"{USR}/{part}" for part in PARTS))
    for path in dict.fromkeys((*parts, *_libraries(), *ETC, *libraries)):
        if os.path.islink(path):
            view.links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            view.binds.append((path, path))
    settings = Path("/etc/ssl/openssl.cnf")
    if settings.is_file():
        view.files[str(settings)] = settings.read_text()
    for library in libraries:
        # Debian's libraries have such a link, to which an agent could give a target.
        custom = f"{library}/sitecustomize.py"
        if os.path.islink(custom) and os.path.realpath(custom).startswith("/etc/"):
            view.files[os.path.realpath(custom)] = ""
    return view


def _libraries() -> list[str]:
    """Return the folders of shared libraries of the machine's architecture, or all of
    /usr/lib on systems without such folders.
    """
    found = [path for path in glob.glob(f"{USR}/lib/*-linux-*") if os.path.isdir(path)]
    return found or [f"{USR}/lib"]


def _standard_libraries() -> list[str]:
    """Return the folders of the standard libraries of our interpreter and of the
    system's interpreter.
    """
    bases = dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix)))
    names = dict.fromkeys((f"lib/{PYTHON}", f"{sys.platlibdir}/{PYTHON}"))
    ours = [f"{base}/{name}" for base in bases for name in names]
    systems = map(os.path.dirname, glob.glob(f"{USR}/lib*/python3.*/os.py"))
    return [path for path in dict.fromkeys((*ours, *systems)) if _is_library(path)]


def _is_library(path: str) -> bool:
    return any(os.path.exists(f"{path}/{name}") for name in ("os.py", "lib-dynload"))


def _prefixes() -> list[str]:
    """Return the folders of our interpreter: the installation's, also by its path with
    all links resolved, and the virtual environment's, if there is one.
    """
    prefixes = (sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix)
    return list(dict.fromkeys(map(os.path.normpath, prefixes)))


def _package_folders() -> list[str]:
    """Return the folders from which our interpreter imports packages, without the
    user's own.
    """
    folders = list(dict.fromkeys(map(os.path.normpath, site.getsitepackages())))
    return [path for path in folders if os.path.isdir(path)] or folders[:1]


def _add_interpreter(content: _Content, prefix: str, libraries: list[str]) -> None:
    """Add the interpreter of a prefix: its programs, shared libraries and settings, and
    folders for its standard libraries.
    """
    base = getattr(sys, "_base_executable", None) or sys.executable
    names = {"python", "python3", PYTHON}
    if prefix == os.path.normpath(sys.prefix) and sys.prefix != sys.base_prefix:
        names.add(os.path.basename(sys.executable))
        content.links |= {f"{prefix}/bin/{name}": base for name in names}
        content.texts[f"{prefix}/pyvenv.cfg"] = _settings(prefix, base)
        if os.path.islink(f"{prefix}/lib64"):
            content.links[f"{prefix}/lib64"] = os.readlink(f"{prefix}/lib64")
        return
    content.files[f"{prefix}/bin/{PYTHON}"] = os.path.realpath(base)
    names.add(os.path.basename(base))
    content.links |= {f"{prefix}/bin/{name}": PYTHON for name in names - {PYTHON}}
    pattern = "libpython*.so*" if prefix.startswith(USR) else "*.so*"
    for path in filter(os.path.isfile, glob.glob(f"{prefix}/lib/{pattern}")):
        content.files[path] = os.path.realpath(path)
    content.folders += [path for path in libraries if _is_below(path, [prefix])]


def _settings(prefix: str, base: str) -> str:
    """Return the pyvenv.cfg of a virtual environment, with the needed settings only."""
    shared = "include-system-site-packages"
    lines = Path(f"{prefix}/pyvenv.cfg").read_text().lower().replace(" ", "").splitlines()
    is_shared = str(f"{shared}=true" in lines).lower()
    return f"home = {os.path.dirname(base)}\n{shared} = {is_shared}\n"


def _kept(
    content: _Content, found: Iterable[Distribution], made: list[str], places: list[str]
) -> str:
    """Return a folder with this content and the files of the distributions in the
    folders `made`. All processes of our user share it.
    """
    found = list(found)
    stats = [(path, os.stat(source)) for path, source in sorted(content.files.items())]
    known = [
        [(path, status.st_ino, status.st_size, status.st_mtime_ns) for path, status in stats],
        sorted(content.links.items()),
        sorted(content.texts.items()),
        content.folders,
        [stamp_of(distribution) for distribution in found],
    ]
    cache = _cache()
    folder = cache / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    if folder.is_dir():
        os.utime(folder)
        return str(folder)
    _remove_unused(cache)
    for distribution in found:
        source = folder_of(distribution)
        place = source if source in places else places[0]
        for path in files_of(distribution):
            target = f"{place}/{path}"
            if path.startswith(".."):
                beside = BESIDE.fullmatch(path)
                prefix = os.path.dirname(SCRIPTS) if sys.prefix == USR else sys.prefix
                target = f"{prefix}/{beside[1]}" if beside else ""
            if _is_below(target, made):
                content.files[target] = f"{source}/{path}"
    with unfinished_folder(cache) as new:
        content.make(new)
        with contextlib.suppress(OSError):  # another process was first
            new.rename(folder)
    return str(folder)


def _remove_unused(cache: Path) -> None:
    remove_leftovers(cache)
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _cache() -> Path:
    """Return a writable folder of ours that processes share, in the user's folder of
    caches or else in the folder of temporary files.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(caches if caches.startswith("/") else os.path.expanduser("~/.cache"))
    for cache in (
        home / "rollweave" / "packages",
        Path(tempfile.gettempdir(), f"rollweave-packages-{os.getuid()}"),
    ):
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            if cache.lstat().st_uid == os.getuid() and os.access(cache, os.W_OK):
                return cache
    raise OSError(f"no folder for packages of sandboxes can be made, not even in {cache.parent}")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return  # a file of two distributions
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or another user's file
        shutil.copy2(source, target)


def _hidden(binds: list[tuple[str, str]], made: list[str]) -> list[str]:
    """Return the folders in the binds that must appear empty: folders of packages for
    which no folder is `made`, and Rollweave's.
    """
    hidden: list[str] = []
    for source, where in binds:
        patterns = ("", "python3*/") if os.path.basename(source).startswith("lib") else ("",)
        names = (pattern + name for pattern in patterns for name in (*FOLDERS, "node_modules"))
        inside = [path for name in names for path in glob.glob(f"{source}/{name}")]
        for directory in DIRECTORIES:
            ours = os.path.relpath(os.path.realpath(directory), os.path.realpath(source))
            if not ours.startswith(".."):
                inside.append(f"{source}/{ours}")
        covers = [path for path in made if _is_below(path, [where])]
        for path in (where + path.removeprefix(source) for path in inside):
            if not _is_below(path, covers):
                hidden.append(path)
                covers.append(path)
    return list(dict.fromkeys(hidden))


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether the path is one of the folders, or inside one of them."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
