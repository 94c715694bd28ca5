"""Bench `workers`: the CPU time that a turn costs the controller, and the number of
trajectories that it carries at once, without workers and with several.

Environments and engine only wait (`world`). In each round, every number of workers is
measured once. CPU time is compared, not elapsed time, so that other programs on the
machine matter little.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.contract import Figure, Result
from benchmarks.runs import trained
from benchmarks.workers.controller import SHARES, Load, Measured
from benchmarks.workers.world import ANSWER_WORDS, PROMPT_WORDS, TURN_S, TURN_TOKENS
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError

COUNTS = (0, 1, 2, 4)
"""Numbers of workers."""

LIMIT_S = 600.0
"""Maximum seconds of one controller."""


class WorkersPlan(Struct, frozen=True, kw_only=True):
    """Length of the bench: `rollouts` at once, of `turns` turns each; a step of an
    environment takes `step_s`.
    """

    rounds: int
    rollouts: int
    turns: int
    step_s: float


FULL = WorkersPlan(rounds=3, rollouts=500, turns=10, step_s=4.0)
QUICK = WorkersPlan(rounds=1, rollouts=64, turns=4, step_s=0.5)


def bench_workers(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return for each number of workers `controller_ms_per_turn_…`,
    `workers_ms_per_turn_…`, `trajectories_at_once_…` and `trajectories_for_one_core_…`.
    """
    plan = QUICK if quick else FULL
    loads: dict[int, list[Load]] = {count: [] for count in COUNTS}
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        model = model_of(Path(scratch), plan)
        for number in range(plan.rounds):
            for count in COUNTS:
                config = config_of(Path(scratch) / f"{number}-{count}", plan, count, model=model)
                load = run_controller(
                    config, "controller", plan.rollouts, kind=Load, limit_s=LIMIT_S
                )
                loads[count].append(load)
            progress(
                "ms of the controller for a turn: "
                + ", ".join(
                    f"{count} workers {_ms(each[-1].controller_s, each[-1]):.2f}"
                    for count, each in loads.items()
                )
            )
    figures: dict[str, Figure] = {}
    for count, each in loads.items():
        own = statistics.median(_ms(load.controller_s, load) for load in each)
        figures[f"controller_ms_per_turn_{count}"] = own
        figures[f"workers_ms_per_turn_{count}"] = statistics.median(
            _ms(load.workers_s, load) for load in each
        )
        figures[f"turns_per_s_{count}"] = statistics.median(
            load.turns / load.wall_s for load in each
        )
        figures[f"trajectories_at_once_{count}"] = min(load.at_once for load in each)
        figures[f"trajectories_for_one_core_{count}"] = 1e3 * (plan.step_s + TURN_S) / own
    return Result(bench="workers", figures=figures, conditions=conditions_of(plan))


def conditions_of(plan: WorkersPlan) -> dict[str, str]:
    """Return the meaning of the figures."""
    return {
        "controller_ms_per_turn": "CPU time of the controller's process, a service "
        f"with one engine, from {SHARES[0]:.0%} to {SHARES[1]:.0%} of all turns; median of "
        f"{plan.rounds} rounds, each of which measures every number of workers. {plan.rollouts} "
        f"rollouts at once of {plan.turns} turns; prompts of {PROMPT_WORDS} words, observations of "
        f"{ANSWER_WORDS}, turns of {TURN_TOKENS} tokens",
        "workers_ms_per_turn": "the same of all workers together",
        "turns_per_s": f"environments take {plan.step_s:g} s for a step and the engine "
        f"{TURN_S:g} s for a turn: {plan.rollouts / (plan.step_s + TURN_S):.0f} a second if "
        "nothing waited",
        "trajectories_at_once": "maximum number of attempts in INIT or RUN; minimum of all rounds",
        "trajectories_for_one_core": "trajectories with these turns that the controller carries if "
        "it has a core for itself, computed from controller_ms_per_turn",
    }


def _ms(seconds: float, load: Load) -> float:
    return 1e3 * seconds / max(1, load.turns)


def run_controller(
    config: RunConfig, module: str, *arguments: object, kind: type[Measured], limit_s: float
) -> Measured:
    """Run one controller, the program `module`, for at most so many seconds, and return
    what it has measured. Raises RollweaveError where it fails.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True)
    file = directory / "given.toml"
    file.write_text(dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.workers.{module}", str(file), *map(str, arguments)],
        stdout=subprocess.PIPE,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RollweaveError(f"the controller ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=kind)


def config_of(
    directory: Path, plan: WorkersPlan, workers: int, *, model: Path | None = None
) -> RunConfig:
    longest = PROMPT_WORDS + plan.turns * (ANSWER_WORDS + TURN_TOKENS + 32)
    source = {"path": str(model)} if model is not None else {"scratch": {"hidden": 32, "layers": 1}}
    return RunConfig.model_validate(
        {
            "run": {"name": "service", "dir": str(directory), "steps": 0},
            "model": source,
            "tasks": [
                {
                    "env": "benchmarks.workers.world:Waiting",
                    "tag": "waiting",
                    "options": {"turns": plan.turns, "step_s": plan.step_s},
                    "max_turns": plan.turns,
                    "max_tokens": 2 * longest,
                    "max_turn_tokens": TURN_TOKENS,
                }
            ],
            "rollout": {"max_running": plan.rollouts},
            "engines": {"max_slots": plan.rollouts, "kv_tokens": 1 << 22},
            "workers": {"count": workers},
            "eval": {"final_episodes": 0},
        }
    )


def model_of(directory: Path, plan: WorkersPlan) -> Path:
    """Write random weights and a tokenizer of the environment's words, by a run of no
    steps.
    """
    made = config_of(directory / "model", plan, 0)
    engines = made.engines[0].model_copy(update={"kv_tokens": 1 << 14, "max_slots": 1})
    run, _ = trained(made.model_copy(update={"engines": (engines,)}))
    return run.model
