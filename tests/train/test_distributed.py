"""Any number of ranks continues from a checkpoint, and how ranks meet."""

import resource
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.schema import training
from rollweave.train.checkpoint import Checkpoint, load, verify
from rollweave.train.distributed import ALONE, RankGroup, interface_of, join_store, open_store
from rollweave.train.model import load_model
from rollweave.train.trainer import Trainer
from rollweave.weights.trainer_checkpoint import file_of, read_trainer_checkpoint
from tests.support.trainers import CPU, make_batch, make_config, make_model, peak_bytes
from tests.train.asking import CASE, save_to, trained
from tests.train.compare import assert_all_close
from tests.train.ranks import on_ranks

WAIT_S = 60.0

SAVING = CASE | {"trainer": {"minibatches": 2, "save_memory": ["activations", "optimizer"]}}
"""A configuration that saves memory, and gives the same updates."""


def restep(model_dir: Path, checkpoint: Path | None, out: Path, ranks: RankGroup = ALONE) -> None:
    """Restore the checkpoint, save it to `out/same` while a step is trained, and save
    the result to `out/trained`.
    """
    check_load(model_dir, ranks)
    trainer = Trainer(make_config(**SAVING), model_dir, ranks=ranks)
    if checkpoint is not None:
        restored = trainer.handle(training.Restore(path=str(checkpoint)))
        assert isinstance(restored, training.Restored), restored
    step = trainer.step
    copied = trainer.handle(training.Save(path=str(out / "same"), background=True))
    assert isinstance(copied, training.Copied), copied
    written = threading.Event()
    replies: list[training.TrainerReply] = []

    def on_written(reply: training.TrainerReply) -> None:
        replies.append(reply)
        written.set()

    trainer.write(on_written)
    trained = trainer.handle(training.TrainOn(batch=make_batch(step, step=step, size=2)))
    assert isinstance(trained, training.Trained), trained
    if ranks.is_first:
        assert written.wait(WAIT_S)
        assert isinstance(replies[0], training.Saved), replies
    failed = trainer.handle(training.Save(path="/proc/nowhere/c"))
    assert isinstance(failed, training.SaveFailed), failed
    assert "nowhere" in failed.error
    assert isinstance(
        trainer.handle(training.Restore(path="/proc/nowhere/c")), training.TrainFailed
    )
    if ranks.world_size > 1:
        check_full_disk(trainer, out, ranks)
    saved = trainer.handle(training.Save(path=str(out / "trained"), export=True))
    assert isinstance(saved, training.Saved), saved
    trainer.handle(training.StopTrainer())


def check_load(model_dir: Path, ranks: RankGroup) -> None:
    """Loading takes the memory of this rank's shards, and of one tensor's rows. The
    file is mapped, which counts as memory, too.
    """
    peak, model = peak_bytes(
        lambda: load_model(model_dir, dtype="float32", device=CPU, ranks=ranks)
    )
    tensors = [4 * parameter.numel() for parameter in model.parameters()]
    share = 1.05 / ranks.world_size  # shards differ by up to a row
    mapped = (model_dir / "model.safetensors").stat().st_size
    assert peak - mapped < share * (sum(tensors) + max(tensors)), (peak, mapped, tensors)


def check_full_disk(trainer: Trainer, out: Path, ranks: RankGroup) -> None:
    """If the disk is full for the last rank alone, no rank saves, and nothing is left.
    A limit of the size of files acts like that.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == ranks.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    failed = trainer.handle(training.Save(path=str(out / "full")))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(failed, training.SaveFailed), failed
    assert f"trainer rank {ranks.world_size - 1}: OSError" in failed.error
    saved = trainer.handle(training.Save(path=str(out / "full")))
    assert isinstance(saved, training.Saved), saved
    assert not list(out.glob("*.partial-*"))


@pytest.mark.slow
def test_any_number_of_ranks_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """One rank, then two, then four, then one again train a step each. What they
    restore is bitwise what was saved, and each step is that of one rank alone.
    """
    model_dir = make_model(tmp_path / "m")
    alone = Trainer(make_config(**CASE), model_dir)
    saved = None
    for number, count in enumerate((1, 2, 4, 1)):
        out = tmp_path / str(number)
        if count == 1:
            restep(model_dir, saved, out)
        else:
            assert saved is not None
            on_ranks(tmp_path, count, partial(restep, model_dir, saved, out))
        if saved is not None:
            assert_equal(load(out / "same"), load(saved), exact=True)
        assert verify(out / "same") == number
        files = sorted(file.name for file in out.joinpath("same").glob("model*"))
        assert files == [file_of("model", rank=rank, world_size=count) for rank in range(count)]
        trained(alone, make_batch(number, step=number, size=2))
        save_to(alone, tmp_path / f"alone{number}")
        saved = out / "trained"
        assert_equal(load(saved), load(tmp_path / f"alone{number}"), exact=False)
        exported = load_file(saved / "hf" / "model.safetensors")
        read = read_trainer_checkpoint(saved, step=number + 1, dtype=torch.float32)
        assert exported.keys() == read.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in read.items())


def assert_equal(one: Checkpoint, other: Checkpoint, *, exact: bool) -> None:
    assert one.step == other.step
    for part, tensors in one.sharded().items():
        bounds = {"atol": 0.0, "rtol": 0.0} if exact else {}
        assert_all_close(tensors, other.sharded()[part], **bounds)


def test_the_store_listens_on_one_address_only() -> None:
    store, address = open_store("127.0.0.1")
    store.set("key", "value")
    assert join_store(address).get("key") == b"value"
    port = int(address.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free, as it would not be on every address


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") is None
