"""Bench `soak`: a run whose processes are killed continually, beside an undisturbed
one.

Engines and trainer learn FrozenLake in mode decoupled, with relays, all as real
processes. Every round kills an engine (every fourth round suspends it forever instead:
SIGSTOP), every other round also kills a relay. The trainer is killed once, and so is
the controller, which is resumed. A round begins when its time has come and a step was
trained since the previous one. The last round kills the controller again and resumes it
with a few more steps, and the run must end by itself.

`unaccounted`, `trained_twice`, `mixed_versions` and `leftovers` must be 0: otherwise
the bench fails.
"""

import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, kept_if_broken, slow_lake
from benchmarks.runs import conditions_of, endless
from benchmarks.soak.lineage import unaccounted
from benchmarks.soak.run_under_test import ENGINE, RELAY, TRAINER, RunUnderTest
from rollweave.record.report.data import read_run

UNBOUNDED = 1_000_000
"""Steps of a run whose end is set later."""

PATIENCE_S = 900.0
"""Maximum seconds until a step is trained, and until a run with a few remaining steps
has ended, on a busy machine.
"""

STOP_EVERY, RELAY_EVERY = 4, 2
"""Rounds between stops of an engine and between kills of a relay."""

CONFIG = "frozenlake_fixed.toml"
ALWAYS = (
    f"run.steps={UNBOUNDED}",
    "run.checkpoint_every=5",
    "engines.max_slots=16",
    "rollout.mode=decoupled",
    "weights.relays=2",
    "trainer.lr.final=1",
)


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """Length of the bench. The trainer is killed in round `trainer_at`, the controller
    in those of `controller_at`.

    Steps are trained until the last round, and `more` after it. With `peace` an
    undisturbed run takes place at the same time.
    """

    settings: tuple[str, ...]
    rounds: int
    every_s: float
    trainer_at: int
    controller_at: tuple[int, ...]
    more: int
    undisturbed: bool


FULL = SoakPlan(
    settings=(
        "engines.count=4",
        "trainer.lr.peak=2e-3",
        *slow_lake(0.1),
        "eval.every=10",
        "eval.episodes=32",
    ),
    rounds=40,
    every_s=30.0,
    trainer_at=14,
    controller_at=(27, 40),
    more=20,
    undisturbed=True,
)
QUICK = SoakPlan(
    settings=(
        "engines.count=3",
        "warmup.steps=10",
        *slow_lake(0.02),
        "watchdog.turn_s=20",
        "watchdog.train_s=200",
        "eval={final_episodes=64}",
    ),
    rounds=8,
    every_s=5.0,
    trainer_at=4,
    controller_at=(8,),
    more=5,
    undisturbed=False,
)


@dataclass(slots=True)
class Kills:
    """Killed processes by kind, and the number of steps trained before each round."""

    counts: Counter[str] = field(default_factory=Counter)
    trained: list[int] = field(default_factory=list)


def bench_soak(*, quick: bool, progress: Progress) -> Result:
    """Return figures: the promises, `killed_…` by kind, `steps`, `success`; and the
    same of the undisturbed run under its name.
    """
    return soak(QUICK if quick else FULL, progress=progress)


def soak(plan: SoakPlan, *, progress: Progress) -> Result:
    """Run the bench.

    Raises RollweaveError where a run stops making progress, and then keeps its
    directory, as it does where a promise is broken.
    """
    return kept_if_broken("soak", lambda scratch: _soaked(plan, scratch, progress), progress)


def _soaked(plan: SoakPlan, scratch: Path, progress: Progress) -> Result:
    settings = [*ALWAYS, *plan.settings, f'run.dir="{scratch}"']
    with ExitStack() as stack:
        names = ("killed", "peace") if plan.undisturbed else ("killed",)
        runs = [
            stack.enter_context(RunUnderTest(endless(CONFIG, [*settings, f"run.name={name}"])))
            for name in names
        ]
        killed = runs[0]
        for run in runs:
            run.start()
        for run in runs:
            run.wait(lambda run=run: run.trained, PATIENCE_S, "the first step")  # type: ignore[misc]
        progress("training")
        began, before = time.monotonic(), [run.reached for run in runs]
        kills = Kills()
        for number in range(1, plan.rounds + 1):
            _wait_for_round(runs, began + number * plan.every_s, kills)
            _strike(killed, number, plan, kills, progress)
        seconds = time.monotonic() - began
        rates = [(run.reached - first) / seconds for run, first in zip(runs, before, strict=True)]
        if plan.undisturbed:
            runs[1].kill()
        summaries = []
        for run in runs:  # one after the other, and from here on in peace
            run.start(steps=run.reached + plan.more)
            summaries.append(run.finish(PATIENCE_S))
        figures, conditions = _measured(killed, summaries[0], kills)
    figures["steps_per_s"] = round(rates[0], 3)
    figures["soaked_s"] = round(seconds, 1)
    if plan.undisturbed:
        figures |= {
            "steps_peace": summaries[1]["steps"],
            "success_peace": _success(summaries[1]),
            "steps_per_s_peace": round(rates[1], 3),
            "steps_over_peace": round(rates[0] / rates[1], 3),
        }
    else:
        conditions["steps_over_peace"] = "not measured: --quick has no undisturbed run"
    conditions |= _conditions(plan, settings[:-1])
    return Result(bench="soak", figures=figures, conditions=conditions)


