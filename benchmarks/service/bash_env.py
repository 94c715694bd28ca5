"""The agent of bench `service`'s ablations: every turn is a real bash command in a
sandbox of its own.

A task is a small project to look at, change and run; `project` gives its payload. How
many turns it takes is the task's (log-normal, a long tail), the first word of a turn
picks the command. Invariants: an episode holds one sandbox, taken from a warm pool,
until it is closed; commands are the same whatever terminal runs them; one that fails
ends the attempt with an error.

`terminal` is `shell`, the sandbox's own (`sandbox/tools.Bash`), or `tmux`, as agents'
terminals are usually driven: keys are sent to it, its end is waited for (not polled
for, which would cost more), and the screen is fetched.
"""

import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from rollweave.envs.base import Observation, Options, Step, mix, payload_of
from rollweave.sandbox.base import Sandbox, SandboxSpec
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.registry import backend
from rollweave.sandbox.tools import Bash
from rollweave.schema.errors import SandboxError
from rollweave.schema.work import Task

TerminalName = Literal["shell", "tmux"]

WARM = 8
"""Sandboxes that wait to be taken."""

BACKEND = "zygote"
"""The quickest to start: this is not what is compared."""

MEDIAN_TURNS, SIGMA, MOST_TURNS = 4.0, 0.8, 24
"""The longest of two dozen tasks has about five times the median: uneven, as agents'
tasks are.
"""

COMMAND_S = 30.0

PROJECT = (
    "mkdir -p p && cd p && for i in 0 1 2 3 4 5 6 7 8 9; do"
    " printf 'import math\\n\\ndef area_%s(r):\\n    return %s * math.pi * r\\n' $i $i > m_$i.py; "
    "done && cd .."
)

COMMANDS = {
    " list": "ls -la p",
    " find": "find p -name '*.py' | sort",
    " search": "grep -rn 'return' p | head -20",
    " read": "sed -n 1,20p p/m_3.py",
    " count": "cat p/*.py | wc -l",
    " edit": "sed -i 's/def area_4(r)/def area_4(radius)/; s/pi \\* r$/pi * radius/' p/m_4.py && "
    "head -3 p/m_4.py",
    " compare": "diff -u p/m_1.py p/m_2.py | cat",
    " run": "cd p && python3 -S -c 'import m_5; print(m_5.area_5(2))'; cd ..",
}
"""What an agent's first word does."""

DIGITS = tuple(f" d{digit}" for digit in range(10))
NUMBER_DIGITS = 9
READ = (" task", " done", " output")


class Terminal(Protocol):
    async def run(self, command: str) -> str:
        """What the command printed. Raises SandboxError."""


class ShellTerminal:
    """Ours."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._bash = Bash(sandbox)

    async def run(self, command: str) -> str:
        found = await self._bash.run(command, timeout_s=COMMAND_S)
        if found.exit_code:
            raise SandboxError(f"{command!r} ended with {found.exit_code}: {found.output[-200:]}")
        return found.output


class TmuxTerminal:
    """A tmux server in the sandbox; each command is three calls of its client, in one
    process that we start.
    """

    _TMUX = "tmux -S /tmp/tmux -f /dev/null"
    _RUN = (
        f'{_TMUX} send-keys -t s "clear; $1; {_TMUX} wait-for -S done" Enter && {_TMUX} wait-for '
        "done"
        f" && {_TMUX} capture-pane -p -t s"
    )

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._started = False

    async def run(self, command: str) -> str:
        if not self._started:
            await self._sh(
                f"{self._TMUX} new-session -d -s s -x 160 -y 50 'bash --norc --noprofile'"
            )
            self._started = True
        return await self._sh(self._RUN, "sh", command)

    async def _sh(self, *arguments: str) -> str:
        found = await self._sandbox.exec(["sh", "-c", *arguments], timeout_s=COMMAND_S)
        if found.rc or found.timed_out:
            raise SandboxError(
                f"tmux: {arguments!r:.200} ended with {found.rc}: {found.stderr[-200:]!r}"
            )
        return found.stdout.decode(errors="replace")


TERMINALS: dict[TerminalName, type[ShellTerminal] | type[TmuxTerminal]] = {
    "shell": ShellTerminal,
    "tmux": TmuxTerminal,
}


class Boxes:
    """The sandboxes of a process that serves: `opened` once, around all episodes."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        boxes = backend(BACKEND)
        self._pool = Pool(boxes, SandboxSpec(), size=WARM)
        try:
            await self._pool.filled()
            yield
        finally:
            pool, self._pool = self._pool, None
            await pool.close()
            await boxes.close()

    async def take(self) -> Sandbox:
        if self._pool is None:
            raise SandboxError("the sandboxes are not open")
        return await self._pool.take()


BOXES = Boxes()


class BashEnv:
    """Reward 1 for every task that is gone through to its end."""

    def __init__(self, *, terminal: TerminalName = "shell") -> None:
        self._kind = TERMINALS[terminal]
        self._box: Sandbox | None = None
        self._left = 0

    async def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        self._left = int(payload["turns"])
        self._box = await BOXES.take()
        self._terminal: Terminal = self._kind(self._box)
        await self._terminal.run(PROJECT)
        number = f"{int(payload['number']):0{NUMBER_DIGITS}d}"[-NUMBER_DIGITS:]
        return Observation.of(" task" + "".join(DIGITS[int(digit)] for digit in number))

    async def step(self, action: str) -> Step:
        output = await self._terminal.run(command_of(action))
        self._left -= 1
        if not output.strip():
            raise SandboxError(f"a command of {action!r:.100} printed nothing")
        done = self._left <= 0
        return Step.of(
            " done" if done else " output", reward=float(done), done=done, success=done or None
        )

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.stop(grace_s=0.0)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [*READ, *DIGITS, *COMMANDS]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return tuple(COMMANDS)


def project(number: int) -> dict[str, int]:
    """Task number `number`, as a payload."""
    turns = MEDIAN_TURNS * math.exp(random.Random(mix("project", number)).gauss(0.0, SIGMA))
    return {"number": number, "turns": min(MOST_TURNS, max(1, round(turns)))}


def command_of(action: str) -> str:
    """The command of an agent's words."""
    word = " " + next(iter(action.split()), "")
    return COMMANDS.get(word, COMMANDS[" list"])
