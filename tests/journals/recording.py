"""Recorded journals of whole runs: the events of a core, and a digest of what it
answered to each.

A digest covers the encoded commands, which name classes without their modules, so that
a recording outlives any move of code. The digests of every hundredth event and of the
last one also cover the status and the account.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import zstandard

from rollweave.core.core import Core
from rollweave.envs.tasks import rules_of
from rollweave.schema.base import as_json, packed
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event
from tests.support.core import always_split

DIGEST_BYTES = 6
"""Bytes of a digest."""

STATUS_EVERY = 100
"""Events from one status that a digest covers to the next."""

SUFFIX = ".journal.zst"
"""Suffix of the files of recordings."""

RESTORES = 5
"""Restorations of the core from its snapshot during a replay that checks them."""


class Recording(msgspec.Struct, kw_only=True):
    """The journal of one core. `digests` has `DIGEST_BYTES` for each event. `splits`:
    every prompt was computed elsewhere that could be, whatever it cost.
    """

    config: bytes
    events: list[tuple[float, Event]]
    digests: bytes
    splits: bool = False

    def write(self, path: Path) -> None:
        path.write_bytes(zstandard.compress(msgspec.msgpack.encode(self), 12))

    @classmethod
    def read(cls, path: Path) -> "Recording":
        return msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=cls)


def digest_of(commands: Iterable[Command]) -> bytes:
    return _digest(b"\n".join(map(packed, commands)))


def status_digest(core: Core, now: float, before: bytes) -> bytes:
    """Return the digest of `before`, and of the status and account at time `now`."""
    seen = core.status(now, core.waits({}, start_s=60.0))
    rows = sorted(map(as_json, seen.waits))
    seen = msgspec.structs.replace(seen, waits=())
    return _digest(b"".join([before, as_json(seen), *rows, as_json(core.account())]))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def differences(recording: Recording, *, restores: bool = False) -> Iterator[str]:
    """Replay the recording and yield each event whose digest differs. With `restores`
    the core is replaced several times by one that is restored from its snapshot.
    """
    with always_split() if recording.splits else nullcontext():
        yield from _differences(recording, restores=restores)


def _differences(recording: Recording, *, restores: bool) -> Iterator[str]:
    config = RunConfig.model_validate_json(recording.config)
    rules = rules_of(config)
    core, every = Core(config, rules=rules), max(1, len(recording.events) // (RESTORES + 1))
    last = len(recording.events) - 1
    for number, (now, event) in enumerate(recording.events):
        if restores and number % every == every // 2:
            core = Core.restore(core.snapshot(), config, rules=rules)
        commands = core.handle(now, event)
        found = digest_of(commands)
        if number == last or number % STATUS_EVERY == STATUS_EVERY - 1:
            found = status_digest(core, now, found)
        if found != recording.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            yield f"event {number} at {now:.3f}: {event} → {commands}"
    core.check()
