"""Functions as applications of Ray Serve that scale to zero (RollArt §5.3): those of
rewards, and the serverless methods of roles.

This module runs in a separate process, Ray's driver, which removes the applications at
the end of the run. If it is killed, they stay on a cluster of the user's, without
instances, until the run is resumed, which replaces them. Ray Serve starts an instance
(`RewardApp`, `RoleApp`) when there are requests, and ends it when there are none.

Invariants: while an instance remembers a key, it computes a request with that key once,
whether the first request is answered or not; a reward function that fails answers with
status 422 and the reason, never with a number.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from rollweave.envs.threads import EnvThreads
from rollweave.io.machine import bound_socket
from rollweave.io.wire import encode
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import FunctionReward, RewardCall
from rollweave.runtime.hosts.user_files import unpack
from rollweave.runtime.roles.serving import Calls, answer_to, constructor_codec, load
from rollweave.schema.base import as_json
from rollweave.schema.config.rollout import RewardConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.roles import CallMethod, DeployedFunction, DeployedRole
from rollweave.schema.rollouts import IDEMPOTENCY_KEY, PAYLOAD_BYTES
from rollweave_ray.agents import connect, imported, in_one_line, prepare_environment
from rollweave_ray.messages import DeployFunctions

IDLE_S = 30.0
"""Seconds without requests after which an instance ends, also the last one."""

PERIOD_S = 0.5
"""Seconds between two decisions of Ray Serve about the number of instances."""

MAX_INSTANCES = 64
"""Maximum number of instances of one function; fewer if the cluster has fewer CPUs."""

SHARED_PORT = 8000
"""Port of the proxy on a cluster of the user's: Ray Serve's own default."""

HEAD = "node:__internal_head__"
"""Ray's resource of the node on which the proxy listens."""


class Functions:
    """The deployed functions of a run."""

    def __init__(self, command: DeployFunctions) -> None:
        """Connect to Ray, and start Ray Serve unless it runs. Raises ConfigError."""
        self._command = command
        self._serve = imported("ray.serve")
        self._ray = connect(command.address) if command.address else start_here()
        self._names: list[str] = []

    def deploy(self) -> dict[str, str]:
        """Deploy all functions, and return their URLs. Raises ConfigError."""
        try:
            base = self._start_proxy()
            return {one.name: base + self._deploy(one) for one in self._command.functions}
        except Exception as error:  # Ray raises several, and its own
            raise ConfigError(in_one_line(error)) from error

    def _start_proxy(self) -> str:
        """Start Ray Serve's proxy on the head node, and return its URL. On a cluster
        that serves already, this is the proxy that it has.
        """
        address, port = "127.0.0.1", _port()
        if self._command.address is not None:
            alive = [node for node in self._ray.nodes() if node["Alive"]]
            (head,) = [node for node in alive if HEAD in node["Resources"]]
            address, port = head["NodeManagerAddress"], SHARED_PORT
        options = {"host": address, "port": port}
        self._serve.start(proxy_location="HeadOnly", http_options=options)
        client = imported("ray.serve.context")._get_global_client()
        return f"http://{address}:{client.http_config.port}"

    def _deploy(self, function: DeployedFunction | DeployedRole) -> str:
        """Deploy one function, and return the path of its URL."""
        command = self._command
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        deployment = self._serve.deployment(
            RewardApp if isinstance(function, DeployedFunction) else RoleApp,
            name=function.name,
            max_ongoing_requests=1,  # one call at a time, as on other platforms
            ray_actor_options={"num_cpus": command.cpus},
            autoscaling_config={
                "min_replicas": 0,
                "initial_replicas": 0,
                "max_replicas": max(1, min(MAX_INSTANCES, cpus)),
                "target_ongoing_requests": 1,
                "upscale_delay_s": 2 * PERIOD_S,
                "downscale_delay_s": IDLE_S,
                "metrics_interval_s": PERIOD_S,
                "look_back_period_s": 2 * PERIOD_S,
            },
        )
        name = f"rollweave-{command.owner}-{function.name}"
        path = f"/{command.secret}/{function.name}"
        self._serve.run(
            deployment.bind(function, command.archive, command.digest), name=name, route_prefix=path
        )
        self._names.append(name)
        return path

    def remove(self) -> None:
        """Remove the functions once their instances have ended, and disconnect; a Ray
        of this machine alone ends.
        """
        for name in self._names:
            self._serve.delete(name)
        self._ray.shutdown()


def start_here() -> Any:
    """Start Ray on this machine, for this process alone. Raises ConfigError."""
    prepare_environment()
    ray = imported("ray")
    try:
        ray.init(address="local", include_dashboard=False, logging_level="warning")
    except Exception as error:  # Ray raises several, and its own
        raise ConfigError(in_one_line(error)) from error
    return ray


