"""The live part of bench `affinity`: two pools of one paced engine each, as processes
of two hosts' agents on this machine.

The engine of pool `compute` takes the time of an H800, which is quick in prefill, that
of pool `bandwidth` the time of an H20, which is quick in decoding; on uniform hardware,
both take that of an H800. Their tokens are real. One domain reads long texts and
answers with a few words, the other reads little and answers at length. Runs are
synchronous, each begins with nothing learned, and the time of a step is that of its
rollout. Agents end with their run.
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure
from benchmarks.phases.paced_engine import BANDWIDTH, COMPUTE, MODEL
from benchmarks.runs import run_secret, trained
from benchmarks.scheduling.paced_engine import TOKENS
from benchmarks.scheduling.rollouts import read_rollouts
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs

POOLS = ("compute", "bandwidth")
"""Pools in the order of their engines, e0 and e1."""

DOMAINS: Mapping[str, Mapping[str, Any]] = {
    "reading": {"options": {"words": 240, "turns": 4}, "max_turn_tokens": 4},
    "thinking": {"options": {"words": 12, "turns": 1}, "max_turn_tokens": 64},
}
"""Settings of the task domains."""

GROUPS, MEMBERS, SLOTS = 4, 4, 2
"""Groups of a step, their members, and slots of an engine: each slot runs four
trajectories of a step.
"""

CHUNK_TOKENS = 128
"""Tokens of prompts in a step of an engine."""

MIXED, UNIFORM = "benchmarks.affinity.mixed_engine", "benchmarks.affinity.uniform_engine"
"""Programs of the engines."""

AGENTS_S = 60.0
"""Maximum seconds until agents have joined the run, and until they have ended."""

ROOT = Path(__file__).parents[2]


class LivePlan(Struct, frozen=True, kw_only=True):
    """Length of the live part: `steps` of a run, how many of them are `left_out` of the
    ratios, since pools are learned in these, the seeds, and the runs of each.
    """

    steps: int
    left_out: int
    seeds: int
    cells: Sequence[str]


class LiveCell(Struct, frozen=True, kw_only=True):
    """One live run: the pools that the domains declare, and the engines' program."""

    declared: tuple[str | None, str | None] = (None, None)
    learns: bool = False
    program: str = MIXED


CELLS: Mapping[str, LiveCell] = {
    "none": LiveCell(),
    "declared": LiveCell(declared=POOLS),
    "learned": LiveCell(learns=True),
    "corrected": LiveCell(declared=(POOLS[1], POOLS[0]), learns=True),
    "uniform_none": LiveCell(program=UNIFORM),
    "uniform_learned": LiveCell(learns=True, program=UNIFORM),
}

FULL = LivePlan(steps=7, left_out=4, seeds=2, cells=tuple(CELLS))
QUICK = LivePlan(steps=2, left_out=1, seeds=1, cells=("none", "declared"))

RATIOS: Mapping[str, tuple[str, str]] = {
    "live_learned_over_declared": ("learned", "declared"),
    "live_declared_over_none": ("declared", "none"),
    "live_corrected_over_declared": ("corrected", "declared"),
    "live_uniform": ("uniform_learned", "uniform_none"),
}
"""The runs whose step times are divided for each figure."""


def config(cell: LiveCell, *, steps: int, seed: int, directory: str, port: int) -> RunConfig:
    """Return the configuration of a run whose hosts join at this port."""
    engine = {"max_slots": SLOTS, "kv_tokens": 32768, "prefill_chunk_tokens": CHUNK_TOKENS}
    return RunConfig.model_validate(
        {
            "run": {"name": "affinity", "dir": directory, "seed": seed, "steps": steps},
            "model": {"scratch": {"hidden": 32, "layers": 1}, "device": "cpu"},
            "cluster": {
                "address": f"127.0.0.1:{port}",
                "hosts": len(POOLS),
                "join_s": AGENTS_S,
            },
            "pools": {pool: {"resource": pool} for pool in POOLS},
            "tasks": [
                {"env": "benchmarks.phases.reading_tasks:Reading", "tag": domain, "pool": pool}
                | {"max_turns": 8, "max_tokens": 2048, **DOMAINS[domain]}
                for domain, pool in zip(DOMAINS, cell.declared, strict=True)
            ],
            "rollout": {
                "mode": "sync",
                "affinity": "learned" if cell.learns else "declared",
                "groups_per_step": GROUPS,
                "group_size": MEMBERS,
                "max_running": GROUPS * MEMBERS,
            },
            "engines": [{**engine, "pool": pool} for pool in POOLS],
            "trainer": {"lr": 1e-12},
            "algorithm": {"advantage": "grpo_no_std"},
            "eval": {"final_episodes": 0},
        }
    )


