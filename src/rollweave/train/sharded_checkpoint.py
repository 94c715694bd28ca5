"""Checkpoints of several ranks, by torch.distributed.checkpoint (DCP): each rank writes
and reads its own shards, and no rank gathers a tensor.

DCP plans what each rank writes and reads, and makes all ranks fail if one rank fails.
The files are safetensors; DCP's usual files are pickles. A checkpoint can be read by
any number of ranks. This module is imported only if there are several ranks, because
DCP takes a second to import.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rollweave.io.disk import file_digest
from rollweave.schema.errors import TrainerError
from rollweave.train.distributed import RankGroup, Split, empty_shard
from rollweave.weights.trainer_checkpoint import (
    Digests,
    Places,
    SavedTensors,
    Shard,
    file_of,
)

Write = Callable[[Mapping[str, torch.Tensor], Path, Places], None]


def save_shards(
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    ranks: RankGroup,
    *,
    begin: Callable[[], Path],
    write: Write,
    finish: Callable[[Path, Digests], None],
) -> None:
    """Write this rank's shards of each part's tensors, each part to a file.

    Rank 0 calls `begin`, which makes the directory, and, once all ranks have written,
    `finish`. Raises `TrainerError` on all ranks if a rank fails.
    """
    state = {f"{part}/{name}": tensor for part in parts for name, tensor in parts[part].items()}
    try:
        save(
            state,
            storage_writer=_Writer(begin, write, finish),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=ranks.host_group,
        )
    except CheckpointException as error:
        raise _failure(error) from None


def load_shards(
    files: Mapping[str, Sequence[Path]], ranks: RankGroup, splits: Mapping[str, Split]
) -> dict[str, dict[str, torch.Tensor]]:
    """Read this rank's shards of the tensors in `files` of each part, whatever number
    of ranks has written them. `splits` are the splits of parameters that tensor groups
    divide. Raises `TrainerError` on all ranks if a rank fails.
    """
    saved: dict[str, SavedTensors] = {}
    error = ""
    try:
        saved = {part: SavedTensors(paths) for part, paths in files.items()}
    except (OSError, SafetensorError) as problem:
        error = f"the checkpoint cannot be read: {problem}"
    ranks.raise_together(error)
    parts = {
        part: {
            name: empty_shard(
                shards[0].shape,
                shards[0].dtype,
                ranks,
                # a moment of the optimizer has the name of its parameter, with a prefix
                split=splits.get(name, splits.get(name.partition(".")[2])),
            )
            for name, shards in tensors.shards.items()
        }
        for part, tensors in saved.items()
    }
    state = {f"{part}/{name}": tensor for part in parts for name, tensor in parts[part].items()}
    try:
        load(state, storage_reader=_Reader(saved), process_group=ranks.host_group)
    except CheckpointException as error:
        raise _failure(error) from None
    finally:
        for tensors in saved.values():
            tensors.__exit__()
    return parts


class _Writer(StorageWriter):
    """Writes one file for each part on each rank."""

    def __init__(
        self,
        begin: Callable[[], Path],
        write: Write,
        finish: Callable[[Path, Digests], None],
    ) -> None:
        self._begin, self._write, self._finish = begin, write, finish
        self._directory = Path()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._directory = self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=(str(self._directory), rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        directory, rank, world_size = plan.storage_data
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        places: dict[str, Places] = {}
        for item in plan.items:
            assert item.tensor_data is not None, "the state has only tensors"
            part, _, name = item.index.fqn.partition("/")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), "the state has only tensors"
            tensors.setdefault(part, {})[name] = tensor
            places.setdefault(part, {})[name] = (
                list(item.tensor_data.size),
                list(item.tensor_data.chunk.offsets),
            )
        written = []
        for part, chosen in tensors.items():
            file = Path(directory) / file_of(part, rank=rank, world_size=world_size)
            self._write(chosen, file, places[part])
            size = _sync(file)
            written.append(
                WriteResult(
                    index=MetadataIndex(file.name),
                    size_in_bytes=size,
                    storage_data=file_digest(file),
                )
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        digests: Digests = {
            result.index.fqn: [result.size_in_bytes, result.storage_data]
            for of_rank in results
            for result in of_rank
        }
        self._finish(self._directory, digests)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads the shards of a rank from the files of all ranks."""

    def __init__(self, saved: Mapping[str, SavedTensors]) -> None:
        self._saved = saved
        self._shards: dict[MetadataIndex, Shard] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: dict[str, TensorStorageMetadata] = {}
        for part, saved in self._saved.items():
            for name, shards in saved.shards.items():
                key = f"{part}/{name}"
                metadata[key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=shards[0].dtype),
                    size=torch.Size(shards[0].shape),
                    chunks=[
                        ChunkStorageMetadata(
                            offsets=torch.Size(shard.offset), sizes=torch.Size(shard.size)
                        )
                        for shard in shards
                    ],
                )
                self._shards |= {MetadataIndex(key, shard.offset): shard for shard in shards}
        return Metadata(state_dict_metadata=dict(metadata))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part, _, name = item.storage_index.fqn.partition("/")
            shard = self._shards[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            target.copy_(
                self._saved[part].read_part(name, shard, item.storage_offsets, item.lengths)
            )
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _sync(file: Path) -> int:
    """Sync the file to the disk, and return its size."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return os.fstat(opened.fileno()).st_size


def _failure(error: CheckpointException) -> TrainerError:
    """Return the first rank's error."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return TrainerError(f"trainer rank {rank}: {type(cause).__name__}: {cause}")
