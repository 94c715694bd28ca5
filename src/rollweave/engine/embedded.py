"""An embedded engine on a thread of this process, for programs that sample outside of a
run.
"""

import asyncio
from pathlib import Path

from rollweave.engine.clients.client import EngineClient, in_thread
from rollweave.engine.thread import EngineThread
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec

KV_TOKENS = 65_536
"""Maximum number of tokens in the engine's cache unless the caller asks for more."""

START_S = 300.0
"""Maximum seconds to read a checkpoint: minutes for a large one on a slow disk."""

REPLY_S = 60.0
"""Maximum seconds to answer anything but a request for tokens."""


def start_engine(
    checkpoint: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    kv_tokens: int = KV_TOKENS,
) -> EngineClient:
    """Start an engine that samples from the model in directory `checkpoint`. Requires a
    running event loop.

    Await `ready()` before the first `generate`, and `close()` at the end.
    """
    model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    model_ready.set_result(None)
    spec = EngineSpec(
        id=EngineId("e0"),
        model=str(checkpoint),
        device=device,
        dtype=dtype,
        threads=threads,
        kv_tokens=kv_tokens,
    )
    return EngineClient(
        "engine",
        in_thread(spec, EngineThread, model_ready=model_ready),
        start_s=START_S,
        reply_s=REPLY_S,
    )
