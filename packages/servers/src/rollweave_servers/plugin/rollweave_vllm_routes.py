"""The experts that each token was routed to, from a vLLM server on a CPU.

vLLM returns them with its second model runner only, which needs Triton, and so not on a
CPU. Here its first one calls the same recorder
(`vllm.distributed.aux_output_connector`) at the same places, so that what a server
returns, and in which form, is vLLM's own. Invariant: each position is recorded by the
forward pass that first computes it, or, for a cached prefix, by the pass that filled
the cache.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np


def register() -> None:
    """Let vLLM's model runner for CPUs record routes. Idempotent."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not hasattr(CPUModelRunner, "rollweave_routes"):
        CPUModelRunner.rollweave_routes = None
        _permit(VllmConfig)
        _record(CPUModelRunner)


def _permit(config: Any) -> None:
    """Have vLLM accept the first runner, as it does from platforms with their own."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    verify, is_out_of_tree = config._verify_aux_output_compatibility, platform.is_out_of_tree

    def verified(self: Any) -> None:
        platform.is_out_of_tree = lambda _: True
        try:
            verify(self)
        finally:
            platform.is_out_of_tree = is_out_of_tree

    config._verify_aux_output_compatibility = verified


def _record(runner: Any) -> None:
    initialize, execute, sample = (
        runner.initialize_kv_cache,
        runner.execute_model,
        runner.sample_tokens,
    )

    def initialize_kv_cache(
        self: Any, cache: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        initialize(self, cache, is_profiling, **others)
        if not is_profiling and self.vllm_config.aux_output_config.enabled:
            self.rollweave_routes = get_aux_output_connector(self.model, self.vllm_config, cache)

    def execute_model(self: Any, scheduled: Any, *others: Any) -> Any:
        self.rollweave_pending = None
        if self.rollweave_routes is None:
            return execute(self, scheduled, *others)
        self.rollweave_routes.begin_step(scheduled.aux_output_connector_metadata)
        output = execute(self, scheduled, *others)
        if self.execute_model_state is not None:
            ids = list(self.input_batch.req_ids)
            counts = [scheduled.num_scheduled_tokens[id] for id in ids]
            batch = SimpleNamespace(
                req_ids=ids,
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(ids)].copy(),
            )
            self.rollweave_pending = self.rollweave_routes.prepare_output(batch)
        return output

    def sample_tokens(self: Any, grammar: Any) -> Any:
        pending = self.rollweave_pending
        output = sample(self, grammar)
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.initialize_kv_cache = initialize_kv_cache
    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
