"""The memory that a process needs, use by use.

Each package states what its processes need, from the configuration and the model's
shape alone: `train/needs`, `engine/needs`, `weights/needs`. A check before a run adds
this up on each GPU and each host (`runtime/preflight/layout`).
"""

from rollweave.schema.base import Struct

PROCESS_BYTES = 450 << 20
"""Memory of an interpreter that has imported torch and transformers, and has computed:
350 to 450 MB were measured on a CPU.
"""

CUDA_BYTES = 640 << 20
"""Memory on a GPU of one process's CUDA context, kernels and workspaces. It was not
measured.
"""


class Need(Struct, frozen=True, kw_only=True):
    """One use of memory by a process: GPU memory if `on_device` and it runs on a GPU.

    `setting` is the key that changes it most directly. If `in_turn`, the memory of a
    colocated run is freed while the processes of the other kind have the devices. If
    `at_restart`, the memory is needed only when a process starts again while the
    engines have theirs.
    """

    what: str
    nbytes: int
    on_device: bool = True
    in_turn: bool = False
    at_restart: bool = False
    setting: str


def interpreter(*, setting: str) -> Need:
    """Return the need of a process that does not compute on a GPU."""
    return Need(what="process", nbytes=PROCESS_BYTES, on_device=False, setting=setting)


def computing(device: str, *, setting: str) -> list[Need]:
    """Return the needs of a process that computes on a device, in addition to its
    tensors.
    """
    cuda = [Need(what="CUDA", nbytes=CUDA_BYTES, setting=setting)] if device == "cuda" else []
    return [*cuda, interpreter(setting=setting)]
