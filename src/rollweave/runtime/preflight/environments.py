"""Check environments, which are the user's code: every call is guarded, and limited in
time.
"""

import asyncio
import functools
import inspect
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollweave.envs.base import Observation
from rollweave.envs.handlers.base import AgentHandler, Endpoint, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import NotCachedError, Sandboxes
from rollweave.envs.images import images_of
from rollweave.envs.registry import check_options, is_handler, resolve
from rollweave.envs.rules import named, rule
from rollweave.envs.tasks import TaskSource
from rollweave.io.locked_folders import temporary_folder
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.handler_episode import declared
from rollweave.rollout.reward_sources import reference_in, reward_function
from rollweave.runtime.images import Images
from rollweave.runtime.preflight.checks import Check, fail, failures, ok, warn
from rollweave.runtime.preflight.images import examine_images
from rollweave.schema.base import Struct, copied
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import Faults
from rollweave.schema.config.tasks import TaskConfig
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.text import valid_tree
from rollweave.schema.work import Limits, Purpose, StopReason, Task, Unreadable

T = TypeVar("T")

PATIENCE_S = 30.0
"""Maximum duration of a class method of an environment, in seconds: each is called
once, before the run.
"""


REPEATED = "repeated evaluation tasks"
"""Name of the checks that say which evaluations have too few tasks."""

COUNTED, COUNTING_S = 1000, 1.0
"""Maximum number of tasks that are drawn to count those of an evaluation, and maximum
duration in seconds.
"""

TRANSCRIPTS = 64
"""Number of transcripts that are checked.

Transcripts are random, so that an overlong one may still appear later.
"""


class Domain(Struct, frozen=True, kw_only=True):
    """A task domain whose checks passed, as far as the checks of the model need it."""

    name: str
    words: tuple[str, ...]
    images: tuple[str, ...]
    allowed: tuple[str, ...]
    limits: Limits
    transcripts: tuple[tuple[Message, ...], ...] = ()
    """Some transcripts of the warm-up."""
    prompts: tuple[tuple[str, tuple[Message, ...]], ...] = ()
    """All prompts with their places, if the domain can list them."""
    drops_overlong: bool = False
    """True if prompts that are too long are to be left out, instead of refused."""
    first: tuple[Message, ...] = ()
    """First messages of an episode; none if none was started."""
    tools: tuple[str, ...] = ()
    """Tools that are offered to the agent, as its chat template shows them."""


class Declared(Struct, frozen=True, kw_only=True):
    """The declarations of the task domains that a run needs at its start: the words of
    a tokenizer from scratch, and the images of their sandboxes.
    """

    words: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


class BrokenError(RollweaveError):
    """The environment breaks the rule that the message states."""


def examine_domain(
    config: RunConfig, index: int, *, deep: bool
) -> tuple[Domain | None, list[Check]]:
    """Check `config.tasks[index]`; the domain is None if a check failed."""
    task = config.tasks[index]
    where = f"tasks.{index}"
    checks: list[Check] = []
    transcripts: tuple[tuple[Message, ...], ...] = ()
    try:
        kind = _guarded(lambda: resolve(task.env), PATIENCE_S, "env must be imported")
        check_options(task.env, task.options)
        checks.append(ok(f"{where}.env", f"{task.name}: {kind.__module__}.{kind.__qualname__}"))
        images = _guarded(
            lambda: images_of(task.env, task.options), PATIENCE_S, "images must return the images"
        )
        checks += examine_images(config, index, images)
        if failures(checks):
            return None, checks
        words = _words(kind, "words", task)
        allowed = _words(kind, "allowed_words", task)
        if config.warmup.steps:
            transcripts, check = _transcripts(kind, task, where)
            checks.append(check)
        drawn, repeated = _draw(config, task)
        checks += repeated
        _check_references(config, drawn)
        prompts = _prompts(kind, task)
        drops = getattr(kind, "drops_overlong", None)
        first: tuple[Message, ...] = ()
        tools: tuple[str, ...] = ()
        if deep and is_handler(task.env):
            agent, missing = _first_turn(config, task, drawn)
            first, tools = agent.messages, agent.tools
            with_tools = f", with {len(tools)} tools" if tools else ""
            detail = (
                f"begins with {_text(first)!r:.90}{with_tools}" if first else "its handler starts"
            )
            checks.append(ok(f"{where} task", missing or detail))
        elif deep:
            first = _first_observation(config, task, drawn).messages
            checks.append(ok(f"{where} task", f"begins with {_text(first)!r:.90}"))
    except (ConfigError, BrokenError) as error:
        return None, [*checks, fail(where, str(error))]
    domain = Domain(
        name=where,
        words=words,
        images=images,
        allowed=allowed,
        limits=task.limits,
        transcripts=transcripts,
        prompts=prompts,
        drops_overlong=drops is not None and bool(drops(copied(task.options))),
        first=first,
        tools=tools,
    )
    return domain, checks