def _wait_for_round(runs: list[RunUnderTest], due: float, kills: Kills) -> None:
    """Wait until the round's time has come, and a step was trained since the previous
    one.
    """
    killed = runs[0]
    before = kills.trained[-1] if kills.trained else 0

    def due_and_trained() -> bool:
        for run in runs[1:]:
            run.inspect()
        return time.monotonic() >= due and killed.trained > before

    killed.wait(
        due_and_trained,
        max(0.0, due - time.monotonic()) + PATIENCE_S,
        f"a step after round {len(kills.trained)}",
    )
    kills.trained.append(killed.trained)


def _strike(
    run: RunUnderTest, number: int, plan: SoakPlan, kills: Kills, progress: Progress
) -> None:
    """Kill the processes of round `number`."""
    rng = random.Random(f"soak {number}")
    wanted = [("engines_stopped", ENGINE) if number % STOP_EVERY == 0 else ("engines", ENGINE)]
    if number % RELAY_EVERY == 0:
        wanted.append(("relays", RELAY))
    if number == plan.trainer_at:
        wanted.append(("trainer", TRAINER))
    for kind, module in wanted:
        run.strike(
            module, signal.SIGSTOP if kind == "engines_stopped" else signal.SIGKILL, rng.choice
        )
    struck = [kind for kind, _ in wanted]
    if number in plan.controller_at:
        run.kill()
        struck.append("controller")
    kills.counts.update(struck)
    progress(f"round {number} at step {run.reached}: {', '.join(struck)}")
    if number in plan.controller_at and number < plan.rounds:
        run.start()


def _measured(
    run: RunUnderTest, summary: dict[str, Any], kills: Kills
) -> tuple[dict[str, Figure], dict[str, Any]]:
    lineage = run.lineage()
    ids = lineage.ids
    figures: dict[str, Figure] = {
        "unaccounted": unaccounted(summary["account"], trained=len(ids)),
        "trained_twice": len(ids) - len(set(ids)),
        "mixed_versions": run.mixed_versions(),
        "leftovers": run.leftovers,
        "killed_engines": kills.counts["engines"],
        "stopped_engines": kills.counts["engines_stopped"],
        "killed_relays": kills.counts["relays"],
        "killed_trainer": kills.counts["trainer"],
        "killed_controller": kills.counts["controller"],
        "rounds_survived": sum(before < run.trained for before in kills.trained),
        "replayed_otherwise": lineage.differing,
        "steps": summary["steps"],
        "steps_lost": run.trained - summary["steps"],
        "success": _success(summary),
    }
    first = next((line for line in read_run(run.run).evaluations if line["step"] == 0), None)
    conditions = {
        "success_before_rl": min(first["success"].values())
        if first is not None
        else "not measured",
        "account": summary["account"],
        "watchdog": summary["watchdog"],
        "retried": summary["retried"],
        "stop_reasons": summary["stop_reasons"],
    }
    return figures, conditions


def _success(summary: dict[str, Any]) -> float:
    """Return the success of the worst task."""
    return float(min(summary["success_rate"].values(), default=0.0))


def _conditions(plan: SoakPlan, settings: list[str]) -> dict[str, Any]:
    return {
        **conditions_of(Path(CONFIG), settings),
        "rounds": f"{plan.rounds}, every {plan.every_s:g} s, but not before a step was trained "
        f"since the previous one: an engine in each (every {STOP_EVERY}th time it is suspended), a "
        f"relay every {RELAY_EVERY}nd; the trainer in round {plan.trainer_at}, the controller in "
        f"{', '.join(map(str, plan.controller_at))}",
        "unaccounted": "started - (trained + dropped + cancelled + buffered); plus the difference "
        "between the trajectories trained by the account and by the journals of all controllers",
        "trained_twice": "trajectories in more than one step of the surviving lineage, from the "
        "journals of all controllers",
        "mixed_versions": "attempts in the store, trained on or not, with tokens of more than one "
        "version of the weights",
        "leftovers": "processes that outlived their controller; shared memory ends with its "
        "processes",
        "steps_lost": "steps trained again, because the trainer or the controller went back to a "
        "checkpoint",
        "success": "greedy, held-out, of the best checkpoint, at the end",
        "peace": "the same run at the same time; no process is killed until the end",
    }
