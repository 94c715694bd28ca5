"""Weights of a vLLM server by its own weight transfer over NCCL, in a group with the
trainer (`weights.transport = "collective"`).

vLLM receives the tensors itself while it is paused, so that it stops for the whole
transfer, and it verifies no digest. A failure leaves weights that may be any: it ends
the server.
"""

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.transport import ServerReceiver
from rollweave_servers.control import ControlError, RefusedError
from rollweave_servers.published import HeldWeights
from rollweave_servers.vllm_control import VllmControl

BACKEND = "nccl"
"""The name of this transfer in vLLM's `--weight-transfer-config`."""


class Announced:
    """A version that the trainer will send: its tensors are those of the model. Raises
    WeightsError.
    """

    def __init__(self, manifest: WeightManifest, shape: ModelShape) -> None:
        if manifest.sender is None:
            raise WeightsError("vLLM receives versions from the trainer alone")
        shapes = {meta.name: meta.shape for meta in manifest.tensors}
        if len(shapes) < len(manifest.tensors):
            raise WeightsError("tensor names must be distinct")
        shape.check(shapes)
        self.manifest = manifest

    def close(self) -> None:
        """Nothing is held here."""


class GroupControl(VllmControl):
    """The control routes of a server that receives weights by `receiver`."""

    def __init__(self, url: str, *, token: str, limit_s: float, receiver: ServerReceiver) -> None:
        super().__init__(url, token=token, limit_s=limit_s)
        self._receiver = receiver

    async def connect(self) -> None:
        """See `Control`. The group is formed with the first version."""
        await self.call("/weight_info")

    async def check(self, weights: HeldWeights) -> None:
        """Begin an update: the server cannot check weights that it does not have."""
        assert isinstance(weights, Announced), "weights for another kind of server"
        try:
            await self.start_update()
        except RefusedError as error:
            raise ControlError(str(error)) from error

    async def swap(self, weights: HeldWeights, label: str) -> None:
        async def begin(info: dict[str, object]) -> None:
            await self.call("/init_weight_transfer_engine", {"init_info": info})

        try:
            await self._receiver.bring(weights.manifest, begin=begin, receive=self.update)
        except WeightsError as error:
            raise ControlError(f"vLLM has not received {label}: {error}") from error
        await self.finish_update(label)
