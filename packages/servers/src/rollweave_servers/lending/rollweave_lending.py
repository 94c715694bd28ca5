"""The memory that a serving engine shares with the lender beside it on its device, and
a baton, so that one of the two computes at a time (ROSE §4.1).

The serving engine listens on a Unix socket of mode 0600. It admits one lender at a
time, and hands it a file descriptor of the memory. After each of its steps the engine
publishes a snapshot of its load and makes an offer: the number of the offer rises by 1.
Before its next step it recalls the offer and waits until the lender has answered with
the same number. The lender computes only between an offer and its answer, and answers a
recall after the rollout step that is under way. Words of the memory say all of this; a
byte on the connection only wakes the other side, so neither side polls.

Invariants:
- Each word has one writer. A snapshot has a checksum, so that one that is being written
  is recognized, and it names its offer, so that an older one is, too.
- The engine waits only for a lender that wants to compute, and never longer than its
  patience. If it has waited for so long, the lender is dropped: a word of the memory
  says so, the connection ends, and the lender gets nothing before it connects again,
  with a new memory. The end of its process ends the connection at once.
- The lender does not compute without recent beats of the engine, which a thread of the
  engine's process writes whatever the engine itself does.

This module imports nothing but the standard library: it runs in the process of the
serving engine, too, where Rollweave is not installed.
"""

import array
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import select
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

VARIABLE = "ROLLWEAVE_LENDING"
"""The environment variable with the path of the socket at which lenders connect."""

PROTOCOL = 1
"""Version of this module's protocol, which a lender compares."""

BEAT_S = 0.02
"""Seconds between two beats of the serving engine. An idle engine sees as late as this
that a lender wants to compute.
"""

STALE_S = 1.0
"""Seconds after which a lender no longer relies on the latest beat."""

LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.05, 10.0
"""Bounds of a lender's patience, whatever it announces."""

CONNECT_S = 1.0
"""Maximum seconds to find out whether another serving engine listens at a path."""

STEPS = 256
"""Number of the latest steps in a snapshot."""

BEAT, OFFERED, RECALLED, DROPPED, CHECK, ANSWERED, WANTS, PATIENCE, FIRST = range(9)
"""The words of the memory. The first five are written by the serving engine: the time
of its beat in nanoseconds, the numbers of its latest offer and of the latest offer that
it recalled, 1 once the lender is dropped, and the checksum of the snapshot, which
begins at `FIRST`. The lender writes the number of the offer that it answered, 1 while
it wants to compute, and its patience in nanoseconds.
"""

HEAD = 8
"""Number of words at the beginning of a snapshot (`Snapshot`)."""


class Step(NamedTuple):
    """A step of the serving engine: its nanoseconds, the tokens of prompts in it, the
    sequences that it decoded, and the tokens of the longest prompt, of which it may
    have computed a part.
    """

    ns: int
    prefill_tokens: int
    decode: int
    longest_prompt: int


class Row(NamedTuple):
    """A request that has not ended: the time of its arrival, the number of its tokens
    that are yet to be computed, the times of its first and its newest token, 0 before
    the first one, and the number of its tokens so far. Times are in nanoseconds of the
    monotonic clock.
    """

    arrived: int
    missing: int
    first: int
    newest: int
    tokens: int


class Counts(NamedTuple):
    """The load: running and waiting requests, tokens of the KV cache, and nanoseconds
    for which the engine has waited for rollout steps.
    """

    running: int
    waiting: int
    kv_used: int
    kv_total: int
    waited: int = 0


class Snapshot(NamedTuple):
    """The load after a step. `offer` is the number of the offer that came with it, and
    `done` the number of steps so far, of which `steps` has the latest. `rows` is None
    if there are more requests than the memory has room for, or they were not listed,
    because the lender does not want to compute or has connected since the last step.
    """

    offer: int
    done: int
    counts: Counts
    steps: list[Step]
    rows: list[Row] | None


class Memory:
    """The words that both sides share, over a file descriptor of `size(rows)` bytes."""

    def __init__(self, fd: int, rows: int) -> None:
        self._map = mmap.mmap(fd, size(rows))
        self.words = memoryview(self._map).cast("q")

    def close(self) -> None:
        """Unmap the memory."""
        self.words.release()
        self._map.close()

    def write(self, image: memoryview) -> None:
        """Write a snapshot, given as words."""
        self.words[FIRST : FIRST + len(image)] = image
        self.words[CHECK] = zlib.crc32(image.cast("B"))

    def read(self) -> Snapshot | None:
        """Return the snapshot; None if it is being written, or was never."""
        check, rows = self.words[CHECK], self.words[FIRST + HEAD - 1]
        end = FIRST + HEAD + len(Step._fields) * STEPS + len(Row._fields) * max(0, rows)
        if end > len(self.words):
            return None
        image = array.array("q", self.words[FIRST:end].tobytes())
        offer, done, *load, same = image[:HEAD]
        if zlib.crc32(image) != check or same != rows:
            return None
        kept = min(done, STEPS)
        steps = [
            Step(*_fields(image, HEAD, number % STEPS, Step)) for number in range(done - kept, done)
        ]
        first = HEAD + len(Step._fields) * STEPS
        found = [Row(*_fields(image, first, number, Row)) for number in range(max(0, rows))]
        return Snapshot(offer, done, Counts(*load), steps, None if rows < 0 else found)


