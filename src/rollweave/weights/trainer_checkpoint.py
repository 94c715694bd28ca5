"""Reads the weights from a checkpoint of the trainer (`train/checkpoint.py`), as they
were published (Laminar §3.3).

Each part of a checkpoint ("model") is one safetensors file, or one per rank of the
trainer that wrote it, with the places of the rank's shards in the file's metadata.
Invariants: a checkpoint that does not match its digests is rejected; the values are
bitwise equal to the published values of the same version, because a checkpoint holds
the trainer's float32 values, and publishing and reading round them in the same way.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rollweave.io.disk import file_digest
from rollweave.schema.errors import WeightsError
from rollweave.weights.views import StoredTensors

FORMAT = 1
DIGESTS = "digests.json"
STATE = "state.json"
MODEL = "model.safetensors"
STORED = "stored.json"
"""File with the tensors of the model's Hugging Face checkpoint (`StoredTensors`), if
they differ from the parameters.
"""

PLACES = "places"
"""Metadata of a file with shards: the place of each shard in its tensor, as JSON."""


Digests = dict[str, list[int | str]]
"""File of a checkpoint → its size in bytes, and its digest."""

Places = dict[str, tuple[list[int], list[int]]]
"""Name → the shape of the full tensor, and the offset of this file's shard in it."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a tensor: the part has `size` and begins at `offset` of the tensor,
    which has `shape`. It is in file number `file`.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    file: int = 0


class SavedTensors:
    """The tensors of one part of a checkpoint, from the files of all ranks.

    Raises OSError and SafetensorError for files that cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.shards: dict[str, list[Shard]] = {}
        self._open = contextlib.ExitStack()
        self._paths = [str(file) for file in files]
        self._files: list[Any] = []
        with contextlib.ExitStack() as opening:
            for path in self._paths:
                opened = opening.enter_context(safe_open(path, framework="pt"))
                self._find(opened, number=len(self._files))
                self._files.append(opened)
            self._open = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor."""
        shards = self.shards[name]
        if shards[0].size == shards[0].shape:
            # from a mapping of its own, which ends with the tensor
            with safe_open(self._paths[shards[0].file], framework="pt") as file:
                whole: torch.Tensor = file.get_tensor(name)
            return whole
        tensor = torch.empty(shards[0].shape, dtype=shards[0].dtype)
        for shard in shards:
            place = tuple(
                slice(start, start + length)
                for start, length in zip(shard.offset, shard.size, strict=True)
            )
            tensor[place] = self._files[shard.file].get_tensor(name)
        return tensor

    def read_part(
        self, name: str, shard: Shard, start: Sequence[int], size: Sequence[int]
    ) -> torch.Tensor:
        """Return the part of a shard that begins at `start` in it."""
        file = self._files[shard.file]
        place = tuple(
            slice(first, first + length) for first, length in zip(start, size, strict=True)
        )
        part: torch.Tensor = file.get_slice(name)[place] if place else file.get_tensor(name)
        return part

    def _find(self, opened: Any, *, number: int) -> None:
        places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
        for name in opened.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            handle = opened.get_slice(name)
            size = tuple(handle.get_shape())
            shape, offset = places.get(name, (size, (0,) * len(size)))
            dtype = handle[:0].dtype if size else opened.get_tensor(name).dtype
            shard = Shard(
                shape=tuple(shape), offset=tuple(offset), size=size, dtype=dtype, file=number
            )
            self.shards.setdefault(name, []).append(shard)


def stored_in(directory: Path, saved: SavedTensors) -> StoredTensors:
    """Return the tensors of the Hugging Face checkpoint whose parameters were saved."""
    path = directory / STORED
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=StoredTensors)
    return StoredTensors.identical({name: of[0].shape for name, of in saved.shards.items()})


def read_stored(directory: Path, saved: SavedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the Hugging Face checkpoint, one parameter at a time in
    memory.
    """
    name, parameter = "", torch.empty(0)
    for stored, view in stored_in(directory, saved).views.items():
        if view.parameter != name:
            name, parameter = view.parameter, saved.read(view.parameter)
        yield stored, view.of(parameter)


def read_constants(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the Hugging Face checkpoint that training does not
    change.
    """
    path = directory / file_of("constants")
    return dict(load_file(path)) if path.exists() else {}


def file_of(part: str, *, rank: int = 0, world_size: int = 1) -> str:
    """Return the name of a rank's file of this part."""
    number = f"-{rank + 1:05d}-of-{world_size:05d}" if world_size > 1 else ""
    return f"{part}{number}.safetensors"


def files_of(part: str, names: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint that have this part."""
    pattern = re.compile(rf"{part}(-\d+-of-\d+)?\.safetensors")
    return sorted(name for name in names if pattern.fullmatch(name))


def read_trainer_checkpoint(
    directory: Path, *, step: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read the model's tensors from the checkpoint of `step`, by name, on the CPU, as
    `dtype`.

    Raises `WeightsError` for a checkpoint that is missing, incomplete or damaged, or
    has another step or format.
    """
    try:
        digests: Mapping[str, Any] = json.loads((directory / DIGESTS).read_text())
        files = files_of("model", digests) or [MODEL]
        others = [name for name in (STORED, file_of("constants")) if name in digests]
        for name in (STATE, *others, *files):
            size, digest = digests[name]
            if (directory / name).stat().st_size != size or file_digest(directory / name) != digest:
                raise WeightsError(
                    f"checkpoint {directory} is damaged: {name} does not match its digest"
                )
        state = json.loads((directory / STATE).read_text())
        if (state["format"], state["step"]) != (FORMAT, step):
            raise WeightsError(
                f"checkpoint {directory} must be of step {step} in format {FORMAT}, got {state}"
            )
        with SavedTensors(directory / name for name in files) as saved:
            tensors = {name: tensor.to(dtype) for name, tensor in read_stored(directory, saved)}
        return tensors | read_constants(directory)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"checkpoint {directory} is incomplete or invalid: {error}") from error