def _port() -> int:
    with bound_socket("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


REMEMBERED = 10_000
"""Maximum number of answers that an instance remembers by their keys."""

REMEMBERED_BYTES = 64 << 20
"""Maximum size in bytes of the remembered answers. The newest is always remembered."""

Answer = tuple[int, bytes]
"""Status and body."""


class Answers:
    """The answers of an instance, by the keys of their requests."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        """Tasks of answers that are being computed, and answers, the oldest first."""
        self._bytes = 0

    async def of(self, key: str, compute: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a key, which is computed if it is not known."""
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = asyncio.create_task(compute())
            known.add_done_callback(self._computed)
        return await asyncio.shield(known)

    def _computed(self, task: asyncio.Task[Answer]) -> None:
        """Count an answer, and forget the oldest ones beyond the limits."""
        self._bytes += _size(task)
        finished = [key for key, one in self._answers.items() if one.done()]
        for key in finished[:-1]:
            if len(self._answers) <= REMEMBERED and self._bytes <= REMEMBERED_BYTES:
                break
            self._bytes -= _size(self._answers.pop(key))


def _size(task: asyncio.Task[Answer]) -> int:
    """Return the size in bytes of a computed answer; 0 if its computation failed."""
    if task.cancelled() or task.exception() is not None:
        return 0
    return len(task.result()[1])


UNPROCESSABLE = 422
"""Status of a request that would fail again: no client repeats it."""


class _App:
    """An instance with the user's modules in a folder, from which it can import
    them.
    """

    media_type: str

    def __init__(self, archive: bytes, digest: bytes) -> None:
        """Unpack the user's modules. Raises HostError."""
        self.folder = Path(tempfile.mkdtemp(prefix="rollweave-function-"))
        unpack(archive, digest, self.folder)
        sys.path.insert(0, str(self.folder))
        self._answers = Answers()

    def __del__(self) -> None:
        """Remove the modules. Ray Serve calls this before it ends an instance."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette."""
        from starlette.responses import Response

        key = request.headers.get(IDEMPOTENCY_KEY, "")
        status, body = await self.answer(key, await request.body())
        return Response(body, status_code=status, media_type=self.media_type)

    async def answer(self, key: str, body: bytes) -> Answer:
        """Return the answer to a request with an idempotency key."""
        raise NotImplementedError


class RewardApp(_App):
    """Computes the rewards of one function."""

    media_type = "application/json"

    def __init__(self, deployed: DeployedFunction, archive: bytes, digest: bytes) -> None:
        super().__init__(archive, digest)
        config = RewardConfig(
            name=deployed.name, function=deployed.function, timeout_s=deployed.timeout_s
        )
        self._function = FunctionReward(config, threads=EnvThreads())

    async def answer(self, key: str, body: bytes) -> Answer:
        """Return the answer to a `RewardCall` in JSON, which names its key itself."""
        del key
        if len(body) > PAYLOAD_BYTES:
            return 413, b"too long"
        try:
            call = msgspec.json.decode(body, type=RewardCall)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return await self._answers.of(call.key, lambda: self._compute(call))

    async def _compute(self, call: RewardCall) -> Answer:
        try:
            return 200, as_json({"reward": await self._function.reward(call.finished)})
        except EpisodeStopError as error:
            return UNPROCESSABLE, str(error).encode()


class RoleApp(_App):
    """Executes the serverless methods of one role, one call after the other, like a
    worker (RollArt §5.2, Listing 1).
    """

    media_type = "application/octet-stream"

    def __init__(self, role: DeployedRole, archive: bytes, digest: bytes) -> None:
        """Construct the worker. Raises HostError, ConfigError, and what the
        constructor raises.
        """
        super().__init__(archive, digest)
        os.chdir(self.folder)  # a script is named by its path from there
        kind = load(role.reference)
        args, kwargs = constructor_codec(kind).decode(role.arguments)
        self._calls = Calls(kind(*args, **kwargs))
        # Once a client has given up on a call, Ray Serve sends the next one.
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, key: str, body: bytes) -> Answer:
        """Return the answer to a `CallMethod`: `Returned` or `Raised`."""
        if not key:
            return 400, f"a request must have the header {IDEMPOTENCY_KEY}".encode()
        try:
            command = msgspec.msgpack.decode(body, type=CallMethod)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return await self._answers.of(key, lambda: self._execute(command))

    async def _execute(self, command: CallMethod) -> Answer:
        async with self._one_at_a_time:
            answer = await asyncio.to_thread(
                answer_to, command.call, lambda: self._calls.execute(command)
            )
        return 200, encode(answer)
