"""Ablation of the sizes of the pools of INIT, RUN and EVAL (ProRL §3.3.1): one number
for all beside a size for each, with the same total number of places.

With one number N, `rollout.max_running` lets N attempts be in INIT and RUN together,
and N others in EVAL: 2 N places, half of which EVAL has. With a table the same places
are divided by the seconds that an attempt spends in each stage. Engines have a known
pace (`slot_engines`), containers start slowly and tests take long (`staged_env`).

Invariants: both variants of a workload have the same tasks in the same order; they take
turns, round by round; a ratio is of the same round.
"""

import asyncio
import contextlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from benchmarks.contract import Figure
from benchmarks.harness import Child, Progress, median_ratio
from packages.service.benchmarks.ablations import ROOM_S
from packages.service.benchmarks.staged_env import SIGMA
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import TRAINABLE
from rollweave_service.client import RolloutClient
from rollweave_service.messages import EngineRequest, RolloutRequest

PLACES = 48
"""Number of places of each variant: of INIT, RUN and EVAL together."""

ENGINES, SLOTS, TOKEN_MS, TURNS = 8, 2, 10.0, 4
"""Engines, slots of each, milliseconds of a token, and turns of a rollout."""

RUN_S = 1.0
"""Seconds that a rollout spends in RUN: `TURNS` turns of 14 tokens in the mean take 0.8
s, and the messages between them some 0.2 s on a busy machine.
"""

LOOK_S = 0.1
"""Maximum seconds between two looks at the number of attempts in each stage."""

STAGES = ("init", "run", "eval")
ONE, THREE = "one", "three"


class Workload(Struct, frozen=True, kw_only=True):
    """The median seconds of an environment's start and of its reward."""

    init_s: float
    eval_s: float

    @property
    def sizes(self) -> dict[str, int]:
        """`PLACES`, divided by the mean seconds in each stage (Little's law)."""
        mean = math.exp(SIGMA**2 / 2)
        seconds = (mean * self.init_s, RUN_S, mean * self.eval_s)
        spent = dict(zip(STAGES, seconds, strict=True))
        total = sum(spent.values())
        sizes = {stage: max(1, round(PLACES * s / total)) for stage, s in spent.items()}
        longest = max(spent, key=spent.__getitem__)
        sizes[longest] += PLACES - sum(sizes.values())
        return sizes


WORKLOADS = {
    "slow_init": Workload(init_s=1.6, eval_s=0.1),
    "slow_eval": Workload(init_s=0.1, eval_s=1.6),
    "slow_both": Workload(init_s=1.6, eval_s=1.6),
}


class PoolRound(Struct, frozen=True, kw_only=True):
    """A round: its seconds and its trajectories while all pools had work, and the most
    attempts that were seen in each stage at once.
    """

    seconds: float
    jobs: int
    most: dict[str, int]

    @property
    def rate(self) -> float:
        """Trajectories a second."""
        return self.jobs / self.seconds


Rounds = Mapping[tuple[str, str], Sequence[PoolRound]]
"""(workload, variant) → its rounds."""


def pool_rounds(
    model: Path, scratch: Path, *, rounds: int, jobs: int, progress: Progress
) -> dict[tuple[str, str], list[PoolRound]]:
    """Return `rounds` rounds of `jobs` rollouts of each workload and variant."""
    settings: dict[tuple[str, str], Any] = {
        (name, variant): PLACES // 2 if variant == ONE else workload.sizes
        for name, workload in WORKLOADS.items()
        for variant in (ONE, THREE)
    }
    with contextlib.ExitStack() as stack:
        paced = (f"{ENGINES}", f"{SLOTS}", f"{TOKEN_MS}")
        engines = stack.enter_context(Child("packages.service.benchmarks.slot_engines", *paced))
        addresses: dict[str, str] = {}  # by value of the setting
        for value in settings.values():
            if str(value) not in addresses:
                file = scratch / f"pools-{len(addresses)}" / "given.toml"
                file.parent.mkdir(parents=True)
                file.write_text(dumps(_config(file.parent, model, value)))
                child = Child("packages.service.benchmarks.process", str(file))
                addresses[str(value)] = stack.enter_context(child).line
        served = {key: addresses[str(value)] for key, value in settings.items()}
        urls = json.loads(engines.line)["engines"]
        return asyncio.run(_measured(served, urls, rounds, jobs, progress))


