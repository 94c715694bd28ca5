"""Publishing: each rank writes the slices that it alone has into one payload, and
nobody gathers the model (ROSE §4.2).

Invariants: rank 0 owns the payload, the ranks beside it on this host write into it;
every byte is written once; either all ranks get the manifest or all raise the same
`TrainerError`, and then versions published before serve on. A rank that cannot reach
the payload, on another machine, say, makes all gather instead, tensor by tensor, and
rank 0 write.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from rollweave.schema.errors import RollweaveError, TrainerError
from rollweave.schema.training import Publish
from rollweave.schema.weights import TensorMeta, WeightManifest
from rollweave.train.distributed import RankGroup, full_tensor, local_tensor
from rollweave.weights.parameters import Model
from rollweave.weights.publication import Draft, DraftHandle, PayloadWriter, Publisher, lay_out
from rollweave.weights.shards import Fsdp, runs
from rollweave.weights.staging import Staging

_log = logging.getLogger(__name__)


class WeightPublisher:
    """Where this rank's weights go out, as `dtype`.

    Every rank calls `publish` for every version.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: RankGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        directory: Path,
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._ranks = ranks
        self._dtype = dtype
        self._publisher = Publisher(directory) if ranks.first else None
        self._staging = Staging(device)
        self._warned = False

    def publish(self, command: Publish) -> tuple[WeightManifest, bool]:
        """The manifest, and whether the ranks had to gather.

        Raises `TrainerError`, on all ranks or none.
        """
        metas = lay_out(
            (name, self._dtype, parameter.shape) for name, parameter in self._parameters.items()
        )
        draft, error = self._drafted(metas, command)
        try:
            offer = self._ranks.from_first(draft.offer if draft is not None else None)
            self._agree(error, command)
            assert offer is not None, "rank 0 has a draft or says why not"
            gathered, error = self._written(metas, draft, offer)
            self._agree(error, command)
            finishing, draft = draft, None
            manifest, error = self._finished(finishing, command)
            manifest = self._ranks.from_first(manifest)
            self._agree(error, command)
        finally:
            if draft is not None:
                draft.abandon()
        assert manifest is not None, "rank 0 has a manifest or says why not"
        return manifest, gathered

    def close(self) -> None:
        """Let published versions go."""
        if self._publisher is not None:
            self._publisher.close()

    def _drafted(self, metas: tuple[TensorMeta, ...], command: Publish) -> tuple[Draft | None, str]:
        """Rank 0's memory for the version, or why there is none."""
        if self._publisher is None:
            return None, ""
        try:
            return self._publisher.draft(
                metas, version=command.version, weights_id=command.weights_id
            ), ""
        except RollweaveError as error:
            return None, str(error)

    def _written(
        self, metas: tuple[TensorMeta, ...], draft: Draft | None, offer: DraftHandle
    ) -> tuple[bool, str]:
        """Whether the ranks had to gather, and what went wrong on this one."""
        slices = draft.slices if draft is not None else PayloadWriter.of(offer)
        try:
            far = [
                rank for rank, near in enumerate(self._ranks.each(slices is not None)) if not near
            ]
            if not far:
                assert slices is not None
                return False, self._write(slices, self._own(metas))
            self._warn(far)
            tensors = self._whole(metas)
            error = self._write(draft.slices, tensors) if draft is not None else ""
            for _ in tensors:
                pass  # the other ranks need us to gather theirs
            return True, error
        finally:
            if slices is not None and draft is None:
                slices.close()

    def _finished(self, draft: Draft | None, command: Publish) -> tuple[WeightManifest | None, str]:
        """Rank 0's manifest, or why there is none."""
        if self._publisher is None or draft is None:
            return None, ""
        try:
            return self._publisher.finish(draft, needed=command.keep), ""
        except RollweaveError as error:
            return None, str(error)

    def _write(self, slices: PayloadWriter, tensors: Iterable[tuple[int, torch.Tensor]]) -> str:
        """Write `tensors` at their offsets. Returns what went wrong."""
        try:
            for offset, data in self._staging.drain(tensors, self._dtype):
                slices.write(offset, data)
        except (OSError, RuntimeError) as error:
            return (
                f"{type(error).__name__}: {error}"
                if isinstance(error, RuntimeError)
                else str(error)
            )
        return ""

    def _own(self, metas: tuple[TensorMeta, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """What this rank has, and the others do not: contiguous slices with their
        offsets.
        """
        model = Model(metas, heads=1, kv_heads=1)  # FSDP does not ask for heads
        shard = Fsdp(self._ranks.world).shard(model, self._ranks.rank)
        places = {meta.name: meta for meta in metas}
        for piece in shard.pieces:
            tensor, meta = local_tensor(self._parameters[piece.tensor]), places[piece.tensor]
            assert tensor.shape == piece.size, (
                f"{piece.tensor} is sharded as {tuple(tensor.shape)}, not {piece.size}"
            )
            ((first, _),) = runs(meta.shape, piece.start, piece.size)
            yield meta.offset + first * self._dtype.itemsize, tensor

    def _whole(self, metas: tuple[TensorMeta, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        for meta in metas:
            yield meta.offset, full_tensor(self._parameters[meta.name])

    def _agree(self, error: str, command: Publish) -> None:
        """Raise on every rank where any rank has an error: the same words."""
        for rank, said in enumerate(self._ranks.each(error)):
            if said:
                where = f"cannot publish weights version {command.version}"
                raise TrainerError(
                    said if said.startswith(where) else f"{where}: trainer rank {rank}: {said}"
                )

    def _warn(self, far: list[int]) -> None:
        if self._ranks.first and not self._warned:
            self._warned = True
            _log.warning(
                "trainer ranks %s cannot reach the memory of rank 0 (another machine?): weights "
                "are gathered to publish",
                far,
            )
