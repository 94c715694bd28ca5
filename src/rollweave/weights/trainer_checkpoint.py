"""Weights out of a checkpoint of the trainer (`train/checkpoint.py`), as they were
published (Laminar §3.3).

Invariants: what does not match the checkpoint's digests is refused; the numbers are bit
for bit those of the publication of the same version: a checkpoint holds what the
trainer has, in float32, and publishing and reading round it alike.
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
    """The model's tensors of the checkpoint of `step`, by name, on the CPU, as `dtype`.

    Raises `WeightsError` for a checkpoint that is torn, damaged, gone, or of another
    step or format.
    """
    try:
        digests = json.loads((directory / DIGESTS).read_text())
        for name in (STATE, MODEL):
            size, found = digests[name]
            if (directory / name).stat().st_size != size or file_digest(directory / name) != found:
                raise WeightsError(
                    f"checkpoint {directory} is torn: {name} does not match its digest"
                )
        state = json.loads((directory / STATE).read_text())
        if (state["format"], state["step"]) != (FORMAT, step):
            raise WeightsError(
                f"checkpoint {directory} must be of step {step} in format {FORMAT}, got {state}"
            )
        return {name: tensor.to(dtype) for name, tensor in load_file(directory / MODEL).items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"checkpoint {directory} is torn or none: {error}") from error
