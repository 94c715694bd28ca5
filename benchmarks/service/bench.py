"""Bench `service`: the cost of HTTP beside calls to the same pipeline in the same
process, the number of concurrent rollouts, the value of its parts (`ablations`), and
the gain from more processes (`scaling`).

For the cost of HTTP there are one service, one embedded engine, and the frozen lake.
Rounds of equal rollouts alternate between the service's object and a client in another
process, first many concurrently, then one after the other. Then `CONCURRENT_ROLLOUTS`
rollouts run at once, in slow environments. Invariant: both variants use the same
pipeline, core and engine, so that they differ in HTTP alone.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.contract import Figure, Result
from benchmarks.runs import trained
from benchmarks.service import ablations as service_ablations
from benchmarks.service import scaling as service_scaling
from rollweave.engine.clients.transport import OnRetry
from rollweave.io.http.access import Access
from rollweave.schema.base import Struct
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs
from rollweave.schema.service import EngineRequest, RolloutRequest, RolloutStatus
from rollweave.service import launch
from rollweave.service.client import RolloutClient
from rollweave.service.service import Service

T = TypeVar("T")

Submit = Callable[[RolloutRequest], Coroutine[Any, Any, RolloutStatus]]

CONCURRENT_ROLLOUTS = 500
"""Number of concurrent rollouts in the last part (ProRL's users run that many
containers on a node).
"""

CONCURRENT = 64
"""Number of concurrent rollouts in a round."""

SIGMA = 0.25
"""Sigma of the logarithm of a step's latency in the last part: a long tail would only
make the bench longer.
"""


class ServicePlan(Struct, frozen=True, kw_only=True):
    """Extent of the bench: a round has `jobs` rollouts, `CONCURRENT` of them at once,
    and `alone` rollouts one after the other.

    `held` run at once, in environments whose steps take `held_step_s` in the median.
    """

    rounds: int
    jobs: int
    alone: int
    held: int
    held_step_s: float
    ablations: service_ablations.AblationPlan
    scaling: service_scaling.ScalingPlan


FULL = ServicePlan(
    rounds=6,
    jobs=512,
    alone=64,
    held=CONCURRENT_ROLLOUTS,
    held_step_s=3.0,
    ablations=service_ablations.AblationPlan(rounds=7, steps=4),
    scaling=service_scaling.ScalingPlan(
        processes=service_scaling.PROCESSES, rounds=3, each=48, saturated=512
    ),
)
QUICK = ServicePlan(
    rounds=1,
    jobs=96,
    alone=16,
    held=100,
    held_step_s=0.4,
    ablations=service_ablations.AblationPlan(rounds=1, steps=1),
    scaling=service_scaling.ScalingPlan(processes=(1, 2), rounds=1, each=16, saturated=96),
)


def bench_service(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the figures of HTTP: `jobs_per_s`, `jobs_per_s_in_process`,
    `added_latency_ms_p50`, `…_p99`, `concurrent_held`; and those of `ablations` and
    `scaling`.
    """
    plan = QUICK if quick else FULL
    conditions = conditions_of(plan)
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        model = _model(Path(scratch))
        figures = _http_figures(model, Path(scratch), plan, progress)
        rounds = service_ablations.ablations(
            model, Path(scratch) / "ablations", plan.ablations, progress
        )
        figures |= service_ablations.figures_of(rounds, conditions)
        rates = service_scaling.scaling(model, Path(scratch) / "scaling", plan.scaling, progress)
        figures |= service_scaling.figures_of(rates, conditions)
    return Result(bench="service", figures=figures, conditions=conditions)


