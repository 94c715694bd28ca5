"""A checkpoint is complete or recognizably incomplete; a failing disk keeps the former
one; an engine reads exactly the bits that were published, or nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollweave.io.tokenizer import tokenizer_files
from rollweave.schema import training
from rollweave.schema.errors import TrainerError, WeightsError
from rollweave.train.checkpoint import Checkpoint, latest, load, save, verify
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint
from tests.support.chats import CHATML
from tests.support.forking import Forked
from tests.support.trainers import make_batch, make_config, make_model
from tests.train.asking import changed, refused, restore_from, save_to, trained


def some(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        model={"w": torch.full((50,), float(step))},
        optimizer={"step.w": torch.tensor(3.0)},
        rng={"cpu": torch.get_rng_state()},
    )


def write(path: Path, step: int) -> None:
    save(path, some(step), export_dtype=torch.float32)


DAMAGE = ["truncated", "flipped", "empty", "missing"]


def inflict(damage: str, file: Path, *, at: bytes | None = None) -> None:
    """Damage a file; what is flipped is a bit of `at`, or of the middle."""
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
        return
    half = len(content) // 2
    content[half if at is None else content.find(at)] ^= 1
    file.write_bytes({"truncated": content[:half], "flipped": content, "empty": b""}[damage])


def test_loads_a_saved_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "c", 7)
    loaded = load(tmp_path / "c")
    assert loaded.step == 7
    assert torch.equal(loaded.model["w"], torch.full((50,), 7.0))
    assert loaded.optimizer["step.w"] == 3
    assert torch.equal(loaded.rng["cpu"], torch.get_rng_state())
    assert loaded.reference is None


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "digests.json"],
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_detects_any_damage(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path / "good", 1)
    write(tmp_path / "bad", 2)
    inflict(damage, tmp_path / "bad" / name)
    with pytest.raises(TrainerError, match=r"damaged|incomplete or invalid"):
        verify(tmp_path / "bad")
    with pytest.raises(TrainerError, match=r"damaged|incomplete or invalid"):
        load(tmp_path / "bad")
    assert latest(tmp_path) == tmp_path / "good"
    assert load(tmp_path).step == 1


def test_finds_the_newest_complete_checkpoint_by_any_name(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    with pytest.raises(TrainerError, match="no complete checkpoint"):
        load(tmp_path)
    for name, step in (("z", 3), ("a", 12), ("m", 9)):
        write(tmp_path / name, step)
    (tmp_path / "b.partial-77").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert latest(tmp_path) == tmp_path / "a"


def test_refuses_other_formats(tmp_path: Path) -> None:
    write(tmp_path / "c", 1)
    (tmp_path / "c" / "state.json").write_text(json.dumps({"format": 99, "step": 1}))
    digests = json.loads((tmp_path / "c" / "digests.json").read_text())
    digests.pop("state.json")
    (tmp_path / "c" / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(TrainerError, match="format 99"):
        load(tmp_path / "c")


def test_replaces_a_checkpoint_and_keeps_unrelated_files(tmp_path: Path) -> None:
    write(tmp_path / "c", 1)
    (tmp_path / "c" / "core.msgpack").write_bytes(b"x")
    assert load(tmp_path / "c").step == 1
    write(tmp_path / "c", 2)
    assert load(tmp_path / "c").step == 2
    assert not (tmp_path / "c" / "core.msgpack").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_trainer_refuses_an_incomplete_checkpoint_unchanged(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = Trainer(make_config(), model_dir)
    save_to(trainer, tmp_path / "c")
    trainer.handle(training.TrainOn(batch=make_batch()))
    file = tmp_path / "c" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    reply = refused(trainer, training.Restore(path=str(tmp_path / "c")))
    assert "damaged" in reply.error
    assert trainer.step == 1
    other = make_model(tmp_path / "other", hidden=64)
    save_to(Trainer(make_config(), other), tmp_path / "o")
    reply = refused(trainer, training.Restore(path=str(tmp_path / "o")))
    assert "shape" in reply.error
    trained(trainer, make_batch(1, step=1))


def test_exports_a_hugging_face_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model_dir, tmp_path / "source"))
    (source / "additional_chat_templates").mkdir()
    for name in ("default", "rag"):
        (source / "additional_chat_templates" / f"{name}.jinja").write_text(CHATML)
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float16"}
    (source / "config.json").write_text(json.dumps(config))
    trainer = Trainer(make_config(), source)
    trainer.handle(training.TrainOn(batch=make_batch()))
    save_to(trainer, tmp_path / "c", export=True)
    exported = tmp_path / "c" / "hf"
    assert "torch_dtype" not in (exported / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(exported)
    weights = load_file(tmp_path / "c" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    text = " at=a1<up> and more"
    before, after = (AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(exported))
    assert after(text).input_ids == before(text).input_ids
    assert after.chat_template == before.chat_template == dict.fromkeys(("default", "rag"), CHATML)
    assert tokenizer_files(exported) == tokenizer_files(source)
    again = Trainer(make_config(), exported)  # it can be trained further
    assert again.step == 0
    (exported / "model.safetensors").write_bytes(b"")
    assert isinstance(
        trainer.handle(training.Restore(path=str(tmp_path / "c"))), training.TrainFailed
    )


# A file-size limit acts like a full disk, and needs no privileges. SIGXFSZ is ignored,
# so that writes fail with an OSError.
LIMITED = """
import resource, signal, sys
from pathlib import Path
from rollweave.schema.training import Save
from rollweave.train.trainer import Trainer
from tests.support.trainers import make_config
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trainer = Trainer(make_config(), Path(sys.argv[1]))
for name, limit in (("c", -1), ("c", 200), ("c", 20000), ("d", -1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    print(type(trainer.handle(Save(path=f"{sys.argv[2]}/{name}"))).__name__)
"""


@pytest.mark.extended
def test_a_failed_write_keeps_the_former_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    limited = Forked(
        [sys.executable, "-c", LIMITED, str(model_dir), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        },
    )
    output, _ = limited.communicate()
    expected = (0, ["Saved", "SaveFailed", "SaveFailed", "Saved"])
    assert (limited.returncode, output.split()) == expected
    assert load(tmp_path / "c").step == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


def test_a_full_disk_keeps_the_former_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    """Use a real file system of 250 kB, if one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        trainer = Trainer(make_config(), model_dir)
        save_to(trainer, disk / "c")
        trained(
            trainer, make_batch()
        )  # now there are moments, which do not fit beside the first checkpoint
        reply = trainer.handle(training.Save(path=str(disk / "d")))
        assert isinstance(reply, training.SaveFailed)
        assert "space" in reply.error
        assert [path.name for path in disk.iterdir()] == ["c"]
        restore_from(trainer, disk, step=0)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# What engines read.


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_the_bits_that_were_published(tmp_path: Path, dtype: str) -> None:
    """This includes the publication of a trainer restored from it."""
    plain, directory = make_config(), make_model(tmp_path / "m")
    config = changed(plain, "model", dtype=dtype)
    trainer = Trainer(config, directory)
    trained(trainer, make_batch())
    first = trainer.handle(training.Publish(version=1, publication_id=7))
    assert isinstance(first, training.Published)
    save_to(trainer, tmp_path / "c")
    trainer.handle(training.TrainOn(batch=make_batch(1, step=1)))
    trainer.handle(training.Restore(path=str(tmp_path / "c")))
    again = trainer.handle(training.Publish(version=1, publication_id=8, keep=(7,)))
    assert isinstance(again, training.Published)
    published_bits = bits(
        read_trainer_checkpoint(tmp_path / "c", step=1, dtype=getattr(torch, config.model.dtype))
    )
    assert (
        published_bits == bits(read_tensors(first.manifest)) == bits(read_tensors(again.manifest))
    )
    trainer.close()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "digests.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_refuses_any_damage(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "c"
    with pytest.raises(WeightsError, match="incomplete or invalid"):
        read_trainer_checkpoint(path, step=2, dtype=torch.float32)
    write(path, 2)
    read = read_trainer_checkpoint(path, step=2, dtype=torch.float32)
    assert torch.equal(read["w"], torch.full((50,), 2.0))
    with pytest.raises(WeightsError, match="must be of step 3"):
        read_trainer_checkpoint(path, step=3, dtype=torch.float32)
    inflict(damage, path / name, at=b"model.safetensors" if name == "digests.json" else None)
    with pytest.raises(WeightsError, match=r"damaged|incomplete or invalid"):
        read_trainer_checkpoint(path, step=2, dtype=torch.float32)
