"""Constrained turns of vLLM, without vLLM: what is requested of it, and the parts of
the plug-in that need nothing of it.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from rollweave.engine.clients.dialects import Vllm
from rollweave.engine.clients.streams import remaining_request
from rollweave.engine.matchers import lark_of
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    Constraint,
    GenerateRequest,
    PartialOutput,
    Sampling,
    VersionSpan,
)
from rollweave_servers.process import PLUGIN
from rollweave_servers.vllm import OwnVllm

END, OWN = 33, 31
REGEX = Constraint(kind="regex", text="a/b|[0-9]+")
SCHEMA = Constraint(kind="json", text='{"type": "integer"}')


def request(constraint: Constraint | None, **more: Any) -> GenerateRequest:
    return GenerateRequest(id="r", tokens=(1, 2), sampling=Sampling(constraint=constraint, **more))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("rollweave_vllm_constraints")


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        (REGEX, r"start: /a\/b|[0-9]+/"),
        (SCHEMA, 'start: %json {"type": "integer"}'),
    ],
)
def test_vllm_gets_the_grammar_of_the_embedded_engine(constraint: Constraint, grammar: str) -> None:
    dialect = OwnVllm(version=0, stop_ids=(END,))
    params = dialect.fields(request(constraint))["sampling_params"]
    assert params["structured_outputs"] == {"grammar": grammar}
    assert params["stop_token_ids"] == [END]
    assert "structured_outputs" not in dialect.fields(request(None))["sampling_params"]
    wrong, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    assert not wrong


def test_a_grammar_stays_as_it_is() -> None:
    text = 'start: "<call>" /(?s:.*)/'
    assert lark_of(Constraint(kind="lark", text=text)) == text


def test_a_constraint_needs_a_token_that_ends_the_turn() -> None:
    with pytest.raises(EngineError, match="needs a token that ends the turn"):
        OwnVllm(version=0, stop_ids=()).fields(request(REGEX))


def test_a_server_without_the_plugin_takes_no_constraint() -> None:
    with pytest.raises(EngineError, match=r"sampling\.constraint cannot be expressed"):
        Vllm().fields(request(REGEX))


def test_a_constrained_turn_starts_over() -> None:
    spans = (VersionSpan(start=0, end=1, version=0),)
    resumed = PartialOutput(tokens=(5,), logprobs=(-1.0,), versions=spans)
    for constraint, tokens in ((REGEX, (1, 2)), (None, (1, 2, 5))):
        asked = GenerateRequest(
            id="r", tokens=(1, 2), sampling=Sampling(constraint=constraint), resumed=resumed
        )
        rest = remaining_request(asked)
        assert isinstance(rest, GenerateRequest)
        assert (rest.tokens, rest.resumed) == (tokens, None)


@pytest.mark.parametrize(
    ("constrained", "speculative", "parser", "whole", "words"),
    [
        (True, None, "", False, ""),
        (True, None, "qwen3", True, ""),
        (False, object(), "qwen3", False, ""),
        (True, object(), "", False, "without speculative decoding"),
        (True, None, "qwen3", False, r"enable_in_reasoning .* got the parser qwen3"),
    ],
)
def test_a_server_that_would_not_constrain_each_token_refuses(
    plugin: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    constrained: bool,
    speculative: object,
    parser: str,
    whole: bool,
    words: str,
) -> None:
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMValidationError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    seen = []

    class Params:
        structured_outputs = object() if constrained else None

        def verify(self, *arguments: object) -> None:
            seen.append(arguments)

    plugin._refuse(Params)
    config = SimpleNamespace(reasoning_parser=parser, enable_in_reasoning=whole)
    asked = ("model", speculative, config, "tokenizer")
    if words:
        with pytest.raises(ValueError, match=words):
            Params().verify(*asked)
    else:
        Params().verify(*asked)
    assert seen == ([] if words else [asked])


@pytest.mark.parametrize("greedy", [False, True])
def test_tokens_get_the_logprobs_of_the_logits_before_the_mask(
    plugin: ModuleType, greedy: bool
) -> None:
    """In the constrained rows of a batch alone, each at its temperature; 0 counts as
    1.
    """
    logits = torch.randn(4, 40)
    before = logits.clone()
    batch = SimpleNamespace(req_ids=["a", "b", "c", "d"])
    plugin.keep(batch, ["d", "b", "gone"], logits)
    logits[[1, 3], :30] = float("-inf")
    tokens = torch.tensor([[3], [35], [5], [36]], dtype=torch.int32)
    theirs = torch.full((4, 3), -7.0)
    listed = torch.tensor([[3, 35, 3], [35, 36, 35], [5, 36, 5], [36, 36, 3]])
    temperatures = None if greedy else torch.tensor([2.0, 0.5, 1.0, 0.0])
    output = SimpleNamespace(
        sampled_token_ids=tokens,
        logprobs_tensors=SimpleNamespace(logprobs=theirs, logprob_token_ids=listed),
    )
    plugin.restore(batch, output, temperatures)
    scales = torch.tensor([1.0, 1.0 if greedy else 0.5, 1.0, 1.0])
    wanted = (before / scales[:, None]).log_softmax(-1).gather(1, tokens.long())[:, 0]
    expected = torch.full((4, 3), -7.0)
    for row in (1, 3):
        expected[row, listed[row] == tokens[row]] = wanted[row]
    assert torch.allclose(theirs, expected)
    theirs[:] = -7.0  # the next step of the batch has no constrained row
    plugin.restore(batch, output, temperatures)
    assert set(theirs.ravel().tolist()) == {-7.0}


def test_the_second_model_runner_is_hooked_at_the_same_places(plugin: ModuleType) -> None:
    """With the signatures of vLLM 0.32, where it needs Triton and cannot run here."""

    class Worker:
        def apply_grammar_bitmask(
            self, logits: torch.Tensor, batch: Any, ids: list[str], bitmask: Any
        ) -> None:
            logits[bitmask] = float("-inf")

    class Sampler:
        sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=torch.tensor([9.0, 0.5])))

        def __call__(self, logits: torch.Tensor, batch: Any) -> Any:
            logprobs = logits.log_softmax(-1).max(dim=-1, keepdim=True)
            return SimpleNamespace(
                sampled_token_ids=logprobs.indices,
                logprobs_tensors=SimpleNamespace(
                    logprobs=logprobs.values, logprob_token_ids=logprobs.indices
                ),
            )

    plugin._keep_second(Worker, Sampler)
    logits = torch.randn(1, 8)
    batch = SimpleNamespace(req_ids=["r"], expanded_idx_mapping=torch.tensor([1]))
    wanted = (logits / 0.5).log_softmax(-1)
    Worker().apply_grammar_bitmask(logits, batch, ["r"], torch.tensor([[True] * 4 + [False] * 4]))
    output = Sampler()(logits, batch)
    token = int(output.sampled_token_ids)
    assert token >= 4
    assert float(output.logprobs_tensors.logprobs) == pytest.approx(float(wanted[0, token]))


@pytest.mark.parametrize("complete", [False, True])
def test_a_complete_answer_ends_with_its_own_stop_tokens(
    plugin: ModuleType, complete: bool
) -> None:
    row = torch.tensor([-1, 0], dtype=torch.int32)
    plugin.allow_ends(row, OWN, [END, 63], complete)
    bits = [(int(row[at // 32]) >> (at % 32)) & 1 for at in range(64)]
    assert bits[:31] == [1] * 31
    assert [at for at in range(31, 64) if bits[at]] == ([END, 63] if complete else [])
    plugin.allow_ends(row, OWN, [OWN], complete=True)
    assert (int(row[0]) >> 31) & 1


def test_an_answer_whose_masks_take_too_long_ends(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grammar:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            return True

        def fill_bitmask(self, bitmask: Any, idx: int) -> None:
            clock[0] += 3.0

    class Backend:
        def compile_grammar(self, kind: Any, text: str, stops: Any = None) -> Grammar:
            matcher = SimpleNamespace(is_error=lambda: False, is_accepting=lambda: False)
            tokens = SimpleNamespace(eos_token=OWN)
            return Grammar(ll_matcher=matcher, ll_tokenizer=tokens, vocab_size=64)

    clock, name = [0.0], "vllm.v1.structured_output.backend_guidance"
    for at in range(4):
        module = ".".join(name.split(".")[: at + 1])
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    vars(sys.modules[name])["GuidanceGrammar"] = Grammar
    monkeypatch.setattr(plugin.time, "thread_time", lambda: clock[0])
    plugin._end(Backend)
    grammar = Backend().compile_grammar("grammar", "start: /a/", [END])
    row = torch.zeros(1, 2, dtype=torch.int32)
    answers = []
    for _ in range(3):
        grammar.fill_bitmask(row, 0)
        answers.append(grammar.accept_tokens("r", [1]))
    assert answers == [True, False, False]


def test_the_first_model_runner_is_hooked_at_the_same_places(plugin: ModuleType) -> None:
    """With the signatures of vLLM 0.32: its temperatures are those before the step."""

    def mask(scheduled: Any, grammar: Any, batch: Any, logits: torch.Tensor) -> None:
        assert (scheduled, batch) == ("scheduled", given)
        logits[:, :4] = float("-inf")

    class Runner:
        def _sample(self, logits: torch.Tensor, speculative: Any) -> Any:
            assert speculative == "none"
            self.input_batch.sampling_metadata = None
            logprobs = logits.log_softmax(-1).max(dim=-1, keepdim=True)
            return SimpleNamespace(
                sampled_token_ids=logprobs.indices,
                logprobs_tensors=SimpleNamespace(
                    logprobs=logprobs.values, logprob_token_ids=logprobs.indices
                ),
            )

    module: Any = SimpleNamespace(GPUModelRunner=Runner, apply_grammar_bitmask=mask)
    plugin._keep(module)
    logits = torch.randn(1, 8)
    metadata = SimpleNamespace(temperature=torch.tensor([0.5]))
    given = SimpleNamespace(req_ids=["r"], sampling_metadata=metadata)
    wanted = (logits / 0.5).log_softmax(-1)
    grammar = SimpleNamespace(structured_output_request_ids=["r"])
    module.apply_grammar_bitmask("scheduled", grammar, given, logits)
    runner: Any = Runner()
    runner.input_batch = given
    output = runner._sample(logits, "none")
    token = int(output.sampled_token_ids)
    assert token >= 4
    assert float(output.logprobs_tensors.logprobs) == pytest.approx(float(wanted[0, token]))


def test_an_answer_ends_with_a_stop_token_of_its_request_alone(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"error": False, "accepts": False}

    class Grammar:
        terminated = False

        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            seen.append((request_id, tokens))
            return tokens != [9]

        def fill_bitmask(self, bitmask: Any, idx: int) -> None:
            bitmask[idx] = -1

    class Backend:
        def compile_grammar(self, kind: Any, text: str, stops: Any = None) -> Grammar:
            assert (kind, text) == ("grammar", "start: /a/")
            matcher = SimpleNamespace(
                is_error=lambda: state["error"], is_accepting=lambda: state["accepts"]
            )
            tokens = SimpleNamespace(eos_token=OWN)
            return Grammar(ll_matcher=matcher, ll_tokenizer=tokens, vocab_size=63)

    seen, name = list[Any](), "vllm.v1.structured_output.backend_guidance"
    for at in range(4):
        module = ".".join(name.split(".")[: at + 1])
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    vars(sys.modules[name])["GuidanceGrammar"] = Grammar
    plugin._end(Backend)
    assert Backend().compile_grammar("grammar", "start: /a/").ends == ()
    grammar = Backend().compile_grammar("grammar", "start: /a/", [END, 62, 63, 99])
    assert grammar.ends == (END, 62), "those of the model's vocabulary"
    assert grammar.vocab_size == 63
    row = torch.zeros(2, 2, dtype=torch.int32)
    for accepts, error, words in (
        (False, False, [0x7FFFFFFF, -1]),
        (True, False, [0x7FFFFFFF, -1]),
        (False, True, [-1, -1]),
    ):
        state |= {"accepts": accepts, "error": error}
        grammar.fill_bitmask(row, 1)
        assert row.tolist() == [[0, 0], words]
    state |= {"accepts": False, "error": False}
    assert grammar.accept_tokens("r", [END]), "the text goes on"
    assert not grammar.terminated
    assert not grammar.accept_tokens("r", [9])
    assert grammar.accept_tokens("r", [])
    state["accepts"] = True
    assert grammar.accept_tokens("r", [5])
    assert not grammar.terminated
    assert grammar.accept_tokens("r", [5, END])
    assert grammar.terminated
    assert seen == [("r", [END]), ("r", [9]), ("r", []), ("r", [5])]
    state |= {"accepts": False, "error": True}
    assert not grammar.accept_tokens("r", [5])
