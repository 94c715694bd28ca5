"""ProRL Agent's HTTP contract beside our own, so that its clients run unchanged (ProRL
§3, and what those clients send and read).

A job is a rollout of one member; `instance.data_source` names a task domain of the
service, or a handler of ProRL for which `task_domain` finds one. Three things are
better than in ProRL's server: repeated job ids do not clash, stopping cancels only the
jobs of this API, and no request causes a 500. Errors are `{"detail"}`.
"""

import asyncio
import functools
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.io.http.fields import NEUTRAL, WITHOUT_EFFECT, refused_field
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.address import Hosts
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Decoding, Segment, SegmentKind, StopReason, Timing, Trajectory
from rollweave_service.base import ClosedError, RefusedError, UnknownError
from rollweave_service.engines import REMOVED, check_engine_host
from rollweave_service.messages import EngineRequest, MemberStatus, RolloutRequest
from rollweave_service.routes import Route, json_response, status_of
from rollweave_service.service import Service

T = TypeVar("T")

DEFAULT_HANDLER = "swebench"
"""Default `data_source` of an instance."""

ENV_OF: Mapping[str, str] = {
    **dict.fromkeys(("swebench", "swe-gym", "swegym"), "swe"),
    **dict.fromkeys(("deepcoder", "codecontests", "apps", "codeforces", "taco"), "code"),
    "math": "math_tool",
    "stem": "stem",
}
"""Name that ProRL's clients send as `data_source` → our handler for such tasks."""

STAGES = ("queued", "init", "run_queued", "run", "eval_queued", "eval")
"""Fields of the service's health that count its jobs."""

POLL_S = 60.0
"""Seconds between two checks whether a job is done."""

LIMITS: Mapping[str, str] = {
    "max_iterations": "max_turns",
    "max_model_len": "max_tokens",
    "max_output_tokens": "max_turn_tokens",
    "timeout": "time_s",
}
"""Field of `sampling_params` → field of our `limits`."""

NEUTRAL_PARAMS: Mapping[str, tuple[object, ...]] = {**NEUTRAL, "enable_thinking": (True,)}
"""Field of `sampling_params` → those of its values that have no effect.

Thinking is on by default, in ProRL and here.
"""

PRORL_AGENT_FIELDS = frozenset(
    """
    api_key api_version aws_access_key_id aws_region_name aws_secret_access_key base_url
    caching_prompt custom_llm_provider custom_tokenizer disable_stop_word disable_vision
    drop_params enable_a11y_tree enable_vision ensure_thinking_end_properly
    input_cost_per_token is_reasoning_task log_completions log_completions_folder
    max_input_tokens max_message_chars model modify_params native_tool_calling
    num_retries ollama_base_url openrouter_app_name openrouter_site_url
    output_cost_per_token retry_max_wait retry_min_wait retry_multiplier
    strict_loop_detector token_level_generation
    """.split()  # noqa: SIM905 (a list has one name a line)
)
"""Fields of `sampling_params` that configure the agent and LLM client of ProRL's
server; our handler has its own.
"""

FAILED_STAGE: Mapping[str, str] = {
    **dict.fromkeys((StopReason.ENV_ERROR, StopReason.ENV_HANG), "run"),
    **dict.fromkeys((StopReason.TEACHER_ERROR, StopReason.IMAGE_ERROR), "run"),
    **dict.fromkeys((StopReason.ENGINE_FAILURE, StopReason.ENGINES_LOST), "run"),
    **dict.fromkeys((StopReason.WORLD_LOST, StopReason.WORKER_LOST), "run"),
    **dict.fromkeys((StopReason.REWARD_ERROR, StopReason.REWARD_HANG), "eval"),
    StopReason.REWARD_UNAVAILABLE: "eval",
    StopReason.TIME_BUDGET: "timeout",
}
"""`critical_error` by stop reason; an environment that never ran failed in "init"."""


class Process(msgspec.Struct, frozen=True):
    """The body of /process. Unknown fields of all bodies are ignored."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = {}
    job_id: str | int | None = None


class Address(msgspec.Struct, frozen=True):
    """The body of /add_llm_server.

    `token` is the server's bearer token, if it requires one; ProRL's clients send none.
    """

    address: str
    token: str = ""


class JobId(msgspec.Struct, frozen=True):
    """The body of /cancel."""

    job_id: str | int


class Done(msgspec.Struct, frozen=True):
    """The answer to a request that was carried out."""

    status: str


class Detail(msgspec.Struct, frozen=True):
    """The answer to a request that is refused."""

    detail: str


class UnknownJobError(UnknownError):
    """No such job is under way."""


def _refused(error: Exception) -> web.Response:
    """Answer in ProRL's form, with the statuses that its clients read."""
    status = status_of(error)
    if isinstance(error, RefusedError) and not isinstance(error, UnknownJobError):
        status = 400 if status in (400, 404) else 503
    return json_response(Detail(detail=str(error)), status=status)


