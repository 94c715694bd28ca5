"""Measurements of one model on a device: rates of an engine and of the trainer, and the
ways of weights and KV.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.batches import random_batch
from benchmarks.contract import Figure
from benchmarks.engine.harness import Harness
from benchmarks.gpu.cases import GpuCase
from rollweave.engine.needs import engine_needs
from rollweave.io.machine import gpu_memory, memory_bytes
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import EngineError
from rollweave.schema.needs import Need
from rollweave.schema.serving import (
    EngineSpec,
    ExportKv,
    GenerateRequest,
    ImportKv,
    KvExported,
    KvImported,
    KvTransport,
    Load,
    Loaded,
    ReleaseKv,
    Sampling,
    Stage,
    Staged,
)
from rollweave.schema.training import Publish, Published, Trained, TrainOn
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.train.needs import rank_needs
from rollweave.train.trainer import Trainer
from rollweave.weights.checkpoint import ModelShape, read_shape

CONCURRENCY = (1, 16, 64)
"""Numbers of requests that an engine decodes at once."""

LONG = 4
"""Number of requests that decode after a long prompt."""

TOGETHER = 16
"""Number of requests of each engine where engines or a trainer share the device."""

OVER: tuple[KvTransport, ...] = ("shm", "tcp")
KV = ("kv_bytes", *(f"kv_{what}_s_{over}" for over in OVER for what in ("export", "import")))
TRAIN = (
    "train_step_s",
    "train_tokens_per_s",
    "publish_s",
    "load_s",
    "stage_s",
    "swap_s",
    "weights_bytes",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "gathered": {"paged_attention": False},
    "kernel": {"cuda_graphs": False},
    "graphs": {},
}
"""Ways of decoding → settings of the engine, each faster than the one before where
there is a GPU: attention that gathers blocks, a kernel that reads them where they lie,
and that kernel in CUDA graphs.
"""

REPEATS = 3
"""Number of measurements of each; the first one is a warm-up."""

DECODE = (
    "prefill_tokens_per_s",
    *(
        f"{figure}_{load}"
        for load in (*CONCURRENCY, "long")
        for figure in (
            *(f"decode_tokens_per_s_{variant}" for variant in VARIANTS),
            "kernel_over_gathered",
            "graphs_over_kernel",
        )
    ),
)
SHARED = ("two_engines_over_one", "beside_trainer_over_alone", "train_beside_engine_over_alone")


class Subject:
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
        return Trainer(self._config(), self._path, self._scratch)

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

    def decode(self) -> dict[str, Figure]:
        """Return output tokens per second of each way of decoding, measured in turn,
        and tokens of prompts per second.
        """
        self._must_fit(self._engine_needs() * len(VARIANTS))
        figures: dict[str, Figure] = {}
        with ExitStack() as stack:
            engines = {
                variant: stack.enter_context(Harness(replace(self._spec, **changes)))
                for variant, changes in VARIANTS.items()
            }
            for load in (*CONCURRENCY, "long"):
                count, prompt = (LONG, self._case.prefill) if load == "long" else (load, None)
                rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
                for _ in range(REPEATS):
                    for variant, engine in engines.items():
                        rates[variant].append(self._rate(engine, int(count), prompt=prompt))
                # the first ones compile kernels and record graphs
                best = {variant: max(measured[1:]) for variant, measured in rates.items()}
                figures |= {
                    **{f"decode_tokens_per_s_{name}_{load}": rate for name, rate in best.items()},
                    f"kernel_over_gathered_{load}": best["kernel"] / best["gathered"],
                    f"graphs_over_kernel_{load}": best["graphs"] / best["kernel"],
                }
            requests = [self._request(self._case.prefill, 1) for _ in range(LONG)]
            started = time.perf_counter()
            engines["graphs"].generate(requests)
            computed = sum(len(request.tokens) for request in requests)
            figures["prefill_tokens_per_s"] = computed / (time.perf_counter() - started)
        return figures

    def kv(self) -> dict[str, Figure]:
        """Return the seconds in which a context leaves one engine and reaches another
        on the same device.
        """
        self._must_fit(self._engine_needs() * 2)
        figures: dict[str, Figure] = {}
        with Harness(self._spec) as source, Harness(self._spec) as target:
            for over in OVER:
                request = self._request(self._case.prefill, 1)
                source.generate([request])
                started = time.perf_counter()
                source.post(ExportKv(id=over, tokens=request.tokens, over=over))
                exported = source.expect(KvExported)
                moved = time.perf_counter()
                target.post(ImportKv(id=over, tokens=request.tokens, manifest=exported.manifest))
                imported = target.expect(KvImported)
                ended = time.perf_counter()
                source.post(ReleaseKv(id=over))
                if imported.moved_tokens != exported.manifest.tokens:
                    raise EngineError(
                        f"{exported.manifest.tokens} tokens must have moved, got "
                        f"{imported.moved_tokens}"
                    )
                figures[f"kv_export_s_{over}"] = moved - started
                figures[f"kv_import_s_{over}"] = ended - moved
                width = NUMBER_BYTES[self._case.dtype]
                figures["kv_bytes"] = exported.manifest.tokens * self._shape.kv_bytes(width)
        return figures

    def train(self) -> dict[str, Figure]:
        """Return the seconds of a step, and of new weights on their way to an
        engine.
        """
        self._must_fit([*self._rank_needs(), *self._engine_needs()])
        with closing(self._trainer()) as trainer, Harness(self._spec) as engine:
            self._step(trainer)  # warm-up
            started = time.perf_counter()
            tokens = self._step(trainer)
            step_s = time.perf_counter() - started
            for version in range(2):  # the first one is a warm-up
                result = published(trainer, version)
                engine.post(Load(manifest=result.manifest))
                loaded = engine.expect(Loaded)
            manifest = published(trainer, 2).manifest
            started = time.perf_counter()
            engine.post(Stage(manifest=manifest))
            engine.expect(Staged)
            stage_s = time.perf_counter() - started
            engine.post(Load(manifest=manifest))
            swapped = engine.expect(Loaded)
        return {
            "train_step_s": step_s,
            "train_tokens_per_s": tokens / step_s,
            "publish_s": result.publish_s,
            "load_s": loaded.load_s,
            "stage_s": stage_s,
            "swap_s": swapped.load_s,
            "weights_bytes": result.manifest.nbytes,
        }

    def shared(self) -> dict[str, Figure]:
        """Return what remains of the rates of two engines, and of an engine beside a
        trainer, on one device.
        """
        self._must_fit([*self._rank_needs(), *self._engine_needs() * 2])
        with (
            Harness(self._spec) as engine,
            Harness(self._spec) as other,
            closing(self._trainer()) as trainer,
        ):
            for one in (engine, other):
                self._rate(one, 1)
            self._step(trainer)
            alone = self._rate(engine, TOGETHER)
            started = time.perf_counter()
            self._step(trainer)
            step_s = time.perf_counter() - started
            both = sum(
                _at_once(lambda: self._rate(engine, TOGETHER), lambda: self._rate(other, TOGETHER))
            )
            stop = threading.Event()
            steps: list[float] = []

            def train() -> float:
                while not steps or not stop.is_set():
                    started = time.perf_counter()
                    self._step(trainer)
                    steps.append(time.perf_counter() - started)
                return 0.0

            def generate() -> float:
                try:
                    return self._rate(engine, TOGETHER)
                finally:
                    stop.set()

            rate, _ = _at_once(generate, train)
        return {
            "two_engines_over_one": both / alone,
            "beside_trainer_over_alone": rate / alone,
            "train_beside_engine_over_alone": step_s / min(steps),
        }


def published(trainer: Trainer, version: int) -> Published:
    reply = trainer.handle(Publish(version=version, publication_id=version))
    if not isinstance(reply, Published):
        raise EngineError(f"weights must be published, got {reply}")
    return reply


def _at_once(*works: Callable[[], float]) -> list[float]:
    """Run functions on a thread each, and return what they return. Raises the first
    error.
    """
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result() for done in [pool.submit(work) for work in works]]
