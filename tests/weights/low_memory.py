"""Publishes without enough memory, as a program: `python -m tests.weights.low_memory
disk|limit memfd|file DIRECTORY`.

"disk" mounts a small tmpfs at DIRECTORY (in a mount namespace); "limit" lowers the file
size limit of this process. A small version is published, a large one fails, the small
one stays readable, and nothing of the large one is left.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from rollweave.schema.errors import WeightsError
from rollweave.weights.publication import Publisher, read_tensors

ROOM_BYTES = 1 << 20


def main(what: str, kind: str, directory: Path) -> None:
    if what == "disk":
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "none", str(directory)], check=True
        )
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))
    small, large = {"w": torch.arange(1000.0)}, {"w": torch.zeros(ROOM_BYTES), "v": torch.zeros(10)}
    publisher = Publisher(directory, memfd=kind == "memfd")
    first = publisher.publish(small, version=1, publication_id=1)
    files, open_before = list(directory.iterdir()), len(os.listdir("/proc/self/fd"))
    try:
        publisher.publish(large, version=2, publication_id=2)
    except WeightsError as error:
        print(error)
    else:
        raise AssertionError("there is room")
    assert list(directory.iterdir()) == files, "nothing of it is left"
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert torch.equal(read_tensors(first)["w"], small["w"]), "the old version serves on"
    third = publisher.publish(small, version=3, publication_id=3)
    assert torch.equal(read_tensors(third)["w"], small["w"]), "a small one still fits"
    publisher.close()
    assert not list(directory.iterdir())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
