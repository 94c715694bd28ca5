"""Measures the engine against transformers' batched `generate`, side by side and interleaved, on random models.

Both sample at temperature 1 from the same prompts and produce the same number of tokens; transformers is spared the log-probs
that the engine gives with every token. Figures carry the model's name as suffix (`_tiny`, `_100m`).
"""

import itertools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rollweave.engine.loop import EngineLoop
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    Abort,
    Add,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    EngineStats,
    Generated,
    GenerateRequest,
    GenerateResult,
    Load,
    LoadFailed,
    Ready,
    Rerank,
    Resume,
    Sampled,
    Sampling,
    Shutdown,
    Stats,
    Suspend,
    Suspended,
)
from rollweave.weights.store import Publisher

CONCURRENCY = (1, 16, 64)
COMPARED = 16
"""Concurrent requests at which the peers are measured too."""
PATIENCE_S = 600.0
"""Longest wait for one reply; a hung engine then raises instead of hanging the bench."""


Reply = TypeVar("Reply", bound=EngineReply)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model, and how long its runs are: prompts of `prompt` tokens on average, `output` tokens each, `repeats` runs."""

    name: str
    config: dict[str, int]
    prompt: int
    output: int
    repeats: int


def subjects(*, quick: bool) -> list[Subject]:
    """The tiny model that the demo trains (hidden 64, 2 layers) and one of 100 million parameters."""
    tiny = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"head_dim": 16, "intermediate_size": 192, "max_position_embeddings": 4096}
    large = {"vocab_size": 32768, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    large |= {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 4096}
    return [
        Subject(name="tiny", config=tiny, prompt=64, output=64 if quick else 128, repeats=3 if quick else 7),
        Subject(name="100m", config=large, prompt=64, output=6 if quick else 32, repeats=1 if quick else 5),
    ]


class Harness:
    """An engine's loop on a thread, with blocking calls."""

    def __init__(self, spec: EngineSpec) -> None:
        self._replies: queue.Queue[EngineReply] = queue.Queue()
        self._loop = EngineLoop(spec, self._replies.put)
        self._done: dict[str, GenerateResult] = {}
        self._thread = threading.Thread(target=self._loop.run, name="bench-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.expect(Ready)
        return self

    def __exit__(self, *_: object) -> None:
        self.post(Shutdown())
        self._thread.join()

    def post(self, *commands: EngineCommand) -> None:
        for command in commands:
            self._loop.post(command)

    def expect(self, kind: type[Reply]) -> Reply:
        """The next reply of this kind; results that come first are kept. Raises EngineError for a failing or silent engine."""
        while True:
            try:
                reply = self._replies.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise EngineError(f"the engine did not answer with {kind.__name__} in {PATIENCE_S} s") from None
            if isinstance(reply, EngineFatal | LoadFailed):
                raise EngineError(reply.error)
            if isinstance(reply, Generated):
                self._done[reply.result.id] = reply.result
            if isinstance(reply, kind):
                return reply

    def stats(self) -> EngineStats:
        self.post(Stats())
        return self.expect(Sampled).stats

    def results(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """The results of requests that were added. Raises EngineError for one that is an error."""
        while any(request.id not in self._done for request in requests):
            self.expect(Generated)
        found = [self._done.pop(request.id) for request in requests]
        for result in found:
            if result.error:
                raise EngineError(result.error)
        return found

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.post(*(Add(request=request) for request in requests))
        return self.results(requests)


def bench_engine(*, quick: bool) -> dict[str, Any]:
    """`{"figures": …, "conditions": …}` of the bench contract: tokens/s, ratios to peers, cache hits, log-prob error."""
    figures: dict[str, float | None] = {}
    conditions: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": "float32", "sampling": "temperature 1"}
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for subject in subjects(quick=quick):
        figures |= {f"{name}_{subject.name}": value for name, value in measure(subject).items()}
        conditions[subject.name] = subject.config | {
            "prompt_tokens": subject.prompt,
            "output_tokens": subject.output,
            "repeats": subject.repeats,
        }
    missing = "vllm is not installed" if find_spec("vllm") is None else "vllm is installed, but no comparison is built yet"
    conditions["ratio_to_vllm_16"] = missing
    return {"figures": figures, "conditions": conditions}


def measure(subject: Subject) -> dict[str, float | None]:
    """All figures of one model, without its suffix. Raises EngineError where the engine fails."""
    threads = torch.get_num_threads()
    model = _random_model(subject)
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        model.save_pretrained(scratch)
        spec = EngineSpec(id=EngineId("bench"), model=scratch, threads=threads, kv_tokens=32768)
        with Harness(spec) as engine:
            measured = _speed(engine, model, subject)
            measured["prefix_hit_rate"] = _conversation(engine, subject)
        measured["logprob_error_max"] = _worst_logprob(spec, model, subject, Path(scratch))
    measured["ratio_to_vllm_16"] = None
    return measured


def _random_model(subject: Subject) -> Any:
    torch.manual_seed(0)
    rope: Any = {"rope_type": "default", "rope_theta": 10000.0}
    settings: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    model: Any = Qwen3ForCausalLM(Qwen3Config(rope_parameters=rope, **(settings | subject.config)))
    return model.eval()


def _prompt(subject: Subject, seed: int, *, length: int | None = None) -> tuple[int, ...]:
    """Token ids that no other seed shares a block of. Lengths vary by half around the subject's."""
    generator = torch.Generator().manual_seed(seed)
    count = length or int(torch.randint(subject.prompt // 2, subject.prompt * 3 // 2 + 1, (), generator=generator))
    return tuple(torch.randint(1, subject.config["vocab_size"], (count,), generator=generator).tolist())


def _requests(subject: Subject, count: int, seed: int) -> list[GenerateRequest]:
    sampling = Sampling(temperature=1.0, max_tokens=subject.output, seed=seed)
    return [
        GenerateRequest(id=f"{seed}.{i}", tokens=_prompt(subject, 1000 * seed + i), sampling=sampling) for i in range(count)
    ]


def _speed(engine: Harness, model: Any, subject: Subject) -> dict[str, float | None]:
    """Output tokens per second at each concurrency, prefill included; at one of them against transformers, interleaved."""
    seeds = itertools.count(1)
    rates: dict[int, list[float]] = {count: [] for count in CONCURRENCY}
    ratios: list[float] = []
    for repeat in range(subject.repeats + 1):
        for count in CONCURRENCY:
            if repeat == 0 and count != COMPARED:
                continue
            requests = _requests(subject, count, next(seeds))
            started = time.perf_counter()
            engine.generate(requests)
            rate = count * subject.output / (time.perf_counter() - started)
            if count == COMPARED:
                peer = _transformers_rate(model, requests, subject.output)
                if repeat:
                    ratios.append(rate / peer)
            if repeat:  # the first round warms both up
                rates[count].append(rate)
    measured: dict[str, float | None] = {f"tokens_per_s_{count}": statistics.median(rates[count]) for count in CONCURRENCY}
    return measured | {f"ratio_to_hf_{COMPARED}": statistics.median(ratios)}


@torch.inference_mode()
def _transformers_rate(model: Any, requests: Sequence[GenerateRequest], output: int) -> float:
    longest = max(len(request.tokens) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
        mask[row, longest - len(request.tokens) :] = 1
    started = time.perf_counter()
    made = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=output, max_new_tokens=output)
    elapsed = time.perf_counter() - started
    assert made.shape[1] == longest + output
    return len(requests) * output / elapsed


def _conversation(engine: Harness, subject: Subject) -> float:
    """Share of the prompt tokens of a 20-turn conversation that come from the prefix cache."""
    context = _prompt(subject, 7, length=subject.prompt)
    prompt = cached = 0
    for turn in range(20):
        sampling = Sampling(max_tokens=min(24, subject.output), seed=turn)
        request = GenerateRequest(id=f"turn{turn}", tokens=context, sampling=sampling)
        (result,) = engine.generate([request])
        prompt += len(context)
        cached += result.cached_tokens
        context = (*context, *result.tokens, *_prompt(subject, 100 + turn, length=16))
    return cached / prompt


def _worst_logprob(spec: EngineSpec, model: Any, subject: Subject, scratch: Path) -> float:
    """Largest log-prob error against full forward passes, in a batch that is preempted, aborted, suspended and updated."""
    updated = _random_model(subject)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    requests = _requests(subject, COMPARED, 999)
    # Half the slots, and KV for about half of those: low ranks lose their slots to high ones, and then their blocks.
    tokens = sum(len(request.tokens) + subject.output for request in requests) // 4 // spec.block_tokens * spec.block_tokens
    tight = msgspec.structs.replace(spec, max_slots=COMPARED // 2, kv_tokens=tokens)
    with Harness(tight) as engine, closing(Publisher(scratch)) as publisher:
        engine.post(*(Add(request=request) for request in requests))
        _await_output(engine, COMPARED)
        engine.post(*(Rerank(id=request.id, rank=float(i)) for i, request in enumerate(requests)))
        _await_output(engine, 2 * COMPARED)
        engine.post(Abort(id=requests[0].id), Suspend())
        engine.expect(Suspended)
        engine.post(Load(manifest=publisher.publish(updated.state_dict(), version=1, weights_id=1)), Resume())
        results = engine.results(requests)
        stats = engine.stats()
    if not (stats.preemptions and stats.recomputed_tokens and any(len(result.versions) > 1 for result in results)):
        raise EngineError(f"the run was to preempt, to recompute and to update in flight, got {stats}")
    models = {-1: model, 1: updated}
    return max(_logprob_error(models, request, result) for request, result in zip(requests, results, strict=True))


def _await_output(engine: Harness, tokens: int) -> None:
    """Wait until the engine has sampled `tokens` tokens in all. Statistics are answered between two steps."""
    while engine.stats().output_tokens < tokens:
        pass


@torch.inference_mode()
def _logprob_error(models: dict[int, Any], request: GenerateRequest, result: GenerateResult) -> float:
    ids = torch.tensor([[*request.tokens, *result.tokens]])
    worst = 0.0
    for span in result.versions:
        rows = torch.log_softmax(models[span.version](ids).logits[0].float(), dim=-1)
        for at in range(span.start, span.end):
            expected = rows[len(request.tokens) + at - 1, result.tokens[at]].item()
            worst = max(worst, abs(expected - result.logprobs[at]))
    return worst
