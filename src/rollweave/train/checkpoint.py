"""Checkpoints of the trainer, which are either complete or recognizably incomplete.

A checkpoint is a directory with `model.safetensors`, `optimizer.safetensors`,
`rng.safetensors`, `state.json`, `reference.safetensors` if there is a reference,
`critic.safetensors` and `critic_optimizer.safetensors` if there is a critic,
`stored.json` if the model's Hugging Face checkpoint has other tensors,
`constants.safetensors` if some of these tensors do not change, and `digests.json`,
which is written last and has the size and xxh3-128 of each file. If there are several
ranks, each writes its shards to a separate file, such as
`model-00001-of-00002.safetensors` (`train/sharded_checkpoint.py`). Any number of ranks
can read a checkpoint. Invariants: a checkpoint gets its name only when all of it is on
disk; a checkpoint that does not match its digests is rejected; unrelated files next to
its files are left alone.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollweave.io.disk import PARTIAL, file_digest, new_directory
from rollweave.io.tokenizer import tokenizer_files
from rollweave.schema.config.training import ALL_LINEAR, LoraConfig
from rollweave.schema.errors import TrainerError
from rollweave.train.distributed import ALONE, RankGroup, Split
from rollweave.weights.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    PREFIX,
    A,
    B,
    base_digest,
    layer_of,
)
from rollweave.weights.checkpoint import read_rows_of, read_sizes
from rollweave.weights.publication import bytes_of
from rollweave.weights.trainer_checkpoint import (
    DIGESTS,
    FORMAT,
    MODEL,
    PLACES,
    STATE,
    STORED,
    Digests,
    Places,
    SavedTensors,
    file_of,
    files_of,
    read_constants,
    read_stored,
    stored_in,
)
from rollweave.weights.views import StoredTensors

SHARDED = ("model", "optimizer", "reference", "critic", "critic_optimizer")
"""The parts whose tensors are sharded over the ranks."""

EXPORT = "hf"
ADAPTER = "adapter"
EXPORT_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Number formats of an export, as safetensors names them."""

HEADER_ALIGNMENT = 8
"""The header of a safetensors file is a multiple of this number of bytes."""


@dataclasses.dataclass
class Checkpoint:
    """The state that a trainer needs to continue after `step` completed steps.

    Tensors are on the CPU. With several ranks they are sharded, except for `rng`, which
    is the first rank's.
    """

    step: int
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor] | None = None
    stored: StoredTensors | None = None
    """The tensors of the model's Hugging Face checkpoint. Not read again."""
    constants: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that training does not change. A checkpoint is read without them."""
    critic: Mapping[str, torch.Tensor] | None = None
    critic_optimizer: Mapping[str, torch.Tensor] | None = None

    def forget_trained(self) -> None:
        """Let go of all tensors that training changes."""
        self.model = self.optimizer = {}
        self.reference = self.critic = self.critic_optimizer = None

    def sharded(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the parts whose tensors are sharded over the ranks."""
        parts = {name: getattr(self, name) for name in SHARDED}
        return {name: tensors for name, tensors in parts.items() if tensors is not None}


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The adapters of a checkpoint whose model is a base model with these `stored`
    tensors.
    """

    lora: LoraConfig
    stored: StoredTensors


def save(
    path: Path,
    checkpoint: Checkpoint,
    *,
    ranks: RankGroup = ALONE,
    export_from: Path | None = None,
    export_dtype: torch.dtype,
    adapted: Adapted | None = None,
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Write `checkpoint` to directory `path`, atomically; with `export_from`, also a
    Hugging Face checkpoint to `path/hf`. All `ranks` call it. After `on_written` is
    called, the tensors of trained state are not read any more.

    The tensors of `adapted` are adapters, which are also exported separately, to
    `path/adapter`.

    Raises OSError, for example if no space is left, and keeps the former content of
    `path`. With several ranks, all ranks raise `TrainerError` instead if a rank fails.
    """

    def finish(directory: Path, digests: Digests) -> None:
        """Write the files that only the first rank writes. `digests` are the shards'
        digests.
        """
        _save_tensors(checkpoint.rng, directory / file_of("rng"))
        (directory / STATE).write_text(json.dumps({"format": FORMAT, "step": checkpoint.step}))
        if checkpoint.stored is not None and not checkpoint.stored.is_identical:
            (directory / STORED).write_bytes(msgspec.json.encode(checkpoint.stored))
        if checkpoint.constants:
            _save_tensors(checkpoint.constants, directory / file_of("constants"))
        if export_from is not None:
            export(directory, source=export_from, dtype=export_dtype, adapted=adapted)
        for file in sorted(file for file in directory.rglob("*") if file.is_file()):
            name = str(file.relative_to(directory))
            if name not in digests:
                digests[name] = [file.stat().st_size, file_digest(file)]
        (directory / DIGESTS).write_text(json.dumps(digests, indent=1))

    if ranks.world_size == 1:
        with new_directory(path) as directory:
            for name, tensors in checkpoint.sharded().items():
                _save_tensors(tensors, directory / file_of(name))
                del tensors
            on_written()
            finish(directory, {})
        return

    from rollweave.train.sharded_checkpoint import save_shards

    with contextlib.ExitStack() as stack:

        def finish_together(directory: Path, digests: Digests) -> None:
            finish(directory, digests)
            stack.close()  # the directory gets its name

        save_shards(
            checkpoint.sharded(),
            ranks,
            begin=lambda: stack.enter_context(new_directory(path)),
            write=_save_tensors,
            finish=finish_together,
        )


