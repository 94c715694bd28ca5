"""Tiny random checkpoints, an oracle (transformers' full forward), and a synchronous
driver of an engine's loop.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollweave.engine.runner import projection
from rollweave.engine.thread import EngineThread
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.weights import WeightManifest
from rollweave.weights.publication import Publisher

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = [
    [5, 9, 2, 77],
    list(range(1, 40)),
    [3],
    [(7 * i) % 90 for i in range(23)],
    list(range(50, 66)),
]
TOLERANCE = 1e-4
"""Maximum error of a log-prob beside the oracle's."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def build(kind: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Return a random model.

    Norm weights and biases are randomized too, so that a missing one shows.
    """
    torch.manual_seed(seed)
    sizes = SIZES | changes
    model: torch.nn.Module
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**({"head_dim": 16} | sizes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model.eval()


def save(model: torch.nn.Module, directory: Path) -> str:
    model.save_pretrained(directory)  # type: ignore[operator]
    return str(directory)


def spec(model: str, **changes: Any) -> s.EngineSpec:
    defaults: dict[str, Any] = {
        "id": EngineId("e"),
        "model": model,
        "max_slots": 8,
        "kv_tokens": 2048,
        "block_tokens": 8,
    }
    return s.EngineSpec(**(defaults | changes))


@torch.no_grad()
def oracle_logprobs(
    model: torch.nn.Module, tokens: Iterable[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Return [tokens, vocab], where row i is the distribution after tokens[: i + 1]."""
    logits = model(torch.tensor([list(tokens)])).logits[0].float()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)


@torch.no_grad()
def oracle_greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )  # type: ignore[operator]
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def oracle_state(
    model: torch.nn.Module, prompt: Iterable[int], result: s.GenerateResult
) -> list[float]:
    """Return the state of a turn: transformers' last hidden state at the last position
    but one, since the last token is only sampled, times the projection.
    """
    ids = torch.tensor([[*prompt, *result.tokens[:-1]]])
    hidden = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return (hidden @ projection(len(hidden))).tolist()


def logprob_error(
    model: torch.nn.Module,
    prompt: Iterable[int],
    result: s.GenerateResult,
    *,
    temperature: float = 1.0,
) -> float:
    """Return the largest difference between the result's log-probs and those of a full
    forward pass of `model`.
    """
    prompt = list(prompt)
    rows = oracle_logprobs(model, [*prompt, *result.tokens], temperature=temperature)
    want = [rows[len(prompt) - 1 + at, token].item() for at, token in enumerate(result.tokens)]
    return max((abs(a - b) for a, b in zip(want, result.logprobs, strict=True)), default=0.0)


def request(
    id: str, prompt: Iterable[int], *, rank: float = 0.0, **sampling: Any
) -> s.GenerateRequest:
    return s.GenerateRequest(
        id=id, tokens=tuple(prompt), sampling=s.Sampling(**sampling), rank=rank
    )


@dataclass
class Outcome:
    results: dict[str, s.GenerateResult] = field(default_factory=dict)
    answers: list[s.GenerateResult] = field(default_factory=list)
    replies: list[s.EngineReply] = field(default_factory=list)
    stats: list[s.EngineStats] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [reply for reply in self.replies if isinstance(reply, kind)]


DRIVEN_S = 120.0
"""Maximum seconds of `drive`: a thread that stages weights waits for a busy machine."""


class Seconds:
    """A clock for `drive`: steps take no time, and there is a second between two of
    them.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, *_: object) -> None:
        self.now += 1.0


def drive(
    of: s.EngineSpec,
    requests: Iterable[s.GenerateRequest],
    *,
    at: Mapping[int, Sequence[s.EngineCommand | Callable[[], s.EngineCommand]]] | None = None,
    on: Mapping[type[s.EngineReply], Sequence[s.EngineCommand]] | None = None,
    clock: "Seconds | None" = None,
) -> Outcome:
    """Run an engine on this thread until every request is answered. `at[n]` are further
    commands before its n-th step, `on[kind]` those after its first reply of this kind.

    A `Stats` command is answered between any two steps, so its answer is the clock:
    there is no sleeping and no second thread.
    """
    later, replies = dict(at or {}), dict(on or {})
    expected = len(list(requests := list(requests)))
    further = itertools.chain(*later.values(), *replies.values())
    expected += sum(isinstance(command, s.Add) for command in further)
    outcome = Outcome()
    ticks, deadline = 0, time.monotonic() + DRIVEN_S

    def reply(message: s.EngineReply) -> None:
        nonlocal ticks
        outcome.replies.append(message)
        for command in replies.pop(type(message), ()):
            loop.post(command)
        match message:
            case s.EngineFatal(error=error):
                raise AssertionError(error)
            case s.Generated(result=result):
                outcome.answers.append(result)
                outcome.results.setdefault(result.id, result)
            case s.Sampled(stats=stats):
                outcome.stats.append(stats)
                if ticks:
                    loop.core.planner.check()
                    assert loop.core.live.keys() == loop.core.planner.live.keys()
                if len(outcome.answers) == expected and not later and not replies:
                    loop.post(s.Shutdown())
                    return
                for command in later.pop(ticks, ()):
                    loop.post(command() if callable(command) else command)
                ticks += 1
                assert time.monotonic() < deadline, "the engine does not finish"
                loop.post(s.Stats())
            case _:
                pass

    loop = (
        EngineThread(of, reply)
        if clock is None
        else EngineThread(of, reply, watch=clock.step, clock=clock)
    )
    for each in requests:
        loop.post(s.Add(request=each))
    loop.post(s.Stats())
    loop.run()
    assert len(outcome.answers) == expected
    return outcome


def publish(publisher: Publisher, model: torch.nn.Module, *, version: int) -> WeightManifest:
    return publisher.publish(model.state_dict(), version=version, publication_id=version)


def check_versions(
    prompt: list[int],
    result: s.GenerateResult,
    models: dict[int, torch.nn.Module],
    *,
    temperature: float = 1.0,
) -> None:
    """Assert that each token's log-prob is that of the version in its span, given all
    tokens before it.
    """
    rows = {
        v: oracle_logprobs(m, [*prompt, *result.tokens], temperature=temperature)
        for v, m in models.items()
    }
    expected = [0, *(span.end for span in result.versions[:-1])]
    assert [span.start for span in result.versions] == expected
    assert result.versions[-1].end == len(result.tokens)
    for span in result.versions:
        for at in range(span.start, span.end):
            want = rows[span.version][len(prompt) - 1 + at, result.tokens[at]].item()
            assert abs(want - result.logprobs[at]) <= TOLERANCE
