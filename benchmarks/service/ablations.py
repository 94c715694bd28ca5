"""Ablations of the rollout service, as in ProRL Agent's Table 3: load balancing,
efficient bash, cancellation of stale jobs.

Agents run real bash commands in sandboxes. Engines have a known pace (`slot_engines`),
so that the used share of their slots is exact. A trainer in the manner of DAPO requests
`JOBS` rollouts a step, takes the first `WANTED`, and continues with its next step. The
ablations:

- `no_balancing`: each conversation stays with the engine that its hash selects, however
  long that engine's queue is;
- `no_bash`: the same commands run through tmux;
- `no_cleanup`: rollouts that are no longer wanted are not cancelled, and run to their
  end.

Invariants: all variants have the same tasks and conversations in the same order; they
take turns, round by round; ratios are of the same round.
"""

import asyncio
import contextlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from benchmarks.contract import Figure
from benchmarks.service.bash_env import BACKEND, project
from benchmarks.service.process import Child, started
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.service import EngineRequest, RolloutRequest, RolloutStatus
from rollweave.schema.serving import EngineStats
from rollweave.schema.work import TRAINABLE
from rollweave.service.client import RolloutClient

ENGINES, SLOTS, TOKEN_MS = 4, 2, 10.0
"""Engines, slots of each, and milliseconds of a token. A turn of about 14 tokens takes
150 ms: ten times as fast as with large models, so that commands weigh as much as there.
"""

JOBS, WANTED = 24, 17
"""Rollouts of a step, and how many of them are wanted: 70 %."""

ROOM_S = 60.0
"""Maximum seconds until cancelled rollouts have ended."""


class Variant(Struct, frozen=True, kw_only=True):
    """One variant. `terminal` names the handler, `balanced` tells whether the service
    knows each engine, `cancels` whether the trainer cancels.
    """

    terminal: str = "shell"
    balanced: bool = True
    cancels: bool = True


FULL = "full"

VARIANTS = {
    FULL: Variant(),
    "no_balancing": Variant(balanced=False),
    "no_bash": Variant(terminal="tmux"),
    "no_cleanup": Variant(cancels=False),
}


class AblationPlan(Struct, frozen=True, kw_only=True):
    """Extent of each variant: `steps` measured steps in each of `rounds` rounds, after
    one warm-up step.
    """

    rounds: int
    steps: int


class Round(Struct, frozen=True, kw_only=True):
    """Measurements of one round.

    Slot-seconds are counted twice: those of turns of wanted rollouts, and all.
    """

    seconds: float
    jobs: int
    turns: int
    action_s: float
    wanted_slot_s: float
    slot_s: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.seconds

    @property
    def action_ms(self) -> float:
        return 1e3 * self.action_s / self.turns

    @property
    def utilization(self) -> float:
        return self.slot_s / (ENGINES * SLOTS * self.seconds)

    @property
    def useful_utilization(self) -> float:
        return self.wanted_slot_s / (ENGINES * SLOTS * self.seconds)


FIGURES = ("jobs_per_s", "action_ms", "utilization", "useful_utilization")


def ablations(
    model: Path, scratch: Path, plan: AblationPlan, progress: Callable[[str], None]
) -> dict[str, list[Round]]:
    """Return rounds by variant, equally many of each. Without tmux there are none of
    `no_bash`.
    """
    variants = {
        name: variant
        for name, variant in VARIANTS.items()
        if variant.terminal != "tmux" or shutil.which("tmux")
    }
    with contextlib.ExitStack() as stack:
        arguments = ("--engines", str(ENGINES), "--slots", str(SLOTS), "--token-ms", str(TOKEN_MS))
        served = stack.enter_context(Child("benchmarks.service.slot_engines", *arguments))
        services = {
            balanced: stack.enter_context(
                started(_config(scratch / f"balanced-{balanced}", model), sandboxes=True)
            )
            for balanced in (True, False)
        }
        addresses = {balanced: service.line for balanced, service in services.items()}
        return asyncio.run(_rounds(variants, addresses, json.loads(served.line), plan, progress))


