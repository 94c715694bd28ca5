"""The process that compiles grammars and computes masks:
`python -m rollweave.engine.constraint_process`, started by `engine/matchers.py`.

It reads the tokenizer, which may take a second, and forks a worker that executes the
commands one by one. The kernel ends a worker that exceeds the bounds on CPU time and
memory; this process then says so in its place, and forks the next worker.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from rollweave.engine.constraints import Grammars, Matcher
from rollweave.engine.matchers import (
    CANNOT,
    MEMORY_BYTES,
    NEXT_S,
    BeginText,
    ContinueText,
    EndText,
    MaskReply,
    TextCommand,
    Vocabulary,
)
from rollweave.io.boot import die_with
from rollweave.io.wire import LENGTH, decoder_of, encode, frame
from rollweave.schema.errors import EngineError

FED_S = 0.01
"""CPU seconds for each token with which a text begins."""


class Connection:
    """The client's end of a socket: frames, read one at a time, so that a worker takes
    no command that the next one should have.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> bytes | None:
        """Return the next payload; None at the end of the stream."""
        head = self._read(LENGTH.size)
        return None if head is None else self._read(LENGTH.unpack(head)[0])

    def send(self, reply: MaskReply) -> None:
        """Send a reply, which is dropped if the client has closed the connection."""
        with contextlib.suppress(OSError):
            self._socket.sendall(b"".join(frame(encode(reply))))

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                return None
            data += more
        return bytes(data)


class Worker:
    """The texts of one worker, by their ids. `begin_s` stands for `BEGIN_S`."""

    def __init__(self, grammars: Grammars, *, begin_s: float) -> None:
        self._grammars, self._begin_s = grammars, begin_s
        self._texts: dict[str, Matcher] = {}

    def reply(self, command: TextCommand) -> MaskReply:
        """Execute a command, within its CPU time."""
        limit_s = NEXT_S
        if isinstance(command, BeginText):
            limit_s = self._begin_s + FED_S * len(command.tokens)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            return self._reply(command)
        except (ValueError, MemoryError) as error:
            self._texts.pop(command.id, None)
            return MaskReply(error=str(error) or f"{CANNOT}it takes too much memory")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _reply(self, command: TextCommand) -> MaskReply:
        match command:
            case BeginText(id=id, constraint=constraint, ends=ends, tokens=tokens):
                text = self._texts[id] = self._grammars.matcher(constraint, ends=ends)
                for token in tokens:
                    text.feed(token)
            case ContinueText(id=id, token=token):
                text = self._texts[id]
                text.feed(token)
            case EndText(id=id):
                self._texts.pop(id, None)
                return MaskReply()
        if text.is_complete:
            return MaskReply(complete=True)
        return MaskReply(mask=text.allowed())


def main() -> None:
    """Serve until the client closes the connection."""
    gc.freeze()
    gc.enable()
    connection = Connection(int(sys.argv[1]))
    payload = connection.receive()
    if payload is None:
        return
    vocabulary: Vocabulary = decoder_of(Vocabulary)(payload)
    checkpoint = Path(vocabulary.checkpoint) if vocabulary.checkpoint else None
    try:
        grammars = Grammars(checkpoint, vocab=vocabulary.size)
    except EngineError as error:
        connection.send(MaskReply(error=str(error)))
        return
    connection.send(MaskReply())
    own = os.getpid()
    while True:
        child = os.fork()
        if not child:
            die_with(own)
            _work(connection, Worker(grammars, begin_s=vocabulary.begin_s))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return
        connection.send(MaskReply(lost=True, error=_why(os.WTERMSIG(status))))


def _work(connection: Connection, worker: Worker) -> NoReturn:
    """Execute commands until the client closes the connection."""
    _bound_memory()
    decode = decoder_of(TextCommand)
    while (payload := connection.receive()) is not None:
        connection.send(worker.reply(decode(payload)))
    os._exit(0)


def _bound_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # only Linux tells its size
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _why(number: int) -> str:
    if number == signal.SIGPROF:
        return f"{CANNOT}it takes too much CPU time"
    return f"{CANNOT}it takes too much memory (signal {signal.Signals(number).name})"


if __name__ == "__main__":
    main()
    os._exit(0)
