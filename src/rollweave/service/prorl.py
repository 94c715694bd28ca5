"""ProRL Agent's HTTP contract beside ours, so that its clients run unchanged (ProRL §3; what they send and read).

A job is a rollout of one member; `instance.data_source` names the handler. What differs is what was in the way there: repeated
job ids do not clash, stopping cancels this API's jobs alone, and no request gives 500. Errors are `{"detail"}`.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.codec.chat import ChatCodec
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.service import AskedLimits, EngineRequest, MemberStatus, RolloutRequest
from rollweave.schema.work import Decoding, Segment, SegmentKind, StopReason, Trajectory
from rollweave.service.http import decode, json_answer
from rollweave.service.refusals import RefusedError, UnknownError
from rollweave.service.service import Service

T = TypeVar("T")

DEFAULT_HANDLER = "swebench"
POLL_S = 60.0

FAILED_IN: Mapping[str, str] = {
    StopReason.ENV_ERROR: "run",
    StopReason.ENV_HANG: "run",
    StopReason.ENGINE_FAILURE: "run",
    StopReason.REWARD_ERROR: "eval",
    StopReason.REWARD_HANG: "eval",
    StopReason.TIME_BUDGET: "timeout",
    StopReason.WORLD_LOST: "run",
}
"""`critical_error` by stop reason; an environment that never ran failed in "init"."""


class _DetailError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Process(msgspec.Struct, frozen=True):
    """The body of /process."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = {}
    job_id: str | int | None = None


class Address(msgspec.Struct, frozen=True):
    """The body of /add_llm_server."""

    address: str


class JobId(msgspec.Struct, frozen=True):
    """The body of /cancel."""

    job_id: str | int


