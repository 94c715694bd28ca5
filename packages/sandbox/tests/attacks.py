"""Attacks on a sandbox. Each is carried out for real, and bounded, so that one which
succeeds does no harm.

An attack is a program that runs inside, or an action of the host on what a program
inside has prepared. A program reports whether it got out by the first word of its last
line: `held` or `escaped`. A program without a verdict is our error and counts as an
escape, unless the sandbox was ended for exceeding a limit. The holes were found by
review of other sandboxes.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollweave.sandbox.base import HOME, MIB, Backend, ExecResult, Limits, Sandbox, SandboxSpec
from rollweave.schema.base import Struct
from rollweave.schema.errors import SandboxError
from rollweave_sandbox.cgroups import unbounded
from rollweave_sandbox.stage import inodes

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PROGRAMS: dict[str, str] = _TABLE["programs"]
COUNTED_BY_GROUPS = frozenset(_TABLE["counted_by_groups"])

LIMITS = Limits(
    processes=48,
    memory_bytes=256 * MIB,
    disk_bytes=32 * MIB,
    cpu_s=60.0,
    wall_s=120.0,
    output_bytes=64 * 1024,
)
"""Limits of a sandbox under attack: small, so that bombs are small."""

TIME_S = 30.0
"""Maximum seconds for one program: the longest is the memory bomb, which keeps its
memory for three seconds.
"""

BAIT = "ROLLWEAVE_BAIT"
"""A variable of the host's environment, which must not be visible inside."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of one attack."""

    attack: str
    escaped: bool
    verdict: str


@dataclass(frozen=True)
class Scene:
    """Targets on the host that an attack tries to reach."""

    port: int
    abstract: str
    secret_path: str
    secret: str
    bait: "subprocess.Popen[bytes]"

    def prelude(self) -> str:
        """Return the definitions of the names that programs inside use."""
        values = {
            "PORT": self.port,
            "ABSTRACT": "\0" + self.abstract,
            "SECRET_PATH": self.secret_path,
            "BAIT": BAIT,
            "PROCESSES": LIMITS.processes,
            "MEMORY": LIMITS.memory_bytes,
            "DISK": LIMITS.disk_bytes,
            "FILES": inodes(LIMITS.disk_bytes),
        }
        return (
            "".join(f"{name} = {value!r}\n" for name, value in values.items()) + _TABLE["prelude"]
        )


async def _killing(sandbox: Sandbox, scene: Scene) -> str:
    """Signal every process: the sandbox's own server ends, the host's processes must
    not.
    """
    pids = [scene.bait.pid, os.getpid()]
    try:
        for program in (
            f"import os\nfor pid in {pids}: os.kill(pid, 9)",
            "import os; os.kill(-1, 9)",
        ):
            await sandbox.exec([sys.executable, "-I", "-c", program], timeout_s=TIME_S)
    except SandboxError:
        pass
    return "escaped: a process of the host is gone" if scene.bait.poll() is not None else "held"


async def _links(sandbox: Sandbox, scene: Scene) -> str:
    """Let the host read links to a file of the host."""
    await _shell(
        sandbox,
        f"mkdir -p d; ln -s {scene.secret_path} link; ln -s {Path(scene.secret_path).parent} d/up; "
        "ln -s / root",
    )
    for path in (
        "link",
        f"d/up/{Path(scene.secret_path).name}",
        f"root{scene.secret_path}",
        scene.secret_path,
    ):
        try:
            if scene.secret.encode() in await sandbox.read(
                path if path.startswith("/") else f"{HOME}/{path}"
            ):
                return f"escaped: {path} was read"
        except SandboxError:
            continue
    return "held"


async def _fifos(sandbox: Sandbox, scene: Scene) -> str:
    """Let the host read files that would block it, or never end."""
    await _shell(sandbox, "mkfifo fifo; ln -s /dev/zero zero")
    for path in (f"{HOME}/fifo", f"{HOME}/zero", "/dev/zero", "/proc/kmsg", "/dev/tty"):
        try:
            await asyncio.wait_for(sandbox.read(path), TIME_S / 3)
        except SandboxError:
            continue
        except TimeoutError:
            return f"escaped: {path} holds the host"
        return f"escaped: {path} was read"
    return "held"


