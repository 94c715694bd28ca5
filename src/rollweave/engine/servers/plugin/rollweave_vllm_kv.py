"""The ends of leases of KV that a vLLM server holds for others.

NixlConnector itself caches what was read after the lease of its blocks, which may have
other contents by then, and holds blocks that nothing reads until their lease ends. Here
an export says when its lease ends, an import that is not complete by then has failed,
and a server can be told that nothing reads any of its blocks any longer.
"""

import functools
import os
import time
from typing import Any

KV = "ROLLWEAVE_VLLM_KV"
"""The environment variable that is set if the server moves KV."""

METHOD = "rollweave_release_kv"
"""The name of the method of each rank, which `/collective_rpc` calls."""

MARGIN_S = 1.0
"""Seconds before the end of a lease by which an import must be complete: more than the
error of the offset between two hosts' clocks, which vLLM measures.
"""


def register() -> None:
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
