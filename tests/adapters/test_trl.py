"""TRL's own trainers on the CPU, with rollouts of a real service and a real engine that takes the trainer's weights.

Needs the extra `trl` (`pip install -e .[test,trl]`); run with `pytest -m slow tests/adapters/test_trl.py`.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollweave.adapters.engine import TrainedEngine
from rollweave.adapters.trl import SyncWeights, TrlRollouts, rollout_reward, rows
from rollweave.schema.base import EngineId
from rollweave.schema.service import EngineRequest, RolloutRequest
from rollweave.schema.serving import EngineSpec
from rollweave.service.client import Rollouts
from rollweave.service.engines import connector
from tests.codec.chats import CHATML, SPECIAL_MAP, bpe
from tests.engine.models import build, oracle_logprobs, save
from tests.service.serving import service_config, serving

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
TEMPERATURE = 0.8
GROUP = 4


def checkpoint(directory: Path) -> Path:
    """Random weights and a byte-level tokenizer, as transformers and the engine load them."""
    directory.mkdir()
    vocab = -(-bpe().get_vocab_size() // 8) * 8
    save(build("qwen3", vocab_size=vocab, max_position_embeddings=1024), directory)
    bpe().save(str(directory / "tokenizer.json"))
    settings = {**SPECIAL_MAP, "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[Rollouts, TrainedEngine, str]]:
    """A service without engines of its own, and one engine that is the trainer's, registered at it."""
    model = checkpoint(directory / "model")
    task = {"env": "tests.adapters.letters:Letters", "max_turn_tokens": 6, "max_tokens": 400}
    config = service_config(directory, task=task, serve={"engines": "registered"}, rollout={"retries": 0})
    spec = EngineSpec(id=EngineId("trained"), model=str(model), max_slots=16, kv_tokens=16384)
    with serving(config, connect=connector(config)) as service, TrainedEngine(spec) as engine:
        with Rollouts(service.address) as rollouts:
            rollouts.register(EngineRequest(address=engine.address, dialect="rollweave", slots=16))
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


def test_grpo_trains_on_rollouts_token_for_token(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra `trl`")
    from datasets import Dataset

    errors, masks, losses = [], [], []

    class Watched(trl.GRPOTrainer):  # type: ignore[misc]
        """Looks at what reaches the loss."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            losses.append((inputs["completion_mask"] * inputs["tool_mask"], int(inputs["num_items_in_batch"])))
            return super()._compute_loss(model, inputs)

    with served(tmp_path) as (rollouts, engine, _):
        rolled = TrlRollouts(rollouts)

        def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
            found = rolled(prompts, trainer)
            for prompt, completion, mask, logprobs in zip(
                *(found[key] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
            ):
                tokens = [*prompt, *completion]
                table = oracle_logprobs(trainer.model, tokens, temperature=TEMPERATURE)
                for place, sampled in enumerate(mask):
                    if sampled:
                        at = len(prompt) + place
                        errors.append(abs(table[at - 1, tokens[at]].item() - logprobs[place]))
            masks.append(found["env_mask"])
            return found

        trainer = Watched(
            model=str(tmp_path / "model"),
            reward_funcs=rollout_reward,
            args=arguments(trl, tmp_path),
            train_dataset=Dataset.from_list(rows(requests(4))),
            rollout_func=watched,
            callbacks=[SyncWeights(engine)],
        )
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        status = rollouts.run(requests(1))[0].members[0].result
    assert trainer.state.global_step == 3
    assert len(errors) > 100
    assert max(errors) < 1e-4  # at every step: the engine has the trainer's weights
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    assert all(entry["reward_std"] > 0 for entry in trainer.state.log_history if "reward_std" in entry)
    for rolled_masks, (loss_mask, items) in zip(masks, losses, strict=True):
        assert all(0 in mask and mask[0] == mask[-1] == 1 for mask in rolled_masks)  # several turns each
        assert items == int(loss_mask.sum()) == sum(map(sum, rolled_masks))  # observations are not trained on
        assert sorted(map(sum, rolled_masks)) == sorted(loss_mask.sum(1).tolist())
    assert status is not None
    assert status.sequences[0].versions() == (3, 3)


def test_a_rollout_that_failed_has_no_reward_and_no_token_in_the_loss(tmp_path: Path) -> None:
    class Trainer:
        temperature = TEMPERATURE

    with served(tmp_path) as (rollouts, _, _):
        prompts = [row["prompt"] for row in rows([*requests(1), *requests(1, broken=True)])]
        found = TrlRollouts(rollouts)([prompts[0], prompts[0], prompts[1]], Trainer())
    assert [reward is None for reward in found["rollout_reward"]] == [False, False, True]
    assert found["stop_reason"][2] == "env_error"
    assert all(len(found[key]) == 3 for key in found)
    assert all(any(mask) for mask in found["env_mask"])
