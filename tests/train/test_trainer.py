"""Commands and replies: a step trains, a bad step changes nothing, and a restored
trainer continues as if never stopped.
"""

import math
import random
import statistics
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollweave.schema import training
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Batch, StopReason
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors
from tests.support.trainers import make_batch, make_config, poisoned
from tests.support.variants import mostly_extended
from tests.train.asking import changed, published, refused, restore_from, same, save_to, trained


def new_trainer(model_dir: Path, tmp_path: Path, config: RunConfig | None = None) -> Trainer:
    return Trainer(config or make_config(), model_dir)


def with_each(batch: Batch, **fields: Any) -> Batch:
    """Return the batch with these fields in each trajectory."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            trajectories=tuple(msgspec.structs.replace(t, **fields) for t in group.trajectories),
        )
        for group in batch.groups
    )
    return msgspec.structs.replace(batch, groups=groups)


def test_a_step_changes_the_weights_and_reports_metrics(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(
        model_dir,
        tmp_path,
        make_config(trainer={"epochs": 2, "minibatches": 2}, kl=0.1, entropy=0.01),
    )
    before = published(trainer)
    batch = make_batch()
    values = trained(trainer, batch)
    assert trainer.step == 1
    after = published(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert "lm_head.weight" not in after  # tied weights are published once
    expected = """
    loss reward_mean reward_std advantage_abs kl_rollout chi2 ess kl_reference entropy clip_fraction
    mask_fraction age/0 overlong_fraction logprob_gap_mean logprob_gap_max logprob_gap/e0
    logprob_gap/e1 grad_norm lr updates tokens input_tokens skipped_fraction tokens_per_s
    """
    assert set(values) == {*expected.split()}
    assert all(math.isfinite(value) for value in values.values())
    assert values["updates"] == 4
    members = [member for group in batch.groups for member in group.trajectories]
    rewards = [member.reward or 0.0 for member in members]
    assert values["reward_mean"] == pytest.approx(statistics.fmean(rewards))
    assert values["reward_std"] == pytest.approx(statistics.pstdev(rewards))
    sequences = [member.sequences[0] for member in members]
    assert values["tokens"] == sum(sum(each.output_mask()) for each in sequences)
    assert values["input_tokens"] == sum(len(each.tokens) for each in sequences)
    assert 0 < values["ess"] <= 1


def test_training_raises_the_probability_of_rewarded_tokens(
    model_dir: Path, tmp_path: Path
) -> None:
    """Of two samples with the same first two tokens one is rewarded: its probability
    grows step by step.
    """
    trainer = new_trainer(model_dir, tmp_path, make_config(steps=20, trainer={"lr": 5e-3}))
    entropies = []
    for step in range(12):
        batch = msgspec.structs.replace(make_batch(7), step=step, version=step)
        entropies.append(trained(trainer, batch)["kl_rollout"])
    assert entropies[-1] > entropies[0]


@pytest.mark.variants
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("passes", [{"epochs": 2, "minibatches": 3}, {"epochs": 1}])
def test_a_loss_that_is_not_finite_changes_nothing(
    model_dir: Path, tmp_path: Path, value: float, passes: dict[str, int]
) -> None:
    trainer, untouched = (
        new_trainer(model_dir, tmp_path / name, make_config(trainer=passes)) for name in "ab"
    )
    for each in (trainer, untouched):
        trained(each, make_batch(0))
    before = published(trainer)
    batch = make_batch(1, step=1)
    reply = trainer.handle(training.TrainOn(batch=poisoned(batch, value)))
    if value == -math.inf:  # its ratio is bounded, so that it is only a very improbable token
        assert isinstance(reply, training.Trained)
        return
    assert isinstance(reply, training.TrainFailed)
    assert reply.nonfinite
    assert reply.groups == tuple(group.id for group in batch.groups)
    assert trainer.step == 1
    assert same(published(trainer), before)
    for step in (1, 2):  # the optimizer's state is as before, too
        for each in (trainer, untouched):
            trained(each, make_batch(step, step=step))
    assert same(published(trainer), published(untouched))


def test_answers_bad_batches_with_an_error(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    before = published(trainer)
    wrong_step = refused(trainer, training.TrainOn(batch=make_batch(step=3)))
    assert "expected part 0 of step 0" in wrong_step.error
    batch = make_batch()
    first = batch.groups[0].trajectories[0]
    unscored = msgspec.structs.replace(first, reward=None)
    huge = msgspec.structs.replace(
        first,
        sequences=(
            msgspec.structs.replace(
                first.sequences[0], tokens=(10**6,) * len(first.sequences[0].tokens)
            ),
        ),
    )
    for trajectory in (unscored, huge):
        group = msgspec.structs.replace(
            batch.groups[0], trajectories=(trajectory, *batch.groups[0].trajectories[1:])
        )
        reply = refused(
            trainer, training.TrainOn(batch=msgspec.structs.replace(batch, groups=(group,)))
        )
        assert not reply.nonfinite
        assert reply.groups == (group.id,)
    assert trainer.step == 0
    assert same(published(trainer), before)


def test_equal_rewards_change_nothing_and_cost_nothing(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    before = published(trainer)
    batch = make_batch()
    values = trained(trainer, with_each(batch, reward=1.0))
    assert (values["updates"], values["skipped_fraction"], values["reward_mean"]) == (0, 1, 1)
    assert (values["mask_fraction"], values["age/0"]) == (0, 1)
    assert same(published(trainer), before)
    assert trainer.step == 1


@pytest.mark.variants
@pytest.mark.parametrize("domains", [1, 2])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "budget"])
def test_micro_batches_do_not_change_the_step(
    model_dir: Path, tmp_path: Path, aggregate: str, domains: int
) -> None:
    own = {"other": {"advantage": "rloo"}}
    weights = []
    for micro_tokens in (20, 10_000):
        config = make_config(trainer={"micro_tokens": micro_tokens}, own=own, aggregate=aggregate)
        trainer = new_trainer(model_dir, tmp_path / str(micro_tokens), config)
        values = trained(trainer, make_batch(envs=("none", "other")[:domains]))
        weights.append((values["loss"], values["grad_norm"], published(trainer)))
    assert weights[0][:2] == pytest.approx(weights[1][:2], rel=1e-4)
    for name, tensor in weights[0][2].items():
        torch.testing.assert_close(tensor, weights[1][2][name], atol=2e-4, rtol=1e-3)


def test_a_batch_of_dropped_trajectories_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    for minibatches in (1, 2):
        config = make_config(overlong="drop", trainer={"minibatches": minibatches})
        trainer = new_trainer(model_dir, tmp_path / str(minibatches), config)
        before = published(trainer)
        values = trained(trainer, with_each(make_batch(), stop_reason=StopReason.MAX_TOKENS))
        assert (values["overlong_fraction"], values["tokens"], values["updates"]) == (1, 0, 0)
        assert values["mask_fraction"] == 0
        assert same(published(trainer), before)
        assert values["reward_mean"] > 0
        assert trained(trainer, make_batch(1, step=1))["updates"] == minibatches


def test_trains_parts_as_they_arrive(model_dir: Path, tmp_path: Path) -> None:
    config = make_config(trainer={"minibatches": 2})
    trainer = new_trainer(model_dir, tmp_path, config)
    assert trained(trainer, make_batch(0, part=0, parts=2))["updates"] == 1, "not divided again"
    assert trainer.step == 0
    half = trainer.handle(training.Save(path=str(tmp_path / "c")))
    assert isinstance(half, training.SaveFailed)
    assert "step 0 is incomplete" in half.error
    refused(trainer, training.TrainOn(batch=make_batch(0, part=0, parts=2)))
    trained(trainer, make_batch(1, part=1, parts=2, version=0))
    assert trainer.step == 1


@pytest.mark.parametrize(
    "correction", mostly_extended(["bypass", "decoupled", "tis"], {"decoupled"})
)
def test_a_restored_trainer_continues_bitwise(
    model_dir: Path, tmp_path: Path, correction: str
) -> None:
    config = make_config(
        trainer={"minibatches": 2, "lr": {"peak": 1e-2, "final": 0.1, "warmup": 2}},
        kl=0.05,
        correction=correction,
    )
    first = new_trainer(model_dir, tmp_path / "a", config)
    for step in range(4):
        trained(first, make_batch(step, step=step))
        if step == 1:
            save_to(first, tmp_path / "c" / "s2", export=True)
    second = new_trainer(model_dir, tmp_path / "b", config)
    trained(second, make_batch(9))  # a step that the restore discards
    restore_from(second, tmp_path / "c" / "s2", step=2)
    for step in (2, 3):
        trained(second, make_batch(step, step=step))
    assert same(published(first), published(second))


def test_publishing_names_the_version_and_stopping_removes_it(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = new_trainer(model_dir, tmp_path, make_config())
    reply = trainer.handle(training.Publish(version=4, publication_id=17))
    assert isinstance(reply, training.Published)
    assert (reply.manifest.version, reply.manifest.publication_id) == (4, 17)
    assert trainer.handle(training.StopTrainer()) is None
    with pytest.raises(Exception, match="gone"):
        read_tensors(reply.manifest)


def test_the_gap_counts_tokens_of_the_current_version_only(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_dir, tmp_path)
    values = trained(trainer, make_batch(0, step=0, version=5))
    assert "logprob_gap_mean" in values
    stale = msgspec.structs.replace(make_batch(1, step=1, version=5), version=6)
    assert "logprob_gap_mean" not in trained(trainer, stale)


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_computes_where_the_cpu_can_and_publishes_in_bfloat16(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("rollweave.io.machine.has_bfloat16", lambda: native)
    full = trained(new_trainer(model_dir, tmp_path / "full"), make_batch())
    config = make_config()
    config = changed(config, "model", dtype="bfloat16")
    trainer = new_trainer(model_dir, tmp_path / "short", config)
    values = trained(trainer, make_batch())
    assert math.isfinite(values["loss"])
    assert (values["logprob_gap_mean"] == full["logprob_gap_mean"]) is not native
    assert {tensor.dtype for tensor in published(trainer).values()} == {torch.bfloat16}


def test_random_batches_never_make_the_trainer_raise(model_dir: Path, tmp_path: Path) -> None:
    trainer = new_trainer(
        model_dir, tmp_path, make_config(trainer={"minibatches": 5}, advantage="gigpo", gamma=0.9)
    )
    rng = random.Random(3)
    for step in range(8):
        batch = make_batch(step, step=step, groups=rng.randint(1, 2), size=rng.randint(1, 4))
        trained(trainer, batch)


def test_a_checkpoint_may_follow_the_report_of_the_one_before(
    model_dir: Path, tmp_path: Path
) -> None:
    """The reply comes at once: on the writing thread, which has not ended yet."""
    trainer = new_trainer(model_dir, tmp_path)
    replies: list[training.TrainerReply | None] = []
    reported = threading.Event()

    def on_done(reply: training.TrainerReply) -> None:
        replies.extend((reply, trainer.handle(training.Save(path=str(tmp_path / "second")))))
        reported.set()

    copied = trainer.handle(training.Save(path=str(tmp_path / "first"), background=True))
    assert isinstance(copied, training.Copied)
    trainer.write(on_done)
    assert reported.wait(60)
    assert [type(reply) for reply in replies] == [training.Saved, training.Saved]
    trainer.close()
