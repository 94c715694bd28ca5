"""Measurements of one model on a device: rates of an engine and of the trainer, and the
ways of weights and KV.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

from msgspec.structs import replace

from benchmarks.contract import Figure
from benchmarks.engine.harness import Harness
from benchmarks.gpu.device import CONCURRENCY, LONG, Device, published
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    ExportKv,
    ImportKv,
    KvExported,
    KvImported,
    KvTransport,
    Load,
    Loaded,
    ReleaseKv,
    Stage,
    Staged,
)
from rollweave.schema.weights import NUMBER_BYTES

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


class Subject(Device):
    """The measurements of a device."""

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


def _at_once(*works: Callable[[], float]) -> list[float]:
    """Run functions on a thread each, and return what they return. Raises the first
    error.
    """
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result() for done in [pool.submit(work) for work in works]]
