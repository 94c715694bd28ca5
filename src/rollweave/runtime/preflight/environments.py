"""Check environments, which are the user's code, and the images that the tasks name:
every call of the user's code is guarded, and limited in time.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import queue
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollweave.envs.base import Observation
from rollweave.envs.handlers.base import AgentHandler, Endpoint, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import NotCachedError, Sandboxes, SandboxHandler
from rollweave.envs.registry import is_handler, resolve
from rollweave.envs.roles import OUTSIDE
from rollweave.envs.tasks import TaskSource, images_of, named, rule
from rollweave.io.locked_folders import temporary_folder
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.handler_episode import declared
from rollweave.rollout.reward_sources import reference_in, reward_function
from rollweave.runtime.episodes import image_opener
from rollweave.runtime.hosts import user_files
from rollweave.runtime.preflight.checks import Check, Status, fail, failures, ok, passing, warn
from rollweave.sandbox.provider import DEFAULT, provider
from rollweave.sandbox.references import check_reference, parse_reference
from rollweave.schema.base import Struct, copied
from rollweave.schema.chat import Message
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import SandboxConfig
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, ImageError, RollweaveError
from rollweave.schema.text import did_you_mean, valid_tree
from rollweave.schema.work import Limits, Purpose, StopReason, Task, Unreadable

T = TypeVar("T")

PATIENCE_S = 30.0
"""Maximum duration of a class method of an environment, in seconds: each is called
once, before the run.
"""


PREPARE_S = 7 * 86_400.0
"""Maximum duration of `prepare`, in seconds: it may download much."""

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
    prepared: dict[str, Any] | None = None
    """The options that `prepare` returned, if the environment has it."""
    tools: tuple[str, ...] = ()
    """Tools that are offered to the agent, as its chat template shows them."""

    @property
    def index(self) -> int:
        """The domain's place in `[[tasks]]`."""
        return int(self.name.rpartition(".")[2])


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
    task, where, checks = config.tasks[index], f"tasks.{index}", list[Check]()
    transcripts: tuple[tuple[Message, ...], ...] = ()
    first, tools = tuple[Message, ...](), tuple[str, ...]()
    try:
        kind = _guarded(lambda: resolve(task.env), "env must be imported")
        _check_sandboxes(config, task, kind)
        prepared = _prepared(kind, task)
        if prepared is not None:
            task = task.model_copy(update={"options": prepared})
        source = TaskSource(_only(config, task))
        checks.append(ok(f"{where}.env", f"{task.name}: {kind.__module__}.{kind.__qualname__}"))
        images = _guarded(
            lambda: images_of(task.env, task.options), "images must return the images"
        )
        checks += examine_images(config, index, images)
        if failures(checks):
            return None, checks
        words = _guarded(source.words, "words must return words")
        allowed = _guarded(
            lambda: source.allowed_words(task.name), "allowed_words must return words"
        )
        if config.warmup.steps:
            transcripts = _transcripts(source, seed=config.run.seed)
            text = _first_paragraph(kind.transcript)
            about = text or f"{len(transcripts[0])} messages in a transcript"
            checks.append(ok(f"{where} warm-up", about))
        drawn, repeated = _draw(config, source, task.name)
        checks += repeated
        _check_references(config, drawn)
        prompts = _prompts(kind, task)
        if deep:
            missing = ""
            try:
                if is_handler(task.env):
                    agent, missing = _first_turn(config, task, drawn)
                    first, tools = agent.messages, agent.tools
                else:
                    first = _first_observation(config, task, drawn).messages
            except BrokenError as error:
                called = re.search(re.escape(OUTSIDE) + r" \[roles\.([^]]*)\]", str(error))
                if called is None:
                    raise
                known = list(config.roles)
                if called[1] not in known:
                    rule = f"environment must call a role of the run ({', '.join(known) or 'none'})"
                    hint = did_you_mean(called[1], known)
                    raise BrokenError(f"{rule}, got role({called[1]!r}){hint}") from error
                missing = "not tried: it calls a role, and a dry run starts none"
            begins = " ".join(message.content for message in first).strip()
            detail = f"begins with {begins!r:.90}" if first else "its handler starts"
            with_tools = f", with {len(tools)} tools" if tools else ""
            checks.append(ok(f"{where} task", missing or detail + with_tools))
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
        drops_overlong=drops_overlong(task),
        first=first,
        tools=tools,
        prepared=prepared,
    )
    return domain, checks


def _check_sandboxes(config: RunConfig, task: TaskConfig, kind: type[Any]) -> None:
    """Raise ConfigError if the domain needs sandboxes, and their implementation is not
    installed. Whether a handler of another base class needs sandboxes is known only if
    the configuration has settings for them.
    """
    configured = config.sandbox != SandboxConfig() and is_handler(task.env)
    if configured or issubclass(kind, SandboxHandler):
        provider(config.sandbox.backend)


