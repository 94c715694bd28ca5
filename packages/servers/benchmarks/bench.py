"""Bench `vllm`: the fixed lake, learned with two real vLLM servers, beside the same
runs with embedded engines. (Tests lose servers, and compare tokens under updates with
transformers: `make test-vllm`.)

Both kinds train the same checkpoint, whose heads are as wide as vLLM requires. Runs are
interleaved: each mode with both kinds, then the next seed. `version_span_errors` and
`mixed_versions` must be 0: otherwise the bench fails.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.engine.vllm_server import MISSING, interpreter
from benchmarks.harness import MODE_SETTINGS, QUICK, Progress, add_ratio, scratch_folder
from benchmarks.runs import MeasuredRun, conditions_of, example, recorded, to_target
from benchmarks.soak.lineage import versions_of
from packages.servers.benchmarks.phases import read_updates
from rollweave.envs.tasks import TaskSource
from rollweave.record.journal import JournalReader
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.loading import load
from rollweave.schema.config.training import VLLM_HEAD_DIM
from rollweave.schema.events import TurnFailed
from rollweave.schema.work import SegmentKind, TokenSequence
from rollweave.train.scratch import build_checkpoint
from rollweave_servers.reports import PHASES
from rollweave_servers.vllm import VllmKind

CONFIG = "frozenlake_fixed.toml"
TARGET = 0.9
"""Success at the sampling temperature."""

MODES = {name: MODE_SETTINGS[name] for name in ("bounded", "partial", "decoupled")}
QUICK_MODES = ("partial",)
KINDS = ("embedded", "vllm")
SEEDS = 1
COUNT, SLOTS = 2, 32
"""Engines of a run, and slots of each."""

COMMON = (
    "eval.every=2",
    "eval.episodes=48",
    "eval.temperature=1.0",
    "eval.final_episodes=200",
    f"eval.stop_at={TARGET}",
    "run.steps=100",
    "run.checkpoint_every=0",
    "watchdog.train_s=2000",
)
REFUSED = "which it has not had since the request was sent"
"""The end of the error of an answer that names a version that its server never had."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run of one mode and kind of engine, with what its files say about its
    updates.
    """

    run: MeasuredRun
    updates: list[dict[str, float]]
    span_errors: int
    mixed_versions: int


def bench_vllm(*, seeds: int | None, quick: bool, progress: Progress) -> Result:
    """Return figures by mode and kind of engine (`success_…`, `steps_…`, `wall_s_…`),
    the ratios of vLLM to embedded, `update_s_…` by phase, and the promises.
    """
    modes = {name: MODES[name] for name in QUICK_MODES} if quick else MODES
    if (python := interpreter()) is None:
        return not_measured(modes, MISSING)
    version = VllmKind().version(python)
    path = example(CONFIG)
    overrides = (*COMMON, *QUICK) if quick else COMMON
    count = seeds if seeds is not None else SEEDS
    trained: dict[tuple[str, str], list[Trained]] = {}
    with scratch_folder() as scratch:
        for seed in range(count):
            model = build_model(path, scratch / f"model-{seed}", seed)
            for mode, settings in modes.items():
                for kind in KINDS:
                    own = [*settings, *engines_of(kind, python, model), f"run.seed={seed}"]
                    one = _train(path, [*overrides, *own, "run.name=vllm"])
                    trained.setdefault((mode, kind), []).append(one)
                    progress(f"seed {seed}, {mode}, {kind}: {one.run.described(TARGET)}")
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "vllm": version,
        "seeds": list(range(count)),
        "modes": {name: list(settings) for name, settings in modes.items()},
        "engines": f"{COUNT} of each kind, {SLOTS} slots each; the same checkpoint",
        "target_success": TARGET,
        "wall_s": "from a warmed-up trainer and ready engines to the first periodic held-out "
        "evaluation at the target; every second step is evaluated",
    }
    figures = _figures(modes, trained, conditions, quick=quick)
    figures |= promises([one for runs in trained.values() for one in runs])
    return Result(bench="vllm", figures=figures, conditions=conditions)


def not_measured(modes: Iterable[str], why: str) -> Result:
    """Return the result without vLLM."""
    names = [f"{what}_{mode}" for mode in modes for what in ("steps_to_target_ratio", "wall_ratio")]
    names += [f"update_s_{phase}" for phase in PHASES]
    names += ["logprob_gap_max", "version_span_errors"]
    return Result.not_measured("vllm", names, why)


def engines_of(kind: str, python: str, model: Path) -> tuple[str, str]:
    """Return the settings of two engines of this kind, and of their model."""
    of_kind = f'kind="vllm", python="{python}"' if kind == "vllm" else 'kind="embedded"'
    return f"engines={{{of_kind}, count={COUNT}, max_slots={SLOTS}}}", f'model={{path="{model}"}}'


def build_model(config: Path, path: Path, seed: int) -> Path:
    """Write the checkpoint from which the runs of a seed start."""
    made = load(config, [])
    assert made.model.scratch is not None, "the example trains a model from scratch"
    build_checkpoint(
        path,
        scratch=made.model.scratch,
        context=made.max_tokens,
        words=TaskSource(made).words(),
        seed=seed,
        head_dim=VLLM_HEAD_DIM,
    )
    return path


def _train(path: Path, settings: Sequence[str]) -> Trained:
    with recorded(path, settings) as (config, run, measured):
        attempts = _attempts(run)
        return Trained(
            run=measured.with_engines_ready(COUNT),
            updates=[one for log in sorted(run.logs.glob("e*.log")) for one in read_updates(log)]
            if config.engines[0].kind == "vllm"
            else [],
            span_errors=_refused(run) + sum(map(backwards, attempts)),
            mixed_versions=sum(len(versions_of(one)) > 1 for one in attempts)
            if config.rollout.mode == "decoupled"
            else 0,
        )


def _attempts(run: RunDir) -> list[Sequence[TokenSequence]]:
    reader = TrajectoryReader(run.trajectories)
    return [reader.load(entry).sequences for entry in reader.entries]


def _refused(run: RunDir) -> int:
    """Return the number of answers with versions that their server never had."""
    return sum(
        isinstance(entry.event, TurnFailed) and entry.event.error.endswith(REFUSED)
        for _, entry in JournalReader(run.journal)
    )


def backwards(sequences: Iterable[TokenSequence]) -> int:
    """Return how often a token has an earlier version than the one before it."""
    count = 0
    for sequence in sequences:
        versions = [one.version for one in sequence.segments if one.kind is SegmentKind.OUTPUT]
        count += sum(later < earlier for earlier, later in itertools.pairwise(versions))
    return count


def _figures(
    modes: Iterable[str],
    trained: Mapping[tuple[str, str], Sequence[Trained]],
    conditions: dict[str, Any],
    *,
    quick: bool,
) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for mode in modes:
        runs = {kind: [one.run for one in trained[mode, kind]] for kind in KINDS}
        figures |= figures_of(mode, runs, conditions, quick=quick)
    seconds = [one for runs in trained.values() for run in runs for one in run.updates]
    conditions["update_s"] = f"medians over {len(seconds)} updates of engines in the runs"
    for phase in PHASES:
        figures[f"update_s_{phase}"] = (
            round(statistics.median(one[phase] for one in seconds), 5) if seconds else None
        )
        if not seconds:
            conditions[f"update_s_{phase}"] = "not measured: no engine was updated"
    return figures


def figures_of(
    mode: str,
    runs: Mapping[str, Sequence[MeasuredRun]],
    conditions: dict[str, Any],
    *,
    quick: bool,
) -> dict[str, Figure]:
    """Return the figures of one mode from its runs by kind of engine; `conditions`
    names the reason for a missing one.
    """
    figures: dict[str, Figure] = {}
    for kind, measured in runs.items():
        steps, seconds, why = to_target(measured, TARGET, quick=quick)
        success = [min(rates) for run in measured if (rates := run.summary.success_rate.values())]
        of_run = {
            "steps": None if why else statistics.median(steps),
            "wall_s": None if why else round(statistics.median(seconds), 1),
            "success": statistics.median(success) if success else None,
        }
        for name, value in of_run.items():
            figures[f"{name}_{kind}_{mode}"] = value
            if value is None:
                conditions[f"{name}_{kind}_{mode}"] = why or "not measured: --quick evaluates none"
        figures[f"step_s_{kind}_{mode}"] = round(
            statistics.median(line["wall_s"] for run in measured for line in run.data.steps[1:]), 3
        )
    for name, of in (("steps_to_target_ratio", "steps"), ("wall_ratio", "wall_s")):
        over, under = (f"{of}_{kind}_{mode}" for kind in ("vllm", "embedded"))
        add_ratio(f"{name}_{mode}", over, under, figures, conditions)
    return figures


def promises(trained: Sequence[Trained]) -> dict[str, Figure]:
    """Return the figures that must be 0, and the largest difference of log-probs
    between the trainer and an engine.
    """
    lines = [line["trainer"] for one in trained if one.updates for line in one.run.data.steps]
    gaps = [float(line["logprob_gap_max"]) for line in lines if "logprob_gap_max" in line]
    return {
        "logprob_gap_max": max(gaps, default=None),
        "version_span_errors": sum(one.span_errors for one in trained),
        "mixed_versions": sum(one.mixed_versions for one in trained),
    }
