"""An SGLang server that its user starts: its start, and what it reports of itself.

`python rollweave_sglang.py ARGUMENT…` starts SGLang's server with these arguments and
those that an engine needs, in the interpreter of the user's SGLang. The guard takes the
place of SGLang's own keys, which it would compare with the token of a lease.
"""

import os
import sys
from typing import Any

from rollweave_leases import LeasedGuard, about_model, require_token, run_server

TOKEN = "ROLLWEAVE_SGLANG_TOKEN"
"""The environment variable with the token that requests must present."""

SERVER = "sglang.launch_server"

OPTIONS = (
    "--enable-priority-scheduling",
    "--disable-priority-preemption",
    "--default-priority-value=0",
    "--incremental-streaming-output",
    "--skip-server-warmup",  # a request without the token, whose refusal ends the server
)
"""Arguments without which the server cannot be an engine; the user's come last."""

VARIABLES = {
    # a health check that generates fails while the server is paused
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # at the temperature of the request
}
"""Environment variables without which the server cannot be an engine."""


def serve_alone() -> None:
    """Run a server that belongs to no run, in this process."""
    require_token(TOKEN)
    os.environ |= VARIABLES
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(SglangGuard)
    run_server(SERVER, [*OPTIONS, *sys.argv[1:]])


class SglangGuard(LeasedGuard):  # type: ignore[misc]
    """The guard of an SGLang server."""

    variable = TOKEN

    def about(self, app: Any) -> dict[str, Any]:
        from sglang.srt.entrypoints import http_server

        state, arguments = http_server._global_state, app.server_args
        model = state.tokenizer_manager.model_config
        return {
            "version": http_server.__version__,
            **about_model(arguments.model_path, model, context=model.context_len),
            "slots": arguments.max_running_requests or 0,
            "policy": "priority" if arguments.enable_priority_scheduling else "fcfs",
            "preempts": not arguments.disable_priority_preemption,
            "deterministic": bool(arguments.enable_deterministic_inference),
            "replicas": arguments.dp_size,
            "kv_tokens": state.scheduler_info["max_total_num_tokens"],
            "prefix_cache": not arguments.disable_radix_cache,
            "device": str(arguments.device),
        }


if __name__ == "__main__":
    serve_alone()
