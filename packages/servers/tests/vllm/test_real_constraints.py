"""Constrained turns of a real vLLM server (`make test-vllm`)."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import msgspec
import pytest

from packages.servers.tests.server_engines import Weights, started
from rollweave.engine.clients.client import EngineClient
from rollweave.schema import serving as s
from rollweave.weights.checkpoint import read_tensors_of
from rollweave.weights.publication import publish
from tests.support.chats import bpe
from tests.support.engines import needs_vllm, vllm_spec
from tests.support.real_gateway import checkpoint, load
from tests.support.tiny_models import oracle_logprobs

pytestmark = list(needs_vllm)

END = bpe().token_to_id("<|im_end|>")
PROMPT = tuple(bpe().encode("go on", add_special_tokens=False).ids)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}, "steps": {"type": "integer"}},
    "required": ["move", "steps"],
    "additionalProperties": False,
}
JSON = s.Constraint(kind="json", text=json.dumps(SCHEMA))
LETTERS = s.Constraint(kind="regex", text="[ab]{3}/?")
PARSES = ("--reasoning-parser", "hunyuan_a13b")
"""Arguments of a server for which the reasoning of these answers never ends."""

LONG = s.Constraint(kind="regex", text="[ab]{400}")


def request(id: str, constraint: s.Constraint | None, **more: Any) -> s.GenerateRequest:
    sampling = s.Sampling(
        constraint=constraint, **{"max_tokens": 60, "stop_token_ids": (END,), "seed": 3, **more}
    )
    return s.GenerateRequest(id=id, tokens=PROMPT, sampling=sampling)


def text_of(result: s.GenerateResult) -> str:
    return str(bpe().decode([token for token in result.tokens if token != END]))


def expected(path: Path, asked: s.GenerateRequest, tokens: Sequence[int]) -> list[float]:
    """Return the tokens' log-probs by transformers, which knows no mask."""
    temperature = asked.sampling.temperature or 1.0
    rows = oracle_logprobs(load(path).eval(), [*PROMPT, *tokens], temperature=temperature)
    return [rows[len(PROMPT) - 1 + at, token].item() for at, token in enumerate(tokens)]


@pytest.mark.parametrize("scaled", [False, True], ids=["raw", "processed"])
async def test_answers_have_the_form_and_logprobs_of_the_whole_distribution(
    tmp_path: Path, scaled: bool
) -> None:
    """At every temperature that such a run has, beside turns without a constraint, and
    also if the server parses reasoning.
    """
    directory = tmp_path / "model"
    directory.mkdir()
    model = cast(Weights, SimpleNamespace(model=checkpoint(directory, head_dim=32)))
    either = f'start: "<tool_call>" /(?s:.*)/ | answer\nanswer: %json {JSON.text}'
    asked = [
        *(request(f"a{seed}", LETTERS, seed=seed) for seed in range(3)),
        request("greedy", LETTERS, temperature=0.0),
        request("json", JSON, temperature=0.0),
        request("long json", JSON, max_tokens=200),
        request("call", s.Constraint(kind="lark", text=either)),
        request("free", None, max_tokens=12),
    ]
    if scaled:
        asked += [
            request("cold", LETTERS, temperature=0.7),
            request("hot json", JSON, temperature=1.7, max_tokens=200),
        ]
    spec = vllm_spec(scaled_logprobs=scaled)
    if scaled:
        spec = msgspec.structs.replace(spec, args=PARSES)
    async with started(model, tmp_path, spec) as (engine, _):
        results = await asyncio.gather(*(engine.generate(each) for each in asked))
        for one, result in zip(asked, results, strict=True):
            text, constraint = text_of(result), one.sampling.constraint
            if constraint is LETTERS:
                assert result.finish is s.FinishReason.STOP
                assert result.tokens[-1] == END
                assert re.fullmatch(constraint.text, text), text
            elif constraint is JSON and result.finish is s.FinishReason.STOP:
                jsonschema.validate(json.loads(text), SCHEMA)
            elif constraint is JSON:
                assert text.lstrip().startswith("{")
            wanted = expected(directory, one, result.tokens)
            assert result.logprobs == pytest.approx(wanted, abs=1e-4), one.id
        # a forced token is certain under the mask
        assert min(min(result.logprobs) for result in results[:3]) < -3
        await a_turn_has_the_logprobs_of_each_version(engine, directory)
        await a_turn_starts_over(engine)
        bad = s.Constraint(kind="json", text='{"not": {}}')
        await is_refused(engine, bad, r"sampling\.constraint cannot be constrained")
        await is_refused(engine, s.Constraint(kind="regex", text="a(?=b)"), "look-around")
        assert (await engine.generate(request("after", LETTERS))).finish is s.FinishReason.STOP


async def is_refused(engine: EngineClient, constraint: s.Constraint, why: str) -> None:
    result = await engine.generate(request("refused", constraint))
    assert (result.finish, result.tokens) == (s.FinishReason.REFUSED, ())
    assert re.search(why, result.error), result.error


async def a_turn_has_the_logprobs_of_each_version(engine: EngineClient, directory: Path) -> None:
    """Change the weights in the middle of a constrained turn."""
    other = directory.parent / "other"
    other.mkdir()
    checkpoint(other, head_dim=32, seed=5)
    with publish(dict(read_tensors_of(other)), version=1, publication_id=1) as publication:
        await engine.stage(publication.manifest)
        asked = request("both", LONG, max_tokens=390)
        turn = engine.generate(asked)
        await engine.generate(request("first", LETTERS, max_tokens=2))
        await engine.suspend()
        await engine.load(publication.manifest)
        engine.resume()
        result = await turn
    assert set(text_of(result)) == {"a", "b"}
    before, after = result.versions
    assert (before.version, after.version) == (0, 1)
    for span, path in ((before, directory), (after, other)):
        wanted = expected(path, asked, result.tokens)[span.start : span.end]
        assert result.logprobs[span.start : span.end] == pytest.approx(wanted, abs=1e-4)


async def a_turn_starts_over(engine: EngineClient) -> None:
    """The grammar of a turn begins with its first sampled token, so tokens of another
    engine are not continued.
    """
    tokens = tuple(bpe().encode("ab", add_special_tokens=False).ids)
    spans = (s.VersionSpan(start=0, end=len(tokens), version=1),)
    begun = s.PartialOutput(tokens=tokens, logprobs=(-1.0,) * len(tokens), versions=spans)
    asked = request("again", LETTERS)
    whole = s.GenerateRequest(id="again", tokens=PROMPT, sampling=asked.sampling, resumed=begun)
    result = await engine.generate(whole)
    assert result.resumed_tokens == 0
    assert re.fullmatch(LETTERS.text, text_of(result))


async def test_a_server_that_would_exempt_the_reasoning_constrains_nothing(tmp_path: Path) -> None:
    """Its arguments replace the setting that a run gives it."""
    directory = tmp_path / "model"
    directory.mkdir()
    model = cast(Weights, SimpleNamespace(model=checkpoint(directory, head_dim=32)))
    args = (*PARSES, "--structured-outputs-config", json.dumps({"backend": "guidance"}))
    spec = msgspec.structs.replace(vllm_spec(), args=args)
    async with started(model, tmp_path, spec) as (engine, _):
        await is_refused(engine, LETTERS, r"enable_in_reasoning .* the parser hunyuan_a13b")
        assert (await engine.generate(request("free", None, max_tokens=3))).tokens
