"""Sandboxes by Apptainer, for clusters that have it and images in its format (ProRL
§3.2.2).

Apptainer provides the isolation: it applies no system call filter of ours, and bounds
the size of writes itself. Time, CPU, memory and processes are limited as by other back
ends. This back end is not yet tested with the real program: a contract test covers its
command line.
"""

import asyncio
import os
import shutil
from pathlib import Path

from rollweave.sandbox.argv import apptainer
from rollweave.sandbox.base import SandboxSpec, Snapshot, addressed, check_image
from rollweave.sandbox.folders import check_folder, put_folder
from rollweave.sandbox.launcher import Launcher
from rollweave.sandbox.running import RunningSandbox, started
from rollweave.schema.errors import SandboxError

PROGRAMS = ("apptainer", "singularity")
INSTALL = "install Apptainer 1.1 or later (https://apptainer.org), or load its module on a cluster"


class Apptainer:
    """Implements `base.Backend`, without snapshots."""

    name = "apptainer"

    def __init__(self) -> None:
        """Find the program. Raises SandboxError if it is not installed."""
        program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
        if program is None:
            raise SandboxError(f"apptainer needs {' or '.join(PROGRAMS)} on PATH: {INSTALL}")
        self._program = program
        self._launcher = Launcher()

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        requested_spec, spec = spec, addressed(spec)
        argv = apptainer(spec, runtime=self._program, support=self._launcher.support)
        check_image(spec.image)
        _check_way(spec.image)
        if spec.folder:
            await asyncio.to_thread(check_folder, spec.folder)
        # Apptainer finds its helpers on PATH; --cleanenv keeps PATH from the sandbox.
        sandbox = await started(
            spec,
            self._launcher,
            requested_spec=requested_spec,
            argv=argv,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )
        if spec.folder:
            try:
                await put_folder(sandbox, spec.folder, spec.workdir)
            except BaseException:
                sandbox.kill()
                raise
        return sandbox

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        raise SandboxError(
            f"apptainer starts from no snapshot, got one with {len(snapshot.layers)} layers"
        )

    async def close(self) -> None:
        await self._launcher.close()


def _check_way(path: str) -> None:
    """Raise ValueError if we are root and the runtime, which then has another uid,
    cannot reach the image.
    """
    if os.getuid() == 0:
        closed = next(
            (str(parent) for parent in Path(path).parents if not parent.stat().st_mode & 0o001),
            None,
        )
        if closed is not None:
            raise ValueError(
                "image must be where every user can come for apptainer by root, got "
                f"{path!r}: {closed} is closed"
            )