def conditions_of(plan: ServicePlan) -> dict[str, Any]:
    """Return the meaning of the figures."""
    door = {
        "jobs_per_s": f"{plan.rounds} alternating rounds of {plan.jobs} by each variant, "
        f"{CONCURRENT} at once; a rollout is up to 6 turns of 6 tokens",
        "added_latency": "difference of the same percentile of both variants' latencies, from the "
        f"request to the result, at that load, which saturates two cores; …_alone: {plan.alone} "
        "of a round one after the other",
        "engine": "one embedded engine process with 32 slots, a random model of hidden 32, which "
        "takes most of the time",
        "concurrent_held": "maximum number in INIT or RUN, by /health; steps take "
        f"{plan.held_step_s:g} s in the median",
    }
    return (
        door
        | service_ablations.conditions_of(plan.ablations)
        | service_scaling.conditions_of(plan.scaling)
    )


def _http_figures(
    model: Path, scratch: Path, plan: ServicePlan, progress: Callable[[str], None]
) -> dict[str, Figure]:
    with _Running(_config(scratch / "rounds", model)) as running:
        results = _rounds(running, plan, progress)
    with _Running(
        _config(scratch / "held", model, held=plan.held, step_s=plan.held_step_s)
    ) as running:
        maximum, seconds = running.call(lambda: _run_concurrently(running, plan.held))
    progress(f"{maximum} concurrent rollouts, done in {seconds:.1f} s")
    inside, outside = results[INSIDE], results[HTTP]
    figures: dict[str, Figure] = {
        "jobs_per_s": statistics.median(outside.rates),
        "jobs_per_s_in_process": statistics.median(inside.rates),
        "throughput_over_in_process": statistics.median(outside.rates)
        / statistics.median(inside.rates),
        "latency_ms_p50": 1e3 * statistics.median(outside.loaded_s),
        "latency_alone_ms_p50": 1e3 * statistics.median(outside.alone_s),
        "concurrent_held": maximum,
    }
    for name, ours, theirs in (
        ("added_latency", inside.loaded_s, outside.loaded_s),
        ("added_latency_alone", inside.alone_s, outside.alone_s),
    ):
        figures |= {
            f"{name}_ms_p{share}": 1e3 * added(ours, theirs, share / 100) for share in (50, 99)
        }
    return figures


def added(ours: Sequence[float], theirs: Sequence[float], share: float) -> float:
    """Return by how much that percentile of their seconds exceeds that of ours; both
    have equally many.
    """
    pairs = list(zip(sorted(ours), sorted(theirs), strict=True))
    mine, its = pairs[int(share * (len(pairs) - 1))]
    return its - mine


def _config(directory: Path, model: Path, *, held: int = 0, step_s: float = 0.0) -> RunConfig:
    slots = max(held, CONCURRENT)
    limits = {"max_turns": 6, "max_tokens": 300, "max_turn_tokens": 6}
    return RunConfig.model_validate(
        {
            "run": {"name": "service", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [{"env": "frozenlake", "tag": "lake", "options": {"maps": "fixed"}, **limits}],
            "rollout": {"max_running": slots},
            "engines": {"count": 1, "max_slots": 32, "kv_tokens": 16384},
            "faults": {"latency_s": step_s, "latency_sigma": SIGMA} if step_s else {},
        }
    )


def _model(directory: Path) -> Path:
    """Write random weights and a tokenizer of the lake's words, by a run of no
    steps.
    """
    made = _config(directory, directory).model_dump(mode="json", exclude_none=True)
    made["tasks"].append({"env": "benchmarks.service.bash_env:BashEnv", "tag": "bash"})
    made |= {
        "model": {
            "scratch": {"hidden": 32, "layers": 1},
        }
    }
    made["run"] |= {"name": "model", "steps": 0}
    made |= {"eval": {"final_episodes": 0}}
    run, _ = trained(RunConfig.model_validate(made))
    return run.model


class _Running:
    """A service in a thread; `call` runs a coroutine on its event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="service")
        self._error: BaseException | None = None

    def _serve(self) -> None:
        try:
            launch.serve(
                self._config,
                observer=self,
                make_backend=_no_backend,
                programs=Programs(),
                on_service=self._on_service,
                access=Access(port=0, no_token=True),
            )
        except BaseException as error:
            self._error = error
        finally:
            self._up.set()

    def _on_service(self, service: Service) -> None:
        self.service, self.loop = service, asyncio.get_running_loop()

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self.address, self._stop = address, stop
        self._up.set()

    def on_warning(self, command: Warn) -> None:
        raise AssertionError(f"no warning is expected: {command}")

    def on_stopping(self, drain: bool) -> None:
        """Do nothing: no caller needs it."""

    def __enter__(self) -> "_Running":
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(False)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Run a rollout in process."""
        (status,) = await self.service.rollouts.submit([request])
        while status.state != "done":
            status = await self.service.rollouts.wait(status.id, 60.0)
        return status


INSIDE, HTTP = "in process", "http"


@dataclass
class VariantResult:
    """Measurements of one variant: rollouts a second of each round, and the seconds of
    each rollout, concurrent and alone.
    """

    rates: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)


