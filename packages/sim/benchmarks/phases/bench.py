"""Bench `phases`: rollouts whose prompts are computed by prefill engines, compared with
the same engines doing everything (RollArt §6.3, Table 5).

Live, with paced engines as processes: one of an H800 and two of an H20, in synchronous
steps. Both variants get the same tasks and samples, since engines are deterministic and
nothing is learned, so that their trajectories must be the same, token by token. Runs
are interleaved. The same with two real vLLM servers, if vLLM is installed with NIXL.
(`rollweave reproduce rollart-table5` simulates RollArt's own GPUs and models.)
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.engine.vllm_server import MISSING, interpreter
from benchmarks.harness import Progress, load_average, scratch_folder
from benchmarks.runs import trained
from packages.sim.benchmarks.phases.paced_engine import BANDWIDTH, COMPUTE, MODEL, SLOWER
from packages.sim.benchmarks.scheduling.paced_engine import TOKENS
from packages.sim.benchmarks.scheduling.rollouts import (
    LOGPROB_TOLERANCE,
    Rollout,
    Sample,
    mismatches,
    read_rollouts,
    read_samples,
)
from rollweave.engine.server_kinds import kind_of
from rollweave.envs.tasks import TaskSource
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import VLLM_HEAD_DIM, ScratchModel
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import Programs
from rollweave.train.scratch import build_checkpoint

GROUPS, MEMBERS = 4, 4

WORDS: Mapping[str, int] = {"long": 240, "short": 12}
"""Words of each text that the agent reads: of the first it is worth computing them
elsewhere.
"""

CHUNK_TOKENS = 128
"""Tokens of prompts in a step: a step of an H20 with more is longer than a turn."""

SPLIT, COLLOCATED = "split", "collocated"

SERVED = ScratchModel(hidden=256, layers=4)
"""Model of the vLLM servers: a prompt of the long texts takes as long as many steps."""

TRAIN_S = 2000.0
"""`watchdog.train_s` of runs with vLLM servers: a tenth is their limit to take weights,
on a busy machine.
"""

PAIRED = (
    "split_over_collocated",
    "rollout_s",
    "turns",
    "split_turns",
    "split_failed",
    "prompt_ms",
)
"""Figures of a pair of variants with texts of one length."""


class PhasesPlan(Struct, frozen=True, kw_only=True):
    """Length of the bench: `steps` of a run, of which the first is left out, and runs
    of each kind.
    """

    steps: int
    runs: int


class Servers(Struct, frozen=True, kw_only=True):
    """The vLLM servers of a run: their interpreter, and the directory of their
    model.
    """

    python: str
    model: str


FULL = PhasesPlan(steps=4, runs=2)
QUICK = PhasesPlan(steps=2, runs=1)


def config(
    variant: str,
    words: int,
    plan: PhasesPlan,
    *,
    seed: int,
    directory: str,
    servers: Servers | None = None,
) -> RunConfig:
    phases = ("prefill", "decode") if variant == SPLIT else ("both", "both")
    engine: dict[str, Any] = {"max_slots": 16, "kv_tokens": 32768}
    model: dict[str, Any] = {"scratch": {"hidden": 32, "layers": 1}}
    if servers is None:
        engine |= {"deterministic": True, "prefill_chunk_tokens": CHUNK_TOKENS}
    else:
        engine |= {"kind": "vllm", "python": servers.python}
        model = {"path": servers.model}
    return RunConfig.model_validate(
        {
            "run": {"name": variant, "dir": directory, "seed": seed, "steps": plan.steps},
            "model": model,
            "tasks": [
                {
                    "env": "packages.sim.benchmarks.phases.reading_tasks:Reading",
                    "tag": "reading",
                    "max_turns": 8,
                }
                | {"max_tokens": 2048, "max_turn_tokens": 12, "options": {"words": words}}
            ],
            "rollout": {
                "mode": "sync",
                "groups_per_step": GROUPS,
                "group_size": MEMBERS,
                "max_running": GROUPS * MEMBERS,
            },
            "engines": [
                {**engine, "count": count, "phase": phase}
                for count, phase in zip((1, 2 if servers is None else 1), phases, strict=True)
            ],
            "trainer": {"lr": 1e-12},
            "algorithm": {"advantage": "grpo_no_std"},
            "eval": {"final_episodes": 0},
            "watchdog": {} if servers is None else {"train_s": TRAIN_S},
        }
    )


class VariantRun(Struct, frozen=True, kw_only=True):
    """One run. `rollouts` are those of the measured steps; `counted` of all."""

    rollouts: tuple[Rollout, ...]
    counted: dict[str, float]
    samples: dict[TrajectoryId, Sample]

    @property
    def makespans(self) -> list[float]:
        return [rollout.makespan_s for rollout in self.rollouts]


def _run(
    variant: str, words: int, plan: PhasesPlan, *, seed: int, servers: Servers | None = None
) -> VariantRun:
    paced = Programs(engine="packages.sim.benchmarks.phases.paced_engine")
    with scratch_folder() as scratch:
        made = config(variant, words, plan, seed=seed, directory=str(scratch), servers=servers)
        run, measured = trained(made, programs=paced if servers is None else None)
        return VariantRun(
            rollouts=tuple(read_rollouts(Path(run.journal), made)[1:]),
            counted=dict(measured.summary.scheduling),
            samples=read_samples(run),
        )


def bench_phases(*, quick: bool, progress: Progress) -> Result:
    plan = QUICK if quick else FULL
    figures: dict[str, Figure] = {"token_mismatches": 0}
    conditions = _conditions(plan)
    figures |= _compared("", plan, None, progress, conditions)
    if (why := _why_no_vllm(quick=quick)) is not None:
        names = [f"vllm_{name}_{length}" for name in PAIRED for length in WORDS]
        names += ["vllm_split_over_collocated", "vllm_token_mismatches"]
        figures |= dict.fromkeys(names)
        conditions |= dict.fromkeys(names, f"not measured: {why}")
    else:
        with scratch_folder() as scratch:
            served = _served(str(interpreter()), scratch / "model", plan)
            figures |= _compared("vllm_", plan, served, progress, conditions)
        conditions["vllm"] = (
            f"one server of each phase, against two of both; random model of {SERVED.hidden} "
            f"hidden and {SERVED.layers} layers, a core each; otherwise as live"
        )
    wrong = (figures["token_mismatches"], figures["vllm_token_mismatches"])
    figures["token_mismatches"] = sum(count for count in wrong if isinstance(count, int))
    return Result(bench="phases", figures=figures, conditions=conditions)


def _why_no_vllm(*, quick: bool) -> str | None:
    """Return why no vLLM servers run here; None if they do."""
    if quick:
        return "--quick starts no vLLM servers"
    if (python := interpreter()) is None:
        return MISSING
    try:
        kind_of("vllm").version(python, moves_kv=True)
    except ConfigError as error:
        return f"{python} {error}"
    return None


def _served(python: str, model: Path, plan: PhasesPlan) -> Servers:
    """Write the model of vLLM servers."""
    made = config(SPLIT, max(WORDS.values()), plan, seed=0, directory=str(model.parent))
    build_checkpoint(
        model,
        scratch=SERVED,
        context=made.max_tokens,
        words=TaskSource(made).words(),
        seed=0,
        head_dim=VLLM_HEAD_DIM,
    )
    return Servers(python=python, model=str(model))


def _compared(
    prefix: str,
    plan: PhasesPlan,
    servers: Servers | None,
    progress: Progress,
    conditions: dict[str, Any],
) -> dict[str, Figure]:
    """Run both variants in turn, with texts of each length, and return their figures,
    whose names begin with `prefix`. Reasons for missing ones are added to `conditions`.
    """
    figures: dict[str, Figure] = {}
    wrong = 0
    for length, words in WORDS.items():
        runs: dict[str, list[VariantRun]] = {SPLIT: [], COLLOCATED: []}
        for seed in range(plan.runs):
            for variant, done in runs.items():
                done.append(_run(variant, words, plan, seed=seed, servers=servers))
                steps = ", ".join(f"{seconds:.2f}" for seconds in done[-1].makespans)
                progress(f"{prefix}{length} prompts, seed {seed}, {variant}: rollouts of {steps} s")
        pairs = list(zip(runs[SPLIT], runs[COLLOCATED], strict=True))
        wrong += sum(mismatches(ours.samples, theirs.samples) for ours, theirs in pairs)
        for name, figure in _live_figures(pairs).items():
            figures[f"{prefix}{name}_{length}"] = figure
            if figure is None:
                why = "not measured: no prompt was computed elsewhere"
                conditions[f"{prefix}{name}_{length}"] = why
    ratios = (figures[f"{prefix}split_over_collocated_{length}"] for length in WORDS)
    figures[f"{prefix}split_over_collocated"] = [
        ratio for ratio in ratios if isinstance(ratio, float)
    ]
    figures[f"{prefix}token_mismatches"] = wrong
    return figures


def _live_figures(pairs: Sequence[tuple[VariantRun, VariantRun]]) -> dict[str, Figure]:
    ratios = [
        ours / theirs
        for split, collocated in pairs
        for ours, theirs in zip(split.makespans, collocated.makespans, strict=True)
    ]
    turns = sum(rollout.turns for split, _ in pairs for rollout in split.rollouts)
    counted = [split.counted for split, _ in pairs]
    given = sum(one["split_turns"] for one in counted)
    return {
        "split_over_collocated": statistics.median(ratios),
        "rollout_s": statistics.median(s for split, _ in pairs for s in split.makespans),
        "turns": turns,
        "split_turns": given,
        "split_failed": sum(one["split_failed"] for one in counted),
        "prompt_ms": 1e3 * sum(one["split_s"] for one in counted) / given if given else None,
    }


def _conditions(plan: PhasesPlan) -> dict[str, Any]:
    return {
        "live": f"medians of {plan.runs} seeds and {plan.steps - 1} steps of {GROUPS} groups of "
        f"{MEMBERS}; engines paced as {MODEL} on {COMPUTE} (one) and {BANDWIDTH} (two), of whose "
        f"tokens each of ours stands for {TOKENS}, and {SLOWER} times as slow; texts of {WORDS} "
        "words, answers of 12 tokens",
        "token_mismatches": "trajectories that differ between both variants in any token, or any "
        f"log-prob by more than {LOGPROB_TOLERANCE:g}; engines are deterministic",
        "split_over_collocated": "of rollouts, with long texts and with short ones",
        "prompt_ms": "mean time until the engine of a turn had the KV of its prompt; turns and "
        "split_turns count measured and all steps",
        "load": load_average(),
    }
