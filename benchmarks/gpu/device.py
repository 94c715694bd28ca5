"""One model on a device, which an engine and a trainer of a bench share."""

import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.batches import random_batch
from benchmarks.engine.harness import Harness
from benchmarks.gpu.cases import GpuCase
from rollweave.engine.needs import engine_needs
from rollweave.io.machine import gpu_memory, memory_bytes
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import EngineError
from rollweave.schema.hosts import Need
from rollweave.schema.serving import (
    EngineSpec,
    GenerateRequest,
    Sampling,
)
from rollweave.schema.training import Publish, Published, Trained, TrainOn
from rollweave.train.needs import rank_needs
from rollweave.train.trainer import Trainer
from rollweave.weights.checkpoint import ModelShape, read_shape

CONCURRENCY = (1, 16, 64)
"""Numbers of requests that an engine decodes at once."""

LONG = 4
"""Number of requests that decode after a long prompt."""


class Device:
    """One model on a device, which an engine and a trainer share."""

    def __init__(self, case: GpuCase, path: Path, scratch: Path, device: str) -> None:
        self._case, self._path, self._scratch, self._device = case, path, scratch, device
        self._seeds = itertools.count(1)
        tokens = max(CONCURRENCY) * 2 * (case.prompt + case.output) + LONG * case.prefill
        self._spec = EngineSpec(
            id=EngineId("bench"),
            model=str(path),
            device=device,
            dtype=case.dtype,
            max_slots=max(CONCURRENCY),
            kv_tokens=-(-tokens // 16) * 16,
            prefill_chunk_tokens=max(512, case.prefill),
        )

    @functools.cached_property
    def _shape(self) -> ModelShape:
        return read_shape(self._path)

    def _request(self, prompt: int, output: int) -> GenerateRequest:
        seed = next(self._seeds)
        generator = torch.Generator().manual_seed(seed)
        vocab = self._case.config["vocab_size"]
        tokens = torch.randint(1, vocab, (prompt,), generator=generator).tolist()
        sampling = Sampling(temperature=1.0, max_tokens=output, seed=seed)
        return GenerateRequest(id=str(seed), tokens=tuple(tokens), sampling=sampling)

    def _rate(self, engine: Harness, count: int, *, prompt: int | None = None) -> float:
        """Return output tokens per second, prefill included."""
        case = self._case
        requests = [self._request(prompt or case.prompt, case.output) for _ in range(count)]
        started = time.perf_counter()
        engine.generate(requests)
        return count * case.output / (time.perf_counter() - started)

    def _config(self) -> RunConfig:
        case = self._case
        return RunConfig.model_validate(
            {
                "run": {"name": "bench"},
                "model": {"path": str(self._path), "dtype": case.dtype, "device": self._device},
                "tasks": [{"env": "none", "max_tokens": case.train}],
                "rollout": {"groups_per_step": 2, "group_size": 4},
                "trainer": {"micro_tokens": 4 * case.train},
                "engines": {
                    "kv_tokens": max(self._spec.kv_tokens, -(-case.train // 16) * 16),
                    "max_slots": self._spec.max_slots,
                },
            }
        )

    def _trainer(self) -> Trainer:
        self._trained = 0
        return Trainer(self._config(), self._path)

    def _step(self, trainer: Trainer) -> int:
        """Train on a batch; return its tokens."""
        step, self._trained = self._trained, self._trained + 1
        vocab, length = self._case.config["vocab_size"], self._case.train
        batch = random_batch(step, vocab=vocab, length=length, groups=2, members=4)
        reply = trainer.handle(TrainOn(batch=batch))
        if not isinstance(reply, Trained):
            raise EngineError(f"the step must be trained, got {reply}")
        return int(reply.metrics.values["input_tokens"])

    def _engine_needs(self) -> list[Need]:
        config = self._config()
        return engine_needs(config, self._shape, config.engines[0])

    def _rank_needs(self) -> list[Need]:
        return rank_needs(self._config(), self._shape, rank=0)

    def _must_fit(self, needs: Sequence[Need]) -> None:
        """Raise EngineError if the device lacks this memory."""
        on_device = self._device != "cpu"
        needed = sum(need.nbytes for need in needs if need.on_device or not on_device)
        free = gpu_memory(self._device)[1] if on_device else memory_bytes()[1]
        if needed > free:
            raise EngineError(f"the device must have {needed >> 20} MiB free, got {free >> 20}")


def published(trainer: Trainer, version: int) -> Published:
    reply = trainer.handle(Publish(version=version, publication_id=version))
    if not isinstance(reply, Published):
        raise EngineError(f"weights must be published, got {reply}")
    return reply