def examine_rules(config: RunConfig) -> Iterator[Check]:
    """Check the functions that `[buffer]` and `[[rewards]]` name."""
    for setting, name in named(config):
        try:
            rule(name)
        except ConfigError as error:
            yield fail(setting, str(error))
        else:
            yield ok(setting, f"function {name}")
    for number, reward in enumerate(config.rewards):
        if reward.function is None:
            continue
        setting, name = f"rewards.{number}.function", reward.function
        try:
            _guarded(
                functools.partial(reward_function, name), PATIENCE_S, f"{name} must be imported"
            )
        except (ConfigError, BrokenError) as error:
            yield fail(setting, str(error))
        else:
            yield ok(setting, f"{reward.name}: function {name}")


def declared_by(config: RunConfig) -> Declared:
    """Return what all task domains declare. Raises ConfigError or BrokenError."""

    def ask() -> Declared:
        return Declared(
            words=TaskSource(config).words(),
            images=tuple(
                image for one in config.tasks for image in images_of(one.env, one.options)
            ),
        )

    return _guarded(ask, PATIENCE_S, "words and images must be returned")


def _text(messages: Sequence[Message]) -> str:
    return " ".join(message.content for message in messages).strip()


def _words(kind: type[Any], name: str, task: TaskConfig) -> tuple[str, ...]:
    """Return the words of an optional class method."""
    method = getattr(kind, name, None)
    if method is None:
        return ()
    words = _guarded(
        lambda: _iterated(method(copied(task.options))), PATIENCE_S, f"{name} must return words"
    )
    wrong = (
        [words]
        if isinstance(words, str)
        else [word for word in words if not isinstance(word, str) or not word]
    )
    if wrong:
        raise BrokenError(f"{name} must return a list of non-empty strings, got {wrong[0]!r:.80}")
    return tuple(words)


def _prompts(kind: type[Any], task: TaskConfig) -> tuple[tuple[str, tuple[Message, ...]], ...]:
    """Return all prompts of a domain that can list them."""
    method = getattr(kind, "prompts", None)
    if method is None:
        return ()
    prompts = _guarded(
        lambda: [(place, _messages(each)) for place, each in method(copied(task.options))],
        PATIENCE_S,
        "prompts must return places and messages",
    )
    return tuple(prompts)


