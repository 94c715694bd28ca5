"""Reads the weights from a checkpoint of the trainer (`train/checkpoint.py`), as they
were published (Laminar §3.3).

Invariants: a checkpoint that does not match its digests is rejected; the values are
bitwise those of the publication of the same version, because a checkpoint holds the
trainer's float32 values, and publishing and reading round them alike.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollweave.io.disk import file_digest
from rollweave.schema.errors import WeightsError

FORMAT = 1
DIGESTS = "digests.json"
STATE = "state.json"
MODEL = "model.safetensors"


def read_trainer_checkpoint(
    directory: Path, *, step: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read the model's tensors from the checkpoint of `step`, by name, on the CPU, as
    `dtype`.

    Raises `WeightsError` for a checkpoint that is incomplete, damaged, missing, or of
    another step or format.
    """
    try:
        digests = json.loads((directory / DIGESTS).read_text())
        for name in (STATE, MODEL):
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
        return {name: tensor.to(dtype) for name, tensor in load_file(directory / MODEL).items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"checkpoint {directory} is incomplete or invalid: {error}") from error
