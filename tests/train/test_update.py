"""Whole batches equal a slow trainer: transformers' forward pass, one sequence at a
time, a loss written out, and torch's AdamW.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.schema.training import Trained, TrainOn
from rollweave.schema.work import Batch
from rollweave.train.advantages import token_advantages
from rollweave.train.losses import IS_CAP
from rollweave.train.trainer import Trainer
from tests.support.trainers import make_batch, make_config
from tests.support.variants import mostly_slow
from tests.train.asking import changed, published, trained
from tests.train.compare import assert_all_close

TEMPERATURE = 0.8
BUDGET = 1024  # of the trajectories of `builders`


def slow_logprobs(model: Any, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of every position, 0 for the first: [T]."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1] / TEMPERATURE
    table = logits.log_softmax(-1)
    chosen = table.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(-1)
    start = torch.zeros(1)
    return torch.cat([start, chosen]), torch.cat([start, entropy])


def slow_token(
    logprob: torch.Tensor,
    entropy: torch.Tensor,
    behavior: float,
    advantage: float,
    proximal: torch.Tensor,
    reference: torch.Tensor,
    algorithm: AlgorithmConfig,
    moved: float,
) -> torch.Tensor:
    """Return a token's loss; `moved` is the mean log-ratio of its sequence."""
    low, high, _ = algorithm.loss_values
    old = torch.tensor(behavior) if algorithm.correction == "bypass" else proximal
    ratio = torch.exp(logprob - old)
    if algorithm.loss == "gspo":
        ratio = torch.exp(torch.tensor(moved)) * torch.exp(logprob) / torch.exp(logprob).detach()
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if algorithm.loss == "cispo":
        loss = -bounded.detach() * advantage * logprob
    elif algorithm.loss == "dppo":
        change = torch.exp(logprob.detach()) - torch.exp(torch.tensor(behavior))
        outside = change > high if advantage > 0 else change < -low
        loss = logprob * 0.0 if outside else -ratio * advantage
    elif algorithm.loss == "dual_clip" and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-3.0 * advantage))
    importance = torch.exp(proximal - behavior)
    if algorithm.correction == "decoupled":
        loss = loss * (importance if importance <= IS_CAP else 0.0)
    elif algorithm.correction == "tis":
        loss = loss * torch.clamp(importance, max=IS_CAP)
    elif algorithm.correction == "icepop":
        loss = loss * (importance if 0.5 <= importance <= 5 else 0.0)
    difference = reference - logprob
    return loss + algorithm.kl * (difference.exp() - difference - 1) - algorithm.entropy * entropy


