"""Constrained texts, token by token: their grammars are compiled, and the masks of
allowed tokens computed, in a separate process (`engine/constraints`). `GrammarCheck`
has grammars compiled in the same way before their texts are given to an engine, so that
a client learns at once which of its fields is wrong.

A grammar comes from a client or an agent, and may take any time and memory. Invariants:
a grammar delays only the text that it constrains and other constrained texts, each by
at most `BEGIN_S` of CPU time, and by `WAIT_S` in all; each command gets one reply,
unless its text is ended before; a text whose grammar is too expensive is refused, and
the other texts continue. This module does not load the library.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import queue
import re
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Final

import msgspec

from rollweave.io.child import kill_group, start_process
from rollweave.io.wire import LENGTH, decoder_of, encode, frame
from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import Constraint

MOST_CHARS: Final = {"json": 1 << 18, "regex": 1 << 15, "lark": 1 << 19}
"""Maximum characters of a schema, of a regular expression, and of the grammar of a turn
that may call tools.
"""

BEGIN_S: Final = 2.0
"""CPU seconds for a grammar and its first mask: a schema of 1,500 required properties
takes 0.4 s.
"""

NEXT_S: Final = 1.0
"""CPU seconds for each further mask."""

WAIT_S: Final = 30.0
"""Maximum seconds to wait for a reply, whatever else this machine does."""

START_S: Final = 120.0
"""Maximum seconds to start the process and read the tokenizer."""

MEMORY_BYTES: Final = 1 << 30
"""Memory of all grammars of a process, together."""

REMEMBERED: Final = 512
"""Number of grammars whose refusal or acceptance is remembered."""

CANNOT: Final = "sampling.constraint cannot be constrained: "
"""The beginning of the error for a grammar that is refused."""


class Vocabulary(Struct, frozen=True, kw_only=True):
    """The tokens that a mask covers: `size` tokens of the tokenizer in the directory
    `checkpoint`, or the bytes if that is "". `begin_s` stands for `BEGIN_S`.
    """

    checkpoint: str = ""
    size: int = 0
    begin_s: float = BEGIN_S


class BeginText(TaggedStruct, frozen=True, kw_only=True):
    """Begin a text with these tokens. `ends` are the tokens that end it."""

    id: str
    constraint: Constraint
    ends: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


class ContinueText(TaggedStruct, frozen=True, kw_only=True):
    """Append a token that does not end the text."""

    id: str
    token: int


class EndText(TaggedStruct, frozen=True, kw_only=True):
    """Forget a text."""

    id: str


TextCommand = BeginText | ContinueText | EndText


class MaskReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that may follow, one bit each, the lowest bit of a byte first; or that
    the text is `complete`, and no token can follow or end it; or an `error`, with which
    the text is forgotten. If the worker is `lost`, all texts are forgotten. A `passing`
    error says nothing about the grammar.
    """

    mask: bytes = b""
    complete: bool = False
    error: str = ""
    lost: bool = False
    passing: bool = False


_reply_of: Callable[[bytes], MaskReply] = decoder_of(MaskReply)


def refused_text(constraint: Constraint) -> str:
    """Return why the text is too long for a grammar; "" if it is not."""
    most, count = MOST_CHARS[constraint.kind], len(constraint.text)
    return f"it must have at most {most} characters, got {count}" if count > most else ""


def lark_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint that can be constrained as llguidance's Lark,
    which servers take.
    """
    return constraint.text if constraint.kind == "lark" else f"start: {rule_of(constraint)}"


def rule_of(constraint: Constraint) -> str:
    """Return the right-hand side of a rule of llguidance's Lark: for JSON of a schema,
    or a match of a regular expression. Raises ValueError for a text that is no JSON.
    """
    text = constraint.text
    return f"%json {json.dumps(json.loads(text))}" if constraint.kind == "json" else _lark(text)


def _lark(regex: str) -> str:
    """Return a regular expression in Lark's form, in which a slash ends it."""
    return "/" + _ENDS_REGEX.sub(lambda found: _ESCAPED.get(found[0], found[0]), regex) + "/"


