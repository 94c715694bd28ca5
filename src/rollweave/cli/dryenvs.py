"""The part of a dry run that looks at environments: the user's code, so every call is guarded and limited in time."""

import asyncio
import inspect
import queue
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollweave.cli.checks import Check, fail, ok
from rollweave.core.evaluation import FINAL_TASKS_FROM
from rollweave.envs.base import Observation
from rollweave.envs.registry import check_options, is_handler, resolve
from rollweave.envs.tasks import TaskSource
from rollweave.handlers.base import Job
from rollweave.handlers.sandboxes import Sandboxes
from rollweave.schema.base import Noun
from rollweave.schema.chat import Message
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.sections import FaultsConfig, TaskConfig
from rollweave.schema.work import Purpose, Task

T = TypeVar("T")

PATIENCE_S = 30.0
"""Seconds that a class method of an environment may take: they are called once a run, to plan it."""


class Domain(Noun, frozen=True, kw_only=True):
    """What the model must know about a task domain that was found to be in order."""

    name: str
    words: tuple[str, ...]
    allowed: tuple[str, ...]
    max_tokens: int
    first: tuple[Message, ...] = ()  # of an episode that was begun; none where none was


class BrokenError(RollweaveError):
    """The environment breaks the rule that the message names."""


def examine_domain(config: RunConfig, index: int, *, deep: bool) -> tuple[Domain | None, list[Check]]:
    """Look at `config.tasks[index]`; the domain is None where a check failed."""
    task = config.tasks[index]
    where = f"tasks.{index}"
    checks: list[Check] = []
    try:
        kind = _guarded(lambda: resolve(task.env), PATIENCE_S, "env must be imported")
        check_options(task.env, task.options)
        checks.append(ok(f"{where}.env", f"{task.name}: {kind.__module__}.{kind.__qualname__}"))
        words = _words(kind, "words", task)
        allowed = _words(kind, "allowed_words", task)
        if config.warmup.steps:
            checks.append(_transcript(kind, task, where))
        drawn = _drawn(config, task)
        first: tuple[Message, ...] = ()
        if deep and is_handler(task.env):
            _first_init(config, task, drawn)
            checks.append(ok(f"{where} task", "its handler makes ready"))
        elif deep:
            first = _first_look(config, task, drawn).messages
            text = " ".join(message.content for message in first).strip()
            checks.append(ok(f"{where} task", f"begins with {text!r:.90}"))
    except (ConfigError, BrokenError) as error:
        return None, [*checks, fail(where, str(error))]
    return Domain(name=where, words=words, allowed=allowed, max_tokens=task.max_tokens, first=first), checks


def _words(kind: type[Any], name: str, task: TaskConfig) -> tuple[str, ...]:
    """What an optional class method says, checked to be words."""
    method = getattr(kind, name, None)
    if method is None:
        return ()
    said = _guarded(lambda: _listed(method(task.options)), PATIENCE_S, f"{name} must return words")
    wrong = [said] if isinstance(said, str) else [word for word in said if not isinstance(word, str) or not word]
    if wrong:
        raise BrokenError(f"{name} must return a list of non-empty strings, got {wrong[0]!r:.80}")
    return tuple(said)


def _listed(said: Any) -> Any:
    """Iterated here, in the user's code, unless it is a string, whose letters were not meant."""
    return said if isinstance(said, str) else tuple(said)


def _transcript(kind: type[Any], task: TaskConfig, where: str) -> Check:
    method = getattr(kind, "transcript", None)
    if method is None:
        raise BrokenError(f"env must have transcript() where warmup.steps is set, {task.env} has none")
    said: Sequence[Any] = _guarded(
        lambda: list(method(random.Random(0), task.options)), PATIENCE_S, "transcript must return messages"
    )
    if not said or any(not isinstance(message, Message) for message in said):
        raise BrokenError(f"transcript must return messages, got {said!r:.80}")
    return ok(f"{where} warm-up", _first_paragraph(method) or f"{len(said)} messages in a transcript")


def _drawn(config: RunConfig, task: TaskConfig) -> Task:
    """The first training task, and before it the first of each kind of evaluation: do options and data do?"""
    source = TaskSource(_alone(config, task))
    wanted = [(FINAL_TASKS_FROM, config.eval.final_episodes), (0, config.eval.every and config.eval.episodes)]

    def draw() -> Task:
        for index, count in wanted:
            if count:
                source.draw(task.name, index, Purpose.EVAL)
        return source.draw(task.name, 0, Purpose.TRAIN)

    return _guarded(draw, PATIENCE_S, "a task must be drawn")


def _alone(config: RunConfig, task: TaskConfig) -> RunConfig:
    return config.model_copy(update={"tasks": (task,), "faults": FaultsConfig()})


def _first_look(config: RunConfig, task: TaskConfig, drawn: Task) -> Observation:
    """Reset an environment with the first training task, where the run would have it: inline or in a process."""

    async def look(logs: Path) -> Observation:
        source = TaskSource(_alone(config, task), logs=logs)
        try:
            env = await source.worlds(task.name).open(drawn, seed=0)
            try:
                async with asyncio.timeout(task.step_s):
                    return await env.reset(drawn)
            except TimeoutError:
                raise BrokenError(f"reset must answer within step_s, got nothing in {task.step_s:g} s") from None
            finally:
                env.kill()
        finally:
            await source.close()

    with tempfile.TemporaryDirectory(prefix="rollweave-dry-run-") as logs:
        limit_s = PATIENCE_S + task.step_s
        return _guarded(lambda: asyncio.run(look(Path(logs))), limit_s, "an environment must be reset")


def _first_init(config: RunConfig, task: TaskConfig, drawn: Task) -> None:
    """Let a handler make ready for the first training task, and free what that took."""

    async def look() -> None:
        sandboxes = Sandboxes(config.sandbox.backend)
        try:
            handler = resolve(task.env)(**task.options)
            try:
                async with asyncio.timeout(task.step_s):
                    await handler.init(Job(task=drawn, seed=0, sandboxes=sandboxes))
            except TimeoutError:
                raise BrokenError(f"init must end within step_s, did not in {task.step_s:g} s") from None
            finally:
                if hasattr(handler, "close"):
                    await handler.close()
        finally:
            await sandboxes.close()

    _guarded(lambda: asyncio.run(look()), 2 * PATIENCE_S + task.step_s, "a handler must make ready")


def _guarded(call: Callable[[], T], limit_s: float, rule: str) -> T:
    """Call the user's code on a thread of its own. Raises BrokenError for what it raises, and for silence beyond `limit_s`."""
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((True, call()))
        except BaseException as error:
            answer.put((False, error))

    threading.Thread(target=work, name="dry-run", daemon=True).start()
    try:
        fine, value = answer.get(timeout=limit_s)
    except queue.Empty:
        raise BrokenError(f"{rule} within {limit_s:g} s, got no answer") from None
    if fine:
        found: T = value
        return found
    if isinstance(value, ConfigError | BrokenError):
        raise value
    text = str(value) if isinstance(value, RollweaveError) else f"{type(value).__name__}: {value}"
    raise BrokenError(f"{rule}, got {text}") from value


def _first_paragraph(method: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
