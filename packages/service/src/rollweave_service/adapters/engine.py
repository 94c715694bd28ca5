"""An embedded engine that samples from an external trainer's weights: a child process,
served over HTTP to rollout services.

Invariants: after `update` returns, every token is sampled with its weights and carries
its version; an update that the engine refuses leaves its weights unchanged.
"""

import asyncio
import secrets
from collections.abc import Iterable

import msgspec
import torch

from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.clients.server import EngineServer
from rollweave.io.child import child_of
from rollweave.io.http.guard import TOKEN_BYTES, Guard
from rollweave.io.http.listening import listening
from rollweave.io.locked_folders import temporary_folder
from rollweave.schema.serving import EngineSpec
from rollweave.schema.weights import WeightManifest
from rollweave.weights.publication import Publisher
from rollweave_service.loop_context import LoopContext

START_S = 300.0
"""Maximum seconds to read a checkpoint: minutes for a large one on a slow disk."""

LOAD_S = 300.0
"""Maximum seconds to load new weights."""

SHUTDOWN_S = 1.0
"""Maximum seconds for requests that are under way when the engine ends."""


class TrainedEngine(LoopContext):
    """`with TrainedEngine(spec) as engine:` serves at `engine.address` (dialect
    `rollweave`), with the checkpoint's weights at first.

    Clients must send `engine.token`, which is new for each engine. The engine must run
    on the trainer's host, because weights pass through its memory. `spec.version` is
    the weight version of the checkpoint, by default 0.
    """

    def __init__(self, spec: EngineSpec, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__("engine")
        self._spec = msgspec.structs.replace(spec, version=max(0, spec.version))
        self._host, self._port = host, port
        self._updates = 0
        self.address = ""
        self.token = secrets.token_urlsafe(TOKEN_BYTES)

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace all weights, named as in transformers. Turns under way continue with
        the new ones; their segments record where.

        Raises WeightsError for tensors that do not fit the model.
        """
        named = {name: tensor.detach() for name, tensor in tensors}
        self._updates += 1  # the checkpoint's weights are number 0
        manifest = self._publisher.publish(named, version=version, publication_id=self._updates)
        self._loop.call(self._load(manifest))

    async def _open(self) -> None:
        scratch = self._stack.enter_context(temporary_folder("rollweave-engines-"))
        self._publisher = Publisher()
        self._stack.callback(self._publisher.close)
        model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model_ready.set_result(None)
        threads = {
            "OMP_NUM_THREADS": str(self._spec.threads),
            "MKL_NUM_THREADS": str(self._spec.threads),
        }
        module = "rollweave.runtime.entrypoints.engine"
        link = in_process(
            self._spec,
            spawn=child_of(module, env=threads),
            log=scratch / "engine.log",
            model_ready=model_ready,
        )
        self._engine = EngineClient(self._spec.id, link, start_s=START_S, reply_s=LOAD_S)
        self._stack.push_async_callback(self._engine.close)
        await self._engine.ready()
        app = EngineServer(self._engine, model=self._spec.model).application()
        served = listening(
            app, self._host, self._port, guard=Guard(token=self.token), shutdown_s=SHUTDOWN_S
        )
        self.address = await self._stack.enter_async_context(served)

    async def _load(self, manifest: WeightManifest) -> None:
        await self._engine.load(manifest)
