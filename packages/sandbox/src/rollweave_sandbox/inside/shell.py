"""`bash`: one shell that persists from call to call, on a separate pseudo-terminal.
Needs Python 3.9 and its standard library alone (no ptyprocess).

The shell reads its commands from a pipe, and writes the exit status of each command to
another pipe, under a random name that the command never sees; the output of commands
goes only to the terminal. Therefore no output can be mistaken for the end of a command,
an unclosed quote ends with its command, and output contains no echo and no prompt.

Invariants: a command has an empty standard input, and reading the terminal returns end
of file immediately; the attributes of the terminal are restored before each command.
When a command runs out of time, its foreground group is interrupted, then killed, then
the shell and its whole session are killed, and the reply says so; no stage waits longer
than its constant. A background job that keeps the terminal open delays nothing; its
output between calls comes first in the next reply.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from typing import Any

from .frames import Call, Deadline, Failed, Refused, Result, Stop
from .processes import end_session, signal_group, start
from .streams import BackgroundReader, Outbox, OutputBuffer, Session, TappedStream, Watch, converse

START_S = 10.0
"""Maximum seconds until a shell has started, on a heavily loaded machine."""

STATUS_BYTES = 4096
"""Maximum number of bytes kept from the status pipe; one status line is much
shorter.
"""

COMMAND_BYTES = 1 << 20
"""Maximum size of a command in bytes."""

TERMINAL_FD = 250
"""File descriptor of the terminal in the shell, far from the descriptors that scripts
choose.
"""

SIZE = struct.pack("HHHH", 50, 160, 0, 0)
"""Rows and columns of the terminal, wide enough for tables."""

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
"""Variables that keep programs from prompting, paging and coloring their output."""

OPTIONS = "--norc --noprofile --noediting +H +o history -i"
"""The shell's options. The shell is interactive, because only then does an interrupt
end the whole command but not the shell, and only then is there a foreground group to
kill. It has no history expansion, so that `!` is an ordinary character.
"""

TERMINAL_HELD = f'exec "$0" {OPTIONS} {TERMINAL_FD}<>"$1"'
"""Script that opens the terminal, which becomes the controlling terminal because a
session leader opens it.
"""


class Bash:
    """The action `bash`, whose body is the command."""

    def __init__(self, idle: BackgroundReader) -> None:
        self._session = Session(
            lambda stop: _Terminal(idle, stop),
            "bash runs one command at a time, and one is running",
        )

    def __call__(self, call: Call) -> Result:
        """Run the command, as `Session.run` does.

        `rc` is its exit status, or 128 plus the number of the signal that ended it. The
        shell's state is lost if the shell had been killed before, and by `exit`, `exec`
        and a command that cannot be interrupted.
        """
        if b"\0" in call.body or len(call.body) > COMMAND_BYTES:
            raise Refused(
                f"command must have at most {COMMAND_BYTES} bytes and no NUL, got "
                f"{len(call.body)} bytes"
            )
        ran = self._session.run(call)
        return {**ran.fields, "rc": ran.status if ran.answer is None else ran.answer}, ran.body


class _Terminal:
    """A pseudo-terminal and the shell on it."""

    def __init__(self, idle: BackgroundReader, stop: Stop) -> None:
        master, self._slave = os.openpty()
        self.tap = TappedStream(master, idle)
        self._attributes = _make_raw(self._slave)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, SIZE)
        self._status_lines = b""
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
        self, command: bytes, output: OutputBuffer, deadline: Deadline, stop: Stop
    ) -> tuple[int | None, bool]:
        """Return the command's exit status, or None if the shell has ended or must be
        ended; and whether the command ran out of time.
        """
        name = os.urandom(16).hex().encode()
        if termios.tcgetattr(self._slave) != self._attributes:
            termios.tcsetattr(self._slave, termios.TCSANOW, self._attributes)
        self.tap.open(output)
        self._status_lines = b""
        self._commands.send(_line(command, name, self._status))
        stages = [self._interrupt, self._kill]
        status, timed_out = converse(self._watch, lambda: self._find(name), deadline, stop, stages)
        if status is not None:
            self._status = status
            self.tap.rest()
        return status, timed_out

    def end(self) -> int:
        """Kill the rest of the session, and close.

        Returns the shell's exit status, or 128 plus the number of the signal that ended
        it.
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
        data = os.read(self._statuses, STATUS_BYTES)
        self._status_lines = (self._status_lines + data)[-STATUS_BYTES:]
        if not data:  # the shell has become another program (`exec`), or is ending
            self._watch.off(self._statuses)

    def _find(self, name: bytes) -> int | None:
        _, separator, status = self._status_lines.partition(b"\n" + name + b" ")
        return int(status.partition(b"\n")[0]) if separator and b"\n" in status else None

    def _foreground(self) -> int:
        """Return the foreground process group of the terminal: the command's, or the
        shell's own while it runs a builtin.
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
    """Return the shell's input: the command as one quoted word, then the report of its
    status under a name that the shell reads only afterwards.
    """
    terminal = b"%d" % TERMINAL_FD
    return b"".join(
        (
            b"(\\builtin exit %d)\n" % before if before else b"",  # so that `$?` persists, too
            b"\\builtin eval -- '",
            command.replace(b"'", b"'\\''"),
            b"' </dev/null >&" + terminal + b" 2>&" + terminal + b"\n",
            b"\\builtin printf '\\n%s %s\\n' " + name + b' "$?"\n',
        )
    )


def _make_raw(terminal: int) -> list[Any]:
    """Switch off echo, translation and signal characters, and let reading return end of
    file immediately. Return the attributes that are set.
    """
    attributes = termios.tcgetattr(terminal)
    attributes[0] = attributes[1] = attributes[3] = 0
    attributes[6][termios.VMIN], attributes[6][termios.VTIME] = 0, 0
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    return termios.tcgetattr(terminal)
