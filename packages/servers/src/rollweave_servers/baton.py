"""The lender's side of the baton (`lending/rollweave_lending`): whether it may compute
beside a serving engine now, and what that engine has published.

A thread connects to the engine's socket, again and again if the engine is not there. It
answers recalls whenever the thread that computes does something else. Invariant: after
`take` has returned a snapshot, no recall is answered before `release`; without a
connection, after a drop, and without recent beats, `take` returns None.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineSpec
from rollweave_servers.lending import rollweave_lending as shared
from rollweave_servers.lending.rollweave_lending import Memory, Snapshot

SCHEDULER = "rollweave_vllm_lending.LendingScheduler"
"""The scheduler of a vLLM that lends, as its argument `--scheduler-cls` names it."""

HELLO_BYTES = 1 << 16
HELLO_S = 5.0
"""Maximum bytes and seconds of a serving engine's greeting."""

RETRY_S = 1.0
"""Seconds until a serving engine that is not there is tried again."""

CONSIDERS_S = 0.005
"""Maximum seconds for the thread that computes to look at an offer which is recalled
already: a serving engine with much to do recalls it within a millisecond.
"""

RESTS_S = 1.0
"""Seconds without work after which the lender no longer wants to compute. A serving
engine waits for no lender that does not want to.
"""


class ConnectedEngine(NamedTuple):
    """A serving engine that is connected: the connection, the engine's description of
    itself, and the memory.
    """

    connection: socket.socket
    about: dict[str, Any]
    memory: Memory

    def close(self) -> None:
        """End the connection, and unmap the memory."""
        self.connection.close()
        self.memory.close()


