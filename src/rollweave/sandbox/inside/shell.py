"""`bash`: one shell that lives from call to call, on a pseudo-terminal of its own.
Python 3.9, stdlib alone (no ptyprocess).

The shell reads its commands from a pipe, and tells each one's exit status on another
pipe, under a name drawn for that call that the command never sees; what commands print
goes to the terminal alone. So nothing that is printed can pass for the end of a
command, an unclosed quote ends with its command, and there is no echo and no prompt to
be told apart from output.

Invariants: a command has an empty standard input, and reading the terminal gives its
end at once; the terminal is as it was before each command, whatever one did to it. When
a command runs out of time, its foreground group is interrupted, then killed, then the
shell and its whole session are, and the reply says so: no stage waits longer than its
constant. A background job that holds the terminal open delays nothing; what it prints
between calls comes first in the next reply.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
from typing import Any

from .background import BackgroundReader
from .calls import DEFAULT_LIMIT, Call, Deadline, Failed, Refused, Result, Stop
from .frames import BODY_BYTES
from .processes import end_session, signal_group, start
from .streams import BUSY_S, Outbox, OutputBuffer, Tap, Watch, converse, has_ended

START_S = 10.0
"""For a shell to start, on a machine that is very busy."""

STATUS_BYTES = 4096
"""OutputBuffer of what comes on the status pipe: a line of ours is much shorter."""

COMMAND_BYTES = 1 << 20
"""Of the longest command."""

TERMINAL_FD = 250
"""The terminal's number in the shell: far from those that a script picks."""

SIZE = struct.pack("HHHH", 50, 160, 0, 0)
"""Rows and columns that programs are told: wide enough that tables are not cut."""

SURROUNDINGS = {
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "PS1": "",
    "PS2": "",
}
"""Nothing asks, pages or colours."""

OPTIONS = "--norc --noprofile --noediting +H +o history -i"
"""Interactive, because only then an interrupt ends the whole command but not the shell,
and a foreground group is there to be killed; without history expansion, so that `!`
means nothing.
"""

TERMINAL_HELD = f'exec "$0" {OPTIONS} {TERMINAL_FD}<>"$1"'
"""Opening the terminal as leader of a session makes it the controlling one."""


