"""Checkpoints of the trainer, which are either complete or recognizably incomplete.

A checkpoint is a directory with `model.safetensors`, `optimizer.safetensors`,
`rng.safetensors`, `state.json`, if there is a reference `reference.safetensors`, and
`digests.json`, written last, with the size and xxh3-128 of each. Invariants: a
checkpoint gets its name only when all of it is on disk; one that does not match its
digests is rejected; unrelated files beside these are left alone.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollweave.io.disk import file_digest
from rollweave.schema.errors import TrainerError
from rollweave.train.files import PARTIAL, new_directory
from rollweave.weights.trainer_checkpoint import DIGESTS, FORMAT, MODEL, STATE

EXPORT = "hf"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state that a trainer needs to continue after `step` completed steps.

    Tensors are unsharded, on the CPU.
    """

    step: int
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor] | None = None


def save(
    path: Path,
    checkpoint: Checkpoint,
    *,
    export_from: Path | None = None,
    export_dtype: torch.dtype,
) -> None:
    """Write `checkpoint` to directory `path`, atomically; with `export_from`, also a
    Hugging Face checkpoint to `path/hf`.

    Raises OSError, for example if no space is left, and keeps the former content of
    `path`.
    """
    with new_directory(path) as directory:
        parts = {
            "model": checkpoint.model,
            "optimizer": checkpoint.optimizer,
            "rng": checkpoint.rng,
        }
        if checkpoint.reference is not None:
            parts["reference"] = checkpoint.reference
        for name, tensors in parts.items():
            _save_tensors(tensors, directory / f"{name}.safetensors")
        (directory / STATE).write_text(json.dumps({"format": FORMAT, "step": checkpoint.step}))
        if export_from is not None:
            export(directory / EXPORT, checkpoint.model, source=export_from, dtype=export_dtype)
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        digests = {
            str(file.relative_to(directory)): [file.stat().st_size, file_digest(file)]
            for file in files
        }
        (directory / DIGESTS).write_text(json.dumps(digests, indent=1))


def load(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`, or the newest complete one in `path` if that is a
    directory of checkpoints.

    Raises `TrainerError`, which names what is incomplete, missing or unknown.
    """
    if not (path / DIGESTS).exists() and not (path / STATE).exists():
        newest = latest(path)
        if newest is None:
            raise TrainerError(f"no complete checkpoint at {path}")
        path = newest
    step = verify(path)
    reference = path / "reference.safetensors"
    try:
        return Checkpoint(
            step=step,
            model=load_file(path / MODEL),
            optimizer=load_file(path / "optimizer.safetensors"),
            rng=load_file(path / "rng.safetensors"),
            reference=load_file(reference) if reference.exists() else None,
        )
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"checkpoint {path} cannot be read: {error}") from error


def latest(directory: Path) -> Path | None:
    """Return the complete checkpoint in `directory` with the most steps; incomplete
    ones are skipped.
    """
    complete: list[tuple[int, Path]] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            if PARTIAL not in path.name:
                complete.append((verify(path), path))
        except TrainerError:
            continue
    return max(complete)[1] if complete else None


def verify(path: Path) -> int:
    """Compare every file of the checkpoint at `path` with its digest, and return the
    checkpoint's step.

    Raises `TrainerError`.
    """
    try:
        digests = json.loads((path / DIGESTS).read_text())
        for name, (size, digest) in digests.items():
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
    path: Path, model: Mapping[str, torch.Tensor], *, source: Path, dtype: torch.dtype
) -> None:
    """Write a Hugging Face checkpoint of `model`: config and tokenizer from `source`,
    weights in `dtype`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, path / name)
    _save_tensors({name: tensor.to(dtype) for name, tensor in model.items()}, path / MODEL)


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    except SafetensorError as error:  # the library reports a failed write like this
        raise OSError(f"cannot write {path.name}: {error}") from error
