"""Measures the step times of the embedded engine for one model: the `Profile` with
which `sim.gpu` simulates it.

There are two kinds of work, each for several batch sizes and lengths: conversations
that begin together, whose next turns find most of their context in the prefix cache;
and conversations whose turns arrive while others decode. For every kind of step in them
(prefill, decode, both) a sample is the mean of its amounts and of its seconds: the fit
is linear, so means lose no information, and totals are what a simulation predicts, so
delays of some steps belong to them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.contract import Result
from benchmarks.engine.conversations import TURNS, Conversations, Grid, staggered, together
from benchmarks.engine.harness import Harness
from benchmarks.harness import scratch_folder
from benchmarks.runs import example
from rollweave.engine.batching import StepWork
from rollweave.envs.tasks import TaskSource
from rollweave.io.disk import replace_file, writing
from rollweave.schema.base import EngineId
from rollweave.schema.config.engines import BLOCK_TOKENS
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineSpec
from rollweave.train.scratch import build_checkpoint
from rollweave.weights.checkpoint import read_shape
from rollweave_sim.profile import Profile, ProfileCost, Sample

DEMO = "frozenlake.toml"
"""Configuration whose model is measured by default, and whose `[engines]` are those of
every profile.
"""


QUICK = Grid(batches=(1, 8), prompts=(16, 128), repeats=1)

Step = tuple[StepWork, float]
"""Amounts that a step computed, and its seconds."""


def bench_profile(path: Path, model: Path | None, *, quick: bool) -> Result:
    """Measure the model in directory `model`, or the demo's, and write the profile to
    `path`. Raises ConfigError, DiskError.
    """
    config = load(example(DEMO), [])
    with scratch_folder() as scratch:
        directory = (
            model.absolute() if model is not None else _demo_model(config, scratch / "model")
        )
        subject = str(model) if model is not None else f"the random model of {DEMO}"
        measured = measure_profile(
            spec_of(config, directory), QUICK if quick else Grid(), subject=subject
        )
    profile = measured.profile
    context = longest_context(profile)
    cost = ProfileCost(samples=profile.samples, kv_tokens=profile.kv_tokens)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return Result(
        bench="profile",
        figures={
            "samples": len(profile.samples),
            "slots": cost.slots(context=context),
            **fit_figures(measured),
            "decode_s": [_shown(s) for s in profile.samples if not s.prefill_tokens],
            "prefill_s": [_shown(s) for s in profile.samples if not s.decode],
        },
        conditions={
            "profile": f"{path}: use it as sim.gpu",
            "subject": profile.subject,
            "slots": "the fewest turns at once with 95 % of the highest throughput of decoding, "
            f"at contexts of {context} tokens (the longest measured), as far as their KV fits: for "
            "engines.max_slots",
            **FIT_CONDITIONS,
        },
    )


def longest_context(profile: Profile) -> int:
    """Return the tokens of the longest contexts that were measured."""
    return max(
        (one.decode_context // one.decode for one in profile.samples if one.decode), default=1
    )


def spec_of(config: RunConfig, model: Path) -> EngineSpec:
    """Return the engine spec of a run of `config`."""
    engines = config.engines[0]
    return EngineSpec(
        id=EngineId("profile"),
        model=str(model),
        dtype=config.model.dtype,
        device=config.model.device,
        threads=engines.degree,
        max_slots=engines.most_slots,
        kv_tokens=engines.kv_tokens,
        block_tokens=BLOCK_TOKENS,
        prefill_chunk_tokens=engines.prefill_chunk_tokens,
        prefix_cache="prefix_cache" not in config.ablation.without,
        deterministic=engines.deterministic,
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A profile's samples. `core_share` is the share of the steps' seconds in which the
    engine's thread had a core.

    It is well below 1 on a machine that other processes use.
    """

    profile: Profile
    core_share: float


