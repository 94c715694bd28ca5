"""No isolation: the server runs as a child process in a temporary folder, with our
rights, our network and our files.

This back end is for trusted code, and for machines that support nothing better. It is
used only if a configuration names it. Time, CPU and memory are limited; a process that
leaves the process tree between two polls is found only when the back end closes.
"""

import asyncio
import os
import sys

import msgspec

from rollweave.sandbox.argv import rlimits, server
from rollweave.sandbox.base import HOME, HOST, SandboxSpec, Snapshot, addressed
from rollweave.sandbox.folders import copy_folder
from rollweave.sandbox.launcher import Launcher
from rollweave.sandbox.layers import Copy
from rollweave.sandbox.running import RunningSandbox, started
from rollweave.schema.errors import SandboxError


class Plain:
    """Implements `base.Backend`, without any isolation."""

    name = "plain"

    def __init__(self) -> None:
        self._launcher = Launcher()

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        if spec.image != HOST:
            raise ValueError(
                f"image must be {HOST!r} for plain, which has no other, got {spec.image!r}"
            )
        if spec.fakeroot:
            raise ValueError("fakeroot must be false for plain, got true")
        return await self._started(spec, str(self._launcher.folder()), spec.folder)

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        folder = str(self._launcher.folder())
        try:
            await asyncio.to_thread(_copied, snapshot, folder)
        except OSError as error:
            raise SandboxError(f"the snapshot cannot be copied: {error}") from error
        return await self._started(snapshot.spec, folder)

    async def close(self) -> None:
        await self._launcher.close()

    async def _started(self, spec: SandboxSpec, folder: str, content: str = "") -> RunningSandbox:
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        home = folder + HOME
        workdir = home if spec.workdir == HOME else spec.workdir
        env = {"PATH": path, "HOME": home, **addressed(spec).env}
        here = msgspec.structs.replace(spec, workdir=workdir, env=env)
        # NPROC counts all processes of our user here, so it cannot limit a sandbox.
        limits = {name: value for name, value in rlimits(spec.limits).items() if name != "NPROC"}
        argv = server(limits, here.workdir, python=sys.executable, support=self._launcher.support)
        if content:
            await asyncio.to_thread(copy_folder, content, "/", workdir)
        writes = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return await started(
            here,
            self._launcher,
            requested_spec=spec,
            writes=writes,
            contained=False,
            drop=False,
            argv=argv,
            env=here.environment(),
        )


def _copied(snapshot: Snapshot, folder: str) -> None:
    target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        source = os.open(snapshot.layers[0], os.O_RDONLY | os.O_DIRECTORY)
        try:
            Copy(limit_bytes=snapshot.spec.limits.disk_bytes).run(source, target)
        finally:
            os.close(source)
    finally:
        os.close(target)
