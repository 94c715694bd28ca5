"""An engine reads from a checkpoint exactly the bits that were published, or
nothing.
"""

from pathlib import Path

import pytest
import torch

from rollweave.schema.errors import WeightsError
from rollweave.schema.training import Publish, Published, Restore, Save, Saved, Trained, TrainOn
from rollweave.train.checkpoint import Checkpoint, save
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint
from tests.support.trainers import make_batch, make_config, make_model


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_the_bits_that_were_published(tmp_path: Path, dtype: str) -> None:
    """This includes the publication of a trainer restored from it."""
    plain, directory = make_config(), make_model(tmp_path / "m")
    config = plain.model_copy(update={"model": plain.model.model_copy(update={"dtype": dtype})})
    trainer = Trainer(config, directory, tmp_path / "run")
    assert isinstance(trainer.handle(TrainOn(batch=make_batch())), Trained)
    first = trainer.handle(Publish(version=1, publication_id=7))
    assert isinstance(first, Published)
    assert isinstance(trainer.handle(Save(path=str(tmp_path / "c"), export=False)), Saved)
    trainer.handle(TrainOn(batch=make_batch(1, step=1)))
    trainer.handle(Restore(path=str(tmp_path / "c")))
    again = trainer.handle(Publish(version=1, publication_id=8, keep=(7,)))
    assert isinstance(again, Published)
    published_bits = bits(
        read_trainer_checkpoint(tmp_path / "c", step=1, dtype=getattr(torch, config.model.dtype))
    )
    assert (
        published_bits == bits(read_tensors(first.manifest)) == bits(read_tensors(again.manifest))
    )
    trainer.close()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "digests.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_refuses_any_damage(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "c"
    save(
        path,
        Checkpoint(
            step=2,
            model={"w": torch.ones(50)},
            optimizer={"s": torch.ones(1)},
            rng={"cpu": torch.get_rng_state()},
        ),
        export_dtype=torch.float32,
    )
    assert torch.equal(
        read_trainer_checkpoint(path, step=2, dtype=torch.float32)["w"], torch.ones(50)
    )
    with pytest.raises(WeightsError, match="must be of step 3"):
        read_trainer_checkpoint(path, step=3, dtype=torch.float32)
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[
            content.find(b"model.safetensors") if name == "digests.json" else len(content) // 2
        ] ^= 1
        file.write_bytes(
            {"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage]
        )
    with pytest.raises(WeightsError, match=r"damaged|incomplete or invalid"):
        read_trainer_checkpoint(path, step=2, dtype=torch.float32)


def test_refuses_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="incomplete or invalid"):
        read_trainer_checkpoint(tmp_path / "c", step=0, dtype=torch.float32)