def live_step_times(cell: LiveCell, *, steps: int, seed: int) -> list[float]:
    """Return the seconds of each step's rollout.

    Raises RollweaveError where the run fails, and subprocess.TimeoutExpired where an
    agent does not end with it.
    """
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        port = _free_port()
        made = config(cell, steps=steps, seed=seed, directory=scratch, port=port)
        with _agents(cell.program, port, Path(scratch)):
            run, _ = trained(made, programs=Programs(engine=cell.program))
        return [rollout.makespan_s for rollout in read_rollouts(Path(run.journal), made)]


def live_figures(
    plan: LivePlan, progress: Callable[[str], None]
) -> tuple[dict[str, Figure], dict[str, Any]]:
    """Return the figures of all runs, one after another, and their conditions.

    Raises as `live_step_times`.
    """
    seeds: list[dict[str, list[float]]] = []
    for seed in range(plan.seeds):
        seeds.append({})
        for name in plan.cells:
            seeds[-1][name] = live_step_times(CELLS[name], steps=plan.steps, seed=seed)
            steps = ", ".join(f"{seconds:.2f}" for seconds in seeds[-1][name])
            progress(f"live, seed {seed}, {name}: rollouts of {steps} s")
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {
        "live": f"medians of {plan.seeds} seeds, {plan.steps} synchronous steps each, of which "
        f"the first {plan.left_out} are left out of the ratios of rollout times (of live_uniform, "
        f"none); two pools of one engine with {SLOTS} slots, paced as {MODEL} on {COMPUTE} and "
        f"on {BANDWIDTH} (uniform: {COMPUTE} twice), of whose tokens each of ours stands for "
        f"{TOKENS}; {GROUPS} groups of {MEMBERS} trajectories a step",
        "live_load": f"{os.getloadavg()[1]:.1f} processes wanted a core in the last five minutes, "
        "this bench's included",
        "live_step_s": [
            {name: [round(one, 2) for one in of] for name, of in times.items()} for times in seeds
        ],
    }
    for figure, (ours, theirs) in RATIOS.items():
        if {ours, theirs} <= {*plan.cells}:
            since = 0 if figure == "live_uniform" else plan.left_out
            ratios = (sum(one[ours][since:]) / sum(one[theirs][since:]) for one in seeds)
            figures[figure] = statistics.median(ratios)
        else:
            figures[figure] = None
            conditions[figure] = "not measured: pools are not learned in the steps of --quick"
    return figures, conditions


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _agents(engine: str, port: int, directory: Path) -> Iterator[None]:
    """Start an agent for each pool, which ends with the run of the context. `engine` is
    the module of its engines.
    """
    program = f"from benchmarks.agent_main import main; main(engine={engine!r})"
    agents: list[subprocess.Popen[bytes]] = []
    with run_secret():
        try:
            for pool in POOLS:
                with (directory / f"agent-{pool}.out").open("wb") as output:
                    agents.append(
                        subprocess.Popen(
                            [
                                *(sys.executable, "-c", program, "host"),
                                *("--join", f"127.0.0.1:{port}", "--name", pool),
                                *("--resource", pool, "--join-s", f"{AGENTS_S:g}"),
                            ],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": str(ROOT)},
                        )
                    )
            yield
            for agent in agents:
                agent.wait(AGENTS_S)
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
