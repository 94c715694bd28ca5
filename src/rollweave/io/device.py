"""The device on which a process computes."""

import torch


def device_named(name: str) -> torch.device:
    """Return the device that `name` stands for, as in `model.device`: `auto` is a GPU if
    this process sees one, and `cuda` the first GPU that it sees.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)
