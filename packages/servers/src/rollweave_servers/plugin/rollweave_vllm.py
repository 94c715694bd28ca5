"""Rollweave in every process of a vLLM server: the start of the server, the guard of
its routes, the registration of `rollweave_vllm_weights`, `rollweave_vllm_constraints`
and `rollweave_vllm_routes`, the ends of leases of KV that the server holds for others,
and the versions of the weights in each part of a streamed answer.

This module runs in the interpreter of the user's vLLM, found by `PYTHONPATH`, and
imports nothing of Rollweave, whose requirements are not installed there. Invariants: no
process of the server outlives the engine that started it, or, in a server that a user
has started, its first process; every request needs the engine's token.

NixlConnector itself caches what was read after the lease of its blocks, which may have
other contents by then, and holds blocks that nothing reads until their lease ends. Here
an export says when its lease ends, an import that is not complete by then has failed,
and a server can be told that nothing reads any of its blocks any longer.

vLLM names the versions of a streamed answer in its last part only, since a client may
count on nothing before. Invariant: each part has the versions that vLLM itself would
name if the answer ended there. A vLLM without these functions streams without
versions.
"""

import ctypes
import functools
import hmac
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import rollweave_vllm_constraints
from rollweave_leases import RERANK, Application, Receive, Send, answer, read_body, run_server

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
    register_kv()
    rollweave_vllm_constraints.register()
    if ROUTES in os.environ:
        importlib.import_module(f"{NAME}_vllm_routes").register()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and end now if that has
    happened: a process that vLLM starts imports for many seconds before it gets here.
    """
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
        register_spans()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._admits(scope["headers"]):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"detail": "no token"}'})
            return
        if scope["type"] == "http" and scope["path"] == RERANK:
            found = await rerank(scope["app"], await read_body(receive))
            await answer(send, 200, {"found": found})
            return
        await self._app(scope, receive, send)

    def _admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = dict(headers).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


async def rerank(app: Any, body: dict[str, Any]) -> bool:
    """Change the priority of a request in the server with this application, whose
    scheduler must be one of `rollweave_vllm_scheduler`. Return False if it does not
    have the request.
    """
    core, priority = app.state.engine_client.engine_core, int(body["priority"])
    return bool(await core.call_utility_async("rollweave_rerank", str(body["id"]), priority))


KV = "ROLLWEAVE_VLLM_KV"
"""The environment variable that is set if the server moves KV."""

METHOD = "rollweave_release_kv"
"""The name of the method of each rank, which `/collective_rpc` calls."""

MARGIN_S = 1.0
"""Seconds before the end of a lease by which an import must be complete: more than the
error of the offset between two hosts' clocks, which vLLM measures.
"""


def register_kv() -> None:
    """Have this process, of a server that moves KV, observe leases."""
    if KV not in os.environ:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler, pull_worker
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, METHOD, release)
    observe(pull_scheduler.NixlPullConnectorScheduler, pull_worker.NixlPullConnectorWorker)


def observe(scheduler: type[Any], worker: type[Any]) -> None:
    """Have exports name the ends of their leases, and late imports fail."""
    finish, pop_done = scheduler.request_finished, worker._pop_done_transfers
    if hasattr(pop_done, "__wrapped__"):
        return  # vLLM calls plug-ins several times

    @functools.wraps(finish)
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        held, parameters = finish(self, request, block_ids)
        end = self._reqs_need_send.get(request.request_id)
        if held and parameters is not None and end is not None:
            parameters["remote_blocks_expiry_time"] = end
        return held, parameters

    @functools.wraps(pop_done)
    def pop_done_transfers(self: Any, transfers: Any) -> Any:
        done, failed = pop_done(self, transfers)
        return done, failed | {id for id in done if _is_late(self, id)}

    scheduler.request_finished = request_finished
    worker._pop_done_transfers = pop_done_transfers


def _is_late(worker: Any, request_id: str) -> bool:
    """Return True unless the lease lasts, by the other server's clock."""
    remote = worker._recving_metadata[request_id].remote
    offset_s = worker._engine_clock_offset.get(remote.engine_id)
    if offset_s is None or remote.blocks_expiry_time is None:
        return True
    return bool(time.perf_counter() + offset_s + MARGIN_S > remote.blocks_expiry_time)


def release(worker: Any) -> None:
    """Let all leases end at the next step, on one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    leases = get_kv_transfer_group().connector_worker._reqs_to_send
    for request_id in leases:
        leases[request_id] = 0.0


def register_spans() -> None:
    """Have vLLM name the versions in each part, in the process that answers requests.
    Later calls have no effect.
    """
    try:
        from vllm.v1.engine.output_processor import RequestState
    except ImportError:
        return
    spans = getattr(RequestState, "_weight_version_spans", None)
    former = getattr(RequestState, "_new_completion_output", None)
    if spans is None or former is None or hasattr(former, "names_versions"):
        return

    def output_with_versions(state: Any, *args: Any, **options: Any) -> Any:
        output = former(state, *args, **options)
        if output.weight_versions is None:
            output.weight_versions = spans(state)
        return output

    output_with_versions.names_versions = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = output_with_versions


if __name__ == "__main__":
    serve()
