"""Bench `gpu`: an engine and a trainer on one GPU, alone and together.

Without a GPU it runs on the CPU, with models small enough for that, so that the bench
itself can be checked anywhere. Weights and prompts are random. A part that fails costs
its own figures only: these are missing, with the reason. Figures carry the model's name
as suffix.
"""

import contextlib
import gc
import itertools
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from benchmarks.batches import random_batch
from benchmarks.contract import Figure, Result
from benchmarks.engine.harness import Harness
from rollweave.runtime.preflight.machine import gpu_memory, memory_bytes
from rollweave.runtime.preflight.memory import Part, engine_parts, kv_bytes, parameters, rank_parts
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import EngineError, RollweaveError
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
from rollweave.train.trainer import Trainer
from rollweave.weights.checkpoint import ModelShape, read_shape

CONCURRENCY = (1, 16, 64)
"""Numbers of requests that an engine decodes at once."""

TOGETHER = 16
"""Number of requests of each engine where engines or a trainer share the device."""

COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Bytes that are copied to measure the memory's bandwidth."""

MATRIX = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices that are multiplied to measure the peak."""

SHARD_BYTES = 4 << 30
"""Maximum size of one file of a checkpoint."""

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One model, and the lengths that are measured with it."""

    name: str
    config: dict[str, int]
    dtype: str = "bfloat16"
    prompt: int = 64
    output: int = 128
    prefill: int = 2048
    train: int = 1024
    """Tokens of one of the eight sequences of a training batch."""


def _qwen3(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, int]:
    return {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "max_position_embeddings": 40_960,
    }


TINY = GpuCase(
    name="tiny",
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
    },
    prompt=16,
    output=16,
    prefill=64,
    train=64,
)
CASES = (
    GpuCase(name="0.6b", config=_qwen3(1024, 28, 16, 3072)),
    GpuCase(name="1.7b", config=_qwen3(2048, 28, 16, 6144)),
    GpuCase(name="8b", config=_qwen3(4096, 36, 32, 12_288)),
)
"""The shapes of Qwen3 models."""