def load(
    path: Path, *, ranks: RankGroup = ALONE, splits: Mapping[str, Split] | None = None
) -> Checkpoint:
    """Read the checkpoint at `path`, or the newest complete checkpoint in `path` if it
    is a directory of checkpoints. All `ranks` call it; their tensor groups divide
    parameters by `splits`.

    Raises `TrainerError`, which names what is incomplete, missing or unknown, on all
    ranks.
    """
    if not (path / DIGESTS).exists() and not (path / STATE).exists():
        newest = latest(path)
        if newest is None:
            raise TrainerError(f"no complete checkpoint at {path}")
        path = newest
    step = verify(path, ranks=ranks)
    try:
        names = json.loads((path / DIGESTS).read_text())
        files = {part: [path / name for name in files_of(part, names)] for part in SHARDED}
        if ranks.world_size > 1:
            from rollweave.train.sharded_checkpoint import load_shards

            parts = load_shards(files, ranks, splits or {})
        else:
            parts = {part: _read(paths) for part, paths in files.items()}
        return Checkpoint(
            step=step,
            model=parts["model"],
            optimizer=parts["optimizer"],
            rng=load_file(path / file_of("rng")),
            reference=parts["reference"] or None,
            critic=parts["critic"] or None,
            critic_optimizer=parts["critic_optimizer"] or None,
        )
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"checkpoint {path} cannot be read: {error}") from error


def latest(directory: Path) -> Path | None:
    """Return the complete checkpoint in `directory` with the most steps; incomplete
    checkpoints are skipped.
    """
    complete: list[tuple[int, Path]] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            if PARTIAL not in path.name:
                complete.append((verify(path), path))
        except TrainerError:
            continue
    return max(complete)[1] if complete else None


def verify(path: Path, *, ranks: RankGroup = ALONE) -> int:
    """Compare every file of the checkpoint at `path` with its digest, and return the
    checkpoint's step. Several ranks, which all call it, divide the files.

    Raises `TrainerError`, on all ranks or none.
    """
    step, error = 0, ""
    try:
        step = _verify(path, ranks)
    except TrainerError as problem:
        error = str(problem)
    ranks.raise_together(error)
    return step


def _verify(path: Path, ranks: RankGroup) -> int:
    """Compare this rank's files with their digests, and return the step."""
    try:
        digests = json.loads((path / DIGESTS).read_text())
        own = list(digests.items())[ranks.rank :: ranks.world_size]
        for name, (size, digest) in own:
            file = path / name
            if file.stat().st_size != size or file_digest(file) != digest:
                raise TrainerError(
                    f"checkpoint {path} is damaged: {name} does not match its digest"
                )
        state = json.loads((path / STATE).read_text())
        if state["format"] != FORMAT:
            raise TrainerError(
                f"checkpoint {path} has format {state['format']}, this version reads {FORMAT}"
            )
        return int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerError(f"checkpoint {path} is incomplete or invalid: {error}") from error


