"""Measures of groups equal a token-by-token computation with transformers, for any
division into passes, and groups that cannot be measured are answered; the warm-up
learns the outputs of transcripts, and a model from scratch observations, too.
"""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rollweave.schema.base import GroupId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ModelConfig
from rollweave.schema.errors import NonFiniteLossError, TrainerError
from rollweave.schema.training import Measure, Measured, TrainerReply
from rollweave.schema.work import Measures, ScoredGroup, Segment, SegmentKind, TokenSequence
from rollweave.train import trainer as trainer_module
from rollweave.train.distributed import RankGroup
from rollweave.train.model import load_model
from rollweave.train.packing import Example, pack
from rollweave.train.passes import Passes, warmup_example
from rollweave.train.trainer import Trainer
from tests.support.properties import examples
from tests.support.trainers import (
    CPU,
    make_batch,
    make_config,
    make_sequence,
    make_trajectory,
    poisoned,
)
from tests.train.asking import changed, published, refused, same, trained

TEMPERATURE = 0.7


def new_trainer(model_dir: Path, run_dir: Path, *, micro_tokens: int = 16384) -> Trainer:
    config = make_config(trainer={"micro_tokens": micro_tokens})
    rollout = config.rollout.model_copy(update={"temperature": TEMPERATURE})
    return Trainer(config.model_copy(update={"rollout": rollout}), model_dir)


def measure(trainer: Trainer, *groups: ScoredGroup, step: int = 0) -> TrainerReply | None:
    return trainer.handle(Measure(step=step, part=0, groups=groups))


def measured(trainer: Trainer, *groups: ScoredGroup) -> tuple[Measures, ...]:
    reply = measure(trainer, *groups)
    assert isinstance(reply, Measured), reply
    return reply.groups


def ratios(trainer: Trainer, *groups: ScoredGroup) -> list[float]:
    return [group.ratio or 0.0 for group in measured(trainer, *groups)]


def unsampled() -> TokenSequence:
    """Build a sequence without sampled tokens."""
    prompt = Segment(start=0, end=2, kind=SegmentKind.PROMPT)
    return TokenSequence(tokens=(5, 6), segments=(prompt,), logprobs=(0.0, 0.0))


def group(name: str, *members: tuple[TokenSequence, ...]) -> ScoredGroup:
    trajectories = tuple(
        make_trajectory(f"{name}/{place}", sequences, 1.0)
        for place, sequences in enumerate(members)
    )
    return ScoredGroup(id=GroupId(name), env="none", trajectories=trajectories)


@torch.no_grad()
def table_of(model: Any, sequence: TokenSequence) -> torch.Tensor:
    """Return the log-probs after each token of a sequence, [T, V]."""
    logits = model(input_ids=torch.tensor([sequence.tokens])).logits[0]
    return (logits / TEMPERATURE).log_softmax(-1)


def expected(model_dir: Path, group: ScoredGroup) -> tuple[float, float]:
    """Compute the ratio and the entropy one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    gaps, entropies = [], []
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            logprobs = table_of(model, sequence)
            for place, sampled in enumerate(sequence.output_mask()):
                if sampled and place:
                    now = float(logprobs[place - 1, sequence.tokens[place]])
                    gaps.append(now - sequence.logprobs[place])
                    row = logprobs[place - 1].double()
                    entropies.append(-float((row.exp() * row).sum()))
    count = max(1, len(gaps))
    return math.exp(sum(gaps) / count), sum(entropies) / count


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    micro=st.sampled_from([30, 16384]),
)
def test_measures_match_a_token_by_token_reference(
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    sizes: list[int],
    micro: int,
) -> None:
    """Members may have several sequences, or one without sampled tokens."""
    rng = random.Random(seed)

    def sequences() -> tuple[TokenSequence, ...]:
        trajectories = [
            make_sequence(rng, turns=rng.randint(1, 3)) for _ in range(rng.randint(1, 2))
        ]
        return (*trajectories, unsampled()) if rng.random() < 0.3 else tuple(trajectories)

    groups = [
        group(f"g{place}", (unsampled(),), *(sequences() for _ in range(size)))
        for place, size in enumerate(sizes)
    ]
    trainer = new_trainer(model_dir, tmp_path_factory.mktemp("run"), micro_tokens=micro)
    found = measured(trainer, *groups)
    for each, (ratio, entropy) in zip(
        found, [expected(model_dir, group) for group in groups], strict=True
    ):
        assert each.ratio == pytest.approx(ratio, rel=1e-4)
        assert each.entropy == pytest.approx(entropy, rel=1e-4)
        assert each.td_error is None


def test_on_policy_samples_have_ratio_one_until_training(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    batch = make_batch(3)
    own = tuple(recorded(model_dir, group) for group in batch.groups)
    assert ratios(trainer, *own) == pytest.approx([1.0] * 3, abs=1e-5)
    trained(trainer, msgspec.structs.replace(batch, groups=own))
    reply = measure(trainer, *own, step=1)
    assert isinstance(reply, Measured)
    assert all(abs(math.log(group.ratio or 1.0)) > 1e-3 for group in reply.groups)


def recorded(model_dir: Path, group: ScoredGroup) -> ScoredGroup:
    """Replace the log-probs by those of the checkpoint's weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trajectories = []
    for trajectory in group.trajectories:
        (sequence,) = trajectory.sequences
        table = table_of(model, sequence)
        mask = sequence.output_mask()
        own = [
            float(table[place - 1, token]) if mask[place] else 0.0
            for place, token in enumerate(sequence.tokens)
        ]
        sequence = msgspec.structs.replace(sequence, logprobs=tuple(own))
        trajectories.append(msgspec.structs.replace(trajectory, sequences=(sequence,)))
    return msgspec.structs.replace(group, trajectories=tuple(trajectories))


