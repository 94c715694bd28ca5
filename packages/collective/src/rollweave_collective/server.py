"""Inference servers that receive weights by their own code: both ends of a group of the
trainer and the ranks of one server, over NCCL.

The contract is that of vLLM's `NCCLWeightTransferEngine` with a trainer that has no
vLLM: the trainer makes NCCL's unique id; all ranks join, and reduce one number; then
the trainer broadcasts each tensor, in the order of the names that the server was told.
"""

import base64
import secrets
from collections.abc import Iterable
from typing import Any

import torch

from rollweave.schema.weights import WeightManifest
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import GroupCall
from rollweave_collective.group import WAIT_S
from rollweave_collective.messages import Begun, JoinServer, Sent, decode, next_answer


class NcclRoot:
    """The trainer's rank in a group of this size. Raises RuntimeError."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch.cuda import nccl

        self._nccl: Any = nccl
        self._size, self._device = size, device
        self.unique_id = bytes(nccl.unique_id())  # type: ignore[no-untyped-call]
        self._ranks: Any = None

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors, after the group is formed. Blocks until all are sent."""
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            if self._ranks is None:
                self._ranks = self._nccl.init_rank(self._size, self.unique_id, 0)
                one = [torch.zeros(1, device=self._device)]
                self._nccl.all_reduce(one, streams=[stream], comms=[self._ranks])
            for tensor in tensors:
                there = [tensor.to(self._device)]
                self._nccl.broadcast(there, 0, streams=[stream], comms=[self._ranks])
        stream.synchronize()


class Server:
    """The end of one server, in the process of its engine."""

    def __init__(self, ranks: int, *, wait_s: float = WAIT_S) -> None:
        self._ranks, self._id = ranks, secrets.token_bytes(16)
        self._tcp = Tcp(idle_timeout_s=wait_s, decode=decode)

    async def bring(
        self, manifest: WeightManifest, *, begin: GroupCall, receive: GroupCall
    ) -> None:
        """See `ServerReceiver`."""
        assert manifest.sender is not None, "the version is not sent"
        channel = await self._tcp.connect(manifest.sender)
        try:
            await channel.send(
                JoinServer(
                    publication_id=manifest.publication_id,
                    digest=manifest.digest,
                    member=self._id,
                    ranks=self._ranks,
                )
            )
            begun = await next_answer(channel, Begun)
            if begun.unique_id:
                await begin(
                    {
                        "nccl_unique_id_b64": base64.b64encode(begun.unique_id).decode(),
                        "rank_offset": 1,
                        "world_size": 1 + self._ranks,
                        "packed": False,
                    }
                )
            await receive(
                {
                    "names": [meta.name for meta in manifest.tensors],
                    "dtype_names": [meta.dtype for meta in manifest.tensors],
                    "shapes": [list(meta.shape) for meta in manifest.tensors],
                }
            )
            await next_answer(channel, Sent)
        finally:
            channel.close()
