"""`rollweave doctor`: checks this installation and this machine."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import typer

from rollweave.cli.console import FAILED, out
from rollweave.io.extras import (
    DISTRIBUTIONS,
    EXTRAS,
    how_to_install,
    how_to_install_distribution,
    missing_from,
)
from rollweave.io.machine import cores, describe_computation, gpu_memory, memory_bytes
from rollweave.runtime.metrics import PACKAGES
from rollweave.runtime.preflight.checks import Check, fail, failures, ok, show, warn
from rollweave.sandbox.provider import provider
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_bytes

MIN_PYTHON = (3, 11)
MIN_MEMORY = 4 << 30
"""Bytes of free memory below which a warning appears: the demo's three processes take
about 1.5 GiB.
"""

MIN_DISK = 2 << 30
"""Bytes of free disk space below which a warning appears."""


def doctor() -> None:
    """Print the result of every check; exit with 1 if one failed."""
    checks = [*_software(), *_machine()]
    show(checks, out)
    failed = failures(checks)
    if failed:
        out.print(f"\n[red]{len(failed)} of {len(checks)} checks failed[/]")
        raise typer.Exit(FAILED)
    out.print("\n[green]rollweave can run on this machine[/]")


def _software() -> Iterator[Check]:
    version = platform.python_version()
    minimum = ".".join(map(str, MIN_PYTHON))
    yield (
        ok("python", version)
        if sys.version_info >= MIN_PYTHON
        else fail("python", f"must be at least {minimum}, got {version}")
    )
    yield from _dependencies()
    for extra in EXTRAS:
        missing = missing_from(extra)
        text = (
            f"without {', '.join(missing)} (optional: {how_to_install(extra)})"
            if missing
            else "installed"
        )
        yield ok(f"extra {extra}", text)
    for name in DISTRIBUTIONS:
        try:
            yield ok(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            advice = how_to_install_distribution(name)
            yield ok(name, f"not installed (optional: {advice})")
    for extra in PACKAGES:
        installed = importlib.util.find_spec(extra) is not None
        yield ok(
            f"extra {extra}",
            _version(extra) if installed else f"not installed (optional: {how_to_install(extra)})",
        )


def _dependencies() -> Iterator[Check]:
    """Check every required package, and report its version."""
    try:
        requirements = importlib.metadata.requires("rollweave") or []
    except importlib.metadata.PackageNotFoundError:
        yield fail("rollweave", "must be installed (pip install -e .), got only its source")
        return
    yield ok("rollweave", importlib.metadata.version("rollweave"))
    missing, installed = [], []
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        name = requirement.split(";")[0].strip()
        for sign in "<>=!~[ ":
            name = name.split(sign)[0]
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield (
        fail("dependencies", f"missing: {', '.join(missing)}")
        if missing
        else ok("dependencies", ", ".join(installed))
    )


def _machine() -> Iterator[Check]:
    count = cores()
    yield (
        ok("cores", str(count))
        if count >= 2
        else warn("cores", f"{count}: the engine and the trainer share it")
    )
    total, available = memory_bytes()
    text = f"{human_bytes(available)} free of {human_bytes(total)}"
    if not total:
        yield warn("memory", "cannot be read on this system")
    else:
        yield (
            ok("memory", text)
            if available >= MIN_MEMORY
            else warn("memory", f"{text}: less than {human_bytes(MIN_MEMORY)}")
        )
    yield _devices()
    yield ok("bfloat16", describe_computation("bfloat16", "cpu"))
    yield _sealed_memory()
    yield _sockets()
    yield _sandbox_limits()
    free = shutil.disk_usage(Path.cwd()).free
    yield (
        ok("disk", f"{human_bytes(free)} free here")
        if free >= MIN_DISK
        else warn("disk", f"{human_bytes(free)} free here: less than {human_bytes(MIN_DISK)}")
    )
    yield _writable(Path.cwd())


def _devices() -> Check:
    if not torch.cuda.is_available():
        return ok("devices", f"CPU only (torch {torch.__version__})")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        total, free = gpu_memory("cuda:0")
    except RuntimeError as error:
        return warn("devices", f"CUDA is installed but does not work: {error}")
    return ok(
        "devices",
        f"CUDA: {', '.join(names)}; {human_bytes(free)} free of {human_bytes(total)} on the first",
    )


def _sealed_memory() -> Check:
    """Check that weights can pass between processes in sealed anonymous files, which
    the receiver opens through /proc.
    """
    try:
        fd = os.memfd_create("rollweave-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return fail("shared memory", f"memfd_create must work, got {error}")
    try:
        os.write(fd, b"rollweave")
        read = Path(f"/proc/{os.getpid()}/fd/{fd}").read_bytes()
    except OSError as error:
        return fail("shared memory", f"/proc/<pid>/fd must be readable, got {error}")
    finally:
        os.close(fd)
    return (
        ok("shared memory", "sealed memory files work")
        if read == b"rollweave"
        else fail("shared memory", f"read back {read!r}")
    )


def _sockets() -> Check:
    try:
        left, right = socket.socketpair()
        left.close()
        right.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return fail("sockets", f"local sockets must work, got {error}")
    return ok("sockets", "local sockets work")


def _sandbox_limits() -> Check:
    """Check whether there are sandboxes, and whether the kernel bounds a sandbox as a
    whole. If not, name what is unbounded.
    """
    try:
        missing = provider().missing_limits()
    except ConfigError as error:
        return warn("sandboxes", str(error))
    if missing:
        return warn("sandbox limits", "; ".join(missing))
    return ok("sandbox limits", "control groups bound memory, the kernel's included, and processes")


def _writable(directory: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return fail("run directories", f"{directory} must be writable, got {error}")
    return ok("run directories", f"{directory} is writable")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "installed"
