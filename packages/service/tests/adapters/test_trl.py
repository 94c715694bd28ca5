"""TRL's trainers on the CPU, with rollouts of a real service and a real engine that
loads the trainer's weights.

The tests need the extra `trl` (`pip install -e .[test,trl]`); run them with `pytest -m
slow packages/service/tests/adapters/test_trl.py`.
"""

import contextlib
import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from packages.service.tests.adapters.accounts import balances
from packages.service.tests.adapters.checkpoints import checkpoint
from packages.service.tests.rollout_service import service_config, serving
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec
from rollweave.schema.work import Decoding
from rollweave_service.adapters.dapo import DapoBatch, DapoRollouts
from rollweave_service.adapters.dapo_policy import DapoRule
from rollweave_service.adapters.engine import TrainedEngine
from rollweave_service.adapters.trl import (
    RolloutWorker,
    SyncWeights,
    TrlRollouts,
    WeightTransfer,
    rollout_reward,
    rows,
)
from rollweave_service.client import Rollouts
from rollweave_service.engines import backend_factory
from rollweave_service.messages import EngineRequest, RolloutRequest
from tests.support.tiny_models import oracle_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
TEMPERATURE = 0.8
GROUP = 4


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[Rollouts, TrainedEngine, str]]:
    """Serve a service without local engines, with the trainer's engine registered."""
    model = checkpoint(directory / "model")
    task = {
        "env": "packages.service.tests.adapters.letters:Letters",
        "max_turn_tokens": 6,
        "max_tokens": 400,
    }
    config = service_config(directory, task=task, rollout={"retries": 0})
    spec = EngineSpec(id=EngineId("trained"), model=str(model), max_slots=16, kv_tokens=16384)
    with (
        serving(config, make_backend=backend_factory(config), registered=True) as service,
        TrainedEngine(spec) as engine,
        Rollouts(service.address) as rollouts,
    ):
        rollouts.register(
            EngineRequest(address=engine.address, token=engine.token, dialect="rollweave", slots=16)
        )
        yield rollouts, engine, service.address


def requests(count: int, **payload: Any) -> list[RolloutRequest]:
    return [RolloutRequest(handler="game", payload=payload, seed=number) for number in range(count)]


