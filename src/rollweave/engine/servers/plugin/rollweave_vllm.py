"""Rollweave in every process of a vLLM server: the start of the server, the guard of
its routes, and the registration of `rollweave_vllm_weights`,
`rollweave_vllm_constraints` and `rollweave_vllm_routes`.

This module runs in the interpreter of the user's vLLM, found by `PYTHONPATH`, and
imports nothing of Rollweave, whose requirements are not installed there. Invariants: no
process of the server outlives the engine that started it, or, in a server that a user
has started, its first process; every request needs the engine's token.
"""

import ctypes
import hmac
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

import rollweave_vllm_constraints
import rollweave_vllm_kv
import rollweave_vllm_spans
from rollweave_leases import Application, Receive, Send, run_server

NAME = "rollweave"
"""The name of the weight transfer in vLLM's `--weight-transfer-config`."""

TOKEN = "ROLLWEAVE_VLLM_TOKEN"
"""The environment variable with the token that requests must present."""

MAIN = "ROLLWEAVE_VLLM_MAIN"
"""The environment variable with the id of a server's first process that has no owner
(`rollweave_vllm_leases`).
"""

ROUTES = "ROLLWEAVE_VLLM_ROUTES"
"""The environment variable that is set if routes are to be recorded on a CPU."""

SERVER = "vllm.entrypoints.openai.api_server"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 75  # as in io/boot


def serve() -> None:
    """Run the server with the arguments behind the id of the process that started
    it.
    """
    parent, *arguments = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(parent):
        os._exit(ORPHANED)
    run_server(SERVER, arguments)


def register() -> None:
    """Offer our weight transfer to vLLM, which calls this in each of its processes,
    possibly several times.

    The lock of progress bars is otherwise a semaphore, which a killed process leaves.
    """
    from tqdm import tqdm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if os.environ.get(MAIN) != str(os.getpid()):
        end_with_parent()
    tqdm.set_lock(threading.RLock())
    if NAME not in Factory._registry:
        Factory.register_engine(NAME, f"{NAME}_vllm_weights", "RollweaveTransfer")
    rollweave_vllm_kv.register()
    rollweave_vllm_constraints.register()
    if ROUTES in os.environ:
        importlib.import_module(f"{NAME}_vllm_routes").register()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and end now if that has
    happened: a process that vLLM starts imports for many seconds before it gets here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(ORPHANED)


class Guard:
    """Middleware of the server, an ASGI application: vLLM's own guard leaves out the
    routes by which a server is paused and its weights are changed.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode()
        rollweave_vllm_spans.register()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._admits(scope["headers"]):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"detail": "no token"}'})
            return
        await self._app(scope, receive, send)

    def _admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = dict(headers).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


if __name__ == "__main__":
    serve()