def _config(directory: Path, model: Path, running: int | dict[str, int]) -> RunConfig:
    env = "packages.service.benchmarks.staged_env:StagedEnv"
    limits = {"max_turns": TURNS, "max_tokens": 2000, "max_turn_tokens": 64}
    return RunConfig.model_validate(
        {
            "run": {"name": "pools", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [{"env": env, "tag": "staged", **limits}],
            "rollout": {"max_running": running},
        }
    )


async def _measured(
    served: Mapping[tuple[str, str], str],
    engines: Sequence[str],
    rounds: int,
    jobs: int,
    progress: Progress,
) -> dict[tuple[str, str], list[PoolRound]]:
    results: dict[tuple[str, str], list[PoolRound]] = {key: [] for key in served}
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            address: await stack.enter_async_context(RolloutClient(address))
            for address in dict.fromkeys(served.values())
        }
        for client in clients.values():
            for url in engines:
                await client.register(EngineRequest(address=url, dialect="rollweave", slots=SLOTS))
        for number in range(rounds):
            for (workload, variant), address in served.items():
                name = f"{workload}-{variant}-{number}"
                measured = await pool_round(
                    clients[address], WORKLOADS[workload], name, number * (jobs + 3 * PLACES), jobs
                )
                results[workload, variant].append(measured)
                progress(f"{workload}, {variant}: {measured.rate:.2f} trajectories/s")
    return results


async def pool_round(
    client: RolloutClient, workload: Workload, name: str, first: int, jobs: int
) -> PoolRound:
    """Request the tasks from number `first` on at once: `PLACES` that fill the pools,
    `jobs` that are measured, and as many that keep the pools full until those are done,
    and are cancelled then.
    """
    most, done = dict.fromkeys(STAGES, 0), list[float]()
    count = jobs + 3 * PLACES
    waiting = {
        asyncio.ensure_future(client.rollout(_request(workload, name, number)))
        for number in range(first, first + count)
    }
    try:
        while len(done) < PLACES + jobs:
            ended, waiting = await asyncio.wait(
                waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            done += [time.perf_counter()] * len(ended)
            for task in ended:
                if any(member.stop_reason not in TRAINABLE for member in task.result().members):
                    raise RuntimeError(f"a rollout of {name} failed: {task.result()}")
            (health,) = (await client.health()).values()
            most = {stage: max(most[stage], health[stage]) for stage in STAGES}
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await _until_idle(client)
    return PoolRound(seconds=done[PLACES + jobs - 1] - done[PLACES - 1], jobs=jobs, most=most)


def _request(workload: Workload, name: str, number: int) -> RolloutRequest:
    payload = {"number": number, "turns": TURNS, **asdict(workload)}
    return RolloutRequest(handler="staged", payload=payload, id=f"{name}-{number}")


async def _until_idle(client: RolloutClient) -> None:
    """Return when the service has no rollout: the next variant has the cores and the
    engines to itself.
    """
    async with asyncio.timeout(ROOM_S):
        while True:
            (health,) = (await client.health()).values()
            if not any(health[stage] for stage in (*STAGES, "queued", "closing")):
                return
            await asyncio.sleep(0.05)


def pool_figures(rounds: Rounds, conditions: dict[str, Any]) -> dict[str, Figure]:
    """Return the median trajectories a second by workload and variant, the most
    attempts in each stage, and the ratio of three pools to one, round by round.
    """
    figures: dict[str, Figure] = {}
    for name in WORKLOADS:
        for variant in (ONE, THREE):
            measured = rounds[name, variant]
            key = f"{name}_{variant}"
            figures[f"pools_per_s_{key}"] = statistics.median(one.rate for one in measured)
            most = {stage: max(one.most[stage] for one in measured) for stage in STAGES}
            conditions[f"pools_most_{key}"] = most
        rates = [[one.rate for one in rounds[name, variant]] for variant in (THREE, ONE)]
        figures[f"pools_ratio_{name}"] = median_ratio(*rates)
    jobs = rounds["slow_both", ONE][0].jobs
    sizes = {name: workload.sizes for name, workload in WORKLOADS.items()}
    medians = {name: (one.init_s, one.eval_s) for name, one in WORKLOADS.items()}
    conditions["pools"] = (
        f"trajectories a second over {jobs} rollouts, while others fill the pools before and "
        f"after them; {PLACES} places: one, max_running = {PLACES // 2} ({PLACES // 2} in INIT "
        f"and RUN together, {PLACES // 2} in EVAL); three, {sizes}; {ENGINES} engines of {SLOTS} "
        f"slots, {TOKEN_MS:g} ms a token, {TURNS} turns, about {RUN_S:g} s of RUN; median seconds "
        f"of INIT and EVAL {medians}, log-normal; the ratio is the median over rounds of three "
        "to one"
    )
    return figures
