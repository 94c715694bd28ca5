"""Ablations of the rollout service, as in ProRL Agent's Table 3: load balancing,
efficient bash, cancellation of stale jobs.

Agents run real bash commands in sandboxes. Engines have a known pace (`slot_engines`),
so that the used share of their slots is exact. A trainer in the manner of DAPO requests
`JOBS` rollouts a step, takes the first `WANTED`, and continues with its next step. The
ablations:

- `no_balancing`: each conversation stays with the engine that its hash selects, however
  long that engine's queue is;
- `no_bash`: the same commands run through tmux, by a signal and without polling;
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from benchmarks.contract import Figure
from benchmarks.harness import Child, Progress, median_ratio
from packages.service.benchmarks.bash_env import BACKEND, TERMINALS, project
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import EngineStats
from rollweave.schema.work import TRAINABLE
from rollweave_service.client import RolloutClient
from rollweave_service.messages import EngineRequest, RolloutRequest, RolloutStatus

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

FIGURES = ("jobs_per_s", "action_ms", "utilization", "useful_utilization")


class Round(Struct, frozen=True, kw_only=True):
    """Measurements of one round. `slot_s` are the seconds for which slots were taken,
    and `wanted_slot_s` those by turns of wanted rollouts.
    """

    seconds: float
    jobs: int
    turns: int
    action_s: float
    wanted_slot_s: float
    slot_s: float

    def figures(self) -> dict[str, float]:
        """Return the figures of `FIGURES`."""
        slots_s = ENGINES * SLOTS * self.seconds
        values = (
            self.jobs / self.seconds,
            1e3 * self.action_s / self.turns,
            self.slot_s / slots_s,
            self.wanted_slot_s / slots_s,
        )
        return dict(zip(FIGURES, values, strict=True))


def ablations(
    model: Path, scratch: Path, *, rounds: int, steps: int, progress: Progress
) -> dict[str, list[Round]]:
    """Return `rounds` rounds of each variant: `steps` measured steps after a warm-up
    step. Without tmux there are none of `no_bash`.
    """
    variants = {
        name: variant
        for name, variant in VARIANTS.items()
        if variant.terminal != "tmux" or shutil.which("tmux")
    }
    with contextlib.ExitStack() as stack:
        arguments = (f"{ENGINES}", f"{SLOTS}", f"{TOKEN_MS}")
        served = stack.enter_context(Child("packages.service.benchmarks.slot_engines", *arguments))
        services = {}
        for balanced in (True, False):
            file = scratch / f"balanced-{balanced}" / "given.toml"
            file.parent.mkdir(parents=True)
            file.write_text(dumps(_config(file.parent, model)))
            child = Child("packages.service.benchmarks.process", str(file))
            services[balanced] = stack.enter_context(child)
        addresses = {balanced: service.line for balanced, service in services.items()}
        return asyncio.run(
            _rounds(variants, addresses, json.loads(served.line), rounds, steps, progress)
        )


def _config(directory: Path, model: Path) -> RunConfig:
    """Return a configuration with as many concurrent environments as slots."""
    limits = {"max_turns": 30, "max_tokens": 2000, "max_turn_tokens": 64}
    tasks = [
        {
            "env": "packages.service.benchmarks.bash_env:BashEnv",
            "tag": name,
            "options": {"terminal": name},
        }
        for name in TERMINALS
    ]
    return RunConfig.model_validate(
        {
            "run": {"name": "ablations", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [task | limits for task in tasks],
            "rollout": {"max_running": ENGINES * SLOTS},
        }
    )


async def _rounds(
    variants: Mapping[str, Variant],
    addresses: Mapping[bool, str],
    engines: Mapping[str, Any],
    rounds: int,
    steps: int,
    progress: Progress,
) -> dict[str, list[Round]]:
    results: dict[str, list[Round]] = {name: [] for name in variants}
    async with RolloutClient(addresses[True]) as balanced, RolloutClient(addresses[False]) as fixed:
        for client, urls, slots in (
            (balanced, engines["engines"], SLOTS),
            (fixed, [engines["fixed"]], ENGINES * SLOTS),
        ):
            for url in urls:
                await client.register(EngineRequest(address=url, dialect="rollweave", slots=slots))
        for number in range(rounds):
            for name, variant in variants.items():
                client = balanced if variant.balanced else fixed
                trainer = Trainer(client, variant, engines["fixed"], name)
                results[name].append(await trainer.round(number, steps))
                progress(f"{name}: {results[name][-1].figures()['jobs_per_s']:.2f} jobs/s")
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
        """Train a step that warms up, then measure `steps` further steps."""
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
        members = [member for status in wanted for member in status.members]
        results = [member.result for member in members if member.result is not None]
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
            while True:
                (health,) = (await self._client.health()).values()
                if not health["init"] + health["run"]:
                    return
                await asyncio.sleep(0.05)

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
    measured = {name: [one.figures() for one in rounds.get(name, ())] for name in VARIANTS}
    figures: dict[str, Figure] = {
        f"{figure}_{name}": statistics.median(one[figure] for one in of) if of else None
        for name, of in measured.items()
        for figure in FIGURES
    }
    ratios: list[float] = []
    for name in VARIANTS.keys() - {FULL}:
        rates = [[one["jobs_per_s"] for one in measured[way]] for way in (FULL, name)]
        ratio = median_ratio(*rates) if rates[1] else None
        part = f"ablation_ratio_{name.removeprefix('no_')}"
        figures[part] = ratio
        if ratio is None:
            conditions[part] = "tmux is not installed: `apt-get install tmux`"
        else:
            ratios.append(ratio)
    figures["ablation_ratio"] = math.prod(ratios) ** (1 / len(ratios))
    conditions["ablations"] = (
        f"a step requests {JOBS} rollouts and ends when {WANTED} are done; {ENGINES} engines of "
        f"{SLOTS} slots, {TOKEN_MS:g} ms a token, as many environments; turns are bash commands in "
        f"sandboxes of back end {BACKEND}; utilization is the occupied share of all slots, useful "
        "by turns of wanted rollouts; the ratio is the geometric mean of the three"
    )
    return figures