def _config(directory: Path, model: Path) -> RunConfig:
    """Return a configuration with as many concurrent environments as slots."""
    env, limits = (
        "benchmarks.service.bash_env:BashEnv",
        {"max_turns": 30, "max_tokens": 2000, "max_turn_tokens": 64},
    )
    return RunConfig.model_validate(
        {
            "run": {"name": "ablations", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [
                {"env": env, "tag": name, "options": {"terminal": name}, **limits}
                for name in ("shell", "tmux")
            ],
            "rollout": {"max_running": ENGINES * SLOTS},
            "serve": {"engines": "registered"},
        }
    )


async def _rounds(
    variants: Mapping[str, Variant],
    addresses: Mapping[bool, str],
    engines: Mapping[str, Any],
    plan: AblationPlan,
    progress: Callable[[str], None],
) -> dict[str, list[Round]]:
    results: dict[str, list[Round]] = {name: [] for name in variants}
    async with RolloutClient(addresses[True]) as balanced, RolloutClient(addresses[False]) as fixed:
        for address in engines["engines"]:
            await balanced.register(
                EngineRequest(address=address, dialect="rollweave", slots=SLOTS)
            )
        await fixed.register(
            EngineRequest(address=engines["fixed"], dialect="rollweave", slots=ENGINES * SLOTS)
        )
        for number in range(plan.rounds):
            for name, variant in variants.items():
                trainer = Trainer(
                    balanced if variant.balanced else fixed, variant, engines["fixed"], name
                )
                results[name].append(await trainer.round(number, plan.steps))
            progress(
                ", ".join(
                    f"{name} {rounds[-1].jobs_per_s:.2f} jobs/s" for name, rounds in results.items()
                )
            )
    return results


class TrainerClient(Protocol):
    """The part of a service's `RolloutClient` that a trainer needs."""

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        """Return the results once all are done. Cancelling the call cancels the
        rollout.
        """

    async def health(self) -> dict[str, dict[str, Any]]:
        """Return the health by address."""


class Trainer:
    """A trainer of one variant. `stats` is the address at which all engines are one,
    whose statistics cover all their slots.
    """

    def __init__(self, client: TrainerClient, variant: Variant, stats: str, name: str) -> None:
        self._client, self._way, self._stats, self._name = client, variant, stats, name
        self._stale: set[asyncio.Task[RolloutStatus]] = set()

    async def round(self, number: int, steps: int) -> Round:
        first = number * (steps + 1)
        try:
            await self._step(first)
            began, before = time.perf_counter(), await self._slot_s()
            wanted = [
                status
                for step in range(first + 1, first + 1 + steps)
                for status in await self._step(step)
            ]
            seconds, slot_s = time.perf_counter() - began, await self._slot_s() - before
        finally:
            await self._cancel(self._stale)
            await self._wait_until_idle()
        results = [
            member.result
            for status in wanted
            for member in status.members
            if member.result is not None
        ]
        return Round(
            seconds=seconds,
            jobs=len(results),
            turns=sum(len(sequence.turns) for result in results for sequence in result.sequences),
            action_s=sum(result.timing.env_s for result in results),
            wanted_slot_s=sum(result.timing.generate_s for result in results),
            slot_s=slot_s,
        )

    async def _step(self, step: int) -> list[RolloutStatus]:
        """Return the rollouts of a step that finish first."""
        requests = [
            RolloutRequest(
                handler=self._way.terminal, payload=project(number), id=f"{self._name}-{number}"
            )
            for number in range(step * JOBS, (step + 1) * JOBS)
        ]
        waiting = {asyncio.ensure_future(self._client.rollout(request)) for request in requests}
        wanted: list[RolloutStatus] = []
        while len(wanted) < WANTED:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            wanted += [task.result() for task in done]
        if self._way.cancels:
            await self._cancel(waiting)
        else:
            self._stale |= waiting
        for status in wanted:
            if any(member.stop_reason not in TRAINABLE for member in status.members):
                raise RuntimeError(f"a rollout of {self._name} failed: {status.members[0].result}")
        return wanted[:WANTED]

    async def _cancel(self, tasks: set[asyncio.Task[RolloutStatus]]) -> None:
        """Cancel the wait, upon which the client asks the service to end the
        rollout.
        """
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_until_idle(self) -> None:
        """Return when no rollout of this variant is running: the next variant has the
        cores and the engines to itself.
        """
        async with asyncio.timeout(ROOM_S):
            while await self._under_way():  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(0.05)

    async def _under_way(self) -> int:
        (health,) = (await self._client.health()).values()
        return int(health["init"] + health["run"])

    async def _slot_s(self) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._stats}/rollweave/v1/stats") as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=EngineStats).busy_s


def figures_of(
    rounds: Mapping[str, Sequence[Round]], conditions: dict[str, Any]
) -> dict[str, Figure]:
    """Return medians over rounds by variant, and the throughput of the full service
    over that without each part, round by round.
    """
    figures: dict[str, Figure] = {
        f"{figure}_{name}": statistics.median(getattr(one, figure) for one in measured)
        if measured
        else None
        for name in VARIANTS
        for measured in (rounds.get(name, ()),)
        for figure in FIGURES
    }
    ratios: list[float] = []
    for name in VARIANTS:
        if name == FULL:
            continue
        pairs = list(zip(rounds[FULL], rounds.get(name, ()), strict=False))
        ratio = (
            statistics.median(full.jobs_per_s / one.jobs_per_s for full, one in pairs)
            if pairs
            else None
        )
        figures[f"ablation_ratio_{name.removeprefix('no_')}"] = ratio
        if ratio is None:
            conditions[f"ablation_ratio_{name.removeprefix('no_')}"] = (
                "tmux is not installed: `apt-get install tmux`"
            )
        else:
            ratios.append(ratio)
    figures["ablation_ratio"] = math.prod(ratios) ** (1 / len(ratios))
    return figures


def conditions_of(plan: AblationPlan) -> dict[str, Any]:
    """Return the meaning of the figures."""
    return {
        "ablations": f"{plan.rounds} alternating rounds, {plan.steps} steps each after a "
        f"warm-up; a step requests {JOBS} rollouts and ends when {WANTED} are done; "
        f"{ENGINES * SLOTS} environments at once",
        "ablation_agents": "each turn is a bash command in the episode's sandbox, 1 to 24 turns, "
        f"log-normal, median 4 (benchmarks/service/bash_env.py); back end {BACKEND}, from a warm "
        "pool",
        "ablation_engines": f"{ENGINES} of {SLOTS} slots, {TOKEN_MS:g} ms a token, log-normal "
        "turns (median 12 tokens); prompts take no time, which favors neither routing "
        "(benchmarks/service/slot_engines.py)",
        "no_balancing": "each conversation's turns go to the engine that its hash selects",
        "no_bash": "tmux in the sandbox: send-keys, wait-for, capture-pane in one process; no "
        "polling",
        "no_cleanup": "the trainer does not cancel the rollouts that it no longer needs",
        "utilization": "occupied share of all slots; useful_utilization counts turns of wanted "
        "rollouts only",
        "ablation_ratio": "throughput of wanted rollouts, full over without; medians of rounds; "
        "geometric mean of the three",
    }
