"""Small models, configurations and batches for the trainer's tests."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import HEAD_DIM, ScratchModel
from rollweave.schema.work import (
    Batch,
    Blame,
    ScoredGroup,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
    TurnSpan,
)
from rollweave.train import scratch
from rollweave.train.packing import Example

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]

T = TypeVar("T")

CPU = torch.device("cpu")

SCRATCH, CONTEXT = ScratchModel(hidden=32, layers=2), 256
WORDS = [f" at={column}{row}" for column in "abcd" for row in range(1, 5)] + [
    "<up>",
    "<down>",
    "<tool>",
]
LR = 1e-2
VOCABULARY = 100  # fewer than the tokenizer has


def make_model(
    path: Path, *, seed: int = 0, head_dim: int = HEAD_DIM, kv_heads: int = 1, **shape: Any
) -> Path:
    """Build a model; `head_dim` and `kv_heads` replace the constants of one from
    scratch.
    """
    config_of = scratch._model_config

    def with_kv_heads(*arguments: Any) -> dict[str, Any]:
        return {**config_of(*arguments), "num_key_value_heads": kv_heads}

    with mock.patch.object(scratch, "_model_config", with_kv_heads):
        made = SCRATCH.model_copy(update=shape)
        scratch.build_checkpoint(
            path, scratch=made, context=CONTEXT, words=WORDS, seed=seed, head_dim=head_dim
        )
    return path


def make_config(
    *,
    steps: int = 10,
    trainer: dict[str, Any] | None = None,
    own: dict[str, dict[str, Any]] | None = None,
    lora: dict[str, Any] | None = None,
    implementation: str | None = None,
    **algorithm: Any,
) -> RunConfig:
    """Build a configuration; `own` has the algorithms of further task domains."""

    settings = {"lr": LR, **(trainer or {})}
    if not isinstance(settings["lr"], dict):
        settings["lr"] = {"peak": settings["lr"], "warmup": 0}
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": steps},
            "model": {"scratch": SCRATCH.model_dump(), "implementation": implementation},
            "tasks": [
                {"env": name, "max_tokens": 256, "algorithm": overrides}
                for name, overrides in {"none": {}, **(own or {})}.items()
            ],
            "rollout": {"mode": "sync"} if settings.get("colocated") else {},
            "trainer": settings,
            "algorithm": algorithm,
            "lora": lora,
        }
    )


def make_sequence(
    rng: random.Random, *, turns: int = 3, version: int = 0, rewards: list[float] | None = None
) -> TokenSequence:
    """Build a prompt, then turns of output with observations between them, and
    log-probs of a wide policy.
    """
    segments: list[Segment] = []
    spans: list[TurnSpan] = []
    tokens: list[int] = []

    def add(kind: SegmentKind, count: int, of: int = -1) -> None:
        segments.append(Segment(start=len(tokens), end=len(tokens) + count, kind=kind, version=of))
        tokens.extend(rng.randrange(4, VOCABULARY) for _ in range(count))

    add(SegmentKind.PROMPT, rng.randint(2, 9))
    for turn in range(turns):
        if turn:
            add(SegmentKind.OBSERVATION, rng.randint(1, 6))
        start = len(tokens)
        add(SegmentKind.OUTPUT, rng.randint(1, 4), version)
        reward = rewards[turn] if rewards else 0.0
        spans.append(
            TurnSpan(start=start, end=len(tokens), reward=reward, state_key=f"s{rng.randrange(3)}")
        )
    mask = [False] * len(tokens)
    for span in spans:
        mask[span.start : span.end] = [True] * (span.end - span.start)
    logprobs = tuple(-rng.uniform(3.0, 6.0) if sampled else 0.0 for sampled in mask)
    return TokenSequence(
        tokens=tuple(tokens), segments=tuple(segments), logprobs=logprobs, turns=tuple(spans)
    )


def make_trajectory(
    name: str,
    sequences: tuple[TokenSequence, ...],
    reward: float,
    *,
    group: str = "g",
    engine: str = "e0",
) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(name),
        group_id=GroupId(group),
        task=Task(id=TaskId("t"), env="none", seed=0),
        attempt=0,
        initiated_version=0,
        sequences=sequences,
        reward=reward,
        stop_reason=StopReason.FINISHED,
        blame=Blame.NONE,
        engine=engine,
    )


def make_group(
    name: str,
    rewards: list[float],
    rng: random.Random,
    *,
    version: int = 0,
    env: str = "none",
) -> ScoredGroup:
    trajectories = tuple(
        make_trajectory(
            f"{name}/{index}",
            (make_sequence(rng, turns=rng.randint(1, 4), version=version),),
            reward,
            group=name,
            engine=f"e{index % 2}",
        )
        for index, reward in enumerate(rewards)
    )
    return ScoredGroup(id=GroupId(name), env=env, trajectories=trajectories)


def make_batch(
    seed: int = 0,
    *,
    step: int = 0,
    part: int = 0,
    parts: int = 1,
    groups: int = 3,
    size: int = 4,
    version: int | None = None,
    envs: tuple[str, ...] = ("none",),
) -> Batch:
    """Build a batch whose groups are of the domains `envs` in turn."""
    rng = random.Random(seed)
    version = step if version is None else version
    trajectories = tuple(
        make_group(
            f"g{seed}.{index}",
            [float(rng.randint(0, 3)) for _ in range(size)],
            rng,
            version=version,
            env=envs[index % len(envs)],
        )
        for index in range(groups)
    )
    return Batch(step=step, version=version, part=part, parts=parts, groups=trajectories)


def make_examples(count: int, *, seed: int = 0, prompts: int = 0) -> list[Example]:
    """Return random sequences; with `prompts`, each begins with one of so many prompts,
    or is a part of one.
    """
    rng = random.Random(seed)
    common = [[rng.randrange(4, VOCABULARY) for _ in range(25)] for _ in range(prompts)]
    examples = []
    for number in range(count):
        length = rng.randint(2, 40)
        targets = sorted(rng.sample(range(1, length), rng.randint(1, length - 1)))
        tokens = [rng.randrange(4, VOCABULARY) for _ in range(length)]
        if prompts:
            tokens = common[number % prompts] + tokens
        examples.append(
            Example(
                tokens=torch.tensor(tokens[:length]),
                targets=torch.tensor(targets),
            )
        )
    return examples


def peak_bytes(work: Callable[[], T]) -> tuple[int, T]:
    """Return the maximum of the bytes that torch allocates on the CPU in `work`, which
    is profiled and takes longer, and its result.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda change: change.start_ns())
    return max(itertools.accumulate(change.nbytes() for change in changes)), result


def poisoned(batch: Batch, value: float) -> Batch:
    """Return the batch with one log-prob of its last group replaced."""
    group = batch.groups[-1]
    trajectory = group.trajectories[0]
    sequence = trajectory.sequences[0]
    place = next(i for i, sampled in enumerate(sequence.output_mask()) if sampled)
    logprobs = (*sequence.logprobs[:place], value, *sequence.logprobs[place + 1 :])
    sequence = msgspec.structs.replace(sequence, logprobs=logprobs)
    trajectory = msgspec.structs.replace(trajectory, sequences=(sequence,), reward=5.0)
    group = msgspec.structs.replace(group, trajectories=(trajectory, *group.trajectories[1:]))
    return msgspec.structs.replace(batch, groups=(*batch.groups[:-1], group))
