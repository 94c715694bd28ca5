"""Constrained answers of a vLLM server.

vLLM masks the logits with a grammar before it takes any log-prob. Invariant: the
log-prob of a token of a constrained answer is that of the model's full distribution at
the temperature of its request, before the mask, as with the embedded engine. Requests
for which this is not ensured are refused. A constrained answer ends with a stop token
of its request, and not with another end-of-sequence token of the tokenizer. One whose
masks take too long ends with an error: vLLM computes them for all requests in turn.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_TEMPERATURE = 1e-5
"""The temperature below which vLLM takes the most likely token."""

FIRST_S, TOKEN_S = 5.0, 0.02
"""CPU seconds that the masks of one answer may take: `FIRST_S` in all, and `TOKEN_S`
more for each token.
"""

KEPT = "rollweave_unmasked"
"""The attribute of a batch that holds the indices of its constrained rows, and their
logits before the mask.
"""


def register() -> None:
    """Patch vLLM in this process, which may be any of its processes. Idempotent."""
    from vllm.sampling_params import SamplingParams
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.worker import gpu_model_runner

    if hasattr(SamplingParams, KEPT):
        return
    setattr(SamplingParams, KEPT, True)
    _refuse(SamplingParams)
    _end(GuidanceBackend)
    _keep(gpu_model_runner)
    if HAS_TRITON:  # without it, vLLM has only the first model runner
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

        _keep_second(StructuredOutputsWorker, Sampler)


def _refuse(params: Any) -> None:
    """Refuse constrained requests with speculative decoding, where a request has
    several rows of logits in a step, and those of which a reasoning parser would exempt
    the first tokens.
    """
    from vllm.exceptions import VLLMValidationError

    verify = params.verify

    def verified(
        self: Any, model: Any, speculative: Any, structured: Any, *others: Any, **more: Any
    ) -> None:
        if self.structured_outputs is not None and speculative is not None:
            raise VLLMValidationError(
                "a constrained answer needs vLLM without speculative decoding"
            )
        if self.structured_outputs is not None and exempts_reasoning(structured):
            raise VLLMValidationError(
                "a constrained answer needs vLLM with --structured-outputs-config."
                "enable_in_reasoning or without a reasoning parser, got the parser "
                f"{structured.reasoning_parser}"
            )
        verify(self, model, speculative, structured, *others, **more)

    params.verify = verified


def exempts_reasoning(config: Any) -> bool:
    """Return whether vLLM, with this configuration of structured outputs, constrains
    only the tokens after the reasoning.
    """
    return bool(config.reasoning_parser) and not config.enable_in_reasoning


def _keep(module: Any) -> None:
    """Have the first model runner keep the logits of constrained rows."""
    runner = module.GPUModelRunner
    apply, sample = module.apply_grammar_bitmask, runner._sample

    def apply_grammar_bitmask(scheduled: Any, grammar: Any, batch: Any, logits: Any) -> None:
        keep(batch, grammar.structured_output_request_ids, logits)
        apply(scheduled, grammar, batch, logits)

    def sample_rows(self: Any, logits: Any, speculative: Any) -> Any:
        temperatures = self.input_batch.sampling_metadata.temperature
        output = sample(self, logits, speculative)
        restore(self.input_batch, output, temperatures)
        return output

    module.apply_grammar_bitmask, runner._sample = apply_grammar_bitmask, sample_rows


def _keep_second(worker: Any, sampler: Any) -> None:
    """Have the second model runner, which needs Triton, do the same."""
    apply, sample = worker.apply_grammar_bitmask, sampler.__call__

    def apply_grammar_bitmask(
        self: Any, logits: Any, batch: Any, ids: Sequence[str], bitmask: Any
    ) -> None:
        keep(batch, ids, logits)
        apply(self, logits, batch, ids, bitmask)

    def sample_rows(self: Any, logits: Any, batch: Any) -> Any:
        temperatures = self.sampling_states.temperature.gpu[batch.expanded_idx_mapping.long()]
        output = sample(self, logits, batch)
        restore(batch, output, temperatures)
        return output

    worker.apply_grammar_bitmask, sampler.__call__ = apply_grammar_bitmask, sample_rows


def keep(batch: Any, constrained: Sequence[str], logits: Any) -> None:
    """Keep the logits [rows, vocab] of the constrained requests of a batch."""
    ids = set(constrained)
    rows = [row for row, id in enumerate(batch.req_ids) if id in ids]
    if rows:
        setattr(batch, KEPT, (rows, logits[rows].float()))


def restore(batch: Any, output: Any, temperatures: Any) -> None:
    """Replace the log-probs of the constrained tokens that a batch has sampled by those
    before the mask. `temperatures` [rows] are those of the requests, or None if all are
    greedy.
    """
    kept = vars(batch).pop(KEPT, None)
    if kept is None or output.logprobs_tensors is None:
        return
    rows, logits = kept
    if temperatures is not None:
        scales = temperatures[rows]
        logits = logits / scales.masked_fill(scales < MIN_TEMPERATURE, 1.0)[:, None]
    tokens = output.sampled_token_ids[rows].long()
    logprobs = logits.log_softmax(dim=-1).gather(1, tokens)
    # The token may also be among the most likely ones, which other clients ask for.
    found, theirs = output.logprobs_tensors, output.logprobs_tensors.logprobs[rows]
    found.logprobs[rows] = theirs.where(found.logprob_token_ids[rows] != tokens, logprobs)


def _end(backend: Any) -> None:
    """Let a complete answer end with a stop token of its request, and with no other."""
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    class Grammar(GuidanceGrammar):  # type: ignore[misc]
        """A grammar whose text ends with one of `ends`."""

        ends: tuple[int, ...] = ()
        sampled: int = 0
        masks_s: float = 0.0

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            """Return False once no token can continue the text, or its masks have
            taken too long, which ends the request with an error.
            """
            self.sampled += len(tokens)
            if self.masks_s > FIRST_S + TOKEN_S * self.sampled:
                return False
            if tokens and tokens[-1] in self.ends and self.ll_matcher.is_accepting():
                self.terminated = True
                return True
            accepted: bool = super().accept_tokens(request_id, tokens)
            return accepted and not self.ll_matcher.is_error()

        def fill_bitmask(self, bitmask: Any, idx: int) -> None:
            started = time.thread_time()
            super().fill_bitmask(bitmask, idx)
            self.masks_s += time.thread_time() - started
            own = self.ll_tokenizer.eos_token
            if not self.ll_matcher.is_error():
                allow_ends(bitmask[idx], own, self.ends, self.ll_matcher.is_accepting())

    compile_ = backend.compile_grammar

    def compile_grammar(self: Any, kind: Any, text: str, stop_token_ids: Any = None) -> Any:
        grammar = compile_(self, kind, text, stop_token_ids)
        ended = Grammar(
            ll_matcher=grammar.ll_matcher,
            ll_tokenizer=grammar.ll_tokenizer,
            vocab_size=grammar.vocab_size,
        )
        ended.ends = tuple(id for id in stop_token_ids or () if id < grammar.vocab_size)
        return ended

    backend.compile_grammar = compile_grammar


def allow_ends(row: Any, own: int, ends: Sequence[int], complete: bool) -> None:
    """Allow the tokens `ends` in a row of a bitmask, 32 tokens in each number, if the
    text is complete. Forbid `own`, unless it is one of `ends` and the text is complete.
    """
    words = row.numpy().view(np.uint32)
    words[own // 32] &= ~np.uint32(1 << (own % 32))
    for end in ends if complete else ():
        words[end // 32] |= np.uint32(1 << (end % 32))