async def _flood(sandbox: Sandbox, scene: Scene) -> str:
    """Print output without end."""
    result = await _shell(sandbox, "head -c 200000000 /dev/zero; head -c 200000000 /dev/zero >&2")
    received = len(result.stdout) + len(result.stderr)
    return (
        "held"
        if received <= 2 * LIMITS.output_bytes and result.truncated
        else f"escaped: {received} bytes"
    )


async def _orphans(sandbox: Sandbox, scene: Scene) -> str:
    """Start processes that leave their parents, ignore every signal, and still run when
    the sandbox is stopped.
    """
    mark = f"orphan-{secrets.token_hex(8)}"
    await _shell(
        sandbox,
        f'(setsid nohup sh -c \'trap "" TERM INT HUP; : {mark}; while :; do '
        "sleep 5; done' &) ; sleep 0.2",
    )
    if not _processes_with(mark):
        return "escaped: the program did not run"
    await sandbox.stop(grace_s=0.2)
    return f"escaped: {left} are left" if (left := _processes_with(mark)) else "held"


HOST_ATTACKS: dict[str, Callable[[Sandbox, Scene], Awaitable[str]]] = {
    "killing processes of the host": _killing,
    "links that the host follows": _links,
    "files that hold the host": _fifos,
    "output without end": _flood,
    "orphans": _orphans,
}
"""Attacks in which the host takes part, by name."""

ATTACKS = (*PROGRAMS, *HOST_ATTACKS)


def attacks_here() -> tuple[str, ...]:
    """Return the attacks that sandboxes must stop on this machine: all, where it has
    control groups.
    """
    return tuple(
        attack
        for attack in ATTACKS
        if attack not in COUNTED_BY_GROUPS or "memory" not in unbounded()
    )


async def attempt(backend: Backend, attack: str) -> Outcome:
    """Carry out one attack, in a new sandbox."""
    with _scene() as scene:
        verdict = await _attempt(backend, attack, scene)
    return Outcome(attack=attack, escaped=not verdict.startswith("held"), verdict=verdict)


@contextmanager
def _scene() -> Iterator[Scene]:
    name, secret = f"rollweave-{secrets.token_hex(8)}", secrets.token_hex(16)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + name)
        abstract.listen()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        (folder / "secret").write_text(secret)
        bait = subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL)
        stack.callback(bait.wait)
        stack.callback(bait.kill)
        yield Scene(server.getsockname()[1], name, str(folder / "secret"), secret, bait)


async def _attempt(backend: Backend, attack: str, scene: Scene) -> str:
    sandbox = await backend.start(SandboxSpec(limits=LIMITS))
    try:
        if attack in HOST_ATTACKS:
            return await HOST_ATTACKS[attack](sandbox, scene)
        program = scene.prelude() + PROGRAMS[attack]
        result = await sandbox.exec([sys.executable, "-I", "-c", program], timeout_s=TIME_S)
        lines = result.stdout.decode(errors="replace").strip().splitlines()
        verdict = lines[-1] if lines else ""
        # killed by the kernel for its memory; the sandbox then ends a moment later
        if result.rc == -signal.SIGKILL:
            await sandbox.exec(["sleep", "5"], timeout_s=TIME_S)
        return (
            verdict
            if verdict.startswith(("held", "escaped"))
            else f"no verdict: {result.rc} {result.stderr[-500:]!r}"
        )
    except SandboxError as error:
        return (
            f"held: {error}"
            if sandbox.ended.startswith("killed: it went beyond")
            else f"no verdict: {error}"
        )
    finally:
        await sandbox.stop(grace_s=0.0)


async def _shell(sandbox: Sandbox, line: str) -> ExecResult:
    return await sandbox.exec(["sh", "-c", line], cwd=HOME, timeout_s=TIME_S)


def _processes_with(mark: str) -> int:
    count = 0
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += mark.encode() in line.read_bytes()
        except OSError:  # the process has ended
            continue
    return count
