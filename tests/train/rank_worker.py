"""One rank of a trainer, started by torchrun or a parent process: it trains, saves,
restores, and writes the weights to a file.

Arguments: model directory, name of a case, output directory, and for a divided model
the size of a tensor group and a checkpoint of a rank alone. Rank and world size come
from the environment.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollweave.schema.training import (
    Measure,
    Measured,
    Save,
    Saved,
    StopTrainer,
    Trained,
    TrainFailed,
    TrainOn,
)
from rollweave.train.distributed import ALONE, RankGroup
from rollweave.train.trainer import Trainer
from tests.support.trainers import make_batch, make_config
from tests.train.asking import published, restore_from, trained
from tests.train.ranks import meet

CASE = {
    "trainer": {"minibatches": 2, "micro_tokens": 60},
    "correction": "decoupled",
    "kl": 0.1,
    "entropy": 0.01,
}


CASES = {
    "decoupled": CASE,
    "domains": {
        "trainer": {"minibatches": 2, "micro_tokens": 60},
        "loss": "gspo",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "own": {"other": {"advantage": "rloo"}},
    },
    "lora": CASE | {"lora": {"rank": 3, "alpha": 6.0}},
    "critic": {"trainer": {"minibatches": 2, "micro_tokens": 60}, "advantage": "gae"},
    "critic of transformers": {
        "trainer": {"minibatches": 2, "micro_tokens": 60},
        "advantage": "gae",
        "implementation": "transformers",
    },
}


def run(
    model_dir: Path,
    out: Path,
    ranks: RankGroup = ALONE,
    case: str = "decoupled",
    *,
    tensor_parallel: int = 1,
    other: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Return the weights after three steps, the last of them repeated after restoring a
    checkpoint, and the measured ratios. The last step is also repeated from the
    checkpoint `other`, of another number of ranks.
    """
    settings = dict(CASES[case])
    if tensor_parallel > 1:
        divided = {"ranks": ranks.world_size, "tensor_parallel": tensor_parallel}
        settings |= {
            "implementation": "transformers",
            "trainer": settings["trainer"] | divided,  # type: ignore[operator]
        }
    config = make_config(**settings)  # type: ignore[arg-type]
    trainer = Trainer(config, model_dir, ranks=ranks)
    envs = ("none", *CASES[case].get("own", ()))  # type: ignore[misc]
    refused = trainer.handle(TrainOn(batch=make_batch(0, step=5)))
    assert isinstance(refused, TrainFailed)
    figures = {}
    for step in range(3):
        if step == 2:
            assert isinstance(
                saved := trainer.handle(Save(path=str(out / "c"), export=True)), Saved
            ), saved
        # One group of two: with two minibatches some ranks have no work.
        reply = trainer.handle(
            TrainOn(
                batch=make_batch(step, step=step, groups=1 if step == 1 else 3, size=2, envs=envs)
            )
        )
        assert isinstance(reply, Trained), reply
        figures = reply.metrics.values
    first = published(trainer, 3)
    measured = trainer.handle(
        Measure(step=3, part=0, groups=make_batch(9, groups=4, size=2).groups)
    )
    assert isinstance(measured, Measured), measured
    first["ratios"] = torch.tensor(measured.ratios, dtype=torch.float64)
    impossible = trainer.handle(Save(path="/proc/nowhere/c"))
    assert type(impossible).__name__ == "SaveFailed", impossible
    restore_from(trainer, out / "c", step=2)
    last = make_batch(2, step=2, size=2, envs=envs)
    trained(trainer, last)
    again = published(trainer, 4)
    assert all(torch.allclose(first[name], again[name], atol=1e-6) for name in again), (
        "a restored trainer goes on the same way"
    )
    if other is not None:
        restore_from(trainer, other, step=2)
        trained(trainer, last)
        from_other = published(trainer, 5)
        assert all(torch.allclose(first[name], from_other[name], atol=1e-4) for name in again), (
            "a checkpoint of another number of ranks continues"
        )
    if ranks.world_size > 1:
        torch.distributed.barrier()  # rank 0's publication ends with it
    assert trainer.handle(StopTrainer()) is None
    return first | {
        f"figure/{name}": torch.tensor(value)
        for name, value in figures.items()
        if name != "tokens_per_s"
    }


if __name__ == "__main__":
    own = meet()
    model_arg, case_arg, *division, out_arg = sys.argv[1:]
    tensors = run(
        Path(model_arg),
        Path(out_arg),
        own,
        case_arg,
        tensor_parallel=int(division[0]) if division else 1,
        other=Path(division[1]) if division else None,
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        Path(out_arg) / f"rank{own.rank}.safetensors",
    )
