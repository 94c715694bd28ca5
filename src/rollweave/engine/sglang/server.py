"""The SGLang server of one engine: its command line and environment, and its process.

Invariants: it listens on the loopback interface only, and admits no request but health
checks without a token that only this process knows; it ends when this process ends,
with all of its children (`launcher.py`), and leaves no socket.
"""

import getpass
import os
import tempfile
from pathlib import Path

from rollweave.engine.servers.process import (
    HOST,
    ServerProcess,
    command_line,
    has_tokenizer,
    inherited,
    max_context,
    settings_of,
)
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.weights.checkpoint import ModelShape

LAUNCHER = Path(__file__).with_name("launcher.py")
TOKEN = "ROLLWEAVE_SGLANG_TOKEN"
"""The environment variable with the token, as in `launcher.py`, which runs
elsewhere.
"""

SPARE_TOKENS = 8
"""Tokens by which the server's context exceeds the model's, which no sequence uses:
SGLang refuses a prompt that ends six tokens before its context, and a sequence ends two
tokens before it.
"""

PAGE_TOKENS = 256
"""Multiple of all page sizes of SGLang's cache, which has whole pages."""


class SglangServer(ServerProcess):
    """The process of a server, which starts at once and has its sockets in `folder`.
    Raises EngineError if it cannot start.
    """

    def __init__(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> None:
        settings = settings_of(spec)
        super().__init__(
            "SGLang",
            settings.python,
            lambda port: (
                str(LAUNCHER),
                str(os.getpid()),
                *arguments(spec, settings, shape, port=port),
            ),
            lambda token: environment(token=token, folder=folder),
        )


def arguments(spec: EngineSpec, settings: ServerSpec, shape: ModelShape, *, port: int) -> list[str]:
    """Return the server's arguments. The user's come last, and take precedence."""
    context = max_context(spec, shape) + SPARE_TOKENS
    kv_tokens = -(-(spec.kv_tokens + SPARE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
    ours: dict[str, object] = {
        "model-path": spec.model,
        "host": HOST,
        "port": port,
        "device": spec.device,
        "dtype": spec.dtype,
        "context-length": context,
        "max-running-requests": spec.max_slots,
        "max-total-tokens": kv_tokens,
        "tp-size": settings.degree,
        "weight-version": max(0, spec.version),
        "default-priority-value": 0,
        "log-level": "warning",  # at info, its log has the token
    }
    # a preempted request would be computed again, which mode decoupled never does
    switches = ["enable-priority-scheduling", "disable-priority-preemption"]
    switches.append("incremental-streaming-output")  # else each event repeats the answer
    if not spec.prefix_cache:
        switches.append("disable-radix-cache")
    if spec.deterministic:
        switches.append("enable-deterministic-inference")
    if not has_tokenizer(spec.model):
        switches.append("skip-tokenizer-init")
    return command_line(ours, switches, settings.args)


def environment(*, token: str, folder: Path) -> dict[str, str]:
    """Return the server's environment."""
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        "TORCHINDUCTOR_CACHE_DIR": kernels,  # torch's default, which TMPDIR would move
        **inherited(),
        "TMPDIR": str(folder),  # the folder of its sockets
        # a health check that generates fails while the server is paused
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # at the temperature of the request
        TOKEN: token,
    }
