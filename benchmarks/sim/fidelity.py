"""Bench `fidelity`: does a simulation predict the duration of a run on this machine?

FrozenLake is trained live; then the engine's step times are measured, and the run is
simulated: its own configuration, its journal as workload, the measured engine, and a
trainer with the times of this run's trainer. Nothing is fitted to it.
"""

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.contract import Figure, Result
from benchmarks.engine.harness import ProcessHarness
from benchmarks.engine.profile import (
    FIT_CONDITIONS,
    Grid,
    fit_figures,
    measure_profile,
    spec_of,
    spinning,
)
from benchmarks.runs import MeasuredRun, conditions_of, example, recorded, shares
from rollweave.envs.tasks import TaskSource
from rollweave.io.disk import replace_file
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.record.summary import Summary, summarize
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.serving import EngineSpec, GenerateRequest, Sampling
from rollweave.sim.hosts import NO_POOL
from rollweave.sim.measured import MeasuredTrainer, Timings, read_timings
from rollweave.sim.metrics import SimMetrics
from rollweave.sim.profile import ProfileCost
from rollweave.sim.workload import Plan, Recorded, Workload, read_run
from rollweave.sim.world import World

CONFIG = "frozenlake_fixed.toml"
WIDE = (
    "run.steps=12",
    "trainer.lr=1e-3",
    "model.scratch.hidden=256",
    "model.scratch.layers=4",
)
"""A model of three million parameters: engine and trainer have most of the work, and
the controller little.
"""

CASES = {"": (), "_wide": WIDE}
"""Further settings, by the suffix of their figures."""

OVERRIDES = (
    "run.steps=30",
    "run.checkpoint_every=0",
    "eval={final_episodes=0}",
    "run.name=fidelity",
)
"""Settings under which a run only trains steps: evaluations could end it early, and
checkpoints would compact the journal.
"""

QUICK = ("run.steps=4", "warmup.steps=5")
SEEDS = 3
REPEATS, QUICK_REPEATS = 10, 2
"""Repeats of each work in the measurement of the engine."""

BUSY = 2
"""Processes that compute beside an engine while a run trains: the controller and the
trainer.
"""

CALLS = 100
"""Single turns from which the round trip to an engine's process is measured."""

CONDITIONS = {
    "ratio_wall": "simulated over live, from the first weights on an engine to the end of the "
    "last training step",
    "ratio_tokens_per_s": "simulated over live, of the sampled tokens in that time",
    "engines_busy": "share of that run's time, after its start, in which an engine had turns",
    "engines_computing": "share of its time in which an engine computed steps",
    "modeled": (
        "the engine's steps (measured after the run on turns of its lengths, while up to two other "
        "processes keep the other cores busy), the trainer's steps, publications and loads of this "
        "run, its lengths, the round trip to the engine, and a controller that handles one event "
        "after another, each in the mean CPU time of this run's (including environments, chat and "
        "journal, which it computes)"
    ),
    "not_modeled": (
        "cores that controller, engine and trainer share: each takes its mean time, independent of "
        "the others; the engine's time for accepting requests; other load that changes between the "
        "run and the measurement"
    ),
}


class Simulated(Struct, frozen=True, kw_only=True):
    """A simulated run. `computing` is the engines' share of time in steps."""

    timings: Timings
    summary: Summary
    computing: float


