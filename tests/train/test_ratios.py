"""Ratios of groups equal a token-by-token computation with transformers, for any
division into passes; groups that cannot be measured are answered.
"""

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rollweave.schema.base import GroupId
from rollweave.schema.training import (
    Measure,
    Measured,
    Trained,
    TrainerReply,
    TrainFailed,
    TrainOn,
)
from rollweave.schema.work import ScoredGroup, Segment, SegmentKind, TokenSequence
from rollweave.train.trainer import Trainer
from tests.support.properties import examples
from tests.support.trainers import (
    make_batch,
    make_config,
    make_model,
    make_sequence,
    make_trajectory,
)
from tests.support.training import poisoned
from tests.train.asking import published

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def new_trainer(model_dir: Path, run_dir: Path, *, micro_tokens: int = 16384) -> Trainer:
    config = make_config(trainer={"micro_tokens": micro_tokens})
    rollout = config.rollout.model_copy(update={"temperature": TEMPERATURE})
    return Trainer(config.model_copy(update={"rollout": rollout}), model_dir, run_dir)


def measure(trainer: Trainer, *groups: ScoredGroup, step: int = 0) -> TrainerReply | None:
    return trainer.handle(Measure(step=step, part=0, groups=groups))


def ratios(trainer: Trainer, *groups: ScoredGroup) -> tuple[float, ...]:
    reply = measure(trainer, *groups)
    assert isinstance(reply, Measured), reply
    return reply.ratios


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


def expected(model_dir: Path, group: ScoredGroup) -> float:
    """Compute the ratio one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    gaps = []
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            with torch.no_grad():
                logprobs = (
                    model(input_ids=torch.tensor([sequence.tokens])).logits[0] / TEMPERATURE
                ).log_softmax(-1)
            for place, sampled in enumerate(sequence.output_mask()):
                if sampled and place:
                    now = float(logprobs[place - 1, sequence.tokens[place]])
                    gaps.append(now - sequence.logprobs[place])
    return math.exp(sum(gaps) / len(gaps)) if gaps else 1.0


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    micro=st.sampled_from([30, 16384]),
)
def test_ratios_match_a_token_by_token_reference(
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
    assert ratios(trainer, *groups) == pytest.approx(
        [expected(model_dir, group) for group in groups], rel=1e-4
    )


def test_on_policy_samples_have_ratio_one_until_training(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    batch = make_batch(3)
    own = tuple(recorded(model_dir, group) for group in batch.groups)
    assert ratios(trainer, *own) == pytest.approx([1.0] * 3, abs=1e-5)
    assert isinstance(
        trainer.handle(TrainOn(batch=msgspec.structs.replace(batch, groups=own))), Trained
    )
    reply = measure(trainer, *own, step=1)
    assert isinstance(reply, Measured)
    assert all(abs(math.log(ratio)) > 1e-3 for ratio in reply.ratios)


def recorded(model_dir: Path, group: ScoredGroup) -> ScoredGroup:
    """Replace the log-probs by those of the checkpoint's weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trajectories = []
    for trajectory in group.trajectories:
        (sequence,) = trajectory.sequences
        with torch.no_grad():
            table = (
                model(input_ids=torch.tensor([sequence.tokens])).logits[0] / TEMPERATURE
            ).log_softmax(-1)
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
            assert isinstance(trainer.handle(TrainOn(batch=make_batch(step, step=step))), Trained)
    left, right = (published(trainer, 2) for trainer in trainers)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_impossible_token_gives_a_finite_ratio(model_dir: Path, tmp_path: Path) -> None:
    bad = poisoned(make_batch(0), -math.inf).groups
    group = ratios(new_trainer(model_dir, tmp_path), *bad)
    assert all(0 < ratio < math.inf for ratio in group)
    assert group[-1] > ratios(new_trainer(model_dir, tmp_path), *make_batch(0).groups)[-1]


def test_answers_groups_that_cannot_be_measured(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    batch = make_batch(0)
    wrong_step = measure(trainer, *batch.groups, step=3)
    assert isinstance(wrong_step, TrainFailed)
    assert "expected part 0 of step 0, got part 0 of step 3" in wrong_step.error
    nan = measure(trainer, *poisoned(batch, math.nan).groups)
    assert isinstance(nan, TrainFailed)
    assert nan.nonfinite
    assert f"log-probs of group {batch.groups[-1].id}" in nan.error
    sequence = make_sequence(random.Random(0))
    huge = group(
        "huge", (msgspec.structs.replace(sequence, tokens=(10**6,) * len(sequence.tokens)),)
    )
    foreign = measure(trainer, huge)
    assert isinstance(foreign, TrainFailed)
    assert not foreign.nonfinite
    assert foreign.groups == ("huge",)