def bench_gpu(*, quick: bool, progress: Progress) -> Result:
    """Return rates of the engine and the trainer, seconds of each way of weights and
    KV, and what sharing the device costs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = (TINY,) if device == "cpu" else CASES[:1] if quick else (TINY, *CASES)
    return measure(cases, device=device, progress=progress)


def measure(cases: Sequence[GpuCase], *, device: str, progress: Progress) -> Result:
    """Return all figures of these models on a device."""
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {"device": device, "requests_together": TOGETHER}
    if device == "cpu":
        conditions["device"] = "cpu: there is no CUDA device"
        conditions["decode_tokens_per_s"] = "the variants are the same engine on a CPU"
        conditions["train_peak_bytes"] = "with 64 MiB of buffers for publishing"
        conditions["train_peak_bytes_optimizer"] = "moments are in the host's memory anyway"
    with _part("peaks", PEAKS, "", figures, conditions, progress):
        figures |= _peaks(device)
    for case in cases:
        conditions[case.name] = {"dtype": case.dtype, **case.config}
        _measure_case(case, device, figures, conditions, progress)
    for name in (name for name, value in figures.items() if value is None):
        conditions.setdefault(name, "the device's peak was not measured")
    return Result(bench="gpu", figures=figures, conditions=conditions)


PEAKS = ("copy_gb_per_s", "matmul_tflops")
DECODE = (
    *(f"tokens_per_s_{count}" for count in CONCURRENCY),
    "decode_bandwidth_share",
    "prefill_tokens_per_s",
    "prefill_flops_share",
)
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
SAVINGS: dict[str, tuple[str, ...]] = {
    "": (),
    "_activations": ("activations",),
    "_optimizer": ("optimizer",),
    "_both": ("activations", "optimizer"),
}
"""Suffix of a figure → `trainer.save_memory`."""

MEMORY = tuple(f"{what}{saved}" for what in ("train_peak_bytes", "train_s") for saved in SAVINGS)
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

LONG = 4
"""Number of requests that decode after a long prompt."""

ATTENTION = tuple(
    f"{figure}_{load}"
    for load in (*CONCURRENCY, "long")
    for figure in (
        *(f"decode_tokens_per_s_{variant}" for variant in VARIANTS),
        "kernel_over_gathered",
        "graphs_over_kernel",
    )
)
SHARED = ("two_engines_over_one", "beside_trainer_over_alone", "train_beside_engine_over_alone")


def _measure_case(
    case: GpuCase,
    device: str,
    figures: dict[str, Figure],
    conditions: dict[str, Any],
    progress: Progress,
) -> None:
    with tempfile.TemporaryDirectory(prefix="rollweave-gpu-") as scratch:
        path = Path(scratch, "model")
        at = case.name
        with _part("checkpoint", (), at, figures, conditions, progress):
            write_checkpoint(path, case, device)
        subject = _Subject(case, path, Path(scratch), device)
        peaks = {name: figures.get(name) for name in PEAKS}
        works: list[tuple[str, Sequence[str], Callable[[], dict[str, Figure]]]] = [
            ("engine", DECODE, lambda: subject.decode(peaks)),
            ("attention", ATTENTION, subject.attention),
            ("KV", KV, subject.kv),
            ("trainer", TRAIN, subject.train),
            ("memory", MEMORY, subject.memory),
            ("sharing", SHARED, subject.shared),
        ]
        for name, keys, work in works:
            with _part(name, keys, at, figures, conditions, progress):
                figures |= {f"{key}_{at}": value for key, value in work().items()}


@contextlib.contextmanager
def _part(
    name: str,
    keys: Sequence[str],
    model: str,
    figures: dict[str, Figure],
    conditions: dict[str, Any],
    progress: Progress,
) -> Iterator[None]:
    """Measure one part; if it fails, its figures are missing."""
    started = time.perf_counter()
    try:
        yield
    except (RollweaveError, RuntimeError, OSError, ValueError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
        for key in keys:
            full = f"{key}_{model}" if model else key
            if figures.setdefault(full, None) is None:
                conditions[full] = reason
        progress(f"{model} {name}: {reason}".strip())
    else:
        progress(f"{model} {name}: {time.perf_counter() - started:.1f} s".strip())
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _peaks(device: str) -> dict[str, Figure]:
    """Return what the device reaches in a large copy, and in a large product."""
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = MATRIX[device]
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    copy_s = _best_s(device, lambda: target.copy_(source))
    product_s = _best_s(device, lambda: torch.mm(left, left))
    return {
        "copy_gb_per_s": 2 * len(source) / copy_s / 1e9,
        "matmul_tflops": 2 * size**3 / product_s / 1e12,
    }


def _best_s(device: str, work: Callable[[], object], repeats: int = 5) -> float:
    best = math.inf
    for _ in range(repeats):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def write_checkpoint(path: Path, case: GpuCase, device: str) -> None:
    """Write a Qwen3 checkpoint of random weights, in files of bounded size."""
    path.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        **case.config,
    }
    (path / "config.json").write_text(json.dumps(config))
    dtype: torch.dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(0)
    places: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(places.values())):05}.safetensors"
        save_file(pending, path / name)
        places.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, size in read_shape(path).tensors().items():
        tensor = torch.empty(size, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        pending[name] = tensor.cpu()
        if sum(one.nbytes for one in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


class _Subject:
    """One model on a device."""

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

    def decode(self, peaks: Mapping[str, Figure]) -> dict[str, Figure]:
        """Return output tokens per second, and the shares of the device's peaks."""
        case, shape = self._case, self._shape
        self._must_fit(self._engine_parts())
        figures: dict[str, Figure] = {}
        with Harness(self._spec) as engine:
            self._rate(engine, 1)  # warm-up
            for count in CONCURRENCY:
                figures[f"tokens_per_s_{count}"] = self._rate(engine, count)
            requests = [self._request(case.prefill, 1) for _ in range(4)]
            started = time.perf_counter()
            engine.generate(requests)
            elapsed = time.perf_counter() - started
        computed = sum(len(request.tokens) for request in requests)
        figures["prefill_tokens_per_s"] = computed / elapsed
        read = parameters(shape) * NUMBER_BYTES[case.dtype]
        single = figures[f"tokens_per_s_{CONCURRENCY[0]}"]
        assert isinstance(single, float)
        figures["decode_bandwidth_share"] = _over(single * read / 1e9, peaks["copy_gb_per_s"])
        flops = 2 * computed * (parameters(shape) - shape.vocab * shape.hidden)
        figures["prefill_flops_share"] = _over(flops / elapsed / 1e12, peaks["matmul_tflops"])
        return figures

    def attention(self) -> dict[str, Figure]:
        """Return output tokens per second of each way of decoding, measured in turn."""
        self._must_fit(self._engine_parts() * len(VARIANTS))
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
        return figures

    def kv(self) -> dict[str, Figure]:
        """Return the seconds in which a context leaves one engine and reaches another
        on the same device.
        """
        self._must_fit(self._engine_parts() * 2)
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
                figures["kv_bytes"] = exported.manifest.tokens * kv_bytes(self._shape, width)
        return figures

    def train(self) -> dict[str, Figure]:
        """Return the seconds of a step, and of new weights on their way to an
        engine.
        """
        self._must_fit([*self._rank_parts(), *self._engine_parts()])
        with closing(self._trainer()) as trainer, Harness(self._spec) as engine:
            self._step(trainer)  # warm-up
            started = time.perf_counter()
            tokens = self._step(trainer)
            step_s = time.perf_counter() - started
            for version in range(2):  # the first one is a warm-up
                published = _publish(trainer, version)
                engine.post(Load(manifest=published.manifest))
                loaded = engine.expect(Loaded)
            manifest = _publish(trainer, 2).manifest
            started = time.perf_counter()
            engine.post(Stage(manifest=manifest))
            engine.expect(Staged)
            stage_s = time.perf_counter() - started
            engine.post(Load(manifest=manifest))
            swapped = engine.expect(Loaded)
        return {
            "train_step_s": step_s,
            "train_tokens_per_s": tokens / step_s,
            "publish_s": published.publish_s,
            "load_s": loaded.load_s,
            "stage_s": stage_s,
            "swap_s": swapped.load_s,
            "weights_bytes": published.manifest.nbytes,
        }

    def memory(self) -> dict[str, Figure]:
        """Return what each way of saving the trainer's memory saves on the device, and
        the seconds that a step takes with it.
        """
        self._must_fit(self._rank_parts())
        figures: dict[str, Figure] = {}
        for suffix, savings in SAVINGS.items():

            def steps(savings: tuple[str, ...] = savings) -> float:
                with closing(self._trainer(savings)) as trainer:
                    self._step(trainer)  # warm-up
                    started = time.perf_counter()
                    self._step(trainer)
                    return time.perf_counter() - started

            peak, _ = peak_bytes(self._device, steps)
            figures |= {f"train_peak_bytes{suffix}": peak, f"train_s{suffix}": steps()}
        return figures

    def shared(self) -> dict[str, Figure]:
        """Return what remains of the rates of two engines, and of an engine beside a
        trainer, on one device.
        """
        self._must_fit([*self._rank_parts(), *self._engine_parts() * 2])
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

    @property
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

    def _config(self, savings: Sequence[str] = ()) -> RunConfig:
        case = self._case
        config = RunConfig.model_validate(
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
        # a CPU, on which a run is refused this, measures the same code
        trainer = config.trainer.model_copy(update={"save_memory": tuple(savings)})
        return config.model_copy(update={"trainer": trainer})

    def _trainer(self, savings: Sequence[str] = ()) -> Trainer:
        self._trained = 0
        return Trainer(self._config(savings), self._path, self._scratch)

    def _step(self, trainer: Trainer) -> int:
        """Train on a batch; return its tokens."""
        step, self._trained = self._trained, self._trained + 1
        vocab, length = self._case.config["vocab_size"], self._case.train
        batch = random_batch(step, vocab=vocab, length=length, groups=2, members=4)
        reply = trainer.handle(TrainOn(batch=batch))
        if not isinstance(reply, Trained):
            raise EngineError(f"the step must be trained, got {reply}")
        return int(reply.metrics.values["input_tokens"])

    def _engine_parts(self) -> list[Part]:
        config = self._config()
        return engine_parts(config, self._shape, config.engines[0])

    def _rank_parts(self) -> list[Part]:
        return rank_parts(self._config(), self._shape, rank=0)

    def _must_fit(self, parts: Sequence[Part]) -> None:
        """Raise EngineError if the device lacks this memory."""
        on_device = self._device != "cpu"
        needed = sum(part.nbytes for part in parts if part.on_device or not on_device)
        free = gpu_memory(self._device)[1] if on_device else memory_bytes()[1]
        if needed > free:
            raise EngineError(f"the device must have {needed >> 20} MiB free, got {free >> 20}")


def peak_bytes(device: str, work: Callable[[], T]) -> tuple[int, T]:
    """Return the maximum of the bytes that torch allocates in `work` on the device, and
    its result. On a CPU, `work` is profiled, and takes longer.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return torch.cuda.max_memory_allocated() - before, result
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda change: change.start_ns())
    return max(itertools.accumulate(change.nbytes() for change in changes)), result


def _publish(trainer: Trainer, version: int) -> Published:
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


def _over(value: float, peak: Figure) -> Figure:
    return value / peak if isinstance(peak, float) else None
