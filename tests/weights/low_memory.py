"""Publishes with a lowered limit of file sizes, as a program.

A small version is published, a large one fails, the small one stays readable, and
nothing of the large one is left.
"""

import os
import resource

import torch

from rollweave.schema.errors import WeightsError
from rollweave.weights.publication import Publisher, read_tensors

ROOM_BYTES = 1 << 20


def main() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))
    small, large = {"w": torch.arange(1000.0)}, {"w": torch.zeros(ROOM_BYTES), "v": torch.zeros(10)}
    publisher = Publisher()
    first = publisher.publish(small, version=1, publication_id=1)
    open_before = len(os.listdir("/proc/self/fd"))
    try:
        publisher.publish(large, version=2, publication_id=2)
    except WeightsError as error:
        print(error)
    else:
        raise AssertionError("there is room")
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert torch.equal(read_tensors(first)["w"], small["w"]), "the old version serves on"
    third = publisher.publish(small, version=3, publication_id=3)
    assert torch.equal(read_tensors(third)["w"], small["w"]), "a small one still fits"
    publisher.close()


if __name__ == "__main__":
    main()