def slow_training(path: Path, batches: list[Batch], config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the weights after `config.trainer.epochs` full-batch updates on each
    batch.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = config.trainer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=trainer.peak_lr, betas=(0.9, 0.95), weight_decay=trainer.weight_decay
    )
    for batch in batches:
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        algorithms = [
            config.own_algorithms().get(group.env, config.algorithm) for group in batch.groups
        ]
        of_env = {
            group.env: iter(
                token_advantages([g for g in batch.groups if g.env == group.env], algorithm)
            )
            for group, algorithm in zip(batch.groups, algorithms, strict=True)
        }
        advantages = [next(of_env[group.env]) for group in batch.groups for _ in group.trajectories]
        sequences = [
            (sequence, advantage)
            for trajectory, tensors in zip(trajectories, advantages, strict=True)
            for sequence, advantage in zip(trajectory.sequences, tensors, strict=True)
        ]
        with torch.no_grad():
            proximal = [slow_logprobs(model, sequence.tokens)[0] for sequence, _ in sequences]
            reference = [slow_logprobs(frozen, sequence.tokens)[0] for sequence, _ in sequences]
        for _ in range(trainer.epochs):
            rows = []
            algorithm = config.algorithm
            for (sequence, advantage), near, far in zip(
                sequences, proximal, reference, strict=True
            ):
                chosen, entropy = slow_logprobs(model, sequence.tokens)
                olds = torch.tensor(sequence.logprobs) if algorithm.correction == "bypass" else near
                sampled_at = torch.tensor(sequence.output_mask())
                moved = float((chosen.detach() - olds)[sampled_at].mean())
                losses = [
                    slow_token(
                        chosen[i],
                        entropy[i],
                        sequence.logprobs[i],
                        float(advantage[i]),
                        near[i],
                        far[i],
                        algorithm,
                        moved,
                    )
                    for i, sampled in enumerate(sequence.output_mask())
                    if sampled
                ]
                rows.append(torch.stack(losses))
            mean = torch.cat(rows).mean()
            if config.algorithm.loss_values.aggregate == "sequence_mean":
                mean = torch.stack([row.mean() for row in rows]).mean()
            elif config.algorithm.loss_values.aggregate == "budget":
                mean = torch.stack([row.sum() / BUDGET for row in rows]).mean()
            optimizer.zero_grad()
            mean.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sampled_by(path: Path, batch: Batch, noise: float) -> Batch:
    """Return the batch with behavior log-probs near those of the model in `path`, as
    slightly different weights would give.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = random.Random(1)
    groups = []
    for group in batch.groups:
        trajectories = []
        for trajectory in group.trajectories:
            sequence = trajectory.sequences[0]
            with torch.no_grad():
                exact = slow_logprobs(model, sequence.tokens)[0].tolist()
            logprobs = tuple(
                value + rng.uniform(-noise, noise) if sampled else 0.0
                for value, sampled in zip(exact, sequence.output_mask(), strict=True)
            )
            sequence = msgspec.structs.replace(sequence, logprobs=logprobs)
            trajectories.append(msgspec.structs.replace(trajectory, sequences=(sequence,)))
        groups.append(msgspec.structs.replace(group, trajectories=tuple(trajectories)))
    return msgspec.structs.replace(batch, groups=tuple(groups))


def configured(**algorithm: Any) -> RunConfig:
    config = make_config(
        trainer={"epochs": 3, "lr": 3e-3, "micro_tokens": 60, "weight_decay": 0.01}, **algorithm
    )
    return changed(config, "rollout", temperature=TEMPERATURE)


CASES: list[dict[str, Any]] = [
    {"correction": "bypass"},
    {"correction": "decoupled"},
    {"correction": "tis"},
    {"correction": "decoupled", "kl": 0.2, "entropy": 0.02, "aggregate": "sequence_mean"},
    {"correction": "bypass", "kl": 0.2, "entropy": 0.02, "advantage": "gigpo", "gamma": 0.9},
    {"loss": "dual_clip", "clip": (0.1, 0.2)},
    {"loss": "gspo", "clip": (0.05, 0.1), "correction": "tis"},
    {"loss": "cispo", "clip": (1.0, 0.3), "aggregate": "budget"},
    {"loss": "dppo", "clip": (0.001, 0.001)},
    {"correction": "icepop", "advantage": "reinforce_pp_baseline"},
    {"advantage": "rloo", "kl": 0.1, "own": {"other": {"advantage": "grpo"}}},
]


@pytest.mark.variants
@pytest.mark.parametrize(
    "case",
    mostly_slow(CASES, [CASES[number] for number in (2, 4, 6, 9, 10)]),
    ids=lambda case: "-".join(str(value) for key, value in case.items() if key != "own"),
)
def test_training_equals_the_slow_trainer(
    model_dir: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    config = configured(**case)
    envs = ("none", *case.get("own", ()))
    batches = [
        sampled_by(model_dir, make_batch(step, step=step, groups=2, envs=envs), noise=0.5)
        for step in range(2)
    ]
    trainer = Trainer(config, model_dir)
    for batch in batches:
        trained(trainer, batch)
    assert_all_close(published(trainer, 2), slow_training(model_dir, batches, config))


def test_corrections_agree_on_policy(model_dir: Path, tmp_path: Path) -> None:
    """If the behavior policy is the one that is trained, all corrections equal
    bypass.
    """
    batch = sampled_by(model_dir, make_batch(3), noise=0.0)
    results = []
    for correction in ("bypass", "decoupled", "tis", "icepop", "sequence_mask", "reject"):
        trainer = Trainer(configured(correction=correction), model_dir)
        reply = trainer.handle(TrainOn(batch=batch))
        assert isinstance(reply, Trained)
        assert reply.metrics.values["mask_fraction"] == 0
        assert reply.metrics.values["logprob_gap_max"] < 1e-5
        results.append((reply.metrics.values["loss"], reply.metrics.values["grad_norm"]))
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-3, abs=1e-5)
