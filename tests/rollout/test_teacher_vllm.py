"""A real vLLM as the teacher, if `ROLLWEAVE_VLLM_PYTHON` names an interpreter that has
it: its log-probs are those of transformers, and its vocabulary is compared.
"""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.vllm_server import VARIABLE, VllmServer
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.teacher import Teacher, TeacherError, check_teacher
from rollweave.schema.config.training import VLLM_HEAD_DIM, ScratchModel, TeacherConfig
from rollweave.schema.errors import ConfigError
from rollweave.train.scratch import build_checkpoint, build_tokenizer
from tests.support.engines import VLLM_START_S, needs_vllm
from tests.support.tiny_models import oracle_logprobs

pytestmark = list(needs_vllm)

WORDS = [f" word{number}" for number in range(60)]


class WithTokenizer(VllmServer):
    def _options(self) -> list[str]:
        return [each for each in super()._options() if each != "--skip-tokenizer-init"]


async def test_vllm_teaches(tmp_path: Path) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    build_checkpoint(
        model,
        scratch=ScratchModel(hidden=64, layers=1),
        context=256,
        words=WORDS,
        seed=3,
        head_dim=VLLM_HEAD_DIM,
    )
    tokens = [(7 * at) % 150 for at in range(100)]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = oracle_logprobs(oracle, tokens)
    with WithTokenizer(
        os.environ[VARIABLE],
        str(model),
        kv_bytes=64 << 20,
        eager=True,
        scratch=scratch,
        concurrency=1,
    ) as server:
        await asyncio.to_thread(server.wait_ready, VLLM_START_S)
        config = TeacherConfig(url=f"http://127.0.0.1:{server.port}")
        teacher = Teacher(config, clock=asyncio.get_running_loop().time)
        for _ in range(2):  # also when the prompt is in its prefix cache
            scored = await teacher.scored(tokens)
            assert [logprob for logprob, _ in scored[1:]] == pytest.approx(
                [rows[at, token].item() for at, token in enumerate(tokens[1:])], abs=1e-4
            )
        with pytest.raises(TeacherError, match="status 400"):
            await teacher.scored([5] * 300)
        await teacher.close()
        own = ChatCodec.from_directory(model).tokenizer
        assert await asyncio.to_thread(check_teacher, config, own, limit_s=30.0) > 100
        other = build_tokenizer([f" other{number}" for number in range(60)])
        with pytest.raises(ConfigError, match="must have the student's vocabulary"):
            await asyncio.to_thread(check_teacher, config, other, limit_s=30.0)
