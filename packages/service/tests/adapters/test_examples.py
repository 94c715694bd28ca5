"""The examples for trainers that need GPUs, with fakes of those trainers: conversions,
and rollouts of a real service.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given

from packages.service.tests.rollout_service import service_config, serving
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import SegmentKind
from rollweave_service.client import Rollouts
from tests.support.sequences import kinds, sequence

EXAMPLES = Path(__file__).parents[4] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nemo, verl = example("nemo_rl_rollouts"), example("verl_agent_loop")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    config = service_config(
        tmp_path, task={"env": "packages.service.tests.lottery:Lottery"}, rollout={"retries": 0}
    )
    with serving(config) as service:
        yield service.address


# NeMo-RL.


@given(kinds)
def test_a_message_log_equals_the_sequence(parts: list[tuple[SegmentKind, int]]) -> None:
    token_sequence = sequence(parts)
    log = nemo.message_log_of(token_sequence)
    assert [token for message in log for token in message["token_ids"].tolist()] == list(
        token_sequence.tokens
    )
    trained = [message["role"] == "assistant" for message in log for _ in message["token_ids"]]
    assert trained == token_sequence.output_mask()
    none = torch.zeros(0)
    logprobs = torch.cat(
        [
            none,
            *(
                message.get("generation_logprobs", torch.zeros(len(message["token_ids"])))
                for message in log
            ),
        ]
    )
    assert logprobs.tolist() == list(token_sequence.logprobs)


def test_nemo_rl_gets_its_batch_without_failures_in_the_baseline(address: str) -> None:
    payloads = [{"name": "a", "rewards": [0.0, 1.0, "broken"]}] * 3 + [
        {"name": "b", "rewards": ["broken"]}
    ]
    batch = {
        "extra_env_info": [
            {"rollweave": {"handler": "game", "payload": payload}} for payload in payloads
        ],
        "message_log": [
            [{"role": "user", "content": "", "token_ids": torch.tensor([1])}] for _ in payloads
        ],
        "loss_multiplier": torch.ones(4),
        "idx": [0, 0, 0, 1],
    }
    with Rollouts(address) as rollouts:
        nemo_batch, metrics = nemo.RollweaveRollouts(rollouts, temperature=1.0)(
            None, batch, None, None, max_seq_len=100
        )
    assert sorted(nemo_batch["total_reward"].tolist()) == [0.0, 0.0, 0.5, 1.0]
    failed = [reward == 0.5 for reward in nemo_batch["total_reward"].tolist()[:3]] + [True]
    assert nemo_batch["loss_multiplier"].tolist() == [0.0 if one else 1.0 for one in failed]
    assert metrics["failed_rollouts"] == 2
    for log, length, one in zip(
        nemo_batch["message_log"], nemo_batch["length"].tolist(), failed, strict=True
    ):
        assert sum(len(message["token_ids"]) for message in log) == length
        assert any(message["role"] == "assistant" for message in log) is not one
    assert nemo_batch["idx"] == [0, 0, 0, 1]
    # the batch that was given is as it was
    assert batch["message_log"][0][0]["token_ids"].tolist() == [1]


# verl.

SAMPLING = {
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


def agent_loop(address: str) -> Any:
    loop = verl.RollweaveAgentLoop(addresses=[address], handler="game")
    loop.rollout_config = SimpleNamespace(prompt_length=200, response_length=3)
    return loop


async def test_verl_gets_the_sampled_tokens(address: str) -> None:
    loop = agent_loop(address)
    info = {"payload": {"name": "v", "rewards": ["broken", 0.25]}}  # the first attempt fails
    output = await loop.run(dict(SAMPLING), extra_info=info, raw_prompt=[])
    assert output["reward_score"] == 0.25
    assert (
        len(output["response_ids"])
        == len(output["response_mask"])
        == len(output["response_logprobs"])
        == 3
    )
    assert output["response_mask"] == [1, 1, 1]
    assert output["response_logprobs"] == [-1.0] * 3
    assert (
        output["extra_fields"]["min_global_steps"]
        == output["extra_fields"]["max_global_steps"]
        == 0
    )
    loop.rollout_config.prompt_length = 1
    with pytest.raises(ValueError, match=r"at most rollout\.prompt_length \(1\) tokens"):
        await loop.run(dict(SAMPLING), extra_info=info, raw_prompt=[])
    with pytest.raises(RollweaveError, match=r"failed 3 times; last: .*broken on purpose"):
        await loop.run(
            dict(SAMPLING),
            extra_info={"payload": {"name": "w", "rewards": ["broken"]}},
            raw_prompt=[],
        )
    for client in loop.clients.values():
        await client.__aexit__()


def test_verls_sampling_parameters_apply_to_the_rollout() -> None:
    request = verl.request_of("swe", {"index": torch.tensor(7), "split": "train"}, SAMPLING)
    assert (request.index, request.sampling.temperature, request.sampling.top_k) == (7, 0.5, 0)
    with pytest.raises(
        ValueError,
        match=r"sampling_params\.repetition_penalty must be 1 or null: it is not "
        r"supported, got 1\.1",
    ):
        verl.request_of("swe", {"index": 7}, SAMPLING | {"repetition_penalty": 1.1})