def bench_fidelity(*, seeds: int | None, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return lists of figures by seed, live and simulated, and the medians of their
    ratios; `_wide` has those of the wide model.
    """
    path = example(CONFIG)
    overrides = (*OVERRIDES, *QUICK) if quick else OVERRIDES
    count = seeds if seeds is not None else 1 if quick else SEEDS
    figures: dict[str, Figure] = {}
    for suffix, shape in CASES.items():
        if quick and suffix:
            continue
        values_by_name: dict[str, list[float]] = {}
        for seed in range(count):
            row = _one(path, [*overrides, *shape, f"run.seed={seed}"], quick=quick)
            for name, value in row.items():
                values_by_name.setdefault(name, []).append(value)
            progress(
                f"seed {seed}{suffix}: {row['wall_s_live']:.1f} s live, "
                f"{row['wall_s_simulated']:.1f} s simulated; {row['tokens_per_s_live']:.0f} and "
                f"{row['tokens_per_s_simulated']:.0f} tokens/s"
            )
        figures |= {
            f"ratio_{name}{suffix}": statistics.median(
                _ratios(values_by_name, f"{name}_s" if name == "wall" else name)
            )
            for name in ("wall", "tokens_per_s")
        }
        figures |= {
            f"{name}{suffix}": [float(f"{value:.4g}") for value in values]
            for name, values in values_by_name.items()
        }
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        **CONDITIONS,
    }
    conditions |= {f"profile_{name}": why for name, why in FIT_CONDITIONS.items()}
    conditions["wide"] = list(WIDE)
    conditions["load"] = (
        f"{os.getloadavg()[1]:.1f} processes wanted a core in the last five minutes, this bench's "
        "included"
    )
    conditions["beside"] = f"{_beside()} other processes computed while the engine was measured"
    return Result(bench="fidelity", figures=figures, conditions=conditions)


def _ratios(values_by_name: dict[str, list[float]], name: str) -> list[float]:
    return [
        ours / live
        for ours, live in zip(
            values_by_name[f"{name}_simulated"], values_by_name[f"{name}_live"], strict=True
        )
    ]


def _one(path: Path, overrides: list[str], *, quick: bool) -> dict[str, float]:
    """Train, measure, simulate."""
    began = _cpu_s()
    with (
        recorded(path, overrides) as (config, run, measured),
        tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch,
    ):
        controller_s = _cpu_s() - began
        live = read_timings(run.journal, config)
        (task,) = config.tasks
        work = read_run(run.path)
        spec, sampling = spec_of(config, run.model), _sampling(config, run)
        grid = grid_of(work, slots=spec.max_slots, repeats=QUICK_REPEATS if quick else REPEATS)
        engine = measure_profile(spec, grid, subject=path.name, sampling=sampling, beside=_beside())
        file = Path(scratch) / "profile.json"
        replace_file(file, msgspec.json.encode(engine.profile))
        call_s = _call_s(spec, sampling, log=Path(scratch) / "engine.log")
        replayed = Computed(work, turn_s=call_s)
        per_event_s = controller_s / live.events
        simulated = simulate_again(
            config, {task.name: replayed}, live, profile=file, controller_s=per_event_s
        )
    times = simulated.timings
    return {
        "wall_s_live": live.wall_s,
        "wall_s_simulated": times.wall_s,
        "tokens_per_s_live": live.tokens_per_s,
        "tokens_per_s_simulated": times.tokens_per_s,
        "engines_busy_live": shares(measured.summary.idle["engines"])["busy"],
        "engines_busy_simulated": shares(simulated.summary.idle["engines"])["busy"],
        "engines_computing_live": _computing(measured),
        "engines_computing_simulated": simulated.computing,
        "trainer_busy_live": shares(measured.summary.idle["trainer"])["busy"],
        "trainer_busy_simulated": shares(simulated.summary.idle["trainer"])["busy"],
        **{f"profile_{name}": value for name, value in fit_figures(engine).items()},
        "call_s": call_s,
        "controller_s_per_event": per_event_s,
    }


def simulate_again(
    config: RunConfig,
    work: dict[str, Workload],
    live: Timings,
    *,
    profile: Path,
    controller_s: float = 0.0,
) -> Simulated:
    """Repeat the recorded run on the virtual clock."""
    # The shape and the GPUs of [sim] play no part: both costs are given.
    made = config.model_copy(update={"sim": SimConfig(model="qwen3-8b")})
    path, metrics = profile.with_name("simulated.bin"), SimMetrics()
    with RunJournal(path) as journal:
        engine = ProfileCost.from_json(profile)
        costs = ({(NO_POOL, group.degree): engine for group in made.engines}, MeasuredTrainer(live))
        world = World(
            made,
            observer=metrics,
            journal=journal,
            costs=costs,
            work=work,
            controller_s=controller_s,
        )
        metrics.watch(world)
        core = world.run()
    timings = read_timings(path, made)
    busy = [node.engine.busy_s for node in world.fleet.nodes.values() if node.engine is not None]
    summary = summarize(core, evaluation=None, wall_s=world.clock.now)
    return Simulated(
        timings=timings, summary=summary, computing=statistics.fmean(busy) / timings.wall_s
    )


def grid_of(work: Recorded, *, slots: int, repeats: int) -> Grid:
    """Return turns like those of a run: the engine's step times depend on more than the
    amounts in a profile.
    """
    plans = [
        plan for members in work.groups for attempts in members for plan in attempts if plan.turns
    ]
    turns = [turn for plan in plans for turn in plan.turns]
    prompt = round(statistics.fmean(plan.prompt_tokens for plan in plans))
    output = max(1, round(statistics.fmean(turn.output_tokens for turn in turns)))
    observation = round(
        statistics.fmean(
            turn.observation_tokens for plan in plans for turn in plan.turns[:-1] or plan.turns
        )
    )
    half = round(statistics.fmean(len(plan.turns) for plan in plans) / 2 * (output + observation))
    batches = tuple(1 << power for power in range(slots.bit_length()))
    return Grid(
        batches=batches,
        prompts=tuple(dict.fromkeys((prompt, prompt + half))),
        output=output,
        observation=max(1, observation),
        repeats=repeats,
    )


class Computed:
    """A recorded workload whose environments and rewards the controller computes.

    Their time is part of the controller's seconds for an event. `turn_s` is added to
    every turn: the round trip to the engine's process.
    """

    def __init__(self, work: Workload, *, turn_s: float) -> None:
        self._work, self._turn_s = work, turn_s

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        turns = tuple(msgspec.structs.replace(turn, env_s=self._turn_s) for turn in plan.turns)
        return msgspec.structs.replace(plan, init_s=0.0, reward_s=0.0, turns=turns)


def _computing(measured: MeasuredRun) -> float:
    """Return the share of computing between the engines' first and last figures."""
    states = [line["engines"] for line in measured.data.steps if line["engines"]]
    if len(states) < 2:
        return 0.0
    first, last = states[0], states[-1]
    busy = [
        (
            last[name]["busy_s"] - first[name]["busy_s"],
            last[name]["uptime_s"] - first[name]["uptime_s"],
        )
        for name in first
    ]
    return float(sum(seconds for seconds, _ in busy) / sum(up for _, up in busy))


def _sampling(config: RunConfig, run: RunDir) -> Sampling:
    """Return the run's sampling; only its length ends a turn."""
    codec = ChatCodec.from_directory(run.model)
    words = TaskSource(config).allowed_words(config.tasks[0].name)
    return Sampling(
        temperature=config.rollout.temperature,
        allowed=codec.single_token_ids(words),
        stop=codec.stop,
    )


def _call_s(spec: EngineSpec, sampling: Sampling, *, log: Path) -> float:
    """Return the mean time of a turn beyond the engine's own: the round trip to its
    process.
    """
    overheads_s: list[float] = []
    with ExitStack() as stack:
        engine = stack.enter_context(ProcessHarness(spec, log=log))
        for _ in range(_beside()):
            stack.enter_context(spinning())
        for number in range(CALLS):
            sampled = msgspec.structs.replace(sampling, max_tokens=1)
            request = GenerateRequest(
                id=str(number), tokens=(1 + number % 8, 1, 2, 3), sampling=sampled
            )
            started = time.perf_counter()
            result = engine.generate([request])[0]
            overheads_s.append(time.perf_counter() - started - result.queue_s - result.generate_s)
    return max(0.0, statistics.fmean(overheads_s[1:]))


def _beside() -> int:
    """Return the number of other computing processes during the measurement: as in a
    run, at most the other cores.
    """
    return max(0, min(BUSY, (os.cpu_count() or 1) - 1))


def _cpu_s() -> float:
    """Return the CPU seconds of this process, which in a run is the controller."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
