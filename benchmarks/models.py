"""Bench `models`: the trainer on tiny random checkpoints of many architectures.

For each architecture, log-probs of packed sequences are compared with those of
transformers' own forward pass on each sequence alone, and one step of the trainer with
the same step written as a plain torch loop over sequences. The weights are then
published and exported, and must equal the trainer's in transformers, and, where it
supports the architecture, be accepted by the embedded engine.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures import CONFIGURATIONS, VOCABULARY, build, read
from benchmarks.contract import Figure, Result
from rollweave.engine.model import Decoder
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave.schema.training import Publish, Published, Save, Saved, Trained, TrainOn
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
from rollweave.train.advantages import token_advantages
from rollweave.train.loading import TrainedModel, implementation_of, load_trained_model
from rollweave.train.packing import Example, pack
from rollweave.train.trainer import Trainer
from rollweave.weights.checkpoint import read_shape
from rollweave.weights.publication import read_tensors

QUICK = ("llama", "qwen3", "qwen3_moe", "gemma3")
"""Architectures of a quick bench."""

GROUPS, MEMBERS = 3, 4
LONGEST = 48
TEMPERATURE = 0.8
ROUNDS, QUICK_ROUNDS = 7, 3
"""Timed passes of each implementation, which take turns."""

LOGPROB_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-5
"""Largest differences that are noise of float32; beyond them a figure is a mismatch."""

ROUNDING = 1e-6
"""Share of a model's largest gradient up to which the gradient of a weight is rounding,
which Adam's first step makes as large as any other: for example that of biases of keys,
which is 0 in exact arithmetic.
"""

LR = 1e-3
CLIP_LOW, CLIP_HIGH = 0.2, 0.28

CONDITIONS = {
    "logprob_gap": "largest difference between a packed log-prob and that of transformers' "
    "eager attention on the sequence alone, float32",
    "step_gap": "largest difference of a weight after one step between the trainer and a plain "
    "torch loop over sequences, with a learning rate of 1e-3; of weights whose gradient is 0 or "
    "more than 1e-6 of the model's largest",
    "compared_min": "smallest share of an architecture's weights that step_gap compares",
    "mismatches": "architectures whose log-probs, step, publication or export differ by more "
    "than noise, and tensors that the embedded engine refuses",
    "engine_reloads": "architectures whose published weights the embedded engine accepts",
    "transformers_over_native": "seconds of a forward and backward pass with transformers' code "
    "by those with ours, the same tiny Qwen3",
}


def bench_models(*, quick: bool) -> Result:
    """Return the largest differences of each architecture and of all."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = dict(CONDITIONS)
    logprobs, steps, shares, mismatches, reloads = [0.0], [0.0], [1.0], 0, 0
    names = QUICK if quick else tuple(CONFIGURATIONS)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = build(name, Path(folder) / name)
            try:
                case = _Case(path, Path(folder) / f"{name}-run")
                logprob, (step, share) = case.logprob_gap(), case.step_gap()
                equal, accepted = case.reloads()
            except RollweaveError as error:
                figures[f"logprob_gap/{name}"] = figures[f"step_gap/{name}"] = None
                conditions[f"logprob_gap/{name}"] = conditions[f"step_gap/{name}"] = str(error)
                mismatches += 1
                continue
            figures[f"logprob_gap/{name}"], figures[f"step_gap/{name}"] = logprob, step
            logprobs.append(logprob)
            steps.append(step)
            shares.append(share)
            wrong = logprob > LOGPROB_TOLERANCE or step > WEIGHT_TOLERANCE
            mismatches += wrong or not equal or accepted is False
            reloads += bool(accepted)
        ratio = _ratio(Path(folder) / "qwen3", rounds=QUICK_ROUNDS if quick else ROUNDS)
    figures |= {
        "architectures": len(names),
        "logprob_gap_max": max(logprobs),
        "step_gap_max": max(steps),
        "compared_min": min(shares),
        "mismatches": mismatches,
        "engine_reloads": reloads,
        "transformers_over_native": ratio,
    }
    conditions["transformers"] = transformers.__version__
    return Result(bench="models", figures=figures, conditions=conditions)


