"""One rank of a trainer that publishes, started by its parent as `python -m
tests.train.publish_worker CASE MODEL OUT`.

Rank and world size come from the environment. The rank asserts what it observes, and
prints a final message to standard output.
"""

import os
import resource
import sys
from pathlib import Path

import torch
from torch.distributed.tensor.debug import CommDebugMode

from rollweave.schema.training import Publish, Published, StopTrainer, TrainFailed, TrainOn
from rollweave.schema.weights import WeightManifest
from rollweave.train.distributed import RankGroup, is_sharded
from rollweave.train.trainer import Trainer
from rollweave.weights.memory import PayloadDigest
from rollweave.weights.publication import bytes_of, read_tensors
from tests.support.trainers import make_batch, make_config
from tests.train.ranks import meet

SMALL_BYTES = 4096


class Rank:
    """A trained trainer, and the weights that it should publish."""

    def __init__(self, model_dir: Path, ranks: RankGroup) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        config = make_config()
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
        )
        self.trainer = Trainer(config, model_dir, ranks=ranks)
        self.train(0)

    def train(self, step: int) -> None:
        self.trainer.handle(TrainOn(batch=make_batch(step, step=step)))

    def expected(self) -> dict[str, torch.Tensor]:
        return {
            name: (parameter.full_tensor() if is_sharded(parameter) else parameter).to(
                torch.bfloat16
            )
            for name, parameter in self.trainer._model.named_parameters()
        }

    def publish(self, version: int) -> Published | TrainFailed:
        reply = self.trainer.handle(Publish(version=version, publication_id=version, keep=(1,)))
        assert isinstance(reply, Published | TrainFailed)
        return reply

    def close(self) -> None:
        torch.distributed.barrier()  # rank 0's publications end with it
        self.trainer.handle(StopTrainer())


def check(manifest: WeightManifest, expected: dict[str, torch.Tensor]) -> None:
    tensors_read = read_tensors(manifest)
    assert list(tensors_read) == list(expected)
    for name, tensor in expected.items():
        assert (tensors_read[name].dtype, tensors_read[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(tensors_read[name]) == bytes_of(tensor), name


def publish_and_count_gathers(rank: Rank, version: int) -> tuple[Published, int]:
    """Publish a version; return the reply, and the number of gathered tensors."""
    with CommDebugMode() as watch:
        reply = rank.publish(version)
    assert isinstance(reply, Published), reply
    return reply, sum(
        count for name, count in watch.get_comm_counts().items() if "into_tensor" in str(name)
    )


def shares(rank: Rank) -> None:
    """No rank gathers. A rank without memory fails the version on all ranks, and the
    next one succeeds.
    """
    expected = rank.expected()
    first, gathers = publish_and_count_gathers(rank, 1)
    assert gathers == 0
    check(first.manifest, expected)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for version, poor in enumerate(range(rank.world_size), start=2):
        rank.train(version - 1)
        if rank.rank == poor:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, unlimited[1]))
        failed = rank.publish(version)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert isinstance(failed, TrainFailed), failed
        who = f"trainer rank {poor}: " if poor else ""
        assert (
            failed.error
            == f"cannot publish weights version {version}: {who}[Errno 27] File too large"
        )
        check(first.manifest, expected)  # the old version is still readable
    last = rank.publish(9)
    assert isinstance(last, Published), last
    check(last.manifest, rank.expected())


def far(rank: Rank) -> None:
    """If a rank cannot see rank 0's process, as on another machine, each publishes a
    part in memory of its own, and together they are the version.
    """
    expected = rank.expected()
    for version in (1, 2):
        reply, gathers = publish_and_count_gathers(rank, version)
        manifest = reply.manifest
        assert gathers == 0
        assert (manifest.location, [part.rank for part in manifest.parts]) == ("", [0, 1])
        payload = bytearray(manifest.nbytes)
        for meta in manifest.tensors:
            payload[meta.offset : meta.offset + meta.nbytes] = bytes_of(expected[meta.name])
        content = PayloadDigest(manifest.parts)
        content.update(payload)
        assert content.hexdigest() == manifest.digest
        own, other = manifest.parts[rank.rank], manifest.parts[1 - rank.rank]
        held = Path(own.location).read_bytes()
        for start, stop in own.ranges:
            assert held[start:stop] == payload[start:stop]
        for start, stop in other.ranges:
            assert not any(held[start:stop]), "it has no memory for them"


def dies(rank: Rank) -> None:
    """The last rank dies while publishing: the others report it, and earlier versions
    stay readable.
    """
    expected = rank.expected()
    first = rank.publish(1)
    assert isinstance(first, Published)
    if rank.rank == rank.world_size - 1:
        os._exit(9)
    before = len(os.listdir("/proc/self/fd"))
    failed = rank.publish(2)
    assert isinstance(failed, TrainFailed), failed
    assert len(os.listdir("/proc/self/fd")) <= before, "its memory is let go"
    check(first.manifest, expected)
    print("survived", flush=True)
    os._exit(0)  # the process group is gone


if __name__ == "__main__":
    own = Rank(Path(sys.argv[2]), meet())
    {"shares": shares, "far": far, "dies": dies}[sys.argv[1]](own)
    own.close()
