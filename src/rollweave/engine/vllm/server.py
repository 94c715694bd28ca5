"""The vLLM server of one engine: its command line and environment, and its process.

Invariants: it listens on the loopback interface only, and admits no request without a
token that only this process knows; it ends when this process ends, with all of its
children (`servers/plugin/rollweave_vllm.py`), and leaves no socket, and once it serves
no shared memory, however it ends; nothing needs to be installed beside vLLM.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from rollweave.engine.servers.process import (
    HOST,
    PLUGIN,
    ServerProcess,
    command_line,
    free_port,
    has_tokenizer,
    inherited,
    max_context,
    settings_of,
)
from rollweave.engine.vllm.kv import LEASE_S
from rollweave.sandbox.processes import family
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.checkpoint import ModelShape

NAME = "rollweave"
TOKEN = "ROLLWEAVE_VLLM_TOKEN"
"""The environment variable with the token, as in the plug-in, which cannot be imported
here.
"""

ROUTES = "ROLLWEAVE_VLLM_ROUTES"
"""The environment variable with which the plug-in records routes on a CPU."""

KV = "ROLLWEAVE_VLLM_KV"
"""The environment variable with which the plug-in can end the leases of moved KV."""

GRAMMARS = "guidance"
"""The library by which vLLM constrains answers: llguidance, as in the embedded engine.
"""

BATCHED_TOKENS = 16384
"""Tokens that a step computes at most on a CPU, where a prompt is computed in one
piece: vLLM's generators of a request with a seed cannot continue one there.
"""

TRANSFERS = 4
"""Number of a server's sequences beside those of turns: the core lets an engine be in
three transfers at once, each of which is a request.
"""

SHARED_MEMORY = " /dev/shm/"
"""Text before the names of shared memory and semaphores in a process's memory map."""

SPARE_BLOCKS = 2
"""Blocks of the cache that vLLM keeps for itself: a sequence of the maximum length must
fit beside them.
"""

BLOCK_TOKENS = 32
"""Tokens in a block on a CPU, where vLLM's default would be 128; fewer elsewhere."""


class VllmServer(ServerProcess):
    """The process of a server, which starts at once and has its sockets in `folder`.
    Raises EngineError if it cannot start.
    """

    def __init__(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> None:
        settings = settings_of(spec)
        super().__init__(
            "vLLM",
            settings.python,
            lambda port: (
                "-m",
                "rollweave_vllm",
                str(os.getpid()),
                *arguments(spec, settings, shape, port=port),
            ),
            lambda token: environment(spec, token=token, folder=folder),
        )

    def on_ready(self) -> None:
        """Remove the names of the shared memory and semaphores of the server and its
        children. All of them have opened what they share once the server is ready.
        """
        names = {
            line.split(maxsplit=5)[5]
            for pid in family(self.pid)
            for line in _maps_of(pid)
            if SHARED_MEMORY in line
        }
        for name in names:
            with contextlib.suppress(OSError):  # such as one with the mark "(deleted)"
                os.unlink(name)


def _maps_of(pid: int) -> list[str]:
    """Return the lines of a process's memory map; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    return []


def arguments(spec: EngineSpec, settings: ServerSpec, shape: ModelShape, *, port: int) -> list[str]:
    """Return the server's arguments. The user's come last, and take precedence."""
    degree, context = settings.degree, max_context(spec, shape)
    own = dataclasses.replace(shape, kv_heads=-(-shape.kv_heads // degree))
    kv_tokens = spec.kv_tokens + SPARE_BLOCKS * BLOCK_TOKENS
    ours: dict[str, object] = {
        "model": spec.model,
        "served-model-name": NAME,
        "host": HOST,
        "port": port,
        "dtype": spec.dtype,
        "max-model-len": context,
        "max-num-seqs": spec.max_slots + (TRANSFERS if settings.moves_kv else 0),
        "tensor-parallel-size": degree,
        "kv-cache-memory-bytes": own.kv_bytes(NUMBER_BYTES[spec.dtype]) * kv_tokens,
        "scheduling-policy": "priority",
        "weight-transfer-config": json.dumps({"backend": NAME}),
        "structured-outputs-config": json.dumps({"backend": GRAMMARS, "enable_in_reasoning": True}),
        "middleware": "rollweave_vllm.Guard",
    }
    if settings.moves_kv:
        ours["kv-transfer-config"] = json.dumps(connector(spec.device))
    switches = ["enable-scale-out", "enable-prompt-tokens-details", "disable-uvicorn-access-log"]
    if settings.scaled_logprobs:
        ours["logprobs-mode"] = "processed_logprobs"  # else they are at temperature 1
    if not spec.prefix_cache:
        switches.append("no-enable-prefix-caching")
    if spec.routes:
        switches.append("enable-return-routed-experts")
    if not has_tokenizer(spec.model):
        switches.append("skip-tokenizer-init")
    if spec.device == "cpu":
        ours |= {"block-size": BLOCK_TOKENS, "max-num-batched-tokens": max(BATCHED_TOKENS, context)}
        if degree == 1:
            ours["distributed-executor-backend"] = "uni"
        switches += ["enforce-eager", "no-enable-chunked-prefill"]
        if spec.routes:
            switches.append("no-async-scheduling")  # the recorder takes each step's tokens
    return command_line(ours, switches, settings.args)


def connector(device: str) -> dict[str, object]:
    """Return vLLM's settings of the transfer of KV to other servers and from them."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": device,
        "kv_load_failure_policy": "fail",  # the turn computes its prompt itself
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }


def environment(spec: EngineSpec, *, token: str, folder: Path) -> dict[str, str]:
    """Return the server's environment."""
    ours = {
        "PYTHONPATH": str(PLUGIN),
        "VLLM_PLUGINS": NAME,
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no control routes
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),  # the folder of its sockets
        TOKEN: token,
    }
    if spec.device == "cpu":
        ours |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        if settings_of(spec).degree == 1:
            ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process is twice as fast
    if settings_of(spec).moves_kv:
        ours |= {
            KV: "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.kv_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(spec.kv_host)),
        }
        if spec.device == "cpu":
            ours["UCX_TLS"] = "tcp"  # shared memory would be left if the server is killed
        if spec.kv_host == HOST:
            ours["UCX_NET_DEVICES"] = "lo"
    if spec.routes:
        ours[ROUTES if spec.device == "cpu" else "VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return inherited() | ours