_ENDS_REGEX = re.compile(r"\\.|[/\n]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


@dataclass(slots=True)
class _Text:
    """A text that has begun in the `worker` with this number."""

    begin: BeginText
    tokens: list[int]
    worker: int = -1


def read_frame(source: socket.socket) -> bytes | None:
    """Read the next frame and nothing more; return its payload, None at the end of the
    stream. Raises OSError.
    """
    head = _read(source, LENGTH.size)
    return None if head is None else _read(source, LENGTH.unpack(head)[0])


def _read(source: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


class _Process:
    """A running process, used by one thread. `kill` may be called on any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ours, theirs = socket.socketpair()
        module = "rollweave.engine.constraints"
        with theirs:
            self._process: Popen[bytes] = start_process(
                theirs, module=module, log=Path("/dev/null"), env={}
            )
        self.send(encode(vocabulary))

    def send(self, payload: bytes) -> None:
        """Send a frame. The reply says if the process is gone."""
        with contextlib.suppress(OSError):
            self._ours.settimeout(WAIT_S)
            self._ours.sendall(b"".join(frame(payload)))

    def receive(self, within_s: float) -> MaskReply | None:
        """Return the next reply, None if the process is gone. Raises TimeoutError."""
        self._ours.settimeout(within_s)
        try:
            payload = read_frame(self._ours)
        except TimeoutError:
            raise
        except OSError:
            return None
        return None if payload is None else _reply_of(payload)

    def kill(self) -> None:
        kill_group(self._process)

    def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.kill()
        self._ours.close()
        self._process.wait()


class Matchers:
    """The constrained texts of one vocabulary. `reply` is called with the id of a text
    and each of its replies, on a thread of this object, which starts with the first
    text. All methods may be called from any thread, and none waits.
    """

    def __init__(
        self,
        checkpoint: Path | None,
        *,
        vocab: int = 0,
        reply: Callable[[str, MaskReply], None],
        begin_s: float = BEGIN_S,
        wait_s: float = WAIT_S,
    ) -> None:
        path = "" if checkpoint is None else str(checkpoint)
        self._vocabulary = Vocabulary(checkpoint=path, size=vocab, begin_s=begin_s)
        self._reply, self._wait_s = reply, wait_s
        self._commands: queue.SimpleQueue[TextCommand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # used on the thread only
        self._process: _Process | None = None
        self._workers = 0
        self._texts: dict[str, _Text] = {}
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def begin(
        self,
        id: str,
        constraint: Constraint,
        *,
        ends: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        """Begin a text with these tokens. `ends` are the tokens that end it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="constraints", daemon=True)
            self._thread.start()
        self._commands.put(
            BeginText(id=id, constraint=constraint, ends=tuple(ends), tokens=tuple(tokens))
        )

    def feed(self, id: str, token: int) -> None:
        """Append a token that does not end the text. The text must have its reply."""
        self._commands.put(ContinueText(id=id, token=token))

    def end(self, id: str) -> None:
        """Forget a text. A reply that is under way still follows, and no other one."""
        self._commands.put(EndText(id=id))

    def close(self) -> None:
        """End the process and the thread. No reply follows."""
        self._closed = True
        self._commands.put(None)
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (command := self._commands.get()) is not None and not self._closed:
                reply = self._executed(command)
                if reply is not None and not self._closed:
                    self._reply(command.id, reply)
        finally:
            if self._process is not None:
                self._process.end()

    def _executed(self, command: TextCommand) -> MaskReply | None:
        """Return the reply; None if there is none."""
        match command:
            case BeginText():
                return self._begun(command)
            case ContinueText(id=id, token=token):
                text = self._texts.get(id)
                if text is None:
                    return None
                text.tokens.append(token)
                return self._answered(text, command)
            case EndText(id=id):
                text = self._texts.pop(id, None)
                if text is not None and text.worker == self._workers:
                    self._exchange(command)
                return None

    def _begun(self, command: BeginText) -> MaskReply:
        constraint = command.constraint
        key = key_of(constraint)
        why = refused_text(constraint)
        error = f"{CANNOT}{why}" if why else self._refused.get(key, "")
        if error:
            return MaskReply(error=error)
        text = self._texts[command.id] = _Text(command, list(command.tokens))
        reply = self._answered(text, command)
        if reply.error and not (reply.passing or command.tokens):
            self._refused[key] = reply.error
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
        return reply

    def _answered(self, text: _Text, command: BeginText | ContinueText) -> MaskReply:
        reply = self._exchange(command)
        if reply.error:
            self._texts.pop(text.begin.id, None)
        text.worker = self._workers
        return reply

    def _exchange(self, command: TextCommand) -> MaskReply:
        """Return the process's reply. A process that has ended in between is replaced
        once.
        """
        for _ in range(2):
            try:
                process = self._process or self._started()
            except (EngineError, OSError) as raised:
                return MaskReply(error=str(raised), passing=True)
            process.send(encode(self._renewed(command)))
            try:
                reply = process.receive(self._wait_s)
            except TimeoutError:
                self._drop_process()
                text = f"{CANNOT}it takes more than {self._wait_s:g} s"
                return MaskReply(error=text, passing=True)
            if reply is not None:
                self._workers += reply.lost
                return reply
            self._drop_process()
        return MaskReply(error=f"{CANNOT}the process that compiles it has ended", passing=True)

    def _renewed(self, command: TextCommand) -> TextCommand:
        """Return the command for a worker that may have none of the texts."""
        text = self._texts.get(command.id)
        if not isinstance(command, ContinueText) or text is None or text.worker == self._workers:
            return command
        return msgspec.structs.replace(text.begin, tokens=tuple(text.tokens))

    def _started(self) -> _Process:
        """Start the process. Raises EngineError or OSError."""
        if self._closed:
            raise EngineError("the engine is closed")
        process = self._process = _Process(self._vocabulary)
        if self._closed:  # meanwhile
            process.kill()
        try:
            reply = process.receive(START_S)
        except TimeoutError:
            reply = MaskReply(error=f"{CANNOT}its process was not ready within {START_S:g} s")
        if reply is None or reply.error:
            self._drop_process()
            raise EngineError(f"{CANNOT}its process ended" if reply is None else reply.error)
        return process

    def _drop_process(self) -> None:
        process, self._process = self._process, None
        self._workers += 1
        if process is not None:
            process.end()


def key_of(constraint: Constraint) -> bytes:
    """Return a digest that is equal for equal constraints."""
    return hashlib.sha256(encode(constraint)).digest()


MOST_CHECKS: Final = 64
"""Maximum number of grammars that wait to be checked."""


_TOKEN = re.compile(r"<\[(\^?)[0-9]+\]>")


class BusyError(EngineError):
    """Too many grammars wait to be checked."""


class GrammarCheck:
    """Checks grammars before their texts are given to an engine. All calls belong to
    one event loop.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[MaskReply]] = {}
        self._numbers = itertools.count()
        self._matchers: Matchers | None = None

    async def why_not(self, constraint: Constraint) -> str:
        """Return why nothing can be constrained by this grammar, "" if it can.

        Raises BusyError.
        """
        if why := refused_text(constraint):
            return why
        if constraint.kind == "lark":  # which names tokens of the model
            text = _TOKEN.sub(r"<[\g<1>0]>", constraint.text)
            constraint = Constraint(kind="lark", text=text)
        key = key_of(constraint)
        if key in self._verdicts:
            return self._verdicts[key]
        reply = await self._compiled(constraint)
        verdict = reply.error.removeprefix(CANNOT)
        if not reply.passing:
            self._verdicts[key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compiled(self, constraint: Constraint) -> MaskReply:
        if len(self._waiting) >= MOST_CHECKS:
            raise BusyError(
                f"grammars that wait to be compiled must be at most {MOST_CHECKS}: try again later"
            )
        loop, id = asyncio.get_running_loop(), str(next(self._numbers))
        waiter: asyncio.Future[MaskReply] = loop.create_future()
        self._waiting[id] = waiter
        if self._matchers is None:

            def on_reply(id: str, reply: MaskReply) -> None:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self._resolve, id, reply)

            self._matchers = Matchers(None, reply=on_reply)
        self._matchers.begin(id, constraint)
        try:
            return await waiter
        finally:
            del self._waiting[id]
            if self._matchers is not None:
                self._matchers.end(id)

    def _resolve(self, id: str, reply: MaskReply) -> None:
        waiter = self._waiting.get(id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def close(self) -> None:
        """End the process, if there is one. Checks under way are refused."""
        if self._matchers is not None:
            self._matchers.close()
            self._matchers = None
        for id in list(self._waiting):
            self._resolve(id, MaskReply(error="the run is ending", passing=True))
