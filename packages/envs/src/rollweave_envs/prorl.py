"""Plug-ins of ProRL Agent's server as handlers of a run (ProRL Agent §3.2.1).

A plug-in is an `AgentHandler` of that server: a class with `name`, the coroutines
`init(job_details, sid)`, `run(job_details, sid)` and `eval(job_details, sid,
allow_skip, reward)`, a callback for the exception of each, and `final_result`. It asks
its model through the address in `job_details.llm_config`, which is here the agent of
the attempt: every token is sampled and recorded by the run, so a plug-in has to
converse in messages (`token_level_generation` is false).

Invariants: each stage of a plug-in runs on a thread and an event loop of its own, as in
ProRL's server, so that a plug-in that blocks delays nobody else; the runtime that
`init` returned is closed before `eval`, and also if a stage fails or is cancelled, even
if `init` returns long after its cancellation; a result with a `critical_error` is a
failure, never a reward.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import inspect
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from rollweave.envs.base import Options, Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Agent, Job
from rollweave.envs.jsonl import draw_record, record_at
from rollweave.envs.registry import load
from rollweave.envs.threads import text_of, type_name
from rollweave.schema.errors import ConfigError, RewardError
from rollweave.schema.text import shortened
from rollweave.schema.work import Task

T = TypeVar("T")

METHODS = ("init", "run", "eval", "init_exception", "run_exception", "eval_exception")
"""Methods of a plug-in beside `final_result`."""

AGENT = {
    "max_iterations": 100,
    "ensure_thinking_end_properly": False,
    "strict_loop_detector": False,
    "enable_vision": False,
    "enable_a11y_tree": False,
}
"""The keys of `agent_config` that plug-ins read. The run bounds the number of turns, so
that a plug-in's own limit is high here.
"""

MODEL = "openai/rollweave"
"""Name of the model in a plug-in's requests, in the form of LiteLLM."""

ADDRESS = ("base_url", "api_key")
"""Fields of `llm_config` that say where the agent answers."""

RECORDED = ("messages", "tools")
"""Fields of a plug-in's results that are left out of `final_result`, because the
trajectory has them token by token.
"""


@dataclass
class JobDetails:
    """The fields that a plug-in's stages share. A plug-in that imports OpenHands' own
    class gets an instance of that class.
    """

    job_id: str | None = None
    instance: dict[str, Any] | None = None
    agent_config: dict[str, Any] = field(default_factory=dict)
    llm_config: Any = None
    runtime: Any = None
    metadata: Any = None
    config: Any = None
    agent: Any = None
    controller: Any = None
    run_results: dict[str, Any] | None = None
    eval_results: dict[str, Any] | None = None
    results: dict[str, Any] | None = None
    timeout_error: bool = False


