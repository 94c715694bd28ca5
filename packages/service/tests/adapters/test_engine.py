"""An engine that samples from an external trainer's weights, called over HTTP."""

import json
import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch

from rollweave.schema.errors import RollweaveError, WeightsError
from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling
from rollweave_service.adapters.engine import TrainedEngine
from tests.support.tiny_models import build, oracle_logprobs, save, spec

PROMPT = (3, 1, 4, 1, 5)


def generate(engine: TrainedEngine, name: str) -> GenerateResult:
    body = msgspec.json.encode(
        GenerateRequest(id=name, tokens=PROMPT, sampling=Sampling(max_tokens=8, seed=7))
    )
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {engine.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{engine.address}/rollweave/v1/generate", body, head)
    ) as answer:
        return msgspec.json.decode(answer.read(), type=GenerateResult)


def error(model: torch.nn.Module, result: GenerateResult) -> float:
    """Return the largest difference between the engine's log-probs and those of
    `model`.
    """
    tokens = [*PROMPT, *result.tokens]
    table = oracle_logprobs(model, tokens)
    places = range(len(PROMPT), len(tokens))
    return max(
        abs(table[at - 1, tokens[at]].item() - sampled)
        for at, sampled in zip(places, result.logprobs, strict=True)
    )


@pytest.mark.extended
def test_samples_from_the_weights_of_the_last_update(tmp_path: Path) -> None:
    first, second = build("qwen3", seed=0), build("qwen3", seed=1)
    with TrainedEngine(spec(save(first, tmp_path / "model"))) as engine:
        result = generate(engine, "a")
        assert (result.versions[0].version, error(first, result) < 1e-4) == (0, True)
        engine.update(second.named_parameters(), version=5)
        result = generate(engine, "b")
        assert result.versions[0].version == 5
        assert error(second, result) < 1e-4
        assert error(first, result) > 0.1
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            engine.update(
                [
                    (name, value)
                    for name, value in first.named_parameters()
                    if name != "model.norm.weight"
                ],
                version=6,
            )
        result = generate(engine, "c")
        assert (result.versions[0].version, error(second, result) < 1e-4) == (5, True)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{engine.address}/health")


def test_refuses_an_invalid_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(RollweaveError, match=r"config\.json"), TrainedEngine(spec(str(tmp_path))):
        pass
