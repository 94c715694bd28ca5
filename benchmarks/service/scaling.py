"""Throughput by number of service processes, over the same engines, with one client
that spreads its rollouts over them.

There are two workloads. `nodes`: each process may run `ENVIRONMENTS` environments,
which are slow, and the engines have capacity; so processes are the bottleneck, until
the cores are. `saturated`: environments and engines take no time, so that the cores are
the bottleneck from the beginning. Invariant: all numbers of processes take turns, round
by round.
"""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure
from benchmarks.service.process import Child, started
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.service import EngineRequest, RolloutRequest
from rollweave.service.client import RolloutClient

PROCESSES = (1, 2, 4)

ENGINES, SLOTS = 2, 256

ENVIRONMENTS, STEP_S, TOKEN_MS = 16, 0.2, 5.0
"""Environments of a process, seconds of each of their steps, and milliseconds of a
token, in workload `nodes`.
"""

PER_PROCESS = 32
"""Concurrent rollouts for each process: more than it has capacity for, so that it never
waits for the client.
"""

WARM_UP = 8
"""Rollouts for each process, before the rounds."""

TURNS, TURN_TOKENS = 6, 6


class Workload(Struct, frozen=True, kw_only=True):
    """One workload.

    `environments` is the number of environments that a process may run.
    """

    environments: int
    step_s: float
    token_ms: float


WORKLOADS = {
    "": Workload(environments=ENVIRONMENTS, step_s=STEP_S, token_ms=TOKEN_MS),
    "saturated_": Workload(environments=2 * PER_PROCESS, step_s=0.0, token_ms=0.0),
}
"""Workloads by the prefix of their figures' names, which the number of processes
follows.
"""


class ScalingPlan(Struct, frozen=True, kw_only=True):
    """Extent of the bench: numbers of processes, `processes` of `PROCESSES`; and the
    rollouts of a round, for each process in `nodes`, in all in `saturated`.
    """

    processes: tuple[int, ...]
    rounds: int
    each: int
    saturated: int


Rates = Mapping[int, Sequence[float]]
"""Rollouts a second of each round, by number of processes."""


def scaling(
    model: Path, scratch: Path, plan: ScalingPlan, progress: Callable[[str], None]
) -> dict[str, Rates]:
    """Return rates by workload."""
    rates_by_workload: dict[str, Rates] = {}
    for prefix, workload in WORKLOADS.items():
        with contextlib.ExitStack() as stack:
            arguments = (
                "--engines",
                str(ENGINES),
                "--slots",
                str(SLOTS),
                "--token-ms",
                str(workload.token_ms),
            )
            served = stack.enter_context(Child("benchmarks.service.slot_engines", *arguments))
            configs = [
                config_of(scratch / f"{prefix}{number}", model, workload)
                for number in range(max(plan.processes))
            ]
            services = [stack.enter_context(started(config)) for config in configs]
            addresses, engines = (
                [service.line for service in services],
                json.loads(served.line)["engines"],
            )
            jobs = {
                count: plan.saturated if prefix else count * plan.each for count in plan.processes
            }
            rates_by_workload[prefix] = asyncio.run(_rounds(addresses, engines, plan.rounds, jobs))
        shown = ", ".join(
            f"{count} processes {statistics.median(rates):.0f}"
            for count, rates in rates_by_workload[prefix].items()
        )
        progress(f"{prefix.removesuffix('_') or 'nodes'}: {shown} jobs/s")
    return rates_by_workload


def config_of(directory: Path, model: Path, workload: Workload) -> RunConfig:
    """Return the configuration of a service process."""
    limits = {"max_turns": TURNS, "max_tokens": 300, "max_turn_tokens": TURN_TOKENS}
    lake = {
        "env": "frozenlake",
        "tag": "lake",
        "options": {"maps": "fixed", "grammar": True},
        **limits,
    }
    latency = {"latency_s": workload.step_s, "latency_sigma": 0.0}
    return RunConfig.model_validate(
        {
            "run": {"name": "node", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [lake],
            "rollout": {"max_running": workload.environments},
            "faults": latency if workload.step_s else {},
            "serve": {"engines": "registered"},
        }
    )


async def _rounds(
    addresses: Sequence[str], engines: Sequence[str], rounds: int, jobs: Mapping[int, int]
) -> Rates:
    """Run rounds of `jobs` rollouts, and return their rates by number of processes."""
    rates_by_count: dict[int, list[float]] = {count: [] for count in jobs}
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            count: await stack.enter_async_context(RolloutClient(addresses[:count]))
            for count in jobs
        }
        for address in engines:
            await clients[max(jobs)].register(
                EngineRequest(address=address, dialect="rollweave", slots=SLOTS)
            )
        for number in range(rounds + 1):
            for count, client in clients.items():
                requests = jobs[count] if number else count * WARM_UP
                rate = await _round(client, f"{count}-{number}", requests, count * PER_PROCESS)
                if number:  # the first round warms up
                    rates_by_count[count].append(rate)
    return rates_by_count


async def _round(client: RolloutClient, name: str, jobs: int, under_way: int) -> float:
    """Return the rollouts a second of one round."""
    room = asyncio.Semaphore(under_way)

    async def one(number: int) -> None:
        async with room:
            status = await client.rollout(
                RolloutRequest(handler="lake", index=number, id=f"{name}-{number}")
            )
            assert all(
                member.result is not None and not member.result.error for member in status.members
            ), status

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(jobs)))
    return jobs / (time.perf_counter() - began)


def figures_of(
    rates_by_workload: Mapping[str, Rates], conditions: dict[str, Any]
) -> dict[str, Figure]:
    """Return medians over rounds."""
    figures: dict[str, Figure] = {}
    for prefix, by_count in rates_by_workload.items():
        for count in PROCESSES:
            rates, name = by_count.get(count), f"jobs_per_s_{prefix}{count}"
            figures[name] = statistics.median(rates) if rates else None
            if not rates:
                conditions[name] = (
                    "not measured: so many processes take long to start; measured without --quick"
                )
    return figures


def conditions_of(plan: ScalingPlan) -> dict[str, Any]:
    return {
        "jobs_per_s_1": f"by number of service processes, alternating {plan.rounds} rounds of "
        f"{plan.each} rollouts for each process, {PER_PROCESS} of them at once, one client for "
        f"all; a process may run {ENVIRONMENTS} environments, whose steps take {STEP_S:g} s, up to "
        f"{TURNS} turns of {TURN_TOKENS} tokens; engines have spare slots, {TOKEN_MS:g} ms a token",
        "jobs_per_s_saturated_1": f"{plan.saturated} rollouts a round, environments and engines "
        "that take no time: this measures the machine's cores, which services, engines and client "
        "share",
    }