class ProRL:
    """A plug-in `handler`, as `package.module:Class`, or an object there.

    - `instances` is a JSONL file with one instance per line, and `held_out` another
      with those that are not trained on; without it, two eighths of `instances` are
      held out. An instance without `data_source` gets the plug-in's `name`, and one
      without `instance_id` its file and row.
    - `agent_config` and `llm_config` are added to the fields of the job with these
      names. The run decides how the agent samples.
    - `reward` is what `eval` gets as its `reward`: `package.module:name`, which is
      called without arguments if it is a class.

    The attempt's reward is the `reward` of the plug-in's result, or 1 or 0 by its
    `resolved`.
    """

    def __init__(
        self,
        *,
        handler: str,
        instances: str,
        held_out: str = "",
        agent_config: Mapping[str, Any] | None = None,
        llm_config: Mapping[str, Any] | None = None,
        reward: str = "",
    ) -> None:
        """Load the plug-in. Raises ConfigError that names the option."""
        del instances, held_out  # used by `make_task`
        self._plugin = _plugin(handler)
        self._agent_config = {**AGENT, **_fields(agent_config, "agent_config")}
        self._llm_config = {"model": MODEL, **_fields(llm_config, "llm_config", *ADDRESS)}
        self._reward = _reward(reward) if reward else None
        self._id = ""
        self._stages: list[_Stage[Any]] = []
        self._details: Any = None
        self._taking = threading.Lock()
        self._told = False
        """True once the plug-in's callback has had the exception of `run`."""
        self._result: dict[str, Any] = {}

    async def init(self, job: Job) -> None:
        """Call the plug-in's `init` for the instance of the task."""
        payload = payload_of(job.task)
        instance = record_at(payload["file"], "", payload["row"], "instances")
        instance.setdefault("data_source", self._plugin.name)
        instance.setdefault("instance_id", f"{payload['file']}:{payload['row']}")
        self._id = instance["trajectory_id"] = f"{job.seed:x}"
        endpoint = await job.endpoint()
        self._details = _theirs("openhands.nvidia.registry", "JobDetails", JobDetails)(
            job_id=self._id,
            instance=instance,
            agent_config=copy.deepcopy(self._agent_config),
            llm_config=_theirs("openhands.core.config.llm_config", "LLMConfig", SimpleNamespace)(
                **{"token_level_generation": False} | self._llm_config,
                base_url=endpoint.url,
                api_key=endpoint.token,
            ),
        )
        details = self._details

        async def prepared() -> None:
            # The runtime is kept here, since a cancelled stage loses what it returns.
            details.runtime, *rest = await self._plugin.init(job_details=details, sid=self._id)
            details.metadata, details.config = rest

        await self._apart(prepared)

    async def run(self, agent: Agent) -> None:
        """Call the plug-in's `run`, which converses at the agent's address."""
        await agent.endpoint()
        details = self._details
        try:
            details.run_results = await self._apart(
                lambda: self._plugin.run(job_details=details, sid=self._id)
            )
        except Exception as error:
            # an agent that has used up its turns is evaluated nevertheless
            self._told = True
            details.run_results = await self._failed("run", error)
            raise

    async def close(self) -> None:
        """Close the runtime after the end of all stages that are under way."""
        for stage in self._stages:
            await stage.ended()
        if (runtime := self._taken()) is not None:
            await self._apart(lambda: _closed(runtime))

    def kill(self) -> None:
        """Close the runtime without waiting, and again when a stage ends that may still
        start one.
        """
        self._drop()
        for stage in self._stages:
            stage.then(self._drop)

    def _drop(self) -> None:
        if (runtime := self._taken()) is not None:
            _in_thread(lambda: _closed(runtime), f"close {self._id}")

    async def eval(self) -> Score:
        """Return the plug-in's reward. Raises RewardError if its result has none."""
        details = self._details

        async def evaluated() -> Any:
            results = await self._plugin.eval(
                details, sid=f"eval_{self._id}", allow_skip=True, reward=self._reward
            )
            report = results.get("report") if isinstance(results, Mapping) else None
            details.eval_results = results if report is None else report
            self._result = _plain(self._plugin.final_result(details))
            return details.eval_results

        return score_of(await self._apart(evaluated), "eval")

    async def init_exception(self, error: Exception) -> Score | None:
        """Let the plug-in describe the failure, which has no reward."""
        await self._failed("init", error)
        return None

    async def run_exception(self, error: Exception) -> Score | None:
        """Return the reward of a failed `run` if the plug-in's callback gives one."""
        if not self._told:  # `run` was cancelled, for example at a time limit
            await self._failed("run", error)
        return _score_of_failure(self._details.results)

    async def eval_exception(self, error: Exception) -> Score | None:
        """Return the reward of a failed `eval` if the plug-in's callback gives one."""
        return _score_of_failure(await self._failed("eval", error))

    def final_result(self) -> dict[str, Any]:
        """Return the plug-in's result without the conversation."""
        return self._result

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next instance of the split. Raises ConfigError."""
        if "instances" not in options:
            raise ConfigError("options.instances must be a JSONL file, got none")
        file, row = draw_record(
            options["instances"],
            options.get("held_out", ""),
            "",
            option="instances",
            index=index,
            seed=seed,
            split=split,
        )
        return new_task(file=file, row=row)

    async def _failed(self, stage: str, error: Exception) -> dict[str, Any] | None:
        """Call the plug-in's callback for a failed stage, and keep what it returns."""
        if self._details is None:
            return None

        async def described() -> Any:
            result = getattr(self._plugin, f"{stage}_exception")(self._details, error)
            return await result if inspect.isawaitable(result) else result

        self._details.results = results = await self._apart(described)
        self._result = _plain(results)
        return results if isinstance(results, dict) else None

    def _taken(self) -> Any:
        """Return the runtime that is to be closed, once; None if there is none."""
        if self._details is None:
            return None
        with self._taking:
            runtime, self._details.runtime = self._details.runtime, None
        return runtime

    async def _apart(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a stage on an event loop of its own in a thread."""
        stage = _Stage(call, self._id)
        self._stages.append(stage)
        return await stage.result()


class _Stage(Generic[T]):
    """A call of a plug-in on a thread, which begins at once."""

    def __init__(self, call: Callable[[], Awaitable[T]], name: str) -> None:
        self._begun: concurrent.futures.Future[Callable[[], Any]] = concurrent.futures.Future()
        self._done = _in_thread(lambda: self._run(call), name)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine of a loop runs in a task"
        self._begun.set_result(functools.partial(loop.call_soon_threadsafe, task.cancel))
        return await call()

    async def result(self) -> T:
        """Return the result of the call; cancel the call if this wait is cancelled."""
        try:
            await self.ended()
        except asyncio.CancelledError:
            self._begun.add_done_callback(lambda cancel: _unless_closed(cancel.result()))
            raise
        return self._done.result()

    async def ended(self) -> None:
        """Wait for the end of the call, which after a cancellation may be late."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self.then(lambda: _unless_closed(lambda: loop.call_soon_threadsafe(ended.set)))
        await ended.wait()

    def then(self, call: Callable[[], None]) -> None:
        """Make the call, in any thread, once the stage has ended."""
        self._done.add_done_callback(lambda _: call())


def _unless_closed(tell: Callable[[], Any]) -> None:
    """Tell an event loop something, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        tell()


def _in_thread(call: Callable[[], Awaitable[T]], name: str) -> "concurrent.futures.Future[T]":
    """Await a call on a new event loop in a new thread, in this context."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    async def awaited() -> T:
        return await call()

    def work() -> None:
        try:
            with asyncio.Runner() as runner:
                try:
                    done.set_result(runner.run(awaited(), context=context))
                except BaseException as error:  # of foreign code, which may raise anything
                    done.set_exception(error)
                # The loop's end waits for what the call has left running.
        except BaseException as error:
            if not done.done():  # the loop could not begin
                done.set_exception(error)

    threading.Thread(target=work, name=f"prorl {name}", daemon=True).start()
    return done


async def _closed(runtime: Any) -> None:
    """Close a runtime of OpenHands, and the threads of its event stream."""
    async with contextlib.AsyncExitStack() as parts:
        for part in (getattr(runtime, "event_stream", None), runtime):
            if (close := getattr(part, "close", None)) is not None:
                parts.push_async_callback(_called, close)


async def _called(close: Callable[[], Any]) -> None:
    if inspect.isawaitable(closing := close()):
        await closing


def score_of(results: Any, stage: str) -> Score:
    """Return the reward in a plug-in's results. Raises RewardError."""
    if not isinstance(results, Mapping):
        raise RewardError(f"{stage} must return a dict, got {type_name(results)}")
    if error := results.get("critical_error"):
        raise RewardError(f"{stage} has the critical_error {error!r}: {results.get('error')}")
    solved = results.get("resolved")
    reward = results.get("reward", solved)
    if not isinstance(reward, int | float):
        raise RewardError(
            f"{stage} must return a number as reward, or resolved, got {sorted(map(str, results))}"
        )
    return Score(
        reward=float(reward),
        success=bool(solved) if solved is not None else None,
        reason=shortened(str(results["error"])) if results.get("error") else "",
    )


def _score_of_failure(results: Any) -> Score | None:
    """Return the reward that a callback for an exception gives, or None."""
    if not isinstance(results, Mapping) or results.get("critical_error"):
        return None
    return score_of(results, "a callback")


def _plain(results: Any) -> dict[str, Any]:
    """Return results as JSON values, without the conversation. Results that JSON cannot
    hold are an error in their place, since a reward does not depend on them.
    """
    if not isinstance(results, Mapping):
        return {}
    kept = {name: value for name, value in results.items() if name not in RECORDED}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": f"the plug-in's result must be JSON: {type_name(error)}: {text_of(error)}"}
    return plain


def _fields(given: Any, option: str, *ours: str) -> dict[str, Any]:
    """Return the fields of an option. Raises ConfigError if it is no table, or has a
    field of ours.
    """
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"options.{option} must be a table, got {type_name(given)}")
    fields = dict(given or {})
    if taken := [name for name in ours if name in fields]:
        raise ConfigError(
            f"options.{option} must leave {' and '.join(ours)} to the run, got {', '.join(taken)}"
        )
    return fields


def _theirs(module: str, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return OpenHands' class if a plug-in has imported its module, else ours."""
    found: Callable[..., Any] = getattr(sys.modules.get(module), name, ours)
    return found


@functools.lru_cache(16)
def _plugin(reference: str) -> Any:
    """Return the plug-in, of which a process has one, as ProRL's registry has."""
    found = load(reference, what="options.handler")
    plugin = _made(found, "options.handler")
    missing = [
        name for name in (*METHODS, "final_result") if not callable(getattr(plugin, name, None))
    ]
    if missing or not isinstance(getattr(plugin, "name", None), str):
        raise ConfigError(
            "options.handler must be an AgentHandler of ProRL Agent, with the text name and the "
            f"methods {', '.join((*METHODS, 'final_result'))}; {reference} has no "
            f"{', '.join(missing or ['name'])}"
        )
    return plugin


@functools.lru_cache(16)
def _reward(reference: str) -> Any:
    return _made(load(reference, what="options.reward"), "options.reward")


def _made(found: Any, option: str) -> Any:
    """Return an instance of a class, and any other object as it is."""
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as error:
        raise ConfigError(
            f"{option} must be made without arguments: {found.__name__}() raised "
            f"{type_name(error)}: {text_of(error)}"
        ) from error