def arguments(trl: Any, directory: Path, **changes: Any) -> Any:
    return trl.GRPOConfig(
        output_dir=str(directory / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        temperature=TEMPERATURE,
        learning_rate=1e-2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=1,
        **changes,
    )


def test_grpo_trains_on_the_exact_sampled_tokens(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra `trl`")
    from datasets import Dataset

    errors, masks, losses = [], [], []

    class Watched(trl.GRPOTrainer):  # type: ignore[misc]
        """Records the inputs of the loss."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            losses.append(
                (inputs["completion_mask"] * inputs["tool_mask"], int(inputs["num_items_in_batch"]))
            )
            return super()._compute_loss(model, inputs)

    with served(tmp_path) as (rollouts, engine, _):
        rolled = TrlRollouts(rollouts)

        def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
            rollouts_made = rolled(prompts, trainer)
            for prompt, completion, mask, logprobs in zip(
                *(
                    rollouts_made[key]
                    for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")
                ),
                strict=True,
            ):
                tokens = [*prompt, *completion]
                table = oracle_logprobs(trainer.model, tokens, temperature=TEMPERATURE)
                for place, sampled in enumerate(mask):
                    if sampled:
                        at = len(prompt) + place
                        errors.append(abs(table[at - 1, tokens[at]].item() - logprobs[place]))
            masks.append(rollouts_made["env_mask"])
            return rollouts_made

        trainer = Watched(
            model=str(tmp_path / "model"),
            reward_funcs=rollout_reward,
            args=arguments(trl, tmp_path),
            train_dataset=Dataset.from_list(rows(requests(4))),
            rollout_func=watched,
            callbacks=[SyncWeights(engine)],
        )
        before = {
            name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
        }
        trainer.train()
        status = rollouts.run(requests(1))[0].members[0].result
    assert trainer.state.global_step == 3
    assert len(errors) > 100
    assert max(errors) < 1e-4  # at every step: the engine has the trainer's weights
    assert any(
        not torch.equal(before[name], parameter)
        for name, parameter in trainer.model.named_parameters()
    )
    assert all(
        entry["reward_std"] > 0 for entry in trainer.state.log_history if "reward_std" in entry
    )
    for rolled_masks, (loss_mask, items) in zip(masks, losses, strict=True):
        # several turns each
        assert all(0 in mask and mask[0] == mask[-1] == 1 for mask in rolled_masks)
        # observations are not trained on
        assert items == int(loss_mask.sum()) == sum(map(sum, rolled_masks))
        assert sorted(map(sum, rolled_masks)) == sorted(loss_mask.sum(1).tolist())
    assert status is not None
    assert status.sequences[0].versions() == (3, 3)


def test_a_failed_rollout_has_no_reward_and_no_token_in_the_loss(tmp_path: Path) -> None:
    class Trainer:
        temperature = TEMPERATURE

    with served(tmp_path) as (rollouts, _, _):
        prompts = [row["prompt"] for row in rows([*requests(1), *requests(1, broken=True)])]
        rollouts_made = TrlRollouts(rollouts)([prompts[0], prompts[0], prompts[1]], Trainer())
    assert [reward is None for reward in rollouts_made["rollout_reward"]] == [False, False, True]
    assert rollouts_made["stop_reason"][2] == "env_error"
    assert all(len(rollouts_made[key]) == 3 for key in rollouts_made)
    assert [any(mask) for mask in rollouts_made["env_mask"]] == [True, True, False]


# AsyncGRPOTrainer.


class PlainAttention:
    """A plain substitute for those functions of FlashAttention 3 that TRL calls,
    because FlashAttention needs a GPU.
    """

    @staticmethod
    def flash_attn_varlen_func(
        query: Any,
        key: Any,
        value: Any,
        query_ends: Any,
        key_ends: Any,
        *_: Any,
        softmax_scale: float,
        **__: Any,
    ) -> Any:
        out = torch.empty_like(query)
        heads = query.shape[1] // key.shape[1]
        for part in range(len(query_ends) - 1):
            rows, columns = slice(*query_ends[part : part + 2]), slice(*key_ends[part : part + 2])
            q = query[rows].transpose(0, 1)
            k, v = (
                x[columns].repeat_interleave(heads, dim=1).transpose(0, 1) for x in (key, value)
            )
            scores = (q @ k.transpose(1, 2)) * softmax_scale
            ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
            out[rows] = (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v).transpose(0, 1)
        return out


class RecordedTransfer(WeightTransfer):
    """Records the weights of every version."""

    def __init__(self, engine: TrainedEngine) -> None:
        super().__init__(engine)
        self.weights: list[dict[str, torch.Tensor]] = []

    def send_weights(self, iterator: Any) -> None:
        named = {name: tensor.clone() for name, tensor in iterator}
        self.weights.append(named)
        super().send_weights(iter(named.items()))


class Seen(DapoRollouts):
    """Records every batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[DapoBatch] = []

    def next(self, *, version: int) -> DapoBatch:
        self.batches.append(super().next(version=version))
        return self.batches[-1]


def test_async_grpo_trains_on_the_workers_samples_and_updates_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs the extra `trl`")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    monkeypatch.setattr(packing, "_flash_attn", lambda: PlainAttention)
    # queries the GPU's name
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    with served(tmp_path) as (_, engine, address):
        rule = DapoRule(groups=2, group_size=GROUP, under_way=3, staleness=2)
        decoding = Decoding(temperature=TEMPERATURE)
        tasks = (replace(requests(seed + 1)[-1], sampling=decoding) for seed in itertools.count())
        source = Seen(address, tasks, rule)
        worker, transfer = (
            RolloutWorker(lambda: source, samples=2 * GROUP),
            RecordedTransfer(engine),
        )
        trainer = AsyncGRPOTrainer(
            model=str(tmp_path / "model"),
            args=AsyncGRPOConfig(
                output_dir=str(tmp_path / "out"),
                use_cpu=True,
                bf16=False,
                dtype="float32",
                per_device_train_batch_size=2 * GROUP,
                gradient_accumulation_steps=1,
                token_budget=0,
                temperature=TEMPERATURE,
                learning_rate=1e-2,
                max_steps=3,
                max_staleness=2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=Dataset.from_list(
                rows(requests(1))
            ),  # TRL insists; the worker draws its own
            rollout_worker=worker,
            weight_transfer=transfer,
        )
        trainer.train()
        health = json.load(urllib.request.urlopen(f"{address}/health"))
    assert trainer.state.global_step == 3
    assert len(transfer.weights) == 4  # before the first step, and after each
    assert not any(health[stage] for stage in ("queued", "init", "run", "eval"))
    assert balances(source.account)
    assert all(len(set(group.rewards)) > 1 for batch in source.batches for group in batch.groups)
    model, errors, versions = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        [],
        set(),
    )
    for trajectory in (
        t for batch in source.batches for group in batch.groups for t in group.trajectories
    ):
        (sequence,) = trajectory.sequences
        for segment in sequence.segments:
            if segment.version >= 0:
                versions.add(segment.version)
                model.load_state_dict(transfer.weights[segment.version - 1], strict=False)
                table = oracle_logprobs(model, sequence.tokens, temperature=TEMPERATURE)
                for at in range(segment.start, segment.end):
                    errors.append(
                        abs(table[at - 1, sequence.tokens[at]].item() - sequence.logprobs[at])
                    )
    assert max(errors) < 1e-4
    assert {1, 2} <= versions  # it sampled from what was sent
