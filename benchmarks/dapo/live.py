"""The live half of bench `dapo`: batches from a real service over HTTP, in rounds and
by the policy.

The task is Nim against an opponent that makes mistakes, played by a random model that
knows the moves: whether a group's rewards differ is chance. Each step of the
environment takes a log-normal time, which makes the long tail. The trainer sleeps.
Invariant: all variants request the same tasks from one service, in turn.
"""

import asyncio
import itertools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.contract import Figure
from benchmarks.runs import trained
from rollweave.core.policy.dapo import DapoRule
from rollweave.core.policy.redundancy import GroupDecision, decide_group
from rollweave.io.http.access import Access
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.service import EngineRequest, RolloutRequest, RolloutStatus
from rollweave.service import launch
from rollweave.service.batches import DapoBatches
from rollweave.service.client import RolloutClient

GROUPS, MEMBERS = 8, 4
UNDER_WAY = 2 * GROUPS
LATENCY_S, SIGMA = 0.05, 1.2
"""Latency of a step of the environment: median, and sigma of its logarithm. A game has
a few steps.
"""

TRAIN_S = 0.25

FULL, QUICK = (5, 6), (1, 1)
"""Rounds of each variant, and training steps of a round."""


def live_figures(*, quick: bool, progress: Callable[[str], None]) -> dict[str, Figure]:
    """Return `live_step_s` and `live_speedup` over rounds by variant: medians over the
    rounds.
    """
    rounds, steps = QUICK if quick else FULL
    variants = {"rounds": _rounds(GROUPS), "rounds_oversampled": _rounds(UNDER_WAY)}
    variants |= {"early": _policy(0), "carried": _policy(1), "carried_4": _policy(4)}
    step_seconds: dict[str, list[float]] = {name: [] for name in variants}
    with (
        tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch,
        _served(Path(scratch)) as address,
    ):
        for round_number, (name, variant) in itertools.product(range(rounds), variants.items()):
            step_seconds[name].append(asyncio.run(_timed(variant, address, round_number, steps)))
            progress(f"{name}: {step_seconds[name][-1]:.2f} s a step")
    figures: dict[str, Figure] = {
        f"live_step_s_{name}": statistics.median(seconds) for name, seconds in step_seconds.items()
    }
    for name, seconds in step_seconds.items():
        pairs = zip(step_seconds["rounds"], seconds, strict=True)
        figures[f"live_speedup_{name}"] = statistics.median(slow / fast for slow, fast in pairs)
    return figures


def live_conditions(*, quick: bool) -> str:
    rounds, steps = QUICK if quick else FULL
    return (
        f"one service over HTTP, Nim, {GROUPS} groups of {MEMBERS}, {UNDER_WAY} groups at once "
        f"(rounds: {GROUPS}), a step of the environment {LATENCY_S:g} s in the median (sigma "
        f"{SIGMA:g}), training {TRAIN_S:g} s of sleep; {rounds} rounds of {steps} steps each"
    )


Variant = Callable[[RolloutClient, Iterator[RolloutRequest], int], Any]
"""A coroutine that trains with a client, on these tasks, for so many steps."""


async def _timed(variant: Variant, address: str, round_number: int, steps: int) -> float:
    tasks = (
        RolloutRequest(handler="nim", index=10_000 * round_number + number, members=MEMBERS)
        for number in itertools.count()
    )
    async with RolloutClient(address) as client:
        began = time.perf_counter()
        await variant(client, tasks, steps)
        return (time.perf_counter() - began) / steps


def _rounds(size: int) -> Variant:
    async def run(client: RolloutClient, tasks: Iterator[RolloutRequest], steps: int) -> None:
        for _ in range(steps):
            informative = 0
            while informative < GROUPS:
                groups = await asyncio.gather(
                    *(client.rollout(task) for task in itertools.islice(tasks, size))
                )
                informative += sum(map(_is_informative, groups))
            await asyncio.sleep(TRAIN_S)

    return run


def _is_informative(status: RolloutStatus) -> bool:
    results = [member.result for member in status.members if member.result is not None]
    rewards = [result.reward for result in results if result.reward is not None]
    decision = decide_group(
        rewards, pending=0, group_size=MEMBERS, min_members=2, dynamic_sampling=True
    )
    return decision is GroupDecision.COMPLETE


def _policy(staleness: int) -> Variant:
    rule = DapoRule(groups=GROUPS, group_size=MEMBERS, under_way=UNDER_WAY, staleness=staleness)

    async def run(client: RolloutClient, tasks: Iterator[RolloutRequest], steps: int) -> None:
        async with DapoBatches(client, tasks, rule) as batches:
            for version in range(steps):
                await batches.next(version=version)
                await asyncio.sleep(TRAIN_S)

    return run


# The service.


@contextmanager
def _served(directory: Path) -> Iterator[str]:
    """Yield the address of a service. It runs in a thread, since it waits more than it
    computes.
    """
    observer = _Observer()
    config = _config(directory, {"path": str(_model(directory))})
    options = {
        "observer": observer,
        "make_backend": _no_backend,
        "access": Access(port=0, no_token=True),
    }
    thread = threading.Thread(target=launch.serve, args=(config,), kwargs=options, name="service")
    thread.start()
    address, stop = observer.started.get(timeout=120.0)
    try:
        yield address
    finally:
        stop(False)
        thread.join()


class _Observer:
    def __init__(self) -> None:
        self.started: queue.Queue[tuple[str, Callable[[bool], None]]] = queue.Queue()

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self.started.put((address, stop))

    def on_warning(self, command: Warn) -> None:
        raise AssertionError(f"no warning is expected: {command}")

    def on_stopping(self, drain: bool) -> None:
        """Do nothing: no caller needs it."""


def _config(directory: Path, model: dict[str, Any], **sections: Any) -> RunConfig:
    limits = {"max_turns": 20, "max_tokens": 200, "max_turn_tokens": 1}
    slots = UNDER_WAY * MEMBERS
    made: dict[str, Any] = {
        "run": {"name": "service", "dir": str(directory)},
        "model": model,
        "tasks": [{"env": "nim", "tag": "nim", "options": {"grammar": True}, **limits}],
        "rollout": {
            "group_size": MEMBERS,
            "max_running": slots,
        },
        "engines": {"count": 1, "max_slots": slots, "kv_tokens": 16384},
        "faults": {"latency_s": LATENCY_S, "latency_sigma": SIGMA},
    }
    return RunConfig.model_validate(made | sections)


def _model(directory: Path) -> Path:
    """Write random weights and a tokenizer of the game's words, by a run of no
    steps.
    """
    scratch = {"scratch": {"hidden": 32, "layers": 1}}
    none = {"name": "model", "dir": str(directory), "steps": 0}
    run, _ = trained(_config(directory, scratch, run=none, eval={"final_episodes": 0}))
    return run.model


def _no_backend(request: EngineRequest, name: str) -> NoReturn:
    raise AssertionError(f"no engine registers in this bench: {name} at {request.address}")