class ProRL:
    """The routes. `codec` gives the text of tokens."""

    def __init__(self, service: Service, *, codec: ChatCodec) -> None:
        self._service, self._codec = service, codec
        self._started = False
        self._jobs: dict[str, list[str]] = {}  # their id → ours, of those under way
        self._numbers = itertools.count()

    def table(self) -> list[web.RouteDef]:
        """To be added to the service's application."""
        routes = {
            "/start": self.start,
            "/stop": self.stop,
            "/add_llm_server": self.add_server,
            "/clear_llm_server": self.clear_servers,
            "/cancel": self.cancel,
            "/process": self.process,
        }
        return [web.get("/status", self.status), *(web.post(path, self._guarded(call)) for path, call in routes.items())]

    def _guarded(self, call: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def guarded(request: web.Request) -> web.Response:
            try:
                return json_answer(await call(request))
            except _DetailError as error:
                return json_answer({"detail": str(error)}, status=error.status)
            except ConfigError as error:
                return json_answer({"detail": str(error)}, status=400)
            except RefusedError as error:
                return json_answer({"detail": str(error)}, status=400 if isinstance(error, UnknownError) else 503)
            except DiskError as error:
                return json_answer({"detail": str(error)}, status=507)

        return guarded

    # Control.

    async def start(self, request: web.Request) -> dict[str, str]:
        del request
        if self._started:
            raise _DetailError(400, "Server is already running")
        self._started = True
        return {"status": "Server started successfully"}

    async def stop(self, request: web.Request) -> dict[str, str]:
        del request
        if not self._started:
            raise _DetailError(400, "Server is not running")
        self._started = False
        for job_id in list(self._jobs):
            self._cancel(job_id)
        return {"status": "Server stopped successfully"}

    async def status(self, request: web.Request) -> web.Response:
        del request
        counts = self._service.counts()
        active = {f"active_{stage}": counts[stage] for stage in ("init", "run", "eval")}
        queued = {"init_queue": counts["queued"], "run_queue": counts["turns_waiting"], "eval_queue": 0}
        total = sum(active.values()) + counts["queued"]
        return json_answer({"status": "running" if self._started else "stopped", **queued, **active, "total": total})

    async def add_server(self, request: web.Request) -> dict[str, str]:
        address = decode(await request.read(), Address, rule="JSON").address
        known = address if address.startswith(("http://", "https://")) else f"http://{address}"
        self._service.register(_asked(EngineRequest, address=known.rstrip("/"), dialect="prorl"))
        return {"status": f"Added LLM server address: {address}"}

    async def clear_servers(self, request: web.Request) -> dict[str, str]:
        """Their turns wait for those that come next."""
        del request
        for engine in self._service.engines():
            if engine.address:
                self._service.withdraw(EngineId(engine.id), drain=False)
        return {"status": "Cleared all LLM server addresses"}

    async def cancel(self, request: web.Request) -> dict[str, str]:
        job_id = str(decode(await request.read(), JobId, rule="JSON").job_id)
        if job_id not in self._jobs:
            raise _DetailError(404, f"Job {job_id} not found")
        self._cancel(job_id)
        return {"status": f"Job {job_id} canceled successfully"}

    def _cancel(self, job_id: str) -> None:
        for ours in self._jobs.get(job_id, []):
            self._service.cancel(ours)

    # Jobs.

    async def process(self, request: web.Request) -> dict[str, Any]:
        """Blocks until the job is over. A client that goes away cancels it."""
        if not self._started:
            raise _DetailError(503, "Server is not running")
        body = decode(await request.read(), Process, rule="JSON")
        if not self._service.engines():
            raise _DetailError(503, "No LLM server is registered")
        theirs = str(body.job_id if body.job_id is not None else body.instance.get("instance_id", next(self._numbers)))
        ours = f"prorl-{secrets.token_hex(12)}"
        await self._service.submit([_request(body, ours)])
        self._jobs.setdefault(theirs, []).append(ours)
        if not self._started:  # stopped while the task was drawn
            self._service.cancel(ours)
        try:
            while True:
                found = await self._service.wait(ours, POLL_S)
                if found.state == "done":
                    return self._result(body, found.members[0])
        except asyncio.CancelledError:
            self._service.cancel(ours)
            raise
        finally:
            self._jobs[theirs].remove(ours)
            if not self._jobs[theirs]:
                del self._jobs[theirs]

    def _result(self, body: Process, member: MemberStatus) -> dict[str, Any]:
        trajectory, reason = member.result, member.stop_reason or StopReason.CANCELLED
        failed = FAILED_IN.get(reason)
        if failed == "run" and (trajectory is None or not trajectory.sequences):
            failed = "init"
        reward = trajectory.reward if trajectory is not None else None
        resolved = bool(trajectory.success if trajectory is not None and trajectory.success is not None else (reward or 0) > 0)
        error = trajectory.error if trajectory is not None else ""
        return {
            "instance_id": body.instance.get("instance_id"),
            "trajectory_id": body.instance.get("trajectory_id", member.id),
            "git_patch": str(_kept(trajectory).get("git_patch", "")),
            "success": failed is None and reason != StopReason.CANCELLED,
            "error": error or (None if failed is None and reward is not None else reason),
            "finish": reason == StopReason.FINISHED,
            "messages": self._messages(trajectory, tokens=bool(body.sampling_params.get("token_level_generation", True))),
            "tools": [],
            "end_properly": reward is not None,
            "resolved": resolved,
            "reward": reward,
            "critical_error": failed,
            "filter": failed is not None,
            "timing": _timing(trajectory, reason),
        }

    def _messages(self, trajectory: Trajectory | None, *, tokens: bool) -> list[dict[str, Any]]:
        """What was said, turn by turn; with the very tokens and log-probs of the agent's turns."""
        found: list[dict[str, Any]] = []
        for sequence in trajectory.sequences if trajectory is not None else ():
            for kind, start, end in _spans(sequence.segments):
                said = sequence.tokens[start:end]
                if kind is not SegmentKind.OUTPUT:
                    found.append({"role": "user", "content": self._codec.decode(said)})
                    continue
                message: dict[str, Any] = {"role": "assistant", "content": self._codec.text(said), "tool_calls": []}
                if tokens:
                    message |= {
                        "token_ids": said,
                        "input_ids": sequence.tokens[:start],
                        "logprobs": sequence.logprobs[start:end],
                    }
                found.append(message)
        return found


def _spans(segments: Sequence[Segment]) -> list[tuple[SegmentKind, int, int]]:
    """Segments, with output of several weight versions as one."""
    spans: list[tuple[SegmentKind, int, int]] = []
    for segment in segments:
        if spans and spans[-1][0] is segment.kind is SegmentKind.OUTPUT:
            spans[-1] = (segment.kind, spans[-1][1], segment.end)
        else:
            spans.append((segment.kind, segment.start, segment.end))
    return spans


def _kept(trajectory: Trajectory | None) -> dict[str, Any]:
    """What the handler gave as its final result."""
    found = msgspec.json.decode(trajectory.result) if trajectory is not None and trajectory.result else {}
    return found if isinstance(found, dict) else {}


def _timing(trajectory: Trajectory | None, reason: str) -> dict[str, Any]:
    """Seconds of active time by stage; what else passed is `others_time`."""
    timing = trajectory.timing if trajectory is not None else None
    init, run, score, queue = (timing.init_s, timing.run_s, timing.eval_s, timing.queue_s) if timing else (0.0,) * 4
    return {
        "init_time": init,
        "run_time": run,
        "eval_time": score,
        "others_time": queue,
        "counted_elapsed": init + run + score,
        "timeout_triggered": reason == StopReason.TIME_BUDGET,
    }


def _request(body: Process, ours: str) -> RolloutRequest:
    """Raises ConfigError."""
    params = body.sampling_params
    instance = dict(body.instance)
    handler = instance.pop("data_source", DEFAULT_HANDLER)
    drawn = set(instance) <= {"index", "instance_id", "trajectory_id"} and "index" in instance
    return _asked(
        RolloutRequest,
        handler=handler,
        id=ours,
        index=instance["index"] if drawn else None,
        payload=None if drawn else instance,
        sampling={name: params[name] for name in Decoding.__struct_fields__ if params.get(name) is not None},
        limits={
            ours: params[theirs]
            for ours, theirs in zip(
                AskedLimits.__struct_fields__, ("max_iterations", "max_model_len", "max_output_tokens", "timeout"), strict=True
            )
            if params.get(theirs) is not None
        },
    )


def _asked(kind: type[T], **fields: Any) -> T:
    """Raises ConfigError for a field that breaks a rule."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error)) from error
