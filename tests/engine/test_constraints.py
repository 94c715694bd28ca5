"""Constrained decoding: the grammars alone, and turns of a tiny engine that must have a
form.
"""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.constraints import Grammars, Matcher, grammar_of
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError
from tests.support.chats import bpe
from tests.support.engines import limit_compilation
from tests.support.properties import examples
from tests.support.real_gateway import checkpoint, engine, load
from tests.support.tiny_models import oracle_logprobs

END = bpe().token_to_id("<|im_end|>")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}, "steps": {"type": "integer"}},
    "required": ["move", "steps"],
    "additionalProperties": False,
}


def regex(text: str) -> s.Constraint:
    return s.Constraint(kind="regex", text=text)


def forbidden(matcher: Matcher) -> Any:
    """Return which tokens of the vocabulary cannot follow."""
    bits = np.frombuffer(matcher.allowed(), dtype=np.uint8)
    return ~np.unpackbits(bits, bitorder="little").view(np.bool_)


def encode(text: str) -> list[int]:
    return list(bpe().encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory, vocab=bpe().get_vocab_size() + 8)


def nested(levels: int) -> dict[str, Any]:
    """Return a schema of as many parts as 2 to the power of the levels."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


PATTERNS = ["a?b*c", "(left|right) [0-9]{1,3}", r"x/y\n?z", r"[^a]{2}", "é+", r"a\/b"]


@settings(max_examples=examples(100))
@given(st.data())
def test_allowed_tokens_are_those_with_which_the_text_can_match(
    grammars: Grammars, data: st.DataObject
) -> None:
    """Whatever allowed tokens are drawn, the text matches once it may end. After a text
    that matches, no other token than its next one was forbidden.
    """
    pattern = data.draw(st.sampled_from(PATTERNS))
    matcher = grammars.matcher(regex(pattern), ends=[END])
    text, tokens = data.draw(st.from_regex(re.compile(pattern), fullmatch=True)), list[int]()
    for token in encode(text):
        assert not forbidden(matcher)[token], (pattern, text, tokens)
        matcher.feed(token)
        tokens.append(token)
    matcher = grammars.matcher(regex(pattern), ends=[END])
    tokens = []
    for _ in range(12):
        allowed = np.flatnonzero(~forbidden(matcher))
        token = int(data.draw(st.sampled_from(allowed.tolist())))
        if token == END:
            assert re.fullmatch(pattern, bpe().decode(tokens))
            break
        matcher.feed(token)
        tokens.append(token)


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (regex("a(?=b)"), "look-around"),
        (regex("("), "unclosed group"),
        (regex(""), "empty"),
        (regex(r"(\w)\1"), "backreferences are not supported"),
        (s.Constraint(kind="json", text='{"not": {"type": "string"}}'), "Unimplemented keys"),
        (s.Constraint(kind="json", text='{"type": "thing"}'), "Invalid type"),
        (s.Constraint(kind="json", text="{"), "."),
        (
            s.Constraint(kind="json", text='{"type": "integer", "multipleOf": 99991}'),
            "least common multiple of all multipleOf.* at most 10000, got 99991",
        ),
        (
            s.Constraint(kind="json", text='{"anyOf": [{"multipleOf": 97}, {"multipleOf": 10.7}]}'),
            "least common multiple of all multipleOf.* at most 10000, got ",
        ),
        (
            s.Constraint(kind="lark", text=f"start: %json {json.dumps(nested(12))}"),
            "grammar size",
        ),
        (
            s.Constraint(kind="json", text='{"$ref": "http://far.away/schema"}'),
            "retrieving it failed",
        ),
        (s.Constraint(kind="json", text='{"$ref": "#"}'), "references lead back to themselves"),
        (
            s.Constraint(
                kind="json",
                text='{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
            ),
            "references lead back to themselves",
        ),
    ],
)
def test_refuses_what_cannot_be_constrained_in_one_line(
    constraint: s.Constraint, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        grammar_of(constraint)
    assert "\n" not in str(refused.value)


def test_a_schema_may_refer_to_itself_where_a_text_can_begin() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    assert grammar_of(s.Constraint(kind="json", text=json.dumps(tree)))
    either = '{"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}'
    assert grammar_of(s.Constraint(kind="json", text=either))


@pytest.mark.parametrize("step", [7, 0.01, 2.5, 10_000])
def test_multiples_can_be_demanded(grammars: Grammars, step: float) -> None:
    text = json.dumps({"type": "number", "multipleOf": step})
    matcher = grammars.matcher(s.Constraint(kind="json", text=text), ends=[END])
    for token in encode(f"{step * 3:g}"):
        assert not forbidden(matcher)[token]
        matcher.feed(token)
    assert not forbidden(matcher)[END]


def test_a_property_may_have_the_name_of_the_keyword() -> None:
    text = json.dumps({"type": "object", "properties": {"multipleOf": {"multipleOf": 3}}})
    assert grammar_of(s.Constraint(kind="json", text=text))


def test_matchers_of_one_constraint_are_independent(grammars: Grammars) -> None:
    first, second = (grammars.matcher(regex("abc|b"), ends=[END]) for _ in range(2))
    a, b = encode("a")[0], encode("b")[0]
    first.feed(a)
    assert not forbidden(second)[b]
    assert not forbidden(second)[a]
    third = grammars.matcher(regex("abc|b"), ends=[END])
    assert not forbidden(third)[b]


def test_a_token_that_is_not_allowed_is_refused(grammars: Grammars, tmp_path: Path) -> None:
    matcher = grammars.matcher(regex("ab"), ends=[])
    with pytest.raises(ValueError, match=r"sampling\.constraint cannot be met"):
        matcher.feed(encode("c")[0])
    with pytest.raises(ValueError, match="cannot be met"):
        matcher.allowed()
    with pytest.raises(EngineError, match=r"needs a tokenizer, and .* is missing"):
        Grammars(tmp_path, vocab=10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"needs a tokenizer, and .* cannot be used"):
        Grammars(tmp_path, vocab=10)
    with pytest.raises(ValueError, match=r"sampling\.constraint must be null with allowed"):
        s.Sampling(constraint=regex("a"), allowed=(1,))


async def turn(
    directory: Path, *requests: tuple[s.Sampling, s.PartialOutput | None]
) -> list[s.GenerateResult]:
    prompt = tuple(encode("go on"))
    async with engine(directory) as tiny:
        return [
            await tiny.generate(
                s.GenerateRequest(id=str(at), tokens=prompt, sampling=sampling, resumed=resumed)
            )
            for at, (sampling, resumed) in enumerate(requests)
        ]


def constrained(constraint: s.Constraint, **more: Any) -> s.Sampling:
    return s.Sampling(
        constraint=constraint, **{"max_tokens": 40, "stop_token_ids": (END,), "seed": 3, **more}
    )


async def test_turns_have_the_form_and_logprobs_of_the_whole_distribution(
    directory: Path,
) -> None:
    """The log-probs are those that a trainer computes, not those under the mask."""
    json_ = s.Constraint(kind="json", text=json.dumps(SCHEMA))
    wide = {"temperature": 1.0, "max_tokens": 200}
    samplings = [
        *(constrained(regex("[ab]{3}|cd"), seed=seed) for seed in range(4)),
        constrained(regex("[ab]{3}"), temperature=0.0),
        constrained(regex("[ab]{3}"), temperature=0.7, top_k=3),
        *(constrained(json_, **wide, seed=seed) for seed in range(3)),
        s.Sampling(max_tokens=5, seed=3),
    ]
    results = await turn(directory, *((each, None) for each in samplings))
    model = load(directory).eval()
    prompt = encode("go on")
    for sampling, result in zip(samplings, results, strict=True):
        text = bpe().decode([token for token in result.tokens if token != END])
        if sampling.constraint is None:
            assert result.finish is s.FinishReason.LENGTH
        elif sampling.constraint.kind == "regex":
            assert re.fullmatch(sampling.constraint.text, text)
        elif result.finish is s.FinishReason.STOP:
            jsonschema.validate(json.loads(text), SCHEMA)
        if sampling.constraint is not None and result.finish is s.FinishReason.STOP:
            assert result.tokens[-1] == END
        rows = oracle_logprobs(
            model, [*prompt, *result.tokens], temperature=sampling.temperature or 1.0
        )
        wanted = [
            rows[len(prompt) - 1 + at, token].item() for at, token in enumerate(result.tokens)
        ]
        assert result.logprobs == pytest.approx(wanted, abs=1e-4)
    # A forced token is certain under the mask; its log-prob says how likely it was.
    assert min(min(result.logprobs) for result in results) < -3
    assert any(result.finish is s.FinishReason.STOP for result in results[6:9])


@pytest.mark.extended
def test_engines_and_controllers_start_without_the_library() -> None:
    modules = "rollweave.engine.thread, rollweave.runtime.launch, rollweave.rollout.gateway.server"
    program = f"import sys, {modules}; print('llguidance' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert printed.stdout == b"False\n"


async def test_a_constrained_turn_resumes_and_ends_without_a_stop_token(directory: Path) -> None:
    spans = (s.VersionSpan(start=0, end=2, version=0),)
    begun = s.PartialOutput(tokens=tuple(encode("ab")[:2]), logprobs=(-1.0, -1.0), versions=spans)
    wrong = s.PartialOutput(tokens=tuple(encode("xy")[:2]), logprobs=(-1.0, -1.0), versions=spans)
    pattern = constrained(regex("ab[cd]{2}"), stop_token_ids=())
    (resumed,) = await turn(directory, (pattern, begun))
    assert re.fullmatch("ab[cd]{2}", bpe().decode([t for t in resumed.tokens if t != END]))
    assert resumed.resumed_tokens == 2
    refused = await turn(directory, (pattern, wrong), (constrained(regex("a(?=b)")), None))
    assert [one.finish for one in refused] == [s.FinishReason.REFUSED] * 2
    assert refused[0].error.startswith("sampling.constraint cannot be met: ")
    assert refused[1].error.startswith("sampling.constraint cannot be constrained: look")


async def test_turns_go_on_while_a_grammar_is_compiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern takes longer than its bound: it is refused, once all others are done,
    constrained ones among them.
    """
    limit_compilation(monkeypatch)
    hostile = constrained(regex("a?" * 16_000))
    beside = [s.Sampling(max_tokens=30, seed=1), constrained(regex("[ab]{3}"), stop_token_ids=())]
    ended = list[str]()
    async with engine(directory) as tiny:
        started = await tiny.generate(
            s.GenerateRequest(id="first", tokens=(1,), sampling=constrained(regex("[ab]{3}")))
        )
        assert started.finish is s.FinishReason.STOP
        turns = {
            f"{at}": tiny.generate(s.GenerateRequest(id=f"{at}", tokens=(1,), sampling=sampling))
            for at, sampling in enumerate([hostile, *beside])
        }
        for id, turn_ in turns.items():
            turn_.add_done_callback(lambda _, id=id: ended.append(id))
        results = await asyncio.gather(*turns.values())
    assert ended[0] == "1", "no turn without a constraint waits for a grammar"
    assert results[0].finish is s.FinishReason.REFUSED
    assert results[0].error.endswith("it takes too much CPU time")
    assert [one.finish for one in results[1:]] == [s.FinishReason.LENGTH, s.FinishReason.STOP]