def _rounds(
    running: _Running, plan: ServicePlan, progress: Callable[[str], None]
) -> dict[str, VariantResult]:
    results = {INSIDE: VariantResult(), HTTP: VariantResult()}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as outside:
        variants: dict[str, Callable[[str, int, int], list[float]]] = {
            INSIDE: lambda name, jobs, at_once: running.call(
                lambda: _round(running.submit, name, jobs, at_once)
            ),
            HTTP: lambda name, jobs, at_once: outside.submit(
                _round_outside, running.address, name, jobs, at_once
            ).result(),
        }
        for variant, submit in variants.items():
            submit(f"{variant[0]}-warm", CONCURRENT, CONCURRENT)
        for number in range(plan.rounds):
            for variant, submit in variants.items():
                began = time.perf_counter()
                results[variant].loaded_s += submit(f"{variant[0]}{number}", plan.jobs, CONCURRENT)
                results[variant].rates.append(plan.jobs / (time.perf_counter() - began))
            for variant, submit in variants.items():
                results[variant].alone_s += submit(f"{variant[0]}{number}-alone", plan.alone, 1)
            progress(
                ", ".join(
                    f"{variant} {one.rates[-1]:.0f} rollouts/s" for variant, one in results.items()
                )
            )
    return results


def _round_outside(address: str, name: str, jobs: int, at_once: int) -> list[float]:
    """Run a round by a client in another process, as a trainer is."""

    async def run() -> list[float]:
        async with RolloutClient(address) as client:
            return await _round(client.rollout, name, jobs, at_once)

    return asyncio.run(run())


async def _round(submit: Submit, name: str, jobs: int, at_once: int) -> list[float]:
    room, durations = asyncio.Semaphore(at_once), []

    async def one(number: int) -> None:
        async with room:
            began = time.perf_counter()
            status = await submit(
                RolloutRequest(handler="lake", index=number, id=f"{name}-{number}")
            )
            durations.append(time.perf_counter() - began)
            assert status.state == "done", status

    await asyncio.gather(*(one(number) for number in range(jobs)))
    return durations


async def _run_concurrently(running: _Running, count: int) -> tuple[int, float]:
    """Return the maximum number of concurrent rollouts, and the seconds until all are
    done.
    """
    maximum, began = 0, time.perf_counter()
    async with RolloutClient(running.address) as client:
        tasks = [
            asyncio.ensure_future(client.rollout(RolloutRequest(handler="lake", index=number)))
            for number in range(count)
        ]
        while not all(task.done() for task in tasks):
            health = await client.health()
            maximum = max(
                maximum, sum(counts["init"] + counts["run"] for counts in health.values())
            )
            await asyncio.wait(tasks, timeout=0.2)
        await asyncio.gather(*tasks)
    return maximum, time.perf_counter() - began


def _no_backend(request: EngineRequest, name: str, failed: OnRetry) -> NoReturn:
    raise AssertionError(f"no engine registers in this bench: {name} at {request.address}")
