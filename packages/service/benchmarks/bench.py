"""Bench `service`: the cost of HTTP beside calls to the same pipeline in the same
process, the number of concurrent rollouts, and the value of its parts (`ablations`) and
of pools of their own sizes (`pools`).

For the cost of HTTP there are one service, one embedded engine, and the frozen lake.
Rounds of equal rollouts alternate between the service's object and a client in another
process, first many concurrently, then one after the other. Then many rollouts run at
once, in slow environments. Invariant: both variants use the same pipeline, core and
engine, so that they differ in HTTP alone.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, scratch_folder
from benchmarks.runs import trained
from packages.service.benchmarks.ablations import ablations, figures_of
from packages.service.benchmarks.pools import pool_figures, pool_rounds
from packages.service.benchmarks.running import Running
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave_service.client import RolloutClient
from rollweave_service.messages import RolloutRequest, RolloutStatus

Submit = Callable[[RolloutRequest], Coroutine[Any, Any, RolloutStatus]]

CONCURRENT = 64
"""Number of concurrent rollouts in a round."""

INSIDE, HTTP = "in process", "http"


class ServicePlan(Struct, frozen=True, kw_only=True):
    """Extent of the bench: a round has `jobs` rollouts, `CONCURRENT` of them at once,
    and `alone` rollouts one after the other. `held` run at once (ProRL's users run that
    many containers on a node), in environments whose steps take `held_step_s` in the
    median. The ablations have rounds of steps, and that of the pools has rounds of
    `pool_jobs` rollouts.
    """

    rounds: int
    jobs: int
    alone: int
    held: int
    held_step_s: float
    ablation_rounds: int
    ablation_steps: int
    pool_rounds: int
    pool_jobs: int


FULL = ServicePlan(
    rounds=6,
    jobs=512,
    alone=64,
    held=500,
    held_step_s=3.0,
    ablation_rounds=7,
    ablation_steps=4,
    pool_rounds=5,
    pool_jobs=80,
)
QUICK = ServicePlan(
    rounds=1,
    jobs=96,
    alone=16,
    held=100,
    held_step_s=0.4,
    ablation_rounds=1,
    ablation_steps=1,
    pool_rounds=1,
    pool_jobs=6,
)


def bench_service(*, quick: bool, progress: Progress) -> Result:
    """Return the figures of HTTP: `jobs_per_s`, `jobs_per_s_in_process`,
    `added_latency_ms_p50`, `…_p99`, `concurrent_held`; and those of `ablations` and of
    `pools`.
    """
    plan = QUICK if quick else FULL
    conditions: dict[str, Any] = {
        "plan": repr(plan),
        "jobs_per_s": f"alternating rounds, {CONCURRENT} at once; a rollout is up to 6 turns of 6 "
        "tokens; one embedded engine process with 32 slots, a random model of hidden 32",
        "added_latency": "difference of the same percentile of both variants' latencies, from the "
        "request to the result, at that load; …_alone: one after the other",
        "concurrent_held": "maximum number in INIT or RUN, by /health",
    }
    with scratch_folder() as scratch:
        model = _model(scratch)
        figures = _http_figures(model, scratch, plan, progress)
        rounds = ablations(
            model,
            scratch / "ablations",
            rounds=plan.ablation_rounds,
            steps=plan.ablation_steps,
            progress=progress,
        )
        figures |= figures_of(rounds, conditions)
        stages = pool_rounds(
            model,
            scratch / "pools",
            rounds=plan.pool_rounds,
            jobs=plan.pool_jobs,
            progress=progress,
        )
        figures |= pool_figures(stages, conditions)
    return Result(bench="service", figures=figures, conditions=conditions)


def _http_figures(
    model: Path, scratch: Path, plan: ServicePlan, progress: Progress
) -> dict[str, Figure]:
    with Running(_config(scratch / "rounds", model)) as running:
        results = _rounds(running, plan, progress)
    held = _config(scratch / "held", model, held=plan.held, step_s=plan.held_step_s)
    with Running(held) as running:
        maximum = running.call(lambda: _run_concurrently(running, plan.held))
    progress(f"{maximum} concurrent rollouts")
    inside, outside = results[INSIDE], results[HTTP]
    rates = [statistics.median(one.rates) for one in (outside, inside)]
    figures: dict[str, Figure] = {
        "jobs_per_s": rates[0],
        "jobs_per_s_in_process": rates[1],
        "throughput_over_in_process": rates[0] / rates[1],
        "latency_ms_p50": 1e3 * statistics.median(outside.loaded_s),
        "latency_alone_ms_p50": 1e3 * statistics.median(outside.alone_s),
        "concurrent_held": maximum,
    }
    for name, ours, theirs in (
        ("added_latency", inside.loaded_s, outside.loaded_s),
        ("added_latency_alone", inside.alone_s, outside.alone_s),
    ):
        for share in (50, 99):
            figures[f"{name}_ms_p{share}"] = 1e3 * added(ours, theirs, share / 100)
    return figures


def added(ours: Sequence[float], theirs: Sequence[float], share: float) -> float:
    """Return by how much that percentile of their seconds exceeds that of ours; both
    have equally many.
    """
    pairs = list(zip(sorted(ours), sorted(theirs), strict=True))
    mine, its = pairs[int(share * (len(pairs) - 1))]
    return its - mine


def _config(directory: Path, model: Path, *, held: int = 0, step_s: float = 0.0) -> RunConfig:
    limits = {"tag": "lake", "max_turns": 6, "max_tokens": 300, "max_turn_tokens": 6}
    options = {"maps": "fixed", "latency_s": step_s, "latency_sigma": 0.25}
    return RunConfig.model_validate(
        {
            "run": {"name": "service", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [{"env": "rollweave.envs.frozenlake:SlowLake", "options": options, **limits}],
            "rollout": {"max_running": max(held, CONCURRENT)},
            "engines": {"count": 1, "max_slots": 32, "kv_tokens": 16384},
        }
    )


def _model(directory: Path) -> Path:
    """Write random weights and a tokenizer of the lake's words, by a run of no
    steps.
    """
    made = _config(directory, directory).model_dump(mode="json", exclude_none=True)
    for env in ("bash_env:BashEnv", "staged_env:StagedEnv"):
        tag = env.partition(":")[0]
        made["tasks"].append({"env": f"packages.service.benchmarks.{env}", "tag": tag})
    made["run"] |= {"name": "model", "steps": 0}
    made |= {"model": {"scratch": {"hidden": 32, "layers": 1}}, "eval": {"final_episodes": 0}}
    run, _ = trained(RunConfig.model_validate(made))
    return run.model


@dataclass
class VariantResult:
    """Measurements of one variant: rollouts a second of each round, and the seconds of
    each rollout, concurrent and alone.
    """

    rates: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)


def _rounds(running: Running, plan: ServicePlan, progress: Progress) -> dict[str, VariantResult]:
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
                progress(f"{variant}: {results[variant].rates[-1]:.0f} rollouts/s")
            for variant, submit in variants.items():
                results[variant].alone_s += submit(f"{variant[0]}{number}-alone", plan.alone, 1)
    return results


def _round_outside(address: str, name: str, jobs: int, at_once: int) -> list[float]:
    """Run a round by a client in another process, as a trainer is."""

    async def run() -> list[float]:
        async with RolloutClient(address) as client:
            return await _round(client.rollout, name, jobs, at_once)

    return asyncio.run(run())


async def _round(submit: Submit, name: str, jobs: int, at_once: int) -> list[float]:
    room, durations = asyncio.Semaphore(at_once), list[float]()

    async def one(number: int) -> None:
        request = RolloutRequest(handler="lake", index=number, id=f"{name}-{number}")
        async with room:
            began = time.perf_counter()
            status = await submit(request)
            durations.append(time.perf_counter() - began)
            assert status.state == "done", status

    await asyncio.gather(*map(one, range(jobs)))
    return durations


async def _run_concurrently(running: Running, count: int) -> int:
    """Run so many rollouts, and return how many were concurrent at most."""
    maximum = 0
    async with RolloutClient(running.address) as client:
        tasks = [
            asyncio.ensure_future(client.rollout(RolloutRequest(handler="lake", index=number)))
            for number in range(count)
        ]
        while not all(task.done() for task in tasks):
            health = (await client.health()).values()
            maximum = max(maximum, sum(counts["init"] + counts["run"] for counts in health))
            await asyncio.wait(tasks, timeout=0.2)
        await asyncio.gather(*tasks)
    return maximum