class Bash:
    """The action `bash`, whose body is the command."""

    def __init__(self, idle: BackgroundReader) -> None:
        self._idle = idle
        self._busy = threading.Lock()
        self._terminal: _Terminal | None = None

    def __call__(self, call: Call) -> Result:
        """Run the command; the body of the reply is the first `split` bytes of output,
        then the last, `dropped` between.

        `rc` is its exit status, 128 and the signal if that ended it. `restarted`: the
        state of the shell was lost, before this command (it had been killed) or by it
        (`exit`, `exec`, or it could not be interrupted).
        """
        if b"\0" in call.body or len(call.body) > COMMAND_BYTES:
            raise Refused(
                f"command must have at most {COMMAND_BYTES} bytes and no NUL, got "
                f"{len(call.body)} bytes"
            )
        limit = call.integer("output_limit", DEFAULT_LIMIT, most=BODY_BYTES // 2)
        if not self._busy.acquire(timeout=BUSY_S):
            raise Refused("bash runs one command at a time, and one is running")
        try:
            kept = OutputBuffer(limit - limit // 2, limit // 2)
            lost = self._retire(kept)
            if self._terminal is None:
                self._terminal = _Terminal(self._idle, call.stop)
            deadline = call.deadline()  # a start is not the command's
            status, timed_out = self._terminal.run(call.body, kept, deadline, call.stop)
            if status is None:
                status, lost = self._terminal.end(), True
                self._terminal = None
        finally:
            self._busy.release()
        fields = {"rc": status, "timed_out": timed_out, "restarted": lost, "dropped": kept.dropped}
        return {
            **fields,
            "seconds": deadline.spent_s,
            "split": len(kept.head),
        }, kept.head + kept.tail

    def _retire(self, kept: OutputBuffer) -> bool:
        """Put away a shell that has died since the last call; its last words come first
        in this one. Did it?
        """
        if self._terminal is None or not has_ended(self._terminal.process):
            return False
        self._terminal.tap.open(kept)
        self._terminal.end()
        self._terminal = None
        return True


class _Terminal:
    """A pseudo-terminal and the shell on it."""

    def __init__(self, idle: BackgroundReader, stop: Stop) -> None:
        master, self._slave = os.openpty()
        self.tap = Tap(master, idle)
        self._attributes = _make_raw(self._slave)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, SIZE)
        self._told = b""
        self._status = 0
        try:
            self.process = start(
                [
                    "bash",
                    "--norc",
                    "--noprofile",
                    "-c",
                    TERMINAL_HELD,
                    "bash",
                    os.ttyname(self._slave),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **SURROUNDINGS},
            )
        except OSError as error:
            os.close(master)
            os.close(self._slave)
            raise Failed(f"bash cannot be started: {error.strerror}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._statuses = self.process.stdout.fileno()
        self._watch = Watch(self.process)
        self._watch.on(master, self.tap.read)
        self._watch.on(self._statuses, self._listen)
        self._commands = Outbox(self._watch, self.process.stdin.fileno())
        self._start(stop)

    def _start(self, stop: Stop) -> None:
        status, _ = self.run(b"", OutputBuffer(0), Deadline(START_S), stop)
        if status is None:
            raise Failed(f"bash does not start: exit status {self.end()}")

    def run(
        self, command: bytes, kept: OutputBuffer, deadline: Deadline, stop: Stop
    ) -> tuple[int | None, bool]:
        """Its exit status, or None if the shell has ended or must be; and whether it
        ran out of time.
        """
        name = os.urandom(16).hex().encode()
        if termios.tcgetattr(self._slave) != self._attributes:
            termios.tcsetattr(self._slave, termios.TCSANOW, self._attributes)
        self.tap.open(kept)
        self._told = b""
        self._commands.send(_line(command, name, self._status))
        stages = [self._interrupt, self._kill]
        status, timed_out = converse(self._watch, lambda: self._find(name), deadline, stop, stages)
        if status is not None:
            self._status = status
            self.tap.rest()
        return status, timed_out

    def end(self) -> int:
        """Kill what is left of the session, and close.

        The exit status of the shell, 128 and the signal if that ended it.
        """
        status = end_session(self.process)
        self._watch.close()
        self.tap.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        os.close(self._slave)
        return status if status >= 0 else 128 - status

    def _listen(self) -> None:
        told = os.read(self._statuses, STATUS_BYTES)
        self._told = (self._told + told)[-STATUS_BYTES:]
        if not told:  # the shell has become another program (`exec`), or is ending
            self._watch.off(self._statuses)

    def _find(self, name: bytes) -> int | None:
        _, found, status = self._told.partition(b"\n" + name + b" ")
        return int(status.partition(b"\n")[0]) if found and b"\n" in status else None

    def _foreground(self) -> int:
        """The process group that the terminal belongs to: the command's, or the shell's
        own while it computes.
        """
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.tap.fd)
            if group > 0 and os.getsid(group) == self.process.pid:
                return group
        return self.process.pid

    def _interrupt(self) -> None:
        group = self._foreground()
        signal_group(group, signal.SIGINT)
        for stopped in {group, self.process.pid}:
            signal_group(stopped, signal.SIGCONT)

    def _kill(self) -> None:
        group = self._foreground()
        if group != self.process.pid:
            signal_group(group, signal.SIGKILL)


def _line(command: bytes, name: bytes, before: int) -> bytes:
    """What the shell reads: the command as one quoted word, then the report under a
    name that it reads only afterwards.
    """
    terminal = b"%d" % TERMINAL_FD
    return b"".join(
        (
            b"(\\builtin exit %d)\n" % before if before else b"",  # so that `$?` lives on, too
            b"\\builtin eval -- '",
            command.replace(b"'", b"'\\''"),
            b"' </dev/null >&" + terminal + b" 2>&" + terminal + b"\n",
            b"\\builtin printf '\\n%s %s\\n' " + name + b' "$?"\n',
        )
    )


def _make_raw(terminal: int) -> list[Any]:
    """No echo, no translation, no signal characters, and reading gives the end of input
    at once. The attributes set.
    """
    attributes = termios.tcgetattr(terminal)
    attributes[0] = attributes[1] = attributes[3] = 0
    attributes[6][termios.VMIN], attributes[6][termios.VTIME] = 0, 0
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    return termios.tcgetattr(terminal)
