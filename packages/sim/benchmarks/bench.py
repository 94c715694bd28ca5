"""Bench `sim`: time and memory of simulating one RL step on many GPUs.

Every size runs in its own process, because the peak of a process's memory never falls:
`python -m packages.sim.benchmarks.bench GPUS LAYOUT GROUPS` prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import program
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import simulate

GROUPS, MEMBERS = 512, 16
"""Prompts of a step and trajectories of a prompt (Laminar §8): 8,192 trajectories."""

TOOL_CALLS = 8
"""Maximum tool calls of one trajectory (Laminar §8)."""

LAYOUTS = {
    "machines": ("qwen2.5-72b", 8, {64: (32, 32), 256: (128, 128), 1024: (768, 256)}),
    "single": ("qwen2.5-7b", 1, {64: (40, 24), 256: (192, 64), 1024: (768, 256)}),
}
"""Model, GPUs of an engine, and by total GPUs those for training and rollout.
`machines`: Laminar Table 2, its 72B. `single`: an engine on each GPU, Laminar Table 2's
7B up to its 256 GPUs, and then the same 256 rollout GPUs as the 72B.
"""

QUICK = 64
"""GPUs of the quick form."""

SCALE = (63, 625, 6250)
"""Prompts of a step with 16 trajectories each on all of `SCALE_GPUS`: up to 100,000
trajectories.
"""

SCALE_GPUS = 3008
"""GPUs as many as in RollArt's largest run, more than 3,000; half of them train."""

LIMIT_S = 1800.0
"""Maximum seconds of one process; a bench that hangs is an error."""


def config(gpus: int, layout: str, groups: int = GROUPS) -> RunConfig:
    """Return one step of bounded training on the tool-calling task."""
    model, engine_gpus, splits = LAYOUTS[layout]
    training, rollout = splits.get(gpus, (gpus // 2, gpus // 2))
    tokens = {"max_turns": TOOL_CALLS + 1, "max_tokens": 18_432, "max_turn_tokens": 16_384}
    return RunConfig.model_validate(
        {
            "run": {"name": f"sim-{gpus}-{layout}", "steps": 1},
            "sim": {"model": model, "gpu": "h800"},
            "trainer": {"ranks": training},
            "tasks": [{"env": "tool-calling", **tokens, "step_s": 600.0, "time_s": 1e6}],
            "rollout": {
                "groups_per_step": groups,
                "group_size": MEMBERS,
                "max_running": groups * MEMBERS,
            },
            "engines": {
                "count": rollout // engine_gpus,
                "degree": engine_gpus,
                "max_slots": 1024,
                "prefill_chunk_tokens": 8192,
            },
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 1e5, "train_s": 1e5},
        }
    )


def measure(gpus: int, layout: str, groups: int) -> dict[str, Any]:
    """Simulate the step. Raises RuntimeError unless it trains all trajectories."""
    made = config(gpus, layout, groups)
    start, computed = time.perf_counter(), time.process_time()
    outcome = simulate(made)
    measured = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - computed,
        "events": outcome.events,
        "peak_mb": peak_mb(),
    }
    trained = outcome.summary.account.trained
    if outcome.summary.error or trained != groups * MEMBERS:
        raise RuntimeError(f"{trained} trajectories were trained: {outcome.summary.error}")
    return measured


def bench_sim(*, quick: bool) -> Result:
    """Return figures by layout, a list each, by size.

    Raises RuntimeError where a simulation fails.
    """
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {
        "step": f"one step of mode bounded, {GROUPS} prompts x {MEMBERS} of family tool-calling, "
        f"up to {TOOL_CALLS} calls each",
        "wall_s": "on one core, without starting Python; events are those that the core handled",
        "peak_mb": "maximum resident memory of the process, Python and packages included",
    }
    for layout, (model, engine_gpus, splits) in LAYOUTS.items():
        sizes = [size for size in splits if not quick or size == QUICK]
        results = [simulated(size, layout) for size in sizes]
        suffix = "" if layout == "machines" else f"_{layout}"
        figures[f"gpus{suffix}"] = [float(size) for size in sizes]
        figures[f"events_per_s{suffix}"] = [one["events"] / one["wall_s"] for one in results]
        for name in ("wall_s", "cpu_s", "peak_mb"):
            figures[f"{name}{suffix}"] = [one[name] for one in results]
        if None in (peaks := [one["peak_mb"] for one in results]):
            figures[f"peak_mb{suffix}"] = None
            conditions[f"peak_mb{suffix}"] = f"not measured: no /proc/self/status, {peaks}"
        engines = [splits[size][1] // engine_gpus for size in sizes]
        conditions[f"engines{suffix}"] = f"{engines} of {engine_gpus} H800 each, {model}"
    if not quick:
        grown = [simulated(SCALE_GPUS, "machines", groups) for groups in SCALE]
        figures["trajectories_scale"] = [float(groups * MEMBERS) for groups in SCALE]
        for name in ("wall_s", "cpu_s", "peak_mb"):
            figures[f"{name}_scale"] = [one[name] for one in grown]
        conditions["scale"] = f"{SCALE_GPUS} GPUs, half of them train, else as machines"
    return Result(bench="sim", figures=figures, conditions=conditions)


def simulated(gpus: int, layout: str, groups: int = GROUPS) -> dict[str, Any]:
    """Return what a process measures. Raises RuntimeError where it fails."""
    measured: dict[str, Any] = program(
        "packages.sim.benchmarks.bench", str(gpus), layout, str(groups), limit_s=LIMIT_S
    )
    return measured


def peak_mb() -> float | None:
    """Return the peak memory of this process since its program began; `ru_maxrss` would
    count the parent from which it was forked. None where the system does not report it.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(peak) / 1024 if peak is not None else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))) + "\n")
