"""A tiny checkpoint, the real engine loop, and the environment of engine processes."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.engine.vllm_server import VARIABLE
from rollweave.engine.clients.client import EngineClient, MakeLoop, in_thread
from rollweave.engine.matchers import Matchers
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.schema.weights import WeightManifest

ROOT = Path(__file__).parents[2]

VLLM_START_S = 240.0
"""Maximum seconds until a vLLM server is ready on a busy machine."""


def limit_compilation(patch: pytest.MonkeyPatch) -> None:
    """Bound the compilation of a form by less than the limit of a run, within which
    fast machines compile every form.
    """
    patch.setitem(Matchers.__init__.__kwdefaults__, "begin_s", 0.3)


needs_vllm = (
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        VARIABLE not in os.environ, reason=f"{VARIABLE} names no interpreter that has vLLM"
    ),
)
"""Marks of a test that needs an interpreter that has vLLM (`make test-vllm`)."""


def vllm_spec(
    *, control_s: float = 60.0, degree: int = 1, scaled_logprobs: bool = False
) -> ServerSpec:
    """Return the server of an engine, on the interpreter that the environment names."""
    return ServerSpec(
        kind="vllm",
        python=os.environ[VARIABLE],
        degree=degree,
        scaled_logprobs=scaled_logprobs,
        start_s=VLLM_START_S,
        control_s=control_s,
    )


def vllm_checkpoint(directory: Path, *, seed: int = 0, eos_token_id: int = 1) -> Path:
    """Write a random checkpoint with heads of 32, the smallest that vLLM accepts."""
    changes = {
        "model_type": "qwen3",
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "hidden_act": "silu",
    }
    return tiny_checkpoint(
        directory,
        seed=seed,
        **changes,
        eos_token_id=eos_token_id,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
    )


def tiny_checkpoint(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """Write a random Qwen3-shaped checkpoint of a few thousand parameters without
    transformers; `changes` apply to its config.
    """
    import torch
    from safetensors.torch import save_file

    from rollweave.weights.checkpoint import read_shape

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    tensors = {
        name: torch.randn(shape) * 0.1 for name, shape in read_shape(directory).tensors().items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def engine_in_thread(
    spec: EngineSpec, *, name: str = "engine e0", start_s: float = 60.0, reply_s: float = 60.0
) -> EngineClient:
    """Start an embedded engine in a thread of this process, whose model is there."""
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    link = in_thread(spec, real_loop(), model_ready=present)
    return EngineClient(name, link, start_s=start_s, reply_s=reply_s)


def real_loop() -> MakeLoop:
    from rollweave.engine.thread import EngineThread

    return EngineThread


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": f"{ROOT}:{':'.join(path for path in sys.path if path)}",
        "OMP_NUM_THREADS": "1",
    }


def manifest(version: int, digest: str = "good") -> WeightManifest:
    """Return a version without tensors."""
    return WeightManifest(
        version=version,
        publication_id=version,
        location="/nowhere",
        tensors=(),
        nbytes=0,
        digest=digest,
    )