def test_measuring_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    """Two trainers, of which one measures, train to the same bits."""
    trainers = [new_trainer(model_dir, tmp_path / name) for name in "ab"]
    for step in range(2):
        assert isinstance(measure(trainers[0], *make_batch(9).groups, step=step), Measured)
        for trainer in trainers:
            trained(trainer, make_batch(step, step=step))
    left, right = (published(trainer, 2) for trainer in trainers)
    assert same(left, right)


def test_an_impossible_token_gives_a_finite_ratio(model_dir: Path, tmp_path: Path) -> None:
    bad = poisoned(make_batch(0), -math.inf).groups
    group = ratios(new_trainer(model_dir, tmp_path), *bad)
    assert all(0 < ratio < math.inf for ratio in group)
    assert group[-1] > ratios(new_trainer(model_dir, tmp_path), *make_batch(0).groups)[-1]


def test_answers_groups_that_cannot_be_measured(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    batch = make_batch(0)
    wrong_step = refused(trainer, Measure(step=3, part=0, groups=batch.groups))
    assert "expected part 0 of step 0, got part 0 of step 3" in wrong_step.error
    nan = refused(trainer, Measure(step=0, part=0, groups=poisoned(batch, math.nan).groups))
    assert nan.nonfinite
    assert f"log-probs of group {batch.groups[-1].id}" in nan.error
    sequence = make_sequence(random.Random(0))
    huge = group(
        "huge", (msgspec.structs.replace(sequence, tokens=(10**6,) * len(sequence.tokens)),)
    )
    foreign = refused(trainer, Measure(step=0, part=0, groups=(huge,)))
    assert not foreign.nonfinite
    assert foreign.groups == ("huge",)


# The warm-up.


def transcripts() -> Iterator[TokenSequence]:
    rng = random.Random(0)
    return itertools.cycle([make_sequence(rng) for _ in range(4)])


def configured(**warmup: object) -> RunConfig:
    config = make_config()
    return changed(config, "warmup", **{"steps": 30, **warmup})


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
    outputs_only = Trainer(configured().model_copy(update=checkpoint), model_dir)
    before = losses_of(outputs_only, kind=False)
    losses = outputs_only.warm_up(transcripts())
    assert len(losses) == 30
    assert losses[-1] < 0.5 < 4 < losses[0]
    assert losses_of(outputs_only, kind=True) < 0.5
    assert losses_of(outputs_only, kind=False) > before
    both = Trainer(configured(), model_dir)
    both.warm_up(transcripts())
    assert losses_of(both, kind=False) < before / 2
    assert outputs_only.step == 0


def test_no_steps_need_no_transcripts(model_dir: Path, tmp_path: Path) -> None:
    assert Trainer(configured(steps=0), model_dir).warm_up(iter(())) == []


def test_too_few_transcripts_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="needs 16 transcripts"):
        Trainer(configured(), model_dir).warm_up(itertools.islice(transcripts(), 3))


def test_a_loss_that_is_not_finite_names_the_setting(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "SCRATCH_LR", 1e20)
    with pytest.raises(
        NonFiniteLossError,
        match=r"warm-up step \d+: loss \S+, gradient norm \S+; the learning rate is 1e\+20",
    ):
        Trainer(configured(), model_dir).warm_up(transcripts())


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
