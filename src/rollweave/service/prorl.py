"""ProRL Agent's HTTP contract beside ours, so that its clients run unchanged (ProRL §3;
what they send and read).

A job is a rollout of one member; `instance.data_source` names the handler, or one of
ProRL's that `task_of` finds a task domain for. What differs is what was in the way
there: repeated job ids do not clash, stopping cancels this API's jobs alone, and no
request gives 500. Errors are `{"detail"}`.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.io.http.bodies import body_of
from rollweave.io.http.fields import NEUTRAL, WITHOUT_EFFECT, refused_field
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.address import Hosts
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.prorl import Address, JobId, Process
from rollweave.schema.service import EngineRequest, MemberStatus, RolloutRequest
from rollweave.schema.work import Decoding, Segment, SegmentKind, StopReason, Trajectory
from rollweave.service.http import BODY_BYTES, decode, json_answer
from rollweave.service.reach import must_admit
from rollweave.service.refusals import RefusedError, UnknownError
from rollweave.service.service import REMOVED, Service

T = TypeVar("T")

DEFAULT_HANDLER = "swebench"
"""Default `data_source` of an instance."""

ENV_OF: Mapping[str, str] = {
    "swebench": "swe",
    "swe-gym": "swe",
    "swegym": "swe",
    "math": "math_tool",
    "deepcoder": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "stem": "stem",
}
"""Name that ProRL's clients send as `data_source` → our handler for such tasks."""

POLL_S = 60.0

LIMITS: Mapping[str, str] = {
    "max_iterations": "max_turns",
    "max_model_len": "max_tokens",
    "max_output_tokens": "max_turn_tokens",
    "timeout": "time_s",
}
"""Field of `sampling_params` → field of our `limits`."""

NEUTRAL_PARAMS: Mapping[str, tuple[object, ...]] = {**NEUTRAL, "enable_thinking": (True,)}
"""Field of `sampling_params` → its values that ask for nothing.

Thinking is on by default, for ProRL as here.
"""

OF_THEIR_AGENT = frozenset(
    (
        "api_key",
        "api_version",
        "aws_access_key_id",
        "aws_region_name",
        "aws_secret_access_key",
        "base_url",
        "caching_prompt",
        "custom_llm_provider",
        "custom_tokenizer",
        "disable_stop_word",
        "disable_vision",
        "drop_params",
        "enable_a11y_tree",
        "enable_vision",
        "ensure_thinking_end_properly",
        "input_cost_per_token",
        "is_reasoning_task",
        "log_completions",
        "log_completions_folder",
        "max_input_tokens",
        "max_message_chars",
        "model",
        "modify_params",
        "native_tool_calling",
        "num_retries",
        "ollama_base_url",
        "openrouter_app_name",
        "openrouter_site_url",
        "output_cost_per_token",
        "retry_max_wait",
        "retry_min_wait",
        "retry_multiplier",
        "strict_loop_detector",
        "token_level_generation",
    )
)
"""Fields of `sampling_params` that configure the agent and LLM client of ProRL's
server; our handler has its own.
"""

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


