"""Everything about a run that can be known before it costs anything. `deep` also begins an episode of each domain.

Each check says for itself what is wrong; all are made, so that the user learns every problem at once.
"""

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollweave.cli.checks import Check, fail, ok, warn
from rollweave.cli.dryenvs import Domain, examine_domain
from rollweave.cli.drymodel import examine_model
from rollweave.cli.machine import cores
from rollweave.codec.config import load
from rollweave.core.seats import first_seats
from rollweave.envs.rules import named, rule
from rollweave.live.relays import host_of, missing_extra
from rollweave.live.sinks import missing_sinks
from rollweave.record.rundir import RunDir
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError


def examine(config: RunConfig, *, resume: bool = False, fresh: bool = False, deep: bool = True) -> list[Check]:
    """All checks. `deep` also resets an environment of each domain with a task: that may take time, and open what it opens."""
    with contextlib.chdir("."):
        rules = list(_rules(config))
    checks = [*_readable_directory(config, resume=resume, fresh=fresh), *_sinks(config), *rules]
    domains: list[Domain] = []
    for index in range(len(config.tasks)):
        with contextlib.chdir("."):  # back to where we were, wherever the user's code goes
            domain, found = examine_domain(config, index, deep=deep)
        checks += found
        if domain is not None:
            domains.append(domain)
    return [*checks, *_cpu(config), *_relays(config), *examine_model(config, domains)]


def _readable_directory(config: RunConfig, *, resume: bool, fresh: bool) -> list[Check]:
    try:
        return list(_run_directory(config, resume=resume, fresh=fresh))
    except (OSError, ValueError) as error:  # a name too long, a null byte, no permission to look
        return [fail("run.dir", f"must be a readable directory, or not there yet, got {config.run.dir!r:.200}: {error}")]


def _run_directory(config: RunConfig, *, resume: bool, fresh: bool) -> Iterator[Check]:
    path = Path(config.run.dir) / config.run.name
    run = RunDir(path)
    if resume:
        if not run.config.exists():
            yield fail("run.name", f"{path} must hold a run to resume, found no config.toml")
        else:
            if run.journal.exists():
                yield from (fail("--resume", line) for line in config.strays_from(load(run.config)))
            yield ok("run.name", f"goes on in {path}")
        return
    holds = run.holds_something()
    if holds and not fresh:
        yield fail(
            "run.name", f"{path} holds a run already; go on with --resume, delete it with --fresh, or choose another name"
        )
        return
    parent = path
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        yield fail("run.dir", f"{parent} must be writable, got {error.strerror or error}")
        return
    yield ok("run.name", f"{path}{' (the former run is deleted)' if holds else ''}")


def _sinks(config: RunConfig) -> Iterator[Check]:
    missing = missing_sinks(config.run.sinks)
    for name in config.run.sinks:
        if name in missing:
            yield fail("run.sinks", f"{name} must be installed (pip install 'rollweave[{name}]'), got none")
        else:
            yield ok("run.sinks", name)


def _relays(config: RunConfig) -> Iterator[Check]:
    weights = config.weights
    if not weights.relays:
        return
    if (extra := missing_extra(weights)) is not None:
        yield fail("weights.transport", f"{extra} must be installed (pip install 'rollweave[{extra}]'), got none")
    try:
        for machine in range(weights.relays):
            with socket.socket() as probe:
                probe.bind((host_of(machine), 0))
    except OSError as error:
        yield fail("weights.relays", f"must each have a loopback address of its own, {host_of(machine)} cannot be had: {error}")
    else:
        first, last = host_of(0), host_of(weights.relays - 1)
        yield ok("relays", f"{weights.relays} processes on {first} to {last} over {weights.transport}")


def _rules(config: RunConfig) -> Iterator[Check]:
    for knob, name in named(config):
        try:
            rule(name)
        except ConfigError as error:
            yield fail(knob, str(error))
        else:
            yield ok(knob, f"function {name}")


def _cpu(config: RunConfig) -> Iterator[Check]:
    trainer, degrees = config.trainer, [seat.degree for seat in first_seats(config)]
    threads = sum(degrees) + trainer.ranks * trainer.threads
    engines = " + ".join(f"{degrees.count(degree)} engines × {degree}" for degree in dict.fromkeys(degrees))
    text = f"{engines} + {trainer.ranks} trainers × {trainer.threads} threads on {cores()} cores"
    yield ok("cores", text) if threads <= cores() else warn("cores", f"{text}: they will take turns")
    if trainer.ranks > 1:
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
        except OSError as error:
            yield fail("trainer.ranks", f"must have a local port for {trainer.ranks} ranks to meet, got {error}")
        else:
            yield ok("ports", "trainer ranks meet on a free local port; nothing else listens")
