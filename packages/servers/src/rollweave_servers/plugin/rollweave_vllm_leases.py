"""A vLLM server that its user starts: its start, and what it reports of itself.

`python rollweave_vllm_leases.py ARGUMENT…` starts vLLM's OpenAI server with these
arguments and those that an engine needs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import rollweave_leases
from rollweave_vllm import MAIN, NAME, SERVER, TOKEN, register_spans, rerank

OPTIONS = (
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
    "--scheduling-policy=priority",
    "--scheduler-cls=rollweave_vllm_scheduler.PreemptingScheduler",
    f"--weight-transfer-config={json.dumps({'backend': NAME})}",
    "--structured-outputs-config="
    f"{json.dumps({'backend': 'guidance', 'enable_in_reasoning': True})}",
    "--middleware=rollweave_vllm_leases.LeasedGuard",
)
"""Arguments without which the server cannot be an engine; the user's come last."""


def serve_alone() -> None:
    """Run a server that belongs to no run, in this process."""
    rollweave_leases.require_token(TOKEN)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),  # of the processes that it starts
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no control routes
        MAIN: str(os.getpid()),
    }
    if "VLLM_PLUGINS" in os.environ:
        os.environ["VLLM_PLUGINS"] += f",{NAME}"
    rollweave_leases.run_server(SERVER, [*OPTIONS, *sys.argv[1:]])


class LeasedGuard(rollweave_leases.LeasedGuard):  # type: ignore[misc]
    """The guard of a vLLM server."""

    variable = TOKEN

    def __init__(self, app: rollweave_leases.Application) -> None:
        super().__init__(app)
        register_spans()

    def about(self, app: Any) -> dict[str, Any]:
        return about(app.state.vllm_config)

    async def rerank(self, app: Any, body: dict[str, Any]) -> bool:
        return bool(await rerank(app, body))


def about(config: Any) -> dict[str, Any]:
    """Return what a server with this configuration of vLLM is."""
    import vllm

    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    transfer, grammars = config.weight_transfer_config, config.structured_outputs_config
    return {
        "version": vllm.__version__,
        **rollweave_leases.about_model(model.model, model, context=model.max_model_len),
        "logprobs": str(model.logprobs_mode),
        "slots": scheduler.max_num_seqs,
        "policy": str(scheduler.policy),
        "preempts": "rollweave_vllm_scheduler" in str(getattr(scheduler, "scheduler_cls", "")),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "prefix_cache": bool(cache.enable_prefix_caching),
        "device": str(config.device_config.device_type),
        "transfer": transfer.backend if transfer is not None else "",
        "grammars": grammars.backend,
        "constrains_reasoning": grammars.enable_in_reasoning,
    }


if __name__ == "__main__":
    serve_alone()
