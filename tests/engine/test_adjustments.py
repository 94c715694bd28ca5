"""Adjusted rows agree with a slow reference of one row, and a tiny engine reports the
likeliest tokens and honors stops.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.sampler import pack, sample
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import Adjustments, FinishReason, GenerateRequest, Sampling
from tests.support.properties import examples
from tests.support.real_gateway import checkpoint, engine, load

VOCAB = 9
CPU = torch.device("cpu")
ENDS = frozenset({1, 2})


@dataclass
class Entry:
    tokens: list[int]


@dataclass
class State:
    request: GenerateRequest
    entry: Entry
    prompt_tokens: int
    stop_ids: frozenset[int] = field(default=ENDS)


def reference(logits: list[float], state: State) -> list[float]:
    """Return the probabilities from which a row is sampled, term by term."""
    sampling, tokens = state.request.sampling, state.entry.tokens
    adjustments, output = sampling.adjustments or Adjustments(), tokens[state.prompt_tokens :]
    values = list(logits)
    for token, bias in adjustments.bias:
        values[token] += bias
    for token in range(VOCAB):
        if token in tokens:
            factor = adjustments.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        count = output.count(token)
        values[token] -= adjustments.frequency_penalty * count
        values[token] -= adjustments.presence_penalty * (count > 0)
    if len(output) < adjustments.min_tokens:
        for token in state.stop_ids:
            values[token] = -math.inf
    for word in adjustments.banned:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            values[word[-1]] = -math.inf
    chances = torch.softmax(torch.tensor(values) / sampling.temperature, dim=0)
    chances[chances < adjustments.min_p * chances.max()] = 0
    return (chances / chances.sum()).tolist()


numbers = st.floats(-2, 2, width=32).filter(lambda number: number == 0 or abs(number) > 0.01)
tokens = st.integers(0, VOCAB - 1)
adjustments = st.builds(
    Adjustments,
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    bias=st.lists(st.tuples(tokens, numbers), max_size=2, unique_by=lambda pair: pair[0]).map(
        tuple
    ),
    banned=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
)
states = st.builds(
    lambda adjusted, temperature, prompt, output: State(
        GenerateRequest(
            id="r",
            tokens=tuple(prompt),
            sampling=Sampling(temperature=temperature, adjustments=adjusted),
        ),
        Entry(prompt + output),
        len(prompt),
    ),
    st.none() | adjustments,
    st.sampled_from([1.0, 0.5, 2.0]),
    st.lists(tokens, min_size=1, max_size=4),
    st.lists(tokens, max_size=4),
)


@settings(max_examples=examples(150))
@given(st.lists(states, min_size=1, max_size=3), st.integers(0, 1000), st.integers(1, 3))
def test_rows_are_sampled_as_one_by_one(rows: list[State], seed: int, steps: int) -> None:
    """Also if the rows stay the same for some steps, and only their tokens grow."""
    params = pack([row.request.sampling for row in rows], vocab=VOCAB, device=CPU, states=rows)
    for step in range(steps):
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed + step))
        sampled, logprobs, _ = sample(logits.clone(), [5 + step] * len(rows), params)
        draw = params.draws.at([5 + step] * len(rows))[:, 0].tolist()
        for row, state in enumerate(rows):
            expected = reference(logits[row].tolist(), state)
            low = sum(expected[: sampled[row]])
            assert low - 1e-4 <= draw[row] <= low + expected[sampled[row]] + 1e-4
            temperature = state.request.sampling.temperature
            whole = torch.log_softmax(logits[row] / temperature, dim=0)
            assert logprobs[row] == pytest.approx(whole[sampled[row]].item(), abs=1e-5)
            state.entry.tokens.append(sampled[row])


def test_a_row_without_a_token_left_is_marked() -> None:
    banned = tuple((token,) for token in range(VOCAB))
    wanted = Sampling(adjustments=Adjustments(banned=banned))
    rows = [
        State(GenerateRequest(id="r", tokens=(0,), sampling=each), Entry([0]), 1)
        for each in (wanted, Sampling())
    ]
    params = pack([row.request.sampling for row in rows], vocab=VOCAB, device=CPU, states=rows)
    _, logprobs, _ = sample(torch.randn(2, VOCAB), [1, 1], params)
    assert logprobs[0] == -math.inf
    assert math.isfinite(logprobs[1])


async def test_an_engine_reports_and_adjusts(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    model, prompt = load(directory), (5, 6, 7, 8)

    async with engine(directory) as tiny:

        async def ask(max_tokens: int = 6, **more: Any) -> Any:
            fields = {name: more.pop(name) for name in ("top_logprobs",) if name in more}
            fields |= {"prompt_logprobs": more.pop("prompt_logprobs", False)}
            fields |= {"logprob_ids": more.pop("logprob_ids", ())}
            sampling = Sampling(temperature=0.0, max_tokens=max_tokens, **more)
            return await tiny.generate(
                GenerateRequest(id="r", tokens=prompt, sampling=sampling, **fields)
            )

        plain = await ask()
        seen = await ask(top_logprobs=3, logprob_ids=(9,), prompt_logprobs=True)
        assert seen.tokens == plain.tokens
        assert (plain.top_logprobs, plain.prompt_top_logprobs) == ((), ())
        ids = torch.tensor([[*prompt, *seen.tokens]])
        whole = torch.log_softmax(model(ids).logits[0].detach(), dim=-1)
        for place, report in enumerate((*seen.prompt_top_logprobs, *seen.top_logprobs)):
            values, tokens = whole[place].topk(3)
            assert [token for token, _ in report[:3]] == tokens.tolist()
            assert [value for _, value in report[:3]] == pytest.approx(values.tolist(), abs=1e-3)
        assert [report[3][0] for report in seen.top_logprobs] == [9] * 6

        first, second = plain.tokens[:2]
        stopped = await ask(stop_token_ids=(second,))
        assert (stopped.finish, len(stopped.tokens)) == (FinishReason.STOP, 2)
        least = Adjustments(min_tokens=4)
        late = await ask(stop_token_ids=(second,), adjustments=least)
        assert second not in late.tokens[:4]
        biased = await ask(adjustments=Adjustments(bias=((77, 100.0),), banned=((77, 77),)))
        assert biased.tokens[0] == 77
        assert 77 not in biased.tokens[1:2]
        with pytest.raises(EngineError, match=r"bad_words must be in \[0, \d+\), got 99999"):
            await ask(adjustments=Adjustments(banned=((99999,),)))
        every = tuple((token,) for token in range(whole.shape[1]))
        with pytest.raises(EngineError, match="must leave a token that can be sampled"):
            await ask(adjustments=Adjustments(banned=every))
        assert (await ask()).tokens == plain.tokens
        assert first
