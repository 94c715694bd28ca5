"""Warm-up learns the outputs of transcripts, and a model from scratch observations,
too.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ModelConfig
from rollweave.schema.errors import NonFiniteLossError, TrainerError
from rollweave.schema.work import TokenSequence
from rollweave.train import trainer
from rollweave.train.distributed import RankGroup
from rollweave.train.model import load_model
from rollweave.train.packing import Example, pack
from rollweave.train.passes import Passes, warmup_example
from rollweave.train.trainer import Trainer
from tests.support.trainers import CPU, make_config, make_model, make_sequence


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def transcripts() -> Iterator[TokenSequence]:
    rng = random.Random(0)
    return itertools.cycle([make_sequence(rng) for _ in range(4)])


def configured(**warmup: object) -> RunConfig:
    config = make_config()
    return config.model_copy(
        update={"warmup": config.warmup.model_copy(update={"steps": 30, **warmup})}
    )


def losses_of(trainer: Trainer, kind: bool) -> float:
    """Return the mean loss of the transcripts' output tokens, or of the others."""
    examples = []
    for sequence in itertools.islice(transcripts(), 4):
        mask = torch.tensor(sequence.output_mask())
        mask = mask if kind else ~mask
        mask[0] = False
        examples.append(
            Example(tokens=torch.tensor(sequence.tokens), targets=mask.nonzero().flatten())
        )
    with torch.no_grad():
        logprobs = trainer._model(pack(examples), 1.0).logprobs
    return float(-logprobs.mean())


def test_learns_outputs_and_from_scratch_observations(model_dir: Path, tmp_path: Path) -> None:
    checkpoint = {"model": ModelConfig(path=str(model_dir))}
    outputs_only = Trainer(configured().model_copy(update=checkpoint), model_dir, tmp_path)
    before = losses_of(outputs_only, kind=False)
    losses = outputs_only.warm_up(transcripts())
    assert len(losses) == 30
    assert losses[-1] < 0.5 < 4 < losses[0]
    assert losses_of(outputs_only, kind=True) < 0.5
    assert losses_of(outputs_only, kind=False) > before
    both = Trainer(configured(), model_dir, tmp_path)
    both.warm_up(transcripts())
    assert losses_of(both, kind=False) < before / 2
    assert outputs_only.step == 0


def test_no_steps_need_no_transcripts(model_dir: Path, tmp_path: Path) -> None:
    assert Trainer(configured(steps=0), model_dir, tmp_path).warm_up(iter(())) == []


def test_too_few_transcripts_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="needs 16 transcripts"):
        Trainer(configured(), model_dir, tmp_path).warm_up(itertools.islice(transcripts(), 3))


def test_a_loss_that_is_not_finite_names_the_setting(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SCRATCH_LR", 1e20)
    with pytest.raises(
        NonFiniteLossError,
        match=r"warm-up step \d+: loss \S+, gradient norm \S+; the learning rate is 1e\+20",
    ):
        Trainer(configured(), model_dir, tmp_path).warm_up(transcripts())


def test_selects_the_targets_of_a_transcript() -> None:
    sequence = make_sequence(random.Random(1))
    outputs = warmup_example(sequence, observations=False).targets.tolist()
    assert outputs == [i for i, sampled in enumerate(sequence.output_mask()) if sampled and i]
    assert warmup_example(sequence, observations=True).targets.tolist() == list(
        range(1, len(sequence.tokens))
    )


def test_passes_do_not_depend_on_the_division_of_examples(model_dir: Path) -> None:
    examples = [
        warmup_example(sequence, observations=True)
        for sequence in itertools.islice(transcripts(), 4)
    ]
    gradients = []
    for micro_tokens in (1, 10_000):
        model = load_model(model_dir, dtype="float32", device=CPU)
        passes = Passes(model, RankGroup(rank=0, world_size=1), micro_tokens=micro_tokens)
        loss = passes.backward(
            examples, range(4), temperature=0.9, loss_of=lambda _, scores: -scores.logprobs.sum()
        )
        assert loss == pytest.approx(
            -sum(
                float(v.sum())
                for v in passes.logprobs(examples, range(4), temperature=0.9).values()
            )
        )
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
