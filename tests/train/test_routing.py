"""Routing replay, against transformers' own block of experts with forced routes."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import TrainerError
from rollweave.schema.work import Batch, Routes, SegmentKind, TokenSequence, Trajectory
from rollweave.train.loading import load_transformers_model
from rollweave.train.packing import FREE, Example, pack
from rollweave.train.rows import batch_rows
from rollweave.train.trainer import Trainer
from rollweave.train.transformers_model import TransformersModel
from tests.support.architectures import build
from tests.support.trainers import CPU, make_batch, make_examples
from tests.train.asking import trained
from tests.train.oracle import loss_of

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def load(path: Path) -> TransformersModel:
    return load_transformers_model(path, dtype="float32", device=CPU)


def routed(examples: list[Example], *, seed: int = 0) -> list[Example]:
    """Give random routes to most tokens of most examples."""
    rng = random.Random(seed)
    changed = []
    for number, example in enumerate(examples):
        routes = torch.full((len(example.tokens), LAYERS, TOP_K), FREE, dtype=torch.int16)
        for token in range(len(example.tokens)):
            if rng.random() < 0.8:
                for layer in range(LAYERS):
                    chosen = rng.sample(range(EXPERTS), TOP_K)
                    routes[token, layer] = torch.tensor(chosen, dtype=torch.int16)
        changed.append(Example(example.tokens, example.targets, routes if number % 4 else None))
    return changed


def forced(
    path: Path, examples: list[Example]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the log-probs of the labels and the gradients of transformers' own model,
    one sequence at a time, with a router that takes the routes token by token.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chosen_logprobs, entropies = [], []
    for example in examples:
        for number, layer in enumerate(model.model.layers):

            def route(
                x: torch.Tensor,
                gate: Any = layer.mlp.gate,
                number: int = number,
                example: Example = example,
            ) -> tuple[torch.Tensor, ...]:
                logits = functional.linear(x, gate.weight)
                scores, indices = [], []
                for token, row in enumerate(logits.softmax(-1)):
                    experts = row.topk(TOP_K).indices.tolist()
                    if example.routes is not None and example.routes[token, number, 0] != FREE:
                        experts = example.routes[token, number].tolist()
                    weights = torch.stack([row[expert] for expert in experts])
                    if gate.norm_topk_prob:
                        weights = weights / sum(weights)
                    scores.append(weights)
                    indices.append(torch.tensor(experts))
                return logits, torch.stack(scores), torch.stack(indices)

            layer.mlp.gate.forward = route
        logits = model(example.tokens[None]).logits[0]
        rows = logits[example.targets - 1].log_softmax(-1)
        entropies.append(-(rows.exp() * rows).sum(-1))
        chosen_logprobs.append(rows[torch.arange(len(rows)), example.tokens[example.targets]])
    logprobs = torch.cat(chosen_logprobs)
    loss_of(logprobs, torch.cat(entropies)).backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_experts_are_the_engines_and_their_weights_the_trainers(
    tmp_path: Path, again: bool
) -> None:
    path = build("qwen3_moe", tmp_path / "m")
    examples = routed(make_examples(6))
    model = load(path)
    model.recompute_activations(again)
    chosen, entropy, _ = model(pack(examples), 1.0)
    loss_of(chosen, entropy).backward()  # type: ignore[no-untyped-call]
    expected, gradients = forced(path, examples)
    torch.testing.assert_close(chosen.detach(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            scale = gradient.abs().max().clamp(min=0.05)
            torch.testing.assert_close(
                parameter.grad / scale, gradient / scale, atol=2e-5, rtol=1e-4, msg=name
            )
    free, _, _ = model(pack(make_examples(6)), 1.0)
    assert (free - chosen).abs().max() > 0.01  # the next pass is free again


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_other_routers_follow_routes_too(tmp_path: Path, name: str) -> None:
    """Their own choices change nothing, and other choices do."""
    model = load(build(name, tmp_path / "m"))
    examples = make_examples(4)
    with torch.no_grad():
        free = model(pack(examples), 1.0).logprobs
    own: dict[int, torch.Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, output, at=layer: own.update({at: output[2]}))
        for layer, router in model._replay.routers.items()
    ]
    with torch.no_grad():
        for example in examples:
            model(pack([example]), 1.0)
            length = int(example.targets[-1])
            routes = torch.zeros((len(example.tokens), LAYERS, TOP_K), dtype=torch.int16)
            for layer, chosen in own.items():
                routes[:length, layer] = chosen.to(torch.int16)
            object.__setattr__(example, "routes", routes)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        torch.testing.assert_close(model(pack(examples), 1.0).logprobs, free, atol=1e-5, rtol=0)
        other = routed(make_examples(4))
        assert (model(pack(other), 1.0).logprobs - free).abs().max() > 1e-3


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    model = load(build("qwen3_moe", tmp_path / "m"))
    (example,) = make_examples(1)
    for shape, expert in (((3, TOP_K), 0), ((LAYERS, TOP_K), EXPERTS), ((LAYERS, 3), 0)):
        routes = torch.full((len(example.tokens), *shape), expert, dtype=torch.int16)
        with pytest.raises(TrainerError, match="Qwen3MoeForCausalLM"):
            model(pack([Example(example.tokens, example.targets, routes)]), 1.0)
    dense = load(build("qwen3", tmp_path / "d"))
    routes = torch.zeros((len(example.tokens), LAYERS, TOP_K), dtype=torch.int16)
    with pytest.raises(TrainerError, match="with 0 experts"):
        dense(pack([Example(example.tokens, example.targets, routes)]), 1.0)


# Batches


def config_of(path: Path, *, replay: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 4},
            "model": {"path": str(path)},
            "tasks": [{"env": "none", "max_tokens": 256}],
            "engines": [{"kind": "vllm", "python": "python3"}],
            "trainer": {"lr": {"peak": 1e-6, "warmup": 0}},
            "algorithm": {"routing_replay": replay, "entropy": 1e-9},
        }
    )


def with_sequences(batch: Batch, change: Any) -> Batch:
    def changed(trajectory: Trajectory) -> Trajectory:
        sequences = tuple(change(sequence) for sequence in trajectory.sequences)
        return msgspec.structs.replace(trajectory, sequences=sequences)

    groups = tuple(
        msgspec.structs.replace(group, trajectories=tuple(map(changed, group.trajectories)))
        for group in batch.groups
    )
    return msgspec.structs.replace(batch, groups=groups)


def test_rows_have_the_routes_that_were_recorded(tmp_path: Path) -> None:
    wide = [(300 * at) % 1000 for at in range(2 * LAYERS * TOP_K)]
    parts = (
        Routes(start=0, end=1, layers=LAYERS, top_k=TOP_K, data=bytes(range(4))),
        Routes(
            start=2,
            end=4,
            layers=LAYERS,
            top_k=TOP_K,
            data=b"".join(number.to_bytes(2, "little") for number in wide),
        ),
    )
    batch = with_sequences(
        make_batch(), lambda sequence: msgspec.structs.replace(sequence, routes=parts)
    )
    config = config_of(tmp_path, replay=True)
    routes = batch_rows(batch, config.algorithm)[0].example.routes
    assert routes is not None
    assert routes[0].flatten().tolist() == [0, 1, 2, 3]
    assert routes[2:4].flatten().tolist() == wide
    assert (routes[1] == FREE).all()
    assert (routes[4:] == FREE).all()
    config = config_of(tmp_path, replay=False)
    assert batch_rows(batch, config.algorithm)[0].example.routes is None


def test_the_gap_is_not_measured_where_an_engine_computed_the_context_again(tmp_path: Path) -> None:
    """After an update in the middle of a sequence it has chosen other experts there."""

    def of_two_versions(sequence: TokenSequence) -> TokenSequence:
        *others, last = sequence.segments
        last = msgspec.structs.replace(last, version=1)
        end = len(sequence.tokens) - 1
        data = bytes(end * LAYERS * TOP_K)
        routes = Routes(start=0, end=end, layers=LAYERS, top_k=TOP_K, data=data)
        return msgspec.structs.replace(sequence, segments=(*others, last), routes=(routes,))

    batch = msgspec.structs.replace(with_sequences(make_batch(), of_two_versions), version=1)
    for replay in (False, True):
        rows = batch_rows(batch, config_of(tmp_path, replay=replay).algorithm)
        mixed = [len(row.ages.unique()) > 1 for row in rows]
        assert any(mixed)
        expected = [not (replay and each) for each in mixed]
        assert [bool(row.current.any()) for row in rows] == expected


class Engine:
    """Samples nothing: it gives the log-probs and the routes of tokens under `path`."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def __call__(self, sequence: TokenSequence) -> TokenSequence:
        output = self._model(torch.tensor([sequence.tokens]), output_router_logits=True)
        rows = output.logits[0].log_softmax(-1)
        logprobs = [0.0] * len(sequence.tokens)
        for segment in sequence.segments:
            if segment.kind is SegmentKind.OUTPUT:
                for at in range(segment.start, segment.end):
                    logprobs[at] = float(rows[at - 1, sequence.tokens[at]])
        layers = [logits.topk(TOP_K).indices[:-1] for logits in output.router_logits]
        chosen = torch.stack(layers, 1).to(torch.uint8)
        routes = Routes(
            start=0,
            end=len(chosen),
            layers=LAYERS,
            top_k=TOP_K,
            data=chosen.contiguous().numpy().tobytes(),
        )
        return msgspec.structs.replace(sequence, logprobs=tuple(logprobs), routes=(routes,))


def test_replay_narrows_the_gap_of_routers_that_choose_otherwise(tmp_path: Path) -> None:
    """The trainer's routers differ a little from the engine's, as from another
    kernel.
    """
    path = build("qwen3_moe", tmp_path / "m")
    batch = with_sequences(make_batch(), Engine(path))
    gaps = {}
    for replay in (False, True):
        trainer = Trainer(config_of(path, replay=replay), path)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in trainer._model.named_parameters():
                if name.endswith("gate.weight"):
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter += 0.02 * noise
        values = trained(trainer, batch)
        gaps[replay] = values["logprob_gap_mean"]
        assert values.get("routed_fraction") == (1.0 if replay else None)
    assert gaps[True] < 0.5 * gaps[False]
    assert gaps[True] > 0  # the weights of the experts are the trainer's


def test_exact_routers_have_no_gap_with_or_without_replay(tmp_path: Path) -> None:
    path = build("qwen3_moe", tmp_path / "m")
    batch = with_sequences(make_batch(), Engine(path))
    for replay in (False, True):
        trainer = Trainer(config_of(path, replay=replay), path)
        assert trained(trainer, batch)["logprob_gap_max"] < 1e-5
