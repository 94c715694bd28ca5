"""One rank of a trainer that continues from a checkpoint of another number of ranks.

Arguments: model directory, checkpoint, output directory. Rank and world size come from
the environment.
"""

import resource
import sys
import threading
from pathlib import Path

from rollweave.schema.training import (
    Copied,
    Restore,
    Restored,
    Save,
    Saved,
    SaveFailed,
    StopTrainer,
    Trained,
    TrainerReply,
    TrainFailed,
    TrainOn,
)
from rollweave.train.distributed import ALONE, RankGroup
from rollweave.train.model import load_model
from rollweave.train.trainer import Trainer
from tests.support.trainers import CPU, make_batch, make_config, peak_bytes
from tests.train.rank_worker import CASE
from tests.train.ranks import meet

WAIT_S = 60.0

SAVING = CASE | {"trainer": {"minibatches": 2, "save_memory": ["activations", "optimizer"]}}
"""A configuration that saves memory, and gives the same updates."""


def restep(model_dir: Path, checkpoint: Path | None, out: Path, ranks: RankGroup = ALONE) -> None:
    """Restore the checkpoint, save it to `out/same` while a step is trained, and save
    the result to `out/trained`.
    """
    check_load(model_dir, ranks)
    trainer = Trainer(make_config(**SAVING), model_dir, ranks=ranks)  # type: ignore[arg-type]
    if checkpoint is not None:
        restored = trainer.handle(Restore(path=str(checkpoint)))
        assert isinstance(restored, Restored), restored
    step = trainer.step
    copied = trainer.handle(Save(path=str(out / "same"), background=True))
    assert isinstance(copied, Copied), copied
    written = threading.Event()
    replies: list[TrainerReply] = []

    def on_written(reply: TrainerReply) -> None:
        replies.append(reply)
        written.set()

    trainer.write(on_written)
    trained = trainer.handle(TrainOn(batch=make_batch(step, step=step, size=2)))
    assert isinstance(trained, Trained), trained
    if ranks.is_first:
        assert written.wait(WAIT_S)
        assert isinstance(replies[0], Saved), replies
    failed = trainer.handle(Save(path="/proc/nowhere/c"))
    assert isinstance(failed, SaveFailed), failed
    assert "nowhere" in failed.error
    assert isinstance(trainer.handle(Restore(path="/proc/nowhere/c")), TrainFailed)
    if ranks.world_size > 1:
        check_full_disk(trainer, out, ranks)
    saved = trainer.handle(Save(path=str(out / "trained"), export=True))
    assert isinstance(saved, Saved), saved
    trainer.handle(StopTrainer())


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
    failed = trainer.handle(Save(path=str(out / "full")))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(failed, SaveFailed), failed
    assert f"trainer rank {ranks.world_size - 1}: OSError" in failed.error
    saved = trainer.handle(Save(path=str(out / "full")))
    assert isinstance(saved, Saved), saved
    assert not list(out.glob("*.partial-*"))


if __name__ == "__main__":
    restep(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), meet())