def connect(path: str) -> ConnectedEngine:
    """Connect to the serving engine at `path`.

    Raises ConfigError, which names the host, if no engine there lends to this lender.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(HELLO_S)
        connection.connect(path)
        data, fds, _, _ = socket.recv_fds(connection, HELLO_BYTES, 1)
        about = json.loads(data)
        if about["protocol"] != shared.PROTOCOL:
            raise ValueError(f"its protocol is {about['protocol']}, ours {shared.PROTOCOL}")
        if about["taken"]:
            raise ValueError("it has another lender")
        memory = Memory(fds[0], about["rows"])
        connection.settimeout(None)
        return ConnectedEngine(connection, about, memory)
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        connection.close()
        raise ConfigError(
            f"--beside must be the socket of a vLLM on host {socket.gethostname()} that was "
            f"started with --scheduler-cls {SCHEDULER}, got {path}: {_reason(error)}"
        ) from None
    finally:
        for fd in fds:
            os.close(fd)


def check(spec: EngineSpec, model: str) -> None:
    """Raise ConfigError unless a server that serves `model`, whose folder `spec` names,
    lends at the socket of `spec`.
    """
    assert spec.lend is not None
    engine = connect(spec.lend.beside)
    engine.close()
    served = str(engine.about["model"])
    if served != model and Path(served).absolute() != Path(spec.model).absolute():
        raise ConfigError(_other_model(spec.lend.beside, served=served, given=model))


def _other_model(path: str, *, served: object, given: object) -> str:
    return f"CHECKPOINT must be the model that the server at {path} serves, {served}, got {given}"


class Baton:
    """The baton of the serving engine at `path`. `wake` is notified when the thread
    that computes should look, and `signals` counts these times. The engine waits at
    most `patience_s` seconds for a rollout step.

    Raises ConfigError if the engine is not there at the beginning.
    """

    def __init__(self, path: str, *, patience_s: float, wake: threading.Condition) -> None:
        self._path, self._patience_s, self._wake = path, patience_s, wake
        self._changed = threading.Condition()
        self._memory: Memory | None = None
        self._connection: socket.socket | None = None
        self._held = self._looks = self._wants = False
        self._considered = 0
        self.error = ""
        """Why the baton does not come back: the next server at the path serves another
        model. "" before that.
        """
        self._worked_at = -RESTS_S
        self.signals = 0
        self._closed = threading.Event()
        first = connect(path)
        self.about = first.about
        """The serving engine's description of itself. Another engine, which takes its
        place, has another value of `server`.
        """
        self._thread = threading.Thread(target=self._run, args=(first,), name="baton", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up the baton and the connection."""
        self._closed.set()
        with self._changed:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def snapshot(self) -> Snapshot | None:
        """Return the latest snapshot; None without a serving engine that beats."""
        with self._changed:
            if self._memory is None or not self._beats(self._memory):
                return None
            return self._memory.read()

    def take(self) -> Snapshot | None:
        """Return the load if a rollout step may begin now, which `release` must follow.
        Calling this says that there is work.
        """
        with self._changed:
            memory = self._memory
            if memory is None:
                return None
            words, self._looks = memory.words, True
            self._worked_at = time.monotonic()
            words[shared.WANTS] = 1
            offer = words[shared.OFFERED]
            if offer == words[shared.ANSWERED] or not self._beats(memory):
                return None
            if words[shared.RECALLED] == offer == self._considered:
                self._answer(memory, offer)
                return None
            snapshot = memory.read()
            if snapshot is None or snapshot.offer != offer:
                return None
            if words[shared.RECALLED] == offer and not snapshot.rows:
                # a request has arrived of which the snapshot does not know
                self._answer(memory, offer)
                return None
            self._held = True
            return snapshot

    def release(self) -> None:
        """End what `take` began: the step is over, or there was none."""
        with self._changed:
            self._held = False
            memory = self._memory
            if memory is None:
                return
            words = memory.words
            self._considered = offer = words[shared.OFFERED]
            if words[shared.RECALLED] == offer:
                self._answer(memory, offer)
            self._changed.notify_all()

    def look_away(self) -> None:
        """Say that the thread that computes does something else, so that no offer waits
        for it.
        """
        with self._changed:
            self._looks = False
            self._changed.notify_all()

    def rest(self) -> None:
        """Say that there is no work."""
        with self._changed:
            self._looks = False
            if self._memory is not None and time.monotonic() - self._worked_at > RESTS_S:
                self._memory.words[shared.WANTS] = 0

    def _beats(self, memory: Memory) -> bool:
        age_s = time.monotonic() - memory.words[shared.BEAT] / 1e9
        return not memory.words[shared.DROPPED] and age_s < shared.STALE_S

    def _answer(self, memory: Memory, offer: int) -> None:
        memory.words[shared.ANSWERED] = offer
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(b"\0", socket.MSG_DONTWAIT)

    # The thread that is connected

    def _run(self, engine: ConnectedEngine | None) -> None:
        while not self._closed.is_set() and not self.error:
            if engine is None:
                self._closed.wait(RETRY_S)
                engine = self._connect_again()
                continue
            connection, self.about, memory = engine
            self._begin(connection, memory)
            with contextlib.suppress(OSError):
                while not self._closed.is_set() and connection.recv(64):
                    self._heed(memory)
            with self._changed:
                self._memory = self._connection = None
                engine.close()
            engine = None
            self._notify()
        if engine is not None:  # it was closed before the first look
            engine.close()

    def _connect_again(self) -> ConnectedEngine | None:
        """Return the serving engine, or the next one at its path. Return None if there
        is none, or if it serves another model.
        """
        try:
            engine = connect(self._path)
        except ConfigError:
            return None
        served, model = engine.about.get("model"), self.about.get("model")
        if served == model:
            return engine
        engine.close()
        self.error = _other_model(self._path, served=served, given=model)
        self._notify()
        return None

    def _begin(self, connection: socket.socket, memory: Memory) -> None:
        with self._changed:
            memory.words[shared.PATIENCE] = int(1e9 * min(self._patience_s, shared.MOST_PATIENCE_S))
            self._connection, self._memory, self._considered = connection, memory, 0
        self._notify()

    def _heed(self, memory: Memory) -> None:
        """Let the thread that computes look at the offer, or answer a recall for it."""
        self._notify()
        with self._changed:
            words = memory.words

            def settled() -> bool:
                offer = words[shared.OFFERED]
                return self._held or not self._looks or self._considered == offer

            if words[shared.RECALLED] != words[shared.OFFERED]:
                return  # only an offer
            self._changed.wait_for(settled, CONSIDERS_S)
            offer = words[shared.OFFERED]
            due = words[shared.RECALLED] == offer != words[shared.ANSWERED]
            if due and not self._held:
                self._answer(memory, offer)

    def _notify(self) -> None:
        with self._wake:
            self.signals += 1
            self._wake.notify()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