def _messages(given: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with valid text, as a rollout begins with them."""
    plain = msgspec.to_builtins(tuple(given), builtin_types=(bytes,))
    return msgspec.convert(valid_tree(plain), tuple[Message, ...])


def _iterated(words: Any) -> Any:
    """Iterate over the user's object under guard, but leave a string as it is."""
    return words if isinstance(words, str) else tuple(words)


def _transcripts(
    kind: type[Any], task: TaskConfig, where: str
) -> tuple[tuple[tuple[Message, ...], ...], Check]:
    """Return the first transcripts of the warm-up, and a check that describes them."""
    method = getattr(kind, "transcript", None)
    if method is None:
        raise BrokenError(f"env must have transcript() if warmup.steps is set, {task.env} has none")
    transcripts: list[tuple[Any, ...]] = _guarded(
        lambda: [
            tuple(method(random.Random(seed), copied(task.options))) for seed in range(TRANSCRIPTS)
        ],
        PATIENCE_S,
        "transcript must return messages",
    )
    for messages in transcripts:
        if not messages or any(not isinstance(message, Message) for message in messages):
            raise BrokenError(f"transcript must return messages, got {list(messages)!r:.80}")
    return tuple(transcripts), ok(
        f"{where} warm-up",
        _first_paragraph(method) or f"{len(transcripts[0])} messages in a transcript",
    )


def _draw(config: RunConfig, task: TaskConfig) -> tuple[Task, list[Check]]:
    """Draw tasks of each kind of evaluation, and return the first training task, with a
    warning for each evaluation that would repeat its tasks.
    """
    source, checks = TaskSource(_only(config, task)), list[Check]()
    evaluations = [
        ("final_episodes", "test", FINAL_TASKS_FROM, config.eval.final_episodes),
        ("episodes", "validation", 0, config.eval.every and config.eval.episodes),
    ]

    def draw() -> Task:
        for setting, split, first, count in evaluations:
            distinct = _exhausted(source, task.name, first, count)
            if distinct is not None:
                checks.append(
                    warn(
                        REPEATED,
                        f"eval.{setting} {count} exceeds the {distinct} distinct tasks of the "
                        f"{split} split of {task.name}: they are repeated, and the result is no "
                        f"surer than that of {distinct} episodes",
                    )
                )
        return source.draw(task.name, 0, Purpose.TRAIN)

    return _guarded(draw, PATIENCE_S, "a task must be drawn"), checks


def _exhausted(source: TaskSource, name: str, first: int, count: int) -> int | None:
    """Return the number of tasks of an evaluation's split, if `count` draws repeat
    them: all others then came before the first repeated one. Otherwise None, also if
    drawing takes too long. The first task is drawn in any case.
    """
    seen, repeated, deadline = set[tuple[int, str]](), False, time.monotonic() + COUNTING_S
    for index in range(first, first + min(count, COUNTED)):
        if index > first and time.monotonic() > deadline:
            return None
        drawn = source.draw(name, index, Purpose.EVAL)
        key = (drawn.seed, drawn.payload)
        if key not in seen and repeated:
            return None
        repeated = repeated or key in seen
        seen.add(key)
    return len(seen) if repeated else None


def _check_references(config: RunConfig, drawn: Task) -> None:
    """Check that the task has the reference answers that judges are shown."""
    for reward in config.rewards_of(drawn.tag):
        key = reward.judge.reference if reward.judge is not None else None
        if key is not None:
            try:
                reference_in(drawn, key)
            except EpisodeStopError as error:
                raise BrokenError(str(error)) from error


def _only(config: RunConfig, task: TaskConfig) -> RunConfig:
    return config.model_copy(update={"tasks": (task,), "faults": Faults()})


def _first_observation(config: RunConfig, task: TaskConfig, drawn: Task) -> Observation:
    """Reset an environment with the first training task, inline or in a process as in
    the run.
    """

    async def reset(logs: Path) -> Observation:
        source = TaskSource(_only(config, task), logs=logs)
        try:
            env = await source.provider(task.name).open(drawn, seed=0)
            try:
                async with asyncio.timeout(task.step_s):
                    return await env.reset(drawn)
            except TimeoutError:
                raise BrokenError(
                    f"reset must answer within step_s, got nothing in {task.step_s:g} s"
                ) from None
            finally:
                env.kill()
        finally:
            await source.close()

    with temporary_folder("rollweave-dry-runs-") as logs:
        limit_s = PATIENCE_S + task.step_s
        return _guarded(lambda: asyncio.run(reset(logs)), limit_s, "an environment must be reset")


class _DryRunError(RollweaveError):
    """Ends the attempt at the handler's first request: a dry run has no agent."""


class _RecordingAgent:
    """An `Agent` that records the first request and ends the attempt there."""

    def __init__(self, turns: int) -> None:
        self.turns_left = turns
        self.messages: tuple[Message, ...] = ()
        self.tools: tuple[str, ...] = ()
        self.has_message = False

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        if not self.has_message:
            self.messages, self.tools, self.has_message = (
                tuple(messages),
                tuple(declared(tool) for tool in tools),
                True,
            )
        self.turns_left = 0
        raise LimitError(StopReason.MAX_TURNS, "a dry run has no agent")

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        del unreadable
        self.has_message = True
        raise _DryRunError("a dry run has no agent")


def _first_turn(config: RunConfig, task: TaskConfig, drawn: Task) -> tuple[_RecordingAgent, str]:
    """Let a handler prepare the first training task and ask its agent once, then free
    the acquired resources.

    Also return why that was not tried, "" if it was: an image is not in the cache, and
    a dry run does not obtain it.
    """

    async def ask(handler: AgentHandler, agent: _RecordingAgent) -> None:
        try:
            async with asyncio.timeout(task.step_s):
                await handler.run(agent)
        except TimeoutError:
            raise BrokenError(
                f"run must ask the agent within step_s, and did not in {task.step_s:g} s"
            ) from None
        except Exception:
            # otherwise the error is that of the agent, or a consequence
            if not agent.has_message:
                raise
        if not agent.has_message:
            raise BrokenError("run must ask the agent at least once, and returned without asking")

    async def run() -> tuple[_RecordingAgent, str]:
        agent = _RecordingAgent(task.max_turns)
        images = Images(config.sandbox, clock=time.monotonic)
        sandboxes = Sandboxes(config.sandbox.backend, images=images, cached_only=True)
        try:
            handler = resolve(task.env)(**copied(task.options))
            try:
                async with asyncio.timeout(task.step_s):
                    await handler.init(Job(task=drawn, seed=0, sandboxes=sandboxes))
            except TimeoutError:
                raise BrokenError(
                    f"init must end within step_s, did not in {task.step_s:g} s"
                ) from None
            except NotCachedError as error:
                return agent, f"not tried: {error}, and the run obtains it"
            else:
                await ask(handler, agent)
            finally:
                if hasattr(handler, "close"):
                    await handler.close()
        finally:
            await sandboxes.close()
            await images.close()
        return agent, ""

    limit_s = 2 * (PATIENCE_S + task.step_s)
    return _guarded(
        lambda: asyncio.run(run()), limit_s, "a handler must initialize and ask its agent"
    )


def _guarded(call: Callable[[], T], limit_s: float, rule: str) -> T:
    """Call the user's code on a separate thread.

    Raises BrokenError if it raises, or does not return within `limit_s`.
    """
    results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((True, call()))
        except BaseException as error:
            results.put((False, error))

    threading.Thread(target=work, name="dry-run", daemon=True).start()
    try:
        returned, value = results.get(timeout=limit_s)
    except queue.Empty:
        raise BrokenError(f"{rule} within {limit_s:g} s, got no answer") from None
    if returned:
        result: T = value
        return result
    if isinstance(value, ConfigError | BrokenError):
        raise value
    text = str(value) if isinstance(value, RollweaveError) else f"{type(value).__name__}: {value}"
    raise BrokenError(f"{rule}: {text}") from value


def _first_paragraph(method: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
