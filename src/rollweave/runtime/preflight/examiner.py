"""Check the user's code: of a run with rollout workers in a short-lived process, so
that code that hangs, exits or crashes cannot harm its controller.

The process is `runtime/entrypoints/examiner`. If it is lost, the task domain or setting
that it was checking fails, and another one checks the rest.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rollweave.envs.tasks import named
from rollweave.io.child import EXIT_S, log_tail, start_process, why_it_ended
from rollweave.io.locked_folders import temporary_folder
from rollweave.io.wire import FrameDecoder, decoder_of, encode, frame
from rollweave.runtime.preflight import environments
from rollweave.runtime.preflight.checks import Check, fail, must_pass
from rollweave.runtime.preflight.environments import BrokenError, Declared, Domain
from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, RollweaveError

BEAT_S = 0.5
"""Seconds between two signs of life of the process."""

SILENT_S = 30.0
"""Seconds of silence after which the process is killed: the user's code keeps the
interpreter from running anything else.
"""

MODULE = "rollweave.runtime.entrypoints.examiner"

RULE = "neither end nor block the process that checks it"


What = Literal["domains", "rules", "declared"]


class Assignment(Struct, frozen=True, kw_only=True):
    """The task of the process: to check the task domains from number `first` on or the
    functions of `[buffer]`, or to return the declarations of all domains. It answers
    with one `Examined` for each domain, and otherwise with a single one.
    """

    config: str
    what: What
    deep: bool = False
    first: int = 0


class Examined(TaggedStruct, frozen=True, kw_only=True):
    """The results of checks. `domain` is None if one of them failed."""

    checks: tuple[Check, ...] = ()
    domain: Domain | None = None
    declared: Declared = Declared()


class Beat(TaggedStruct, frozen=True):
    """A sign of life."""


class _LostError(RollweaveError):
    """The process has ended, or was killed because it was silent."""


_decode = decoder_of(Examined | Beat)


def examine(
    config: RunConfig, *, what: What, deep: bool = False, first: int = 0
) -> Iterator[Examined]:
    """Yield the results of an assignment, in order, in this process."""
    match what:
        case "domains":
            for index in range(first, len(config.tasks)):
                with contextlib.chdir("."):  # the user's code may change the directory
                    domain, checks = environments.examine_domain(config, index, deep=deep)
                yield Examined(domain=domain, checks=tuple(checks))
        case "rules":
            with contextlib.chdir("."):
                yield Examined(checks=tuple(environments.examine_rules(config)))
        case "declared":
            try:
                yield Examined(declared=environments.declared_by(config))
            except (ConfigError, BrokenError) as error:
                yield Examined(checks=(fail("tasks", str(error)),))


def examine_domains(config: RunConfig, *, deep: bool) -> Iterator[Examined]:
    """Check each task domain (`environments.examine_domain`): in another process if the
    run has rollout workers, whose controller runs no environment.
    """
    if not config.workers.maximum:
        yield from examine(config, what="domains", deep=deep)
        return
    number = 0
    while number < len(config.tasks):
        assignment = Assignment(
            config=config.model_dump_json(), what="domains", deep=deep, first=number
        )
        try:
            for examined in _ask(assignment, answers=len(config.tasks) - number):
                yield examined
                number += 1
        except _LostError as error:
            check = fail(f"tasks.{number}.env", f"must {RULE}, got one that {error}")
            yield Examined(checks=(check,))
            number += 1


def examine_rules(config: RunConfig) -> tuple[Check, ...]:
    """Check the functions of `[buffer]` and `[[rewards]]`
    (`environments.examine_rules`), as `examine_domains` checks domains.
    """
    functions = named(config) or any(one.function is not None for one in config.rewards)
    if not functions:
        return ()
    if not config.workers.maximum:
        (examined,) = examine(config, what="rules")
        return examined.checks
    try:
        (examined,) = _ask(Assignment(config=config.model_dump_json(), what="rules"))
    except _LostError as error:
        return (fail("buffer", f"must {RULE}, got one that {error}"),)
    return examined.checks


def declared_by(config: RunConfig) -> Declared:
    """Return what all task domains declare, by another process. Raises ConfigError."""
    try:
        (examined,) = _ask(Assignment(config=config.model_dump_json(), what="declared"))
    except _LostError as error:
        examined = Examined(checks=(fail("tasks", f"must {RULE}, got one that {error}"),))
    must_pass(examined.checks)
    return examined.declared


def _ask(assignment: Assignment, *, answers: int = 1) -> Iterator[Examined]:
    """Yield the answers of a new process, which ends with the last one."""
    with temporary_folder("rollweave-examiner-") as folder:
        ours, theirs = socket.socketpair()
        log = folder / "log"
        with ours:
            with theirs:
                process = start_process(theirs, module=MODULE, log=log, env={})
            try:
                ours.sendall(b"".join(frame(encode(assignment))))
                received = _received(ours)
                for _ in range(answers):
                    examined = next(received, None)
                    if examined is None:
                        status = process.wait(EXIT_S)
                        raise _LostError(_in_one_line(status, log))
                    yield examined
            except TimeoutError:
                raise _LostError(f"was silent for {SILENT_S:g} s") from None
            finally:
                process.kill()
                process.wait()


def _received(ours: socket.socket) -> Iterator[Examined]:
    """Yield what the process answers, until its socket ends. Raises TimeoutError."""
    ours.settimeout(SILENT_S)
    frames = FrameDecoder()
    while True:
        try:
            data = ours.recv(1 << 18)
        except ConnectionError:
            return
        if not data:
            return
        for payload in frames.feed(data):
            message = _decode(payload)
            if isinstance(message, Examined):
                yield message


def _in_one_line(status: int, log: Path) -> str:
    last = log_tail(log).splitlines()[-1:]
    return ": ".join([why_it_ended(status, Path(os.devnull)), *last])
