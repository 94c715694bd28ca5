"""The agent of bench `service`'s ablations: every turn is a real bash command in the
episode's sandbox.

A task is a small project to inspect, change and run; `project` returns its payload. The
task determines the number of turns (log-normal, with a long tail); the first word of a
turn selects the command. Invariants: an episode has one sandbox, taken from a warm
pool, until it is closed; commands do not depend on the terminal; a command that fails
ends the attempt with an error.

`terminal` is `shell`, the sandbox's own (`sandbox/tools.Bash`), or `tmux`, driven as
agents usually drive terminals: send keys, wait for the end of the command (by a signal;
polling would cost more), and fetch the screen.
"""

import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal, get_args

from rollweave.envs.base import Observation, Options, Step, payload_of
from rollweave.sandbox.base import Sandbox, SandboxSpec
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.tools import Bash
from rollweave.schema.base import mix
from rollweave.schema.errors import SandboxError
from rollweave.schema.work import Task
from rollweave_sandbox.registry import backend

TerminalName = Literal["shell", "tmux"]
TERMINALS: Final[tuple[TerminalName, ...]] = get_args(TerminalName)

WARM = 8
"""Number of sandboxes that the pool keeps ready."""

BACKEND = "zygote"
"""Back end of the sandboxes: the one that starts fastest, since back ends are not
compared here.
"""

MEDIAN_TURNS, SIGMA, MOST_TURNS = 4.0, 0.8, 24
"""Log-normal distribution of the turns, and their maximum. The longest of two dozen
tasks has about five times the median: uneven, as agents' tasks are.
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
"""Command for each first word of a turn."""

DIGITS = tuple(f" d{digit}" for digit in range(10))
NUMBER_DIGITS = 9
OBSERVATION_WORDS = (" task", " done", " output")


TMUX = "tmux -S /tmp/tmux -f /dev/null"
TMUX_START = f"{TMUX} new-session -d -s s -x 160 -y 50 'bash --norc --noprofile'"
TMUX_RUN = (
    f'{TMUX} send-keys -t s "clear; $1; {TMUX} wait-for -S done" Enter && {TMUX} wait-for done '
    f"&& {TMUX} capture-pane -p -t s"
)
"""Program of a command in tmux: three calls of its client, in one process."""


class Terminal:
    """A terminal in a sandbox: its own shell, or a server of tmux."""

    def __init__(self, sandbox: Sandbox, name: TerminalName) -> None:
        self._sandbox, self._bash = sandbox, Bash(sandbox) if name == "shell" else None
        self._started = False

    async def run(self, command: str) -> str:
        """Return the command's output. Raises SandboxError if it fails."""
        if self._bash is not None:
            result = await self._bash.run(command, timeout_s=COMMAND_S)
            if result.exit_code:
                raise SandboxError(f"{command!r} ended with {result.exit_code}: {result.output}")
            return result.output
        if not self._started:
            await self._tmux(TMUX_START)
            self._started = True
        return await self._tmux(TMUX_RUN, "sh", command)

    async def _tmux(self, *arguments: str) -> str:
        result = await self._sandbox.exec(["sh", "-c", *arguments], timeout_s=COMMAND_S)
        if result.rc or result.timed_out:
            raise SandboxError(
                f"tmux: {arguments!r:.200} ended with {result.rc}: {result.stderr[-200:]!r}"
            )
        return result.stdout.decode(errors="replace")


class Sandboxes:
    """The sandboxes of a serving process. `opened` is entered once, around all
    episodes.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        backend_sandboxes = backend(BACKEND)
        self._pool = Pool(backend_sandboxes, SandboxSpec(), size=WARM)
        try:
            await self._pool.filled()
            yield
        finally:
            pool, self._pool = self._pool, None
            await pool.close()
            await backend_sandboxes.close()

    async def take(self) -> Sandbox:
        if self._pool is None:
            raise SandboxError("the sandboxes are not open")
        return await self._pool.take()


SANDBOXES = Sandboxes()


class BashEnv:
    """An environment whose reward is 1 for every task that is worked through to its
    end.
    """

    def __init__(self, *, terminal: TerminalName = "shell") -> None:
        self._name: TerminalName = terminal
        self._sandbox: Sandbox | None = None
        self._left = 0

    async def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        self._left = int(payload["turns"])
        self._sandbox = await SANDBOXES.take()
        self._terminal = Terminal(self._sandbox, self._name)
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
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.stop(grace_s=0.0)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [*OBSERVATION_WORDS, *DIGITS, *COMMANDS]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return tuple(COMMANDS)


def project(number: int) -> dict[str, int]:
    """Return the payload of task `number`."""
    turns = MEDIAN_TURNS * math.exp(random.Random(mix("project", number)).gauss(0.0, SIGMA))
    return {"number": number, "turns": min(MOST_TURNS, max(1, round(turns)))}


def command_of(action: str) -> str:
    """Return the command that an agent's words select."""
    word = " " + next(iter(action.split()), "")
    return COMMANDS.get(word, COMMANDS[" list"])