class ProRL:
    """Serves ProRL's API. `codec` decodes tokens to text; engines may be registered at
    `hosts`.
    """

    def __init__(self, service: Service, *, codec: ChatCodec, hosts: Hosts) -> None:
        self._service, self._codec, self._hosts = service, codec, hosts
        self._started = False
        # id of a client's job → ids of its rollouts that are under way
        self._jobs: dict[str, list[str]] = {}
        self._numbers = itertools.count()

    def routes(self) -> list[Route]:
        """Return the routes to add to those of the service's own API."""
        route = functools.partial(Route, refusal=Detail, refused=_refused, tag="ProRL")
        return [
            route("GET", "/status", self.status),
            route("POST", "/start", self.start, errors=(400,)),
            route("POST", "/stop", self.stop, errors=(400,)),
            route("POST", "/add_llm_server", self.add, errors=(400, 503, 507)),
            route("POST", "/clear_llm_server", self.clear, errors=(507,)),
            route("POST", "/cancel", self.cancel, errors=(400, 404)),
            route("POST", "/process", self.process, errors=(400, 503, 507)),
        ]

    # Control.

    async def start(self) -> Done:
        """Accept jobs from now on."""
        if self._started:
            raise RefusedError("Server is already running")
        self._started = True
        return Done("Server started successfully")

    async def stop(self) -> Done:
        """Cancel all jobs and accept no more."""
        if not self._started:
            raise RefusedError("Server is not running")
        self._started = False
        for job_id in list(self._jobs):
            self._cancel(job_id)
        return Done("Server stopped successfully")

    async def status(self) -> dict[str, str | int]:
        """Count jobs by stage."""
        now = self._service.health()
        return {
            "status": "running" if self._started else "stopped",
            "init_queue": now.queued,
            "run_queue": now.run_queued,
            "eval_queue": now.eval_queued,
            "active_init": now.init,
            "active_run": now.run,
            "active_eval": now.eval,
            "total": sum(getattr(now, stage) for stage in STAGES),
        }

    async def add(self, body: Address) -> Done:
        """Register an engine."""
        url = body.address
        if not url.startswith(("http://", "https://")):
            url = f"http://{url}"
        url = url.rstrip("/")
        # Clients whose agents use OpenAI's API send its base URL; vLLM serves tokens
        # there, too.
        dialect = "completions" if url.endswith("/v1") else "prorl"
        engine = _convert(
            EngineRequest, address=url.removesuffix("/v1"), dialect=dialect, token=body.token
        )
        await check_engine_host(self._hosts, engine.address)
        self._service.engines.register(engine)
        return Done(f"Added LLM server address: {engine.address}")

    async def clear(self) -> Done:
        """Withdraw all registered engines. Their turns wait for the next ones."""
        for engine in self._service.engines.statuses():
            if engine.address:
                self._service.engines.withdraw(EngineId(engine.id), drain=False, force=True)
        return Done("Cleared all LLM server addresses")

    async def cancel(self, body: JobId) -> Done:
        """Cancel a job."""
        job_id = str(body.job_id)
        if job_id not in self._jobs:
            raise UnknownJobError(f"Job {job_id} not found")
        self._cancel(job_id)
        return Done(f"Job {job_id} canceled successfully")

    def _cancel(self, job_id: str) -> None:
        for rollout_id in self._jobs.get(job_id, []):
            self._service.rollouts.cancel(rollout_id)

    # Jobs.

    async def process(self, body: Process) -> dict[str, Any]:
        """Run a job and wait for its result. A client that disconnects cancels it."""
        if not self._started:
            raise ClosedError("Server is not running")
        rollouts, engines = self._service.rollouts, self._service.engines
        if all(engine.status == REMOVED for engine in engines.statuses()):
            raise ClosedError("No LLM server is registered")
        job_id = str(
            body.job_id
            if body.job_id is not None
            else body.instance.get("instance_id", next(self._numbers))
        )
        rollout_id = f"prorl-{secrets.token_hex(12)}"
        await rollouts.submit([_request(body, rollout_id, rollouts.environments())])
        self._jobs.setdefault(job_id, []).append(rollout_id)
        if not self._started:  # stopped while the task was drawn
            rollouts.cancel(rollout_id)
        try:
            while True:
                status = await rollouts.wait(rollout_id, POLL_S)
                if status.state == "done":
                    return self._result(body, status.members[0])
        except asyncio.CancelledError:
            rollouts.cancel(rollout_id)
            raise
        finally:
            self._jobs[job_id].remove(rollout_id)
            if not self._jobs[job_id]:
                del self._jobs[job_id]

    def _result(self, body: Process, member: MemberStatus) -> dict[str, Any]:
        """Return a job's result in ProRL's form."""
        trajectory, reason = member.result, member.stop_reason or StopReason.CANCELLED
        failed_stage = FAILED_STAGE.get(reason)
        if failed_stage == "run" and (trajectory is None or not trajectory.sequences):
            failed_stage = "init"
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
            "git_patch": str(_final_result(trajectory).get("git_patch", "")),
            "success": failed_stage is None and reason != StopReason.CANCELLED,
            "error": error or (None if reward is not None else reason),
            "finish": reason == StopReason.FINISHED,
            "messages": self._messages(
                trajectory, tokens=bool(body.sampling_params.get("token_level_generation", True))
            ),
            "tools": [msgspec.json.decode(tool) for tool in trajectory.tools]
            if trajectory is not None
            else [],
            "end_properly": reward is not None,
            "resolved": resolved,
            "reward": reward,
            "critical_error": failed_stage,
            "filter": failed_stage is not None,
            "timing": _timing(trajectory, reason),
        }

    def _messages(self, trajectory: Trajectory | None, *, tokens: bool) -> list[dict[str, Any]]:
        """Return the conversation, turn by turn; with `tokens`, including the sampled
        tokens and log-probs of the agent's turns.
        """
        messages: list[dict[str, Any]] = []
        for sequence in trajectory.sequences if trajectory is not None else ():
            for kind, start, end in _spans(sequence.segments):
                span = sequence.tokens[start:end]
                if kind is not SegmentKind.OUTPUT:
                    messages.append({"role": "user", "content": self._codec.decode(span)})
                    continue
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": self._codec.text(span),
                    "tool_calls": [],
                }
                if tokens:
                    message |= {
                        "token_ids": span,
                        "input_ids": sequence.tokens[:start],
                        "logprobs": sequence.logprobs[start:end],
                    }
                messages.append(message)
        return messages