class StepRecorder:
    """Collects the steps that the engine's thread reports.

    `cpu_s` is that thread's, at the end of the last one.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.cpu_s = 0.0

    def add(self, amounts: StepWork, seconds: float) -> None:
        self.steps.append((amounts, seconds))
        self.cpu_s = time.thread_time()


def measure_profile(spec: EngineSpec, grid: Grid, *, subject: str) -> Measurement:
    """Measure an engine's steps.

    Raises ConfigError for an unusable model, EngineError.
    """
    torch.set_num_threads(spec.threads)
    vocabulary = read_shape(Path(spec.model)).vocab
    # no text can match it: every turn has its full length
    spec = msgspec.structs.replace(spec, eos_token_ids=(vocabulary,))
    recorder, kinds = StepRecorder(), dict[tuple[object, ...], list[Step]]()
    with Harness(spec, watch=recorder.add) as engine:
        conversations = Conversations(engine, vocabulary, grid)
        cells = list(_cells(engine, spec, grid))
        if not cells:
            raise ConfigError(
                f"model: {spec.model} must have room for a prompt of {grid.prompts[0]} tokens and "
                f"{TURNS} turns"
            )
        before_s = 0.0
        for repeat in range(-1, grid.repeats):
            for work, count, prompt in cells:
                recorder.steps.clear()
                work(conversations, count, prompt)
                engine.stats()  # answered after the last step has been noted
                for step in recorder.steps if repeat >= 0 else ():  # the first round warms up
                    kind = (
                        work.__name__,
                        count,
                        prompt,
                        bool(step[0].prefill_tokens),
                        bool(step[0].decode),
                    )
                    kinds.setdefault(kind, []).append(step)
            if repeat < 0:
                before_s = recorder.cpu_s
        kv_tokens = engine.ready.kv_total_tokens
    total_s = sum(seconds for group in kinds.values() for _, seconds in group)
    profile = Profile(
        kv_tokens=kv_tokens, samples=tuple(map(sample_of, kinds.values())), subject=subject
    )
    return Measurement(profile=profile, core_share=min(1.0, (recorder.cpu_s - before_s) / total_s))


def sample_of(steps: Sequence[Step]) -> Sample:
    """Return the mean of steps of one kind."""
    means = [
        round(statistics.fmean(column))
        for column in zip(*(amounts for amounts, _ in steps), strict=True)
    ]
    return Sample(
        prefill_tokens=means[0],
        prefill_context=means[1],
        decode=means[2],
        decode_context=means[3],
        seconds=statistics.fmean(seconds for _, seconds in steps),
    )


def fitted(profile: Profile) -> list[float]:
    """Return the fitted seconds of each sample.

    Raises ConfigError where there is no fit.
    """
    cost = ProfileCost(samples=profile.samples, kv_tokens=profile.kv_tokens)
    return [
        cost.step_s(
            prefill_tokens=s.prefill_tokens,
            prefill_context=s.prefill_context,
            decode=s.decode,
            decode_context=s.decode_context,
        )
        for s in profile.samples
    ]


def fit_figures(measured: Measurement) -> dict[str, float]:
    """Return how well the linear cost describes the engine, and whether the engine had
    a core to itself.
    """
    samples, costs = measured.profile.samples, fitted(measured.profile)
    return {
        "fit_error_median": statistics.median(
            abs(cost / s.seconds - 1) for cost, s in zip(costs, samples, strict=True)
        ),
        "fit_over_measured": sum(costs) / sum(s.seconds for s in samples),
        "core_share": measured.core_share,
    }


FIT_CONDITIONS = {
    "fit_error_median": "of the linear cost that sim.gpu fits, against each sample",
    "fit_over_measured": "the fitted seconds of all samples over the measured ones; the fit "
    "weighs relative errors",
    "core_share": "CPU seconds of the engine's thread over the seconds of its steps: below 1, the "
    "machine was shared",
}


Work = Callable[[Conversations, int, int], None]


def _cells(engine: Harness, spec: EngineSpec, grid: Grid) -> Iterator[tuple[Work, int, int]]:
    """Return work, conversations and prompt tokens of every measurement that fits the
    engine.
    """
    for count, prompt, work in itertools.product(grid.batches, grid.prompts, (together, staggered)):
        longest = prompt + (TURNS + 1) * grid.output + TURNS * grid.observation
        fits = (
            longest < engine.ready.max_context
            and count * (longest + spec.block_tokens) <= engine.ready.kv_total_tokens
        )
        if fits and count <= spec.max_slots and (work is together or count > 1):
            yield work, count, prompt


def _demo_model(config: RunConfig, path: Path) -> Path:
    assert config.model.scratch is not None, "the demo begins from scratch"
    build_checkpoint(
        path,
        scratch=config.model.scratch,
        context=config.max_tokens,
        head_dim=config.head_dim,
        words=TaskSource(config).words(),
        seed=config.run.seed,
    )
    return path


def _shown(sample: Sample) -> float:
    return round(sample.seconds, 6)