def as_prepared(config: RunConfig, domains: Iterable[Domain]) -> RunConfig:
    """Return the configuration with the options that `prepare` returned."""
    for domain in domains:
        if domain.prepared is not None:
            config = with_options(config, domain, domain.prepared)
    return config


def with_options(config: RunConfig, domain: Domain, options: dict[str, Any]) -> RunConfig:
    """Return the configuration with other options of a task domain."""
    tasks = list(config.tasks)
    tasks[domain.index] = tasks[domain.index].model_copy(update={"options": options})
    return config.model_copy(update={"tasks": tuple(tasks)})


def drops_overlong(task: TaskConfig) -> bool:
    """Return whether prompts of the domain that are too long are left out."""
    hook = getattr(resolve(task.env), "drops_overlong", None)
    return hook is not None and bool(hook(copied(task.options)))


def examine_rules(config: RunConfig) -> Iterator[Check]:
    """Check the functions that `[buffer]` and `[[rewards]]` name."""

    def of_buffer(name: str) -> str:
        rule(name)
        return f"function {name}"

    def of_reward(owner: str, name: str) -> str:
        _guarded(functools.partial(reward_function, name), f"{name} must be imported")
        return f"{owner}: function {name}"

    for setting, name in named(config):
        yield passing(setting, functools.partial(of_buffer, name), ConfigError)
    for number, reward in enumerate(config.rewards):
        if reward.function is not None:
            check = functools.partial(of_reward, reward.name, reward.function)
            yield passing(f"rewards.{number}.function", check, ConfigError, BrokenError)


def declared_by(config: RunConfig) -> Declared:
    """Return what all task domains declare. Raises ConfigError or BrokenError."""

    def ask() -> Declared:
        return Declared(
            words=TaskSource(config).words(),
            images=tuple(
                image for one in config.tasks for image in images_of(one.env, one.options)
            ),
        )

    return _guarded(ask, "words and images must be returned")


def _prepared(kind: type[Any], task: TaskConfig) -> dict[str, Any] | None:
    """Return the options that the environment's `prepare` returns; None without such a
    method of the class. A method of its instances is the user's own.
    """
    found = inspect.getattr_static(kind, "prepare", None)
    is_own = inspect.isfunction(found) and "self" in inspect.signature(found).parameters
    if found is None or is_own:
        return None
    return _guarded(
        lambda: dict(kind.prepare(copied(task.options))), "prepare must return options", PREPARE_S
    )


def _prompts(kind: type[Any], task: TaskConfig) -> tuple[tuple[str, tuple[Message, ...]], ...]:
    """Return all prompts of a domain that can list them."""
    method = getattr(kind, "prompts", None)
    if method is None:
        return ()
    prompts = _guarded(
        lambda: [(place, _messages(each)) for place, each in method(copied(task.options))],
        "prompts must return places and messages",
    )
    return tuple(prompts)