def export(
    checkpoint: Path, *, source: Path, dtype: torch.dtype, adapted: Adapted | None = None
) -> None:
    """Write a Hugging Face checkpoint into directory `checkpoint` from the files of its
    model: config and tokenizer from `source`, weights in `dtype`. Adapters are merged
    into the weights of `source`.

    One tensor at a time is in memory.
    """
    path = checkpoint / EXPORT
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    for name in tokenizer_files(source):
        (path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, path / name)
    files = files_of("model", [file.name for file in checkpoint.iterdir()])
    with SavedTensors(checkpoint / name for name in files) as model:
        if adapted is not None:
            adapters = {name: model.read(name) for name in model.shards}
            _export_merged(adapters, adapted, source, path / MODEL, dtype=dtype)
            _export_adapters(adapters, adapted, source, checkpoint / ADAPTER)
            return
        stored = stored_in(checkpoint, model)
        sizes = {name: view.size for name, view in stored.views.items()}
        constants = read_constants(checkpoint)
        _stream_tensors(sizes, read_stored(checkpoint, model), constants, path / MODEL, dtype=dtype)


def _export_merged(
    adapters: Mapping[str, torch.Tensor],
    adapted: Adapted,
    source: Path,
    path: Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write the weights of `source` with these adapters, as `dtype`, to one file."""
    views, kept = adapted.stored.views, adapted.stored.constants
    sizes = {name: size for name, size in read_sizes(source).items() if name in views}
    constants = dict(read_rows_of(source, {name: slice(None) for name in kept}))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_rows_of(source, {name: slice(None) for name in sizes}):
            layer = views[name].parameter.removesuffix(".weight")
            if layer + A in adapters:
                a, b = adapters[layer + A], adapters[layer + B]
                added = views[name].of(torch.mm(b, a))
                tensor = tensor.float().add(added, alpha=adapted.lora.scale)
            yield name, tensor

    _stream_tensors(sizes, tensors(), constants, path, dtype=dtype)


def _export_adapters(
    adapters: Mapping[str, torch.Tensor], adapted: Adapted, source: Path, path: Path
) -> None:
    """Write adapters as peft does."""
    path.mkdir(parents=True, exist_ok=True)
    lora = adapted.lora
    layers = {layer_of(name) or "" for name in adapters}
    named = {layer.rpartition(".")[2] for layer in layers}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(named if ALL_LINEAR in lora.targets else lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    tensors = {PREFIX + name: tensor for name, tensor in adapters.items()}
    _save_tensors(tensors, path / ADAPTER_WEIGHTS, base=base_digest(source))


def _stream_tensors(
    sizes: Mapping[str, Sequence[int]],
    tensors: Iterator[tuple[str, torch.Tensor]],
    constants: Mapping[str, torch.Tensor],
    path: Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write tensors of these `sizes` to one safetensors file, as `dtype`, one after the
    other; `constants` keep their format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + math.prod(size) * dtype.itemsize
        header[name] = {
            "dtype": EXPORT_DTYPES[dtype],
            "shape": list(size),
            "data_offsets": [start, end],
        }
    for name, tensor in constants.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": EXPORT_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in tensors:
            file.write(bytes_of(tensor.to(dtype).contiguous()))
        for tensor in constants.values():
            file.write(bytes_of(tensor.contiguous()))


def _read(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Read full tensors from the files of all ranks."""
    with SavedTensors(files) as saved:
        return {name: saved.read(name) for name in saved.shards}


def _save_tensors(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    places: Places | None = None,
    *,
    base: str | None = None,
) -> None:
    """Write tensors to a safetensors file; `places` are the places of shards, `base` is
    the base model of adapters.
    """
    metadata = {"format": "pt"} | ({} if places is None else {PLACES: json.dumps(places)})
    metadata |= {} if base is None else {BASE: base}
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata=metadata,
        )
    except SafetensorError as error:  # the library reports a failed write like this
        raise OSError(f"cannot write {path.name}: {error}") from error
