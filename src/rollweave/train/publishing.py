"""Publishing by all ranks: each writes the slices that only it holds into one payload,
without gathering the model (ROSE §4.2).

Invariants: rank 0 owns the payload, and the other ranks on its host write into it;
every byte is written once; either all ranks get the manifest or all raise the same
`TrainerError`, and earlier versions stay published. If a rank cannot reach the payload,
for example because it is on another machine, all ranks gather the tensors one by one
instead, and rank 0 writes them.
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
    """Publishes this rank's weights as `dtype`.

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
        self._publisher = Publisher(directory) if ranks.is_first else None
        self._staging = Staging(device)
        self._warned = False

    def publish(self, command: Publish) -> tuple[WeightManifest, bool]:
        """Publish the weights; return the manifest, and whether the ranks had to
        gather.

        Raises `TrainerError`, on all ranks or none.
        """
        metas = lay_out(
            (name, self._dtype, parameter.shape) for name, parameter in self._parameters.items()
        )
        draft, error = self._open_draft(metas, command)
        try:
            handle = self._ranks.broadcast(draft.handle if draft is not None else None)
            self._raise_together(error, command)
            assert handle is not None, "rank 0 has a draft or an error"
            gathered, error = self._write_slices(metas, draft, handle)
            self._raise_together(error, command)
            finishing, draft = draft, None
            manifest, error = self._finish(finishing, command)
            manifest = self._ranks.broadcast(manifest)
            self._raise_together(error, command)
        finally:
            if draft is not None:
                draft.abandon()
        assert manifest is not None, "rank 0 has a manifest or an error"
        return manifest, gathered

    def close(self) -> None:
        """Release the published versions."""
        if self._publisher is not None:
            self._publisher.close()

    def _open_draft(
        self, metas: tuple[TensorMeta, ...], command: Publish
    ) -> tuple[Draft | None, str]:
        """Return rank 0's draft of the version, or the error."""
        if self._publisher is None:
            return None, ""
        try:
            return self._publisher.draft(
                metas, version=command.version, weights_id=command.weights_id
            ), ""
        except RollweaveError as error:
            return None, str(error)

    def _write_slices(
        self, metas: tuple[TensorMeta, ...], draft: Draft | None, handle: DraftHandle
    ) -> tuple[bool, str]:
        """Write this rank's slices; return whether the ranks had to gather, and the
        error of this one.
        """
        writer = draft.writer if draft is not None else PayloadWriter.open(handle)
        try:
            unreachable = [
                rank
                for rank, reachable in enumerate(self._ranks.all_gather(writer is not None))
                if not reachable
            ]
            if not unreachable:
                assert writer is not None
                return False, self._write(writer, self._local_slices(metas))
            self._warn_of_gathering(unreachable)
            tensors = self._gathered(metas)
            error = self._write(draft.writer, tensors) if draft is not None else ""
            for _ in tensors:
                pass  # the other ranks need this one to gather their tensors
            return True, error
        finally:
            if writer is not None and draft is None:
                writer.close()

    def _finish(self, draft: Draft | None, command: Publish) -> tuple[WeightManifest | None, str]:
        """Return rank 0's manifest, or the error."""
        if self._publisher is None or draft is None:
            return None, ""
        try:
            return self._publisher.finish(draft, needed=command.keep), ""
        except RollweaveError as error:
            return None, str(error)

    def _write(self, writer: PayloadWriter, tensors: Iterable[tuple[int, torch.Tensor]]) -> str:
        """Write `tensors` at their offsets. Return the error, or ""."""
        try:
            for offset, data in self._staging.download(tensors, self._dtype):
                writer.write(offset, data)
        except (OSError, RuntimeError) as error:
            return (
                f"{type(error).__name__}: {error}"
                if isinstance(error, RuntimeError)
                else str(error)
            )
        return ""

    def _local_slices(self, metas: tuple[TensorMeta, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the contiguous slices that only this rank holds, with their offsets."""
        model = Model(metas, heads=1, kv_heads=1)  # FSDP does not use the heads
        shard = Fsdp(self._ranks.world).shard(model, self._ranks.rank)
        places = {meta.name: meta for meta in metas}
        for piece in shard.pieces:
            tensor, meta = local_tensor(self._parameters[piece.tensor]), places[piece.tensor]
            assert tensor.shape == piece.size, (
                f"{piece.tensor} is sharded as {tuple(tensor.shape)}, not {piece.size}"
            )
            ((first, _),) = runs(meta.shape, piece.start, piece.size)
            yield meta.offset + first * self._dtype.itemsize, tensor

    def _gathered(self, metas: tuple[TensorMeta, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        for meta in metas:
            yield meta.offset, full_tensor(self._parameters[meta.name])

    def _raise_together(self, error: str, command: Publish) -> None:
        """Raise the same error on every rank if any rank has one."""
        for rank, text in enumerate(self._ranks.all_gather(error)):
            if text:
                where = f"cannot publish weights version {command.version}"
                raise TrainerError(
                    text if text.startswith(where) else f"{where}: trainer rank {rank}: {text}"
                )

    def _warn_of_gathering(self, unreachable: list[int]) -> None:
        if self._ranks.is_first and not self._warned:
            self._warned = True
            _log.warning(
                "trainer ranks %s cannot reach the memory of rank 0 (another machine?): weights "
                "are gathered for publishing",
                unreachable,
            )