class _Case:
    """The trainer on one checkpoint, with transformers' code, and the plain loop."""

    def __init__(self, path: Path, run_dir: Path) -> None:
        self._path, self._run_dir = path, run_dir
        self._config = _config(path)
        self._trainer = Trainer(self._config, path, run_dir)
        self._plain = read(path, attn_implementation="eager")
        self._batch = _batch(random.Random(0))

    def logprob_gap(self) -> float:
        sequences = [s for t in _trajectories(self._batch) for s in t.sequences]
        examples = [_example(sequence) for sequence in sequences]
        with torch.no_grad():
            packed = self._trainer._model(pack(examples), TEMPERATURE).logprobs
            alone = torch.cat([_logprobs(self._plain, e.tokens)[e.targets] for e in examples])
        return float((packed - alone).abs().max())

    def step_gap(self) -> tuple[float, float]:
        """Take the same step twice. Return the largest difference of a weight whose
        gradient is not rounding, and the share of the weights that are compared.
        """
        reply = self._trainer.handle(TrainOn(batch=self._batch))
        assert isinstance(reply, Trained), reply
        optimizer = torch.optim.AdamW(
            self._plain.parameters(),
            lr=LR,
            betas=(0.9, 0.95),
            weight_decay=self._config.trainer.weight_decay,
        )
        losses = []
        advantages = token_advantages(self._batch.groups, self._config.algorithm)
        for trajectory, values in zip(_trajectories(self._batch), advantages, strict=True):
            for sequence, advantage in zip(trajectory.sequences, values, strict=True):
                chosen = torch.tensor(sequence.output_mask())
                now = _logprobs(self._plain, torch.tensor(sequence.tokens))[chosen]
                ratio = torch.exp(now - torch.tensor(sequence.logprobs)[chosen])
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                gain = advantage[chosen]
                losses.append(-torch.minimum(ratio * gain, clipped * gain))
        torch.cat(losses).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._plain.parameters(), self._config.trainer.max_grad_norm)
        optimizer.step()
        return self._compared()

    def _compared(self) -> tuple[float, float]:
        expected = dict(self._plain.named_parameters())
        gradients = {
            name: torch.zeros_like(one) if one.grad is None else one.grad.abs()
            for name, one in expected.items()
        }
        smallest = ROUNDING * max(float(gradient.max()) for gradient in gradients.values())
        gap, compared, weights = 0.0, 0, 0
        for name, parameter in self._trainer._model.named_parameters():
            gradient = gradients[name]
            known = (gradient == 0) | (gradient > smallest)
            differences = (parameter - expected[name]).detach().abs()
            gap = max(gap, float((differences * known).max()))
            compared += int(known.sum())
            weights += known.numel()
        return gap, compared / weights

    def reloads(self) -> tuple[bool, bool | None]:
        """Return whether transformers reads the trainer's weights from its export and
        its publication, and whether the embedded engine accepts these; None if it does
        not support the architecture.
        """
        reply = self._trainer.handle(Publish(version=1, publication_id=1))
        assert isinstance(reply, Published), reply
        published = read_tensors(reply.manifest)
        saved = self._trainer.handle(Save(path=str(self._run_dir / "c"), export=True))
        assert isinstance(saved, Saved), saved
        exported = read(self._run_dir / "c" / "hf")
        loaded = type(self._plain).from_pretrained(
            None, config=exported.config, state_dict=dict(published), dtype=torch.float32
        )
        equal = all(
            torch.equal(model.get_parameter(name), parameter)
            for name, parameter in self._trainer._model.named_parameters()
            for model in (exported, loaded)
        )
        if implementation_of(self._path) != "native":
            return equal, None
        decoder = Decoder(read_shape(self._path), device=torch.device("cpu"), dtype=torch.float32)
        try:
            decoder.check(published)
        except RollweaveError:
            return equal, False
        return equal, True


def _config(path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "models", "steps": 1},
            "model": {"path": str(path), "implementation": "transformers", "device": "cpu"},
            "tasks": [{"env": "none", "max_tokens": LONGEST}],
            "rollout": {"temperature": TEMPERATURE},
            "algorithm": {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "aggregate": "token_mean"},
            "trainer": {"lr": LR, "warmup_steps": 0, "micro_tokens": 4 * LONGEST},
        }
    )


def _batch(rng: random.Random) -> Batch:
    groups = tuple(
        ScoredGroup(
            id=GroupId(f"g{number}"),
            env="none",
            trajectories=tuple(_trajectory(f"g{number}", member, rng) for member in range(MEMBERS)),
        )
        for number in range(GROUPS)
    )
    return Batch(step=0, version=0, part=0, parts=1, groups=groups)


def _trajectory(group: str, member: int, rng: random.Random) -> Trajectory:
    prompt, length = rng.randint(2, 12), rng.randint(20, LONGEST)
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(length))
    sequence = TokenSequence(
        tokens=tokens,
        segments=(
            Segment(start=0, end=prompt, kind=SegmentKind.PROMPT, version=-1),
            Segment(start=prompt, end=length, kind=SegmentKind.OUTPUT, version=0),
        ),
        logprobs=tuple(
            -rng.uniform(4.0, 5.0) if place >= prompt else 0.0 for place in range(length)
        ),
        turns=(TurnSpan(start=prompt, end=length, reward=0.0, state_key="s"),),
    )
    return Trajectory(
        id=TrajectoryId(f"{group}/{member}"),
        group_id=GroupId(group),
        task=Task(id=TaskId("t"), env="none", seed=0),
        attempt=0,
        initiated_version=0,
        sequences=(sequence,),
        reward=float(rng.random()),
        stop_reason=StopReason.FINISHED,
        blame=Blame.NONE,
        engine="e0",
    )


def _trajectories(batch: Batch) -> list[Trajectory]:
    return [trajectory for group in batch.groups for trajectory in group.trajectories]


def _example(sequence: TokenSequence) -> Example:
    return Example(
        tokens=torch.tensor(sequence.tokens),
        targets=torch.tensor(sequence.output_mask()).nonzero().flatten(),
    )


def _logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each token, [T]; 0 for the first, which nothing
    predicts.
    """
    table = (model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return torch.cat([torch.zeros(1), table.gather(1, tokens[1:, None]).squeeze(1)])


def _ratio(path: Path, *, rounds: int) -> float:
    """Return the seconds of a pass with transformers' code, relative to ours."""
    cpu = torch.device("cpu")
    examples = [_example(s) for t in _trajectories(_batch(random.Random(1))) for s in t.sequences]
    theirs, ours = (
        load_trained_model(path, name, dtype="float32", device=cpu)
        for name in ("transformers", "native")
    )
    ratios = [_seconds(theirs, examples) / _seconds(ours, examples) for _ in range(rounds)]
    return statistics.median(ratios)


def _seconds(model: TrainedModel, examples: Sequence[Example]) -> float:
    started = time.process_time()
    model(pack(examples), 1.0).logprobs.sum().backward()
    return time.process_time() - started
