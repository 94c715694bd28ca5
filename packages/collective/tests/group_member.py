"""Versions, and an engine's end of a group in a process of its own, which stops at a
bucket if it is told to.
"""

import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights.publication import Publication, bytes_of, publish
from rollweave_collective import group as groups
from rollweave_collective.group import Group
from rollweave_collective.member import Member

CPU = torch.device("cpu")
BUCKET = 1 << 20


def weights(seed: int, *, elements: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn((elements, 3), generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "empty": torch.empty((0, 4), dtype=torch.float16),
        "scalar": torch.tensor(float("nan")),
        "eight": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
    }


def version(number: int, **sizes: int) -> Publication:
    return publish(weights(number, **sizes), version=number, publication_id=number)


def main(pipe: Connection, wait_s: float) -> None:
    """Answer each manifest by a digest of its tensors and the number of broadcasts, or
    by the error; "stop" stops the next broadcast at its first bucket, and says so.
    """
    groups.BUCKET_BYTES = BUCKET
    member = Member(CPU, wait_s=wait_s)
    finish, stops = Group._finish, False

    def finish_or_stop(group: Group, *bucket: Any) -> torch.Tensor:
        received = finish(group, *bucket)
        if stops:
            pipe.send("stopped")
            threading.Event().wait()
        return received

    Group._finish = finish_or_stop  # type: ignore[method-assign]
    pipe.send("ready")
    while True:
        command: WeightManifest | str = pipe.recv()
        if isinstance(command, str):
            stops = command == "stop"
            continue
        try:
            pipe.send((digest(member.read(command)), member.broadcasts))
        except WeightsError as error:
            pipe.send((str(error), member.broadcasts))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    content = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(bytes_of(tensor))
    return str(content.hexdigest())