def size(rows: int) -> int:
    """Return the bytes of a memory whose snapshots have room for this many requests."""
    return 8 * (FIRST + HEAD + len(Step._fields) * STEPS + len(Row._fields) * rows)


def _fields(
    image: "array.array[int]", first: int, number: int, kind: type[Step] | type[Row]
) -> "array.array[int]":
    width = len(kind._fields)
    return image[first + number * width : first + (number + 1) * width]


class Lender:
    """The lender that is connected, as the serving engine sees it."""

    def __init__(self, connection: socket.socket, memory: Memory) -> None:
        self.connection, self.memory = connection, memory
        self.offered = 0

    @property
    def has_answered(self) -> bool:
        """True if the lender has nothing to answer, and so does not compute."""
        return bool(self.memory.words[ANSWERED] == self.offered)

    @property
    def wants(self) -> bool:
        """True if the lender wants to compute."""
        return bool(self.memory.words[WANTS])

    @property
    def has_gone(self) -> bool:
        """True if the connection has ended."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def await_answer(self) -> bool:
        """Recall the offer, and wait for the answer. Return False if the lender has
        gone, or its patience is over.
        """
        words = self.memory.words
        words[RECALLED] = self.offered
        patience_s = min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, words[PATIENCE] / 1e9))
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        self.wake()
        while not self.has_answered:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if poll.poll(1e3 * left):
                try:
                    if not self.connection.recv(4096, socket.MSG_DONTWAIT):
                        return False
                except BlockingIOError:
                    continue
                except OSError:
                    return False
        return True

    def wake(self) -> None:
        """Wake the lender. It has been woken already if the connection is full."""
        with contextlib.suppress(OSError):
            self.connection.send(b"\0", socket.MSG_DONTWAIT)

    def drop(self) -> None:
        """End the connection, so that the lender computes no more."""
        self.memory.words[DROPPED] = 1
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.memory.close()


class Serving:
    """The side of the serving engine. `begin_step` and `end_step` are called by the
    thread that computes; another thread admits lenders at the socket `path`, and beats.
    `about` describes the engine to a lender. `rows` is the maximum number of requests
    in a snapshot.

    Raises OSError if the socket cannot be made, and FileExistsError if another engine
    listens there.
    """

    def __init__(self, path: str, about: dict[str, Any], *, rows: int) -> None:
        self._path, self._rows = path, rows
        server = f"{os.getpid()} {time.monotonic_ns()}"
        self._about = {"protocol": PROTOCOL, "rows": rows, "server": server, **about}
        words = size(rows) // 8 - FIRST
        self._image = memoryview(array.array("q", bytes(8 * words)))
        self._lock = threading.Lock()
        self._lender: Lender | None = None
        self._between = True
        self._waits = self._closed = self._refuses = False
        self._done = self._waited = 0
        self._listener = _listen(path)
        self._file = _file_at(path)
        self._thread = threading.Thread(target=self._tend, name="lending", daemon=True)
        self._thread.start()

    @property
    def lends(self) -> bool:
        """True while a lender is connected."""
        return self._lender is not None

    def begin_step(self) -> None:
        """Take the baton: wait for the end of the rollout step that is under way."""
        with self._lock:
            self._between = False
            lender = self._lender
            if lender is None or lender.has_answered:
                return
            self._waits = True
        since = time.monotonic_ns()
        answered = lender.await_answer()
        with self._lock:
            self._waits = False
            self._waited += time.monotonic_ns() - since
            if not answered:
                self._drop(lender)

    def end_step(
        self, step: Step | None, counts: Counts, rows: Callable[[], Iterable[Row]]
    ) -> None:
        """Publish the load after a step, and offer the baton to a lender that wants it.
        `rows` returns the requests; it is called only for such a lender, and iterated
        up to the first request without room. `step` is None if the engine has computed
        nothing.
        """
        with self._lock:
            self._between = True
            image = self._image
            if step is not None:
                at = HEAD + len(step) * (self._done % STEPS)
                image[at : at + len(step)] = array.array("q", step)
                self._done += 1
            image[2:7] = array.array("q", counts._replace(waited=self._waited))
            lender = self._lender
            if lender is not None:
                offers = lender.wants and lender.has_answered
                listed = itertools.islice(rows(), self._rows + 1) if offers else None
                self._publish(lender, None if listed is None else list(listed), offers=offers)

    def close(self) -> None:
        """End the loan, and listen no longer. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._lock:
            if self._lender is not None:
                self._drop(self._lender)
        # while the listener is open, no other file has the number of its own
        with contextlib.suppress(FileNotFoundError):
            if _file_at(self._path) == self._file:
                os.unlink(self._path)
        self._listener.close()

    @property
    def _is_idle(self) -> bool:
        """True if the engine is between two steps, and has had no requests since."""
        return self._between and not self._image[2] and not self._image[3]

    def _publish(self, lender: Lender, rows: list[Row] | None, *, offers: bool) -> None:
        """Write a snapshot, with an offer if the lender is to have one."""
        image = self._image
        image[0], image[1] = lender.offered + offers, self._done
        image[7] = -1 if rows is None or len(rows) > self._rows else len(rows)
        first = end = HEAD + len(Step._fields) * STEPS
        if rows and image[7] > 0:
            flat = array.array("q", [value for row in rows for value in row])
            end = first + len(flat)
            image[first:end] = flat
        lender.memory.write(image[:end])
        if offers:
            lender.offered += 1
            lender.memory.words[OFFERED] = lender.offered
            lender.wake()

    def _drop(self, lender: Lender) -> None:
        self._lender = None
        lender.drop()

    # The thread that tends the socket

    def _tend(self) -> None:
        while not self._closed:
            lender, poll = self._lender, select.poll()
            poll.register(self._listener, select.POLLIN)
            timeout = None
            if lender is not None:
                timeout = 1e3 * BEAT_S
                with contextlib.suppress(ValueError):  # it is being dropped
                    poll.register(lender.connection, select.POLLRDHUP)
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._closed:
                return
            if self._listener.fileno() in ready:
                self._admit_or_say()
            with self._lock:
                if lender is None or lender is not self._lender:
                    continue
                lender.memory.words[BEAT] = time.monotonic_ns()
                if self._waits:
                    continue  # the thread that waits notices the end of the connection
                if lender.has_gone:
                    self._drop(lender)
                    continue
                if self._is_idle and lender.wants and lender.has_answered:
                    self._publish(lender, [], offers=True)

    def _admit_or_say(self) -> None:
        """Admit a lender. If that fails, the first failure of a row is written to the
        standard error, and the next attempt follows after a beat.
        """
        try:
            self._admit()
        except OSError as error:
            if not self._refuses and not self._closed:
                sys.stderr.write(f"{VARIABLE}: no lender is admitted for now: {error}\n")
            self._refuses = True
            time.sleep(BEAT_S)
        else:
            self._refuses = False

    def _admit(self) -> None:
        """Admit a lender, or tell it that there is another one."""
        connection, _ = self._listener.accept()
        with self._lock:
            taken = self._lender is not None and (self._waits or not self._lender.has_gone)
            if self._lender is not None and not taken:
                self._drop(self._lender)
        hello = json.dumps({**self._about, "taken": taken}).encode()
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if taken:
                with contextlib.suppress(OSError):  # it has gone already
                    connection.send(hello, socket.MSG_DONTWAIT)
                return
            fd = _sealed_file(size(self._rows))
            stack.callback(os.close, fd)
            memory = Memory(fd, self._rows)
            memory.words[BEAT] = time.monotonic_ns()
            try:
                socket.send_fds(connection, [hello], [fd], socket.MSG_DONTWAIT)
            except OSError:  # it has gone already
                memory.close()
                return
            stack.pop_all()
        os.close(fd)
        with self._lock:
            self._lender = Lender(connection, memory)
            # the requests of a step under way are not known: an offer follows the step
            self._publish(self._lender, [] if self._is_idle else None, offers=False)


def _sealed_file(nbytes: int) -> int:
    """Return the descriptor of a memory file whose size nobody can change: reading
    beyond the end of a file that has become shorter would kill the process.
    """
    fd = os.memfd_create("rollweave-lending", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


def _file_at(path: str) -> tuple[int, int]:
    """Return the device and the number of the file at `path`, by which it is told from
    another one that has taken its place.
    """
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _listen(path: str) -> socket.socket:
    """Return a socket that listens at `path`, which only this user may use. The socket
    of an engine that has died is replaced; any other file stays.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.settimeout(CONNECT_S)
        listens = True
        try:
            other.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            listens = False
        except (BlockingIOError, TimeoutError):
            pass  # many wait there already
    if listens:
        raise FileExistsError(f"{VARIABLE}: another serving engine lends at {path}")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(
                f"{VARIABLE} must be the path of a socket, got {path}, which is another file"
            )
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(listener.fileno(), 0o600)  # the mode with which the path is made
    try:
        listener.bind(path)
        listener.listen(8)
    except OSError:
        listener.close()
        raise
    return listener
