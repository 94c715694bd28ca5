"""Sandboxes by bubblewrap, the default back end: all namespaces, no capability, and a
filter of system calls.
"""

import shutil

from rollweave.sandbox.argv import bubblewrap, rlimits
from rollweave.sandbox.base import SandboxSpec, Snapshot, addressed, check_image
from rollweave.sandbox.launcher import Launcher
from rollweave.sandbox.rootfs import python_of, root_of, view_of
from rollweave.sandbox.running import RunningSandbox, started
from rollweave.schema.errors import SandboxError

PROGRAM = "bwrap"
INSTALL = "install bubblewrap, version 0.8 or later (apt-get install bubblewrap)"


class Bubblewrap:
    """Implements `base.Backend`."""

    name = "bubblewrap"

    def __init__(self) -> None:
        """Find the program. Raises SandboxError if it is not installed."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise SandboxError(f"bubblewrap needs {PROGRAM} on PATH: {INSTALL}")
        self._program = program
        self._launcher = Launcher()

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        check_image(spec.image)
        return await self._started(spec, await self._launcher.layers_of(spec))

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        return await self._started(snapshot.spec, snapshot.layers)

    async def close(self) -> None:
        await self._launcher.close()

    async def _started(self, spec: SandboxSpec, layers: tuple[str, ...]) -> RunningSandbox:
        requested_spec, spec = spec, addressed(spec)
        argv = bubblewrap(
            spec, bwrap=self._program, root=self._launcher.root, python=python_of(spec)
        )
        view = await view_of(spec)
        root = root_of(spec, view, support=self._launcher.support, layers=layers)
        return await started(
            spec,
            self._launcher,
            requested_spec=requested_spec,
            below=layers,
            argv=argv,
            env={},
            root=root,
            rlimits=rlimits(spec.limits),
        )
