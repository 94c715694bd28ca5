"""Sandboxes without a separate program: forks of a process that has loaded Python and
the server.

The supervisor itself is this process (`zygote_process`). A Python sandbox is therefore
ready in milliseconds, and shares its interpreter's memory with its siblings. Compared
with bubblewrap there are two disadvantages: siblings share the layout of their address
space, and the code that makes the sandbox is ours alone. Only the host's image is
supported, because its interpreter is ours.
"""

from rollweave.sandbox.argv import UID, rlimits
from rollweave.sandbox.base import HOST, SandboxSpec, Snapshot, addressed
from rollweave.sandbox.launcher import Launcher
from rollweave.sandbox.rootfs import root_of, view_of
from rollweave.sandbox.running import RunningSandbox, started

PROCESS = "rollweave.sandbox.zygote_process"

PRELOADED_PACKAGE = "ipython"
"""The package that the zygote has loaded, and that a sandbox without it must not
have.
"""


class Zygote:
    """Implements `base.Backend`."""

    name = "zygote"

    def __init__(self) -> None:
        self._launcher = Launcher(module=PROCESS)

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        if spec.image != HOST:
            raise ValueError(
                f"image must be {HOST!r} for zygote, whose interpreter is the "
                f"host's, got {spec.image!r}"
            )
        return await self._started(spec, await self._launcher.layers_of(spec))

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        return await self._started(snapshot.spec, snapshot.layers)

    async def close(self) -> None:
        await self._launcher.close()

    async def _started(self, spec: SandboxSpec, layers: tuple[str, ...]) -> RunningSandbox:
        requested_spec, spec = spec, addressed(spec)
        view = await view_of(spec)
        inside = {
            "root": self._launcher.root,
            "uid": 0 if spec.fakeroot else UID,
            "network": spec.network,
            "hostname": spec.hostname,
            "workdir": spec.workdir,
            "env": spec.environment(),
            "preloaded": PRELOADED_PACKAGE in view.names,
        }
        support = self._launcher.support
        root = root_of(spec, view, support=support, layers=layers)
        # The server was loaded from `support`, and finds its files there.
        root["binds"].append((support, support))
        return await started(
            spec,
            self._launcher,
            requested_spec=requested_spec,
            below=layers,
            argv=[],
            env={},
            root=root,
            rlimits=rlimits(spec.limits),
            inside=inside,
        )