class ProRL:
    """Make the routes. `codec` decodes tokens to text; engines may be at `hosts`."""

    def __init__(self, service: Service, *, codec: ChatCodec, hosts: Hosts) -> None:
        self._service, self._codec, self._hosts = service, codec, hosts
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
        return [
            web.get("/status", self.status),
            *(web.post(path, self._guarded(call)) for path, call in routes.items()),
        ]

    def _guarded(self, call: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def guarded(request: web.Request) -> web.Response:
            try:
                return json_answer(await call(request))
            except _DetailError as error:
                return json_answer({"detail": str(error)}, status=error.status)
            except ConfigError as error:
                return json_answer({"detail": str(error)}, status=400)
            except RefusedError as error:
                return json_answer(
                    {"detail": str(error)}, status=400 if isinstance(error, UnknownError) else 503
                )
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
        queued = {
            "init_queue": counts["queued"],
            "run_queue": counts["turns_waiting"],
            "eval_queue": 0,
        }
        total = sum(active.values()) + counts["queued"]
        return json_answer(
            {
                "status": "running" if self._started else "stopped",
                **queued,
                **active,
                "total": total,
            }
        )

    async def add_server(self, request: web.Request) -> dict[str, str]:
        body = decode(await body_of(request, most=BODY_BYTES), Address, rule="JSON")
        known = (
            body.address
            if body.address.startswith(("http://", "https://"))
            else f"http://{body.address}"
        ).rstrip("/")
        # Clients whose agents use OpenAI's API send its base URL; vLLM serves tokens
        # there, too.
        dialect = "completions" if known.endswith("/v1") else "prorl"
        engine = _asked(
            EngineRequest, address=known.removesuffix("/v1"), dialect=dialect, token=body.token
        )
        await must_admit(self._hosts, engine.address)
        self._service.register(engine)
        return {"status": f"Added LLM server address: {engine.address}"}

    async def clear_servers(self, request: web.Request) -> dict[str, str]:
        """Their turns wait for those that come next."""
        del request
        for engine in self._service.engines():
            if engine.address:
                self._service.withdraw(EngineId(engine.id), drain=False, force=True)
        return {"status": "Cleared all LLM server addresses"}

    async def cancel(self, request: web.Request) -> dict[str, str]:
        job_id = str(decode(await body_of(request, most=BODY_BYTES), JobId, rule="JSON").job_id)
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
        body = decode(await body_of(request, most=BODY_BYTES), Process, rule="JSON")
        if all(engine.status == REMOVED for engine in self._service.engines()):
            raise _DetailError(503, "No LLM server is registered")
        theirs = str(
            body.job_id
            if body.job_id is not None
            else body.instance.get("instance_id", next(self._numbers))
        )
        ours = f"prorl-{secrets.token_hex(12)}"
        await self._service.submit([_request(body, ours, self._service.environments())])
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
        resolved = bool(
            trajectory.success
            if trajectory is not None and trajectory.success is not None
            else (reward or 0) > 0
        )
        error = trajectory.error if trajectory is not None else ""
        return {
            "instance_id": body.instance.get("instance_id"),
            "trajectory_id": body.instance.get("trajectory_id", member.id),
            "git_patch": str(_kept(trajectory).get("git_patch", "")),
            "success": failed is None and reason != StopReason.CANCELLED,
            "error": error or (None if failed is None and reward is not None else reason),
            "finish": reason == StopReason.FINISHED,
            "messages": self._messages(
                trajectory, tokens=bool(body.sampling_params.get("token_level_generation", True))
            ),
            "tools": [],
            "end_properly": reward is not None,
            "resolved": resolved,
            "reward": reward,
            "critical_error": failed,
            "filter": failed is not None,
            "timing": _timing(trajectory, reason),
        }

    def _messages(self, trajectory: Trajectory | None, *, tokens: bool) -> list[dict[str, Any]]:
        """What was said, turn by turn; with the very tokens and log-probs of the
        agent's turns.
        """
        found: list[dict[str, Any]] = []
        for sequence in trajectory.sequences if trajectory is not None else ():
            for kind, start, end in _spans(sequence.segments):
                said = sequence.tokens[start:end]
                if kind is not SegmentKind.OUTPUT:
                    found.append({"role": "user", "content": self._codec.decode(said)})
                    continue
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": self._codec.text(said),
                    "tool_calls": [],
                }
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
    found = (
        msgspec.json.decode(trajectory.result)
        if trajectory is not None and trajectory.result
        else {}
    )
    return found if isinstance(found, dict) else {}


def _timing(trajectory: Trajectory | None, reason: str) -> dict[str, Any]:
    """Seconds of active time by stage; what else passed is `others_time`."""
    timing = trajectory.timing if trajectory is not None else None
    init, run, score, queue = (
        (timing.init_s, timing.run_s, timing.eval_s, timing.queue_s) if timing else (0.0,) * 4
    )
    return {
        "init_time": init,
        "run_time": run,
        "eval_time": score,
        "others_time": queue,
        "counted_elapsed": init + run + score,
        "timeout_triggered": reason == StopReason.TIME_BUDGET,
    }


def task_of(name: str, tasks: Mapping[str, str]) -> str:
    """Return the task domain for a `data_source`; `tasks` maps the names of served
    domains to their environments.

    It is the domain of that name, or else the first one whose environment does what
    ProRL's handler of that name does. The default, `swebench`, also selects the only
    domain. Any other name is returned as it is, and will be refused.
    """
    if name in tasks:
        return name
    env = "code" if name.startswith("deepcoder") else ENV_OF.get(name)
    found = [task for task, its_env in tasks.items() if its_env == env]
    if found:
        return found[0]
    return next(iter(tasks)) if name == DEFAULT_HANDLER and len(tasks) == 1 else name


def _request(body: Process, ours: str, tasks: Mapping[str, str]) -> RolloutRequest:
    """Raises ConfigError."""
    params = body.sampling_params
    instance = dict(body.instance)
    handler = instance.pop("data_source", DEFAULT_HANDLER)
    if not isinstance(handler, str):
        raise ConfigError(f"instance.data_source must be a name, got {handler!r:.100}")
    drawn = set(instance) <= {"index", "instance_id", "trajectory_id"} and "index" in instance
    sampling = {
        name: params[name] for name in Decoding.__struct_fields__ if params.get(name) is not None
    }
    if sampling.get("top_k") == -1:  # off, as vLLM says it
        sampling["top_k"] = 0
    others = {
        name: value for name, value in params.items() if name not in sampling and name not in LIMITS
    }
    found = refused_field(
        others, neutral=NEUTRAL_PARAMS, without_effect=WITHOUT_EFFECT | OF_THEIR_AGENT
    )
    if found is not None:
        name, rule = found
        raise ConfigError(f"sampling_params.{name} {rule}, got {others[name]!r:.100}")
    return _asked(
        RolloutRequest,
        handler=task_of(handler, tasks),
        id=ours,
        index=instance["index"] if drawn else None,
        payload=None if drawn else instance,
        sampling=sampling,
        limits={
            name: params[theirs]
            for theirs, name in LIMITS.items()
            if params.get(theirs) is not None
        },
    )


def _asked(kind: type[T], **fields: Any) -> T:
    """Raises ConfigError for a field that breaks a rule."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error)) from error
