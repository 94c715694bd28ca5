"""Models and requests of the engine bench.

Weights and prompts are random, from fixed seeds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollweave.schema.serving import GenerateRequest, Sampling


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model and its run lengths: prompts of `prompt` tokens on average, `output`
    tokens each, `repeats` runs.
    """

    name: str
    config: dict[str, int]
    prompt: int
    output: int
    repeats: int


def model_cases(*, quick: bool) -> list[ModelCase]:
    """Return a model of the demo's size (hidden 64, 2 layers) and one of 100 million
    parameters.

    Heads are at least 32 wide, where the demo has 16: vLLM's attention on a CPU
    supports no narrower ones.
    """
    tiny = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    tiny |= {"head_dim": 32, "intermediate_size": 192, "max_position_embeddings": 4096}
    large = {
        "vocab_size": 32768,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    large |= {
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
    }
    return [
        ModelCase(
            name="tiny",
            config=tiny,
            prompt=64,
            output=64 if quick else 128,
            repeats=3 if quick else 7,
        ),
        ModelCase(
            name="100m",
            config=large,
            prompt=32 if quick else 64,
            output=6 if quick else 32,
            repeats=1 if quick else 5,
        ),
    ]


def random_model(case: ModelCase) -> Any:
    torch.manual_seed(0)
    rope: Any = {"rope_type": "default", "rope_theta": 10000.0}
    settings: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(rope_parameters=rope, **(settings | case.config)))
    return model.eval()


def kv_bytes(case: ModelCase, tokens: int) -> int:
    """Return the bytes of `tokens` cached tokens in float32."""
    sizes = case.config
    return (
        tokens
        * 2
        * 4
        * sizes["num_hidden_layers"]
        * sizes["num_key_value_heads"]
        * sizes["head_dim"]
    )


def prompt(case: ModelCase, seed: int, *, length: int | None = None) -> tuple[int, ...]:
    """Return token ids that share no block with any other seed's.

    Lengths vary by half around the model case's.
    """
    generator = torch.Generator().manual_seed(seed)
    count = length or int(
        torch.randint(case.prompt // 2, case.prompt * 3 // 2 + 1, (), generator=generator)
    )
    return tuple(
        torch.randint(1, case.config["vocab_size"], (count,), generator=generator).tolist()
    )


def requests_of(case: ModelCase, count: int, seed: int) -> list[GenerateRequest]:
    """Return `count` requests that are unique to this seed."""
    sampling = Sampling(temperature=1.0, max_tokens=case.output, seed=seed)
    return [
        GenerateRequest(id=f"{seed}.{i}", tokens=prompt(case, 1000 * seed + i), sampling=sampling)
        for i in range(count)
    ]