def _spans(segments: Sequence[Segment]) -> list[tuple[SegmentKind, int, int]]:
    """Return the segments as (kind, start, end). Output of several weight versions in a
    row becomes one span.
    """
    spans: list[tuple[SegmentKind, int, int]] = []
    for segment in segments:
        if spans and spans[-1][0] is segment.kind is SegmentKind.OUTPUT:
            spans[-1] = (segment.kind, spans[-1][1], segment.end)
        else:
            spans.append((segment.kind, segment.start, segment.end))
    return spans


def _final_result(trajectory: Trajectory | None) -> dict[str, Any]:
    """Return the handler's final result, or {} if it is not an object."""
    result = msgspec.json.decode(trajectory.result or "{}") if trajectory is not None else {}
    return result if isinstance(result, dict) else {}


def _timing(trajectory: Trajectory | None, reason: str) -> dict[str, Any]:
    """Return the seconds of active time by stage; `others_time` is the time in
    queues.
    """
    timing = trajectory.timing if trajectory is not None else Timing()
    return {
        "init_time": timing.init_s,
        "run_time": timing.run_s,
        "eval_time": timing.eval_s,
        "others_time": timing.queue_s,
        "counted_elapsed": timing.init_s + timing.run_s + timing.eval_s,
        "timeout_triggered": reason == StopReason.TIME_BUDGET,
    }


def task_domain(name: str, tasks: Mapping[str, str]) -> str:
    """Return the task domain for a `data_source`; `tasks` maps the names of served
    domains to their environments.

    It is the domain of that name, or else the first one whose environment does what
    ProRL's handler of that name does. The default, `swebench`, also selects the only
    domain. Any other name is returned as it is, and will be refused.
    """
    if name in tasks:
        return name
    env = "code" if name.startswith("deepcoder") else ENV_OF.get(name)
    domains = [task for task, task_env in tasks.items() if task_env == env]
    if domains:
        return domains[0]
    return next(iter(tasks)) if name == DEFAULT_HANDLER and len(tasks) == 1 else name


def _request(body: Process, rollout_id: str, tasks: Mapping[str, str]) -> RolloutRequest:
    """Return the rollout request for a job. Raises ConfigError."""
    params = body.sampling_params
    instance = dict(body.instance)
    handler = instance.pop("data_source", DEFAULT_HANDLER)
    if not isinstance(handler, str):
        raise ConfigError(f"instance.data_source must be a name, got {handler!r:.100}")
    drawn = set(instance) <= {"index", "instance_id", "trajectory_id"} and "index" in instance
    sampling = {
        name: params[name] for name in Decoding.__struct_fields__ if params.get(name) is not None
    }
    if sampling.get("top_k") == -1:  # vLLM's value for "off"
        sampling["top_k"] = 0
    others = {
        name: value for name, value in params.items() if name not in sampling and name not in LIMITS
    }
    refused = refused_field(
        others, neutral=NEUTRAL_PARAMS, without_effect=WITHOUT_EFFECT | PRORL_AGENT_FIELDS
    )
    if refused is not None:
        name, rule = refused
        raise ConfigError(f"sampling_params.{name} {rule}, got {others[name]!r:.100}")
    return _convert(
        RolloutRequest,
        handler=task_domain(handler, tasks),
        id=rollout_id,
        index=instance["index"] if drawn else None,
        payload=None if drawn else instance,
        sampling=sampling,
        limits={
            name: params[param] for param, name in LIMITS.items() if params.get(param) is not None
        },
    )


def _convert(kind: type[T], **fields: Any) -> T:
    """Make a `kind` of `fields`. Raises ConfigError for a field that breaks a rule."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error)) from error
