"""Models and requests of the engine bench.

Prompts are random, from fixed seeds, and so are weights that are not a checkpoint's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rollweave.schema.serving import GenerateRequest, Sampling
from rollweave.weights.checkpoint import read_shape


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model and its run lengths: prompts of `prompt` tokens on average, `output`
    tokens each, `repeats` runs; `compared` are the numbers of concurrent requests at
    which the peers are measured, too. Without a `path`, weights are random.
    """

    name: str
    config: dict[str, int]
    prompt: int
    output: int
    repeats: int
    compared: tuple[int, ...] = (16,)
    path: Path | None = None


def sizes(
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head: int,
    ffn: int,
    context: int = 4096,
) -> dict[str, int]:
    """Return the sizes of a Qwen3 model under the names of its configuration."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": ffn,
        "max_position_embeddings": context,
    }


TINY_CONFIG = sizes(vocab=512, hidden=64, layers=2, heads=2, kv_heads=1, head=32, ffn=192)


def model_cases(*, quick: bool) -> list[ModelCase]:
    """Return a model of the demo's size (hidden 64, 2 layers) and one of 100 million
    parameters.

    Heads are at least 32 wide, where the demo has 16: vLLM's attention on a CPU
    supports no narrower ones.
    """
    large = sizes(vocab=32768, hidden=768, layers=12, heads=12, kv_heads=4, head=64, ffn=2048)
    if quick:
        return [
            ModelCase(name="tiny", config=TINY_CONFIG, prompt=64, output=64, repeats=3),
            ModelCase(name="100m", config=large, prompt=32, output=6, repeats=1),
        ]
    return [
        ModelCase(name="tiny", config=TINY_CONFIG, prompt=64, output=128, repeats=7),
        ModelCase(name="100m", config=large, prompt=64, output=32, repeats=5),
    ]


def pretrained_case(path: Path, *, quick: bool) -> ModelCase:
    """Return the case of a checkpoint of a Llama or Qwen model."""
    shape = read_shape(path)
    same = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "context")
    config = sizes(head=shape.head_dim, **{name: getattr(shape, name) for name in same})
    output, repeats = (8, 1) if quick else (64, 5)
    return ModelCase(
        name="model",
        config=config,
        prompt=64,
        output=output,
        repeats=repeats,
        compared=(1, 16, 32),
        path=path,
    )


def model_of(case: ModelCase) -> Any:
    """Return the model as transformers computes it, in float32."""
    if case.path is not None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32)
        loaded.generation_config = GenerationConfig(pad_token_id=0)
        return loaded.eval()
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
    config = case.config
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 4 * tokens * numbers


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