def _messages(given: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with valid text, as a rollout begins with them."""
    plain = msgspec.to_builtins(tuple(given), builtin_types=(bytes,))
    return msgspec.convert(valid_tree(plain), tuple[Message, ...])


def _transcripts(source: TaskSource, *, seed: int) -> tuple[tuple[Message, ...], ...]:
    """Return the first transcripts of the warm-up."""
    transcripts: list[tuple[Any, ...]] = _guarded(
        lambda: [*map(tuple, itertools.islice(source.transcripts(seed=seed), TRANSCRIPTS))],
        "transcript must return messages",
    )
    for messages in transcripts:
        if not messages or any(not isinstance(message, Message) for message in messages):
            raise BrokenError(f"transcript must return messages, got {list(messages)!r:.80}")
    return tuple(transcripts)


def _draw(config: RunConfig, source: TaskSource, name: str) -> tuple[Task, list[Check]]:
    """Draw tasks of each kind of evaluation, and return the first training task, with a
    warning for each evaluation that would repeat its tasks.
    """
    checks = list[Check]()
    evaluations = [
        ("final_episodes", "test", FINAL_TASKS_FROM, config.eval.final_episodes),
        ("episodes", "validation", 0, config.eval.every and config.eval.episodes),
    ]

    def draw() -> Task:
        for setting, split, first, count in evaluations:
            distinct = _exhausted(source, name, first, count)
            if distinct is not None:
                text = (
                    f"eval.{setting} {count} exceeds the {distinct} distinct tasks of the {split} "
                    f"split of {name}: they are repeated, and the result is no surer than that of "
                    f"{distinct} episodes"
                )
                checks.append(warn(REPEATED, text))
        return source.draw(name, 0, Purpose.TRAIN)

    return _guarded(draw, "a task must be drawn"), checks


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
    return config.model_copy(update={"tasks": (task,)})


@contextlib.asynccontextmanager
async def _within(step_s: float, rule: str) -> AsyncIterator[None]:
    """Raise BrokenError, which begins with the rule, if the context takes longer."""
    try:
        async with asyncio.timeout(step_s):
            yield
    except TimeoutError:
        raise BrokenError(f"{rule} in {step_s:g} s") from None


def _first_observation(config: RunConfig, task: TaskConfig, drawn: Task) -> Observation:
    """Reset an environment with the first training task, inline or in a process as in
    the run.
    """

    async def reset(logs: Path) -> Observation:
        source = TaskSource(_only(config, task), logs=logs)
        try:
            env = await source.provider(task.name).open(drawn)
            try:
                async with _within(task.step_s, "reset must answer within step_s, got nothing"):
                    return await env.reset(drawn)
            finally:
                env.kill()
        finally:
            await source.close()

    with temporary_folder("rollweave-dry-runs-") as logs:
        rule, limit_s = "an environment must be reset", PATIENCE_S + task.step_s
        return _guarded(lambda: asyncio.run(reset(logs)), rule, limit_s)


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
            async with _within(task.step_s, "run must ask the agent within step_s, and did not"):
                await handler.run(agent)
        except BrokenError:
            raise
        except Exception:
            # otherwise the error is that of the agent, or a consequence
            if not agent.has_message:
                raise
        if not agent.has_message:
            raise BrokenError("run must ask the agent at least once, and returned without asking")

    async def run() -> tuple[_RecordingAgent, str]:
        agent = _RecordingAgent(task.max_turns)
        images = image_opener(config.sandbox, clock=time.monotonic)
        sandboxes = Sandboxes(config.sandbox.backend, images=images, cached_only=True)
        try:
            handler = resolve(task.env)(**copied(task.options))
            try:
                async with _within(task.step_s, "init must end within step_s, did not"):
                    await handler.init(Job(task=drawn, seed=0, sandboxes=sandboxes))
                await ask(handler, agent)
            except NotCachedError as error:
                return agent, f"not tried: {error}, and the run obtains it"
            finally:
                if hasattr(handler, "close"):
                    await handler.close()
        finally:
            await sandboxes.close()
        return agent, ""

    rule, limit_s = "a handler must initialize and ask its agent", PATIENCE_S + task.step_s
    return _guarded(lambda: asyncio.run(run()), rule, 2 * limit_s)


def _guarded(call: Callable[[], T], rule: str, limit_s: float = PATIENCE_S) -> T:
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


SHOWN = 5
"""Maximum number of images of a task domain that are listed."""

CHECKED = 100
"""Maximum number of images of a task domain that are checked: each may cost a
request.
"""


def examine_images(config: RunConfig, index: int, images: Sequence[str]) -> Iterator[Check]:
    """Check the images of task domain number `index`."""
    where, backend = f"tasks.{index} image", config.sandbox.backend or DEFAULT
    if not images:
        return
    able = provider(backend).image_backends
    if backend not in able:
        yield fail(
            "sandbox.backend",
            f"must be {' or '.join(able)} for the image {images[0]}, got {backend}",
        )
        return
    failed = shown = 0
    for image in images[:CHECKED]:
        check = _check(config, where, image)
        failed += check.status is Status.FAIL
        if (check.status is Status.FAIL and failed <= SHOWN) or shown < SHOWN:
            shown += 1
            yield check
    if (more := len(images) - shown) > 0:
        yield (fail if failed > SHOWN else ok)(where, f"and {more} more")


def _check(config: RunConfig, where: str, image: str) -> Check:
    remote = config.cluster is not None and config.workers.maximum > 0
    try:
        reference = parse_reference(image, Path.cwd())
        if remote:
            user_files.check_image(image, reference)
        detail = check_reference(reference)
    except ConfigError as error:
        if remote and image.startswith("/"):
            return warn(where, f"not checked, since it need not be on this machine: {error}")
        return fail(where, str(error).removeprefix("image "))
    if reference.digest:
        return _check_source(config, where, reference.digest, remote=remote)
    return ok(where, detail)


def _check_source(config: RunConfig, where: str, digest: str, *, remote: bool) -> Check:
    """Check that the cache or the mirror has an image of this digest."""
    sandbox = config.sandbox
    try:
        return ok(where, provider(sandbox.backend).locate_image(digest, sandbox.mirror))
    except ImageError as error:
        return fail(where, str(error))
    except ConfigError as error:
        return (warn if remote else fail)(where, str(error))
