"""Publishing by all ranks: each writes its slices into memory of its own host, without
gathering the model (ROSE §4.2).

Ranks that share memory form a group: its first rank owns the payload, and the others
write into it. If there are several groups, on several hosts, each publishes a part of
the version, and relays put the parts together (`weights/relay`). Ranks that divide a
tensor by columns exchange its rows first. Invariants: every byte is written once;
either all ranks get the manifest or all raise the same `TrainerError`, and earlier
versions that are needed stay published.
"""

import collections
import logging
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import torch
from torch import nn

from rollweave.schema.errors import RollweaveError, TrainerError
from rollweave.schema.training import Publish
from rollweave.schema.weights import TensorMeta, WeightManifest
from rollweave.train.distributed import RankGroup, local_tensor, published_rows, to_rows
from rollweave.train.state import trained_parameters
from rollweave.train.tensor_parallel import division_of
from rollweave.weights.memory import Ranges, combined_digest
from rollweave.weights.publication import (
    Draft,
    DraftHandle,
    PayloadWriter,
    Publisher,
    lay_out,
    read_tensors,
)
from rollweave.weights.staging import Staging
from rollweave.weights.transport import VersionSender, group_end
from rollweave.weights.views import Part, StoredTensors

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
        stored: StoredTensors | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype,
        device: torch.device,
        collective: bool = False,
    ) -> None:
        """`stored` are the tensors to publish; without `stored`, each trained parameter
        is a tensor. The first rank publishes `constants`, in their own number formats.
        With `collective` it sends versions to a group of the engines.
        """
        self._constants = dict(constants or {})
        self._parameters: dict[str, torch.Tensor] = dict(trained_parameters(model))
        division = division_of(model)
        self._splits = division.splits
        self._shapes = {
            name: division.shape(name, parameter) for name, parameter in self._parameters.items()
        }
        self._views = (stored or StoredTensors.identical(self._shapes)).views
        self._ranks = ranks
        self._dtype = dtype
        self._staging = Staging(device)
        alone = (device.type, ranks.world_size, dtype) == ("cpu", 1, torch.float32)
        self._alike = alone and (stored is None or stored.is_identical)
        """True if a version has the bytes of the weights, in the host's memory."""
        self._owners: list[int] = []
        """Owner of the payload of each rank; empty before the first publication."""
        self._publisher: Publisher | None = None
        self._collective = collective
        self._sender: VersionSender | None = None
        if collective and ranks.is_first:
            self._sender = group_end("sender")(ranks.address, device)

    def publish(self, command: Publish) -> WeightManifest:
        """Publish the weights, and return the manifest.

        Raises `TrainerError`, on all ranks or none.
        """
        metas = lay_out(
            [
                *((name, self._dtype, view.size) for name, view in self._views.items()),
                *((name, value.dtype, value.shape) for name, value in self._constants.items()),
            ]
        )
        if self._sender is not None:
            self._sender.keep(command.keep)
        if not self._owners:
            self._owners = self._find_owners()
            if self._collective and len(set(self._owners)) > 1:
                raise TrainerError("weights.transport must not be collective with ranks on hosts")
            if self._owners[self._ranks.rank] == self._ranks.rank:
                self._publisher = Publisher()
        draft, error = self._open_draft(metas, command)
        try:
            handles = self._ranks.all_gather(draft.handle if draft is not None else None)
            self._raise_together(error, command)
            handle = handles[self._owners[self._ranks.rank]]
            assert handle is not None, "an owner has a draft or an error"
            error = self._write_slices(metas, draft, handle)
            self._raise_together(error, command)
            finishing, draft = draft, None
            own, error = self._finish(finishing)
            manifests = self._ranks.all_gather(own)
            self._raise_together(error, command)
        finally:
            if draft is not None:
                draft.abandon()
        combined = _combined([manifest for manifest in manifests if manifest is not None])
        if self._alike:
            # a private mapping: it needs no memory until the next update writes to it
            for name, tensor in read_tensors(combined).items():
                self._parameters[name].data = tensor
        return combined if self._sender is None else self._sender.offer(combined)

    def doubts(self) -> tuple[str, ...]:
        """Return a line for each broadcast that has failed since the last call."""
        return () if self._sender is None else self._sender.doubts()

    def close(self) -> None:
        """Release the published versions."""
        if self._sender is not None:
            self._sender.close()
        if self._publisher is not None:
            self._publisher.close()

    def _find_owners(self) -> list[int]:
        """Return the owner of each rank's payload: the first rank whose memory it
        reaches.
        """
        probe = Draft((), version=0, publication_id=0)
        try:
            handles = self._ranks.all_gather(probe.handle)
            reached = []
            for handle in handles:
                writer = PayloadWriter.open(handle)
                reached.append(writer is not None)
                if writer is not None:
                    writer.close()
            matrix = self._ranks.all_gather(reached)
        finally:
            probe.abandon()
        owners: list[int] = []
        for rank, reaches in enumerate(matrix):
            among = (other for other in range(rank) if owners[other] == other and reaches[other])
            owners.append(next(among, rank))
        if self._ranks.is_first and len(set(owners)) > 1:
            _log.warning(
                "trainer ranks %s do not share memory: relays put the weights together",
                sorted(set(owners)),
            )
        return owners

    def _open_draft(
        self, metas: tuple[TensorMeta, ...], command: Publish
    ) -> tuple[Draft | None, str]:
        """Return this rank's draft of the version, if it owns one, or the error."""
        if self._publisher is None:
            return None, ""
        try:
            return self._publisher.draft(
                metas,
                version=command.version,
                publication_id=command.publication_id,
                ranges=self._part(metas),
                rank=self._ranks.rank,
                needed=command.keep,
            ), ""
        except RollweaveError as error:
            return None, str(error)

    def _part(self, metas: tuple[TensorMeta, ...]) -> list[tuple[int, int]] | None:
        """Return the ranges of bytes in this rank's payload: the ranges of the ranks
        that write into it and, in the first rank's payload, also the gaps between
        tensors. None if there is only one payload.
        """
        if len(set(self._owners)) == 1:
            return None
        own, others = Ranges(), Ranges()
        for rank, owner in enumerate(self._owners):
            among = own if owner == self._ranks.rank else others
            for meta in metas:
                among.add(*self._slice(meta, rank=rank))
        if self._ranks.is_first:
            return others.missing(0, max(meta.offset + meta.nbytes for meta in metas))
        return list(own)

    def _write_slices(
        self, metas: tuple[TensorMeta, ...], draft: Draft | None, handle: DraftHandle
    ) -> str:
        """Write this rank's slices; return the error, or ""."""
        writer = draft.writer if draft is not None else PayloadWriter.open(handle)
        slices = self._local_slices(metas)
        try:
            if writer is None:
                return "the memory of its host's first rank is gone"
            constants = [
                (meta.offset, self._constants[meta.name])
                for meta in metas
                if meta.name in self._constants and self._ranks.is_first
            ]
            return self._write(writer, slices, constants)
        finally:
            # after a failure, too: the ranks of a tensor group exchange what they write
            collections.deque(slices, maxlen=0)
            if draft is None and writer is not None:
                writer.close()

    def _finish(self, draft: Draft | None) -> tuple[WeightManifest | None, str]:
        """Return the manifest of this rank's payload, if it owns one, or the error."""
        if self._publisher is None or draft is None:
            return None, ""
        try:
            return self._publisher.finish(draft), ""
        except RollweaveError as error:
            return None, str(error)

    def _write(
        self,
        writer: PayloadWriter,
        tensors: Iterable[tuple[int, torch.Tensor]],
        constants: Iterable[tuple[int, torch.Tensor]],
    ) -> str:
        """Write `tensors` at their offsets. Return the error, or ""."""
        try:
            for offset, data in self._staging.download(tensors, self._dtype):
                writer.write(offset, data)
            for offset, value in constants:
                for place, data in self._staging.download([(offset, value)], value.dtype):
                    writer.write(place, data)
        except (OSError, RuntimeError) as error:
            return (
                f"{type(error).__name__}: {error}"
                if isinstance(error, RuntimeError)
                else str(error)
            )
        return ""

    def _local_slices(self, metas: tuple[TensorMeta, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the contiguous slices that only this rank publishes, with their
        offsets.
        """
        stored = [meta for meta in metas if meta.name in self._views]
        last, rows = "", torch.empty(0)
        for meta in sorted(stored, key=lambda meta: self._views[meta.name].parameter):
            view = self._views[meta.name]
            if view.parameter != last:
                last, split = view.parameter, self._splits.get(view.parameter)
                rows = to_rows(local_tensor(self._parameters[last]), split, self._ranks)
            part = self._part_of(meta.name, rank=self._ranks.rank)
            start, stop = slice_of(meta, part)
            tensor = part.of(view, rows)
            assert tensor.numel() * self._dtype.itemsize == stop - start, (
                f"{meta.name} is divided as {tuple(tensor.shape)}, not into {stop - start} bytes"
            )
            if start < stop:
                yield start, tensor

    def _slice(self, meta: TensorMeta, *, rank: int) -> tuple[int, int]:
        if meta.name in self._constants:
            return meta.offset, meta.offset + (0 if rank else meta.nbytes)
        return slice_of(meta, self._part_of(meta.name, rank=rank))

    def _part_of(self, name: str, *, rank: int) -> Part:
        """Return the part of a tensor that a rank publishes."""
        view = self._views[name]
        shape, split = self._shapes[view.parameter], self._splits.get(view.parameter)
        rows = published_rows(shape[0] if shape else 1, self._ranks, split=split, rank=rank)
        return view.part(shape, rows)

    def _raise_together(self, error: str, command: Publish) -> None:
        """Raise the same error on every rank if any rank has one."""
        for rank, text in enumerate(self._ranks.all_gather(error)):
            if text:
                where = f"cannot publish weights version {command.version}"
                raise TrainerError(
                    text if text.startswith(where) else f"{where}: trainer rank {rank}: {text}"
                )


def slice_of(meta: TensorMeta, part: Part) -> tuple[int, int]:
    """Return the range of bytes of a tensor that has this part of it."""
    row = meta.nbytes // max(1, meta.shape[0]) if meta.shape else meta.nbytes
    return meta.offset + part.rows.start * row, meta.offset + part.rows.stop * row


def _combined(manifests: list[WeightManifest]) -> WeightManifest:
    """Return the manifest of a version from the manifests of all payloads."""
    if len(manifests) == 1:
        return manifests[0]
    parts = tuple(part for manifest in manifests for part in manifest.parts)
    digest = combined_digest([part.digest for part in parts])
    return msgspec.structs.replace(manifests[0], location="", digest=digest, parts=parts)
