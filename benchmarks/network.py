"""Hosts on one machine: a network namespace each, connected to a bridge by links whose
speed can be limited. Some may be at a second site: another bridge, connected to the
first by one more link.

Invariants: namespaces have no name and are referred to by descriptors of this process
alone, and links live in them, so that nothing remains however this process ends, even
by SIGKILL; nothing is ever created in the original namespace. Where namespaces cannot
be created (without root, `ip` or `tc`) all hosts are loopback, and no link is limited.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000  # <linux/sched.h>

SWITCH = "10.77.0.1"
"""Address of the process that started the hosts: the controller."""

LIMIT_S = 0.1
"""Maximum seconds of a link's traffic that are queued before a packet is dropped."""

BURST_S, LEAST_BURST = 0.002, 128 << 10
"""Burst that may pass at once: seconds at the link's rate, and minimum bytes, since a
packet before segmentation has 64 KiB.
"""


FAR = "far"
"""Name of the second site's bridge."""

BETWEEN = ("out", "back")
"""Names of the two ends of the link between the sites: at the first, at the second."""


class Network:
    """`hosts` hosts, from `__enter__` on; the last `far` of them are at a second site.
    The thread that enters is then on the switch that joins them, until `__exit__`.
    """

    def __init__(self, hosts: int, *, far: int = 0, loopback: bool = False) -> None:
        self.hosts, self.far = hosts, far
        self.why_not = "hosts are loopback, without limits, as requested" if loopback else ""
        """Reason why all hosts are loopback; empty where they are namespaces."""
        self._spaces: list[int] = []
        self._switch = self._home = -1

    def __enter__(self) -> Self:
        if self.why_not:
            return self
        self._home = _current()
        try:
            self._build()
        except OSError as error:
            self._unwind()
            self.why_not = f"hosts are loopback, without limits: {error}"
        except BaseException:
            self._unwind()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._unwind()

    def address(self, host: int) -> str:
        """Return the address at which processes of this host listen."""
        return "127.0.0.1" if self.why_not else f"10.77.{1 + host // 250}.{1 + host % 250}"

    @property
    def interface(self) -> str:
        """Return the name of every host's link."""
        return "lo" if self.why_not else "eth0"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Move this thread to that host: sockets created and processes started in this
        context stay there.
        """
        if self.why_not:
            yield
            return
        _enter(self._spaces[host])
        try:
            yield
        finally:
            _enter(self._switch)

    def path(self, host: int) -> str:
        """Return a file through which any child process can enter the host (setns);
        empty on loopback.
        """
        return "" if self.why_not else f"/proc/{os.getpid()}/fd/{self._spaces[host]}"

    def cut(self, host: int) -> None:
        """Disconnect this host.

        Raises RuntimeError on loopback.
        """
        self._link(host, "down")

    def join(self, host: int) -> None:
        """Reconnect this host."""
        self._link(host, "up")

    def _link(self, host: int, state: str) -> None:
        if self.why_not:
            raise RuntimeError(self.why_not)
        _run("ip", [f"link set h{host} {state}"])

    def processes(self, host: int) -> list[int]:
        """Return the ids of the processes on that host, except zombies.

        Raises RuntimeError on loopback.
        """
        if self.why_not:
            raise RuntimeError(self.why_not)
        space = os.fstat(self._spaces[host])
        return [pid for pid in _process_ids() if _is_in(pid, space)]

    def signal_all(self, host: int, number: signal.Signals) -> None:
        """Send a signal to every process on that host."""
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def limit(self, mbits: float | None, hosts: Iterable[int] | None = None) -> None:
        """Limit the links of these hosts (default: all) to so many megabits a second up
        and down; None removes the limit.

        Raises RuntimeError on loopback.
        """
        if self.why_not:
            raise RuntimeError(self.why_not)
        chosen = list(range(self.hosts)) if hosts is None else list(hosts)
        for host in chosen:
            with self.inside(host):
                _run("tc", [_discipline("eth0", mbits)])
        _run("tc", [_discipline(f"h{host}", mbits) for host in chosen])

    def limit_sites(self, mbits: float | None) -> None:
        """Limit the link between the two sites to so many megabits a second up and
        down; None removes the limit.
        """
        _run("tc", [_discipline(end, mbits) for end in BETWEEN])

    def crossed_bytes(self) -> int:
        """Return the bytes that have been sent to the second site, headers included."""
        shown = _output("ip", "-s", "-json", "link", "show", BETWEEN[0])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _build(self) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise OSError(f"there is no `{tool}`")
        self._switch = _new(self._home)
        for _ in range(self.hosts):
            self._spaces.append(_new(self._switch))
        lines = [
            "link set lo up",
            "link add switch type bridge",
            "link set switch up",
            f"addr add {SWITCH}/16 dev switch",
        ]
        if self.far:
            near, distant = BETWEEN
            lines += [
                f"link add {FAR} type bridge",
                f"link set {FAR} up",
                f"link add {near} type veth peer name {distant}",
                f"link set {near} master switch up",
                f"link set {distant} master {FAR} up",
            ]
        for host in range(self.hosts):
            bridge = "switch" if host < self.hosts - self.far else FAR
            lines.append(f"link add h{host} type veth peer name eth0 netns {self.path(host)}")
            lines.append(f"link set h{host} master {bridge} up")
        _run("ip", lines)
        for host in range(self.hosts):
            with self.inside(host):
                _run(
                    "ip",
                    [
                        "link set lo up",
                        f"addr add {self.address(host)}/16 dev eth0",
                        "link set eth0 up",
                    ],
                )
        self.limit(1000.0)  # raises here where `tc` lacks the discipline
        self.limit(None)

    def _unwind(self) -> None:
        if self._home >= 0:
            _enter(self._home)
        for fd in (*self._spaces, self._switch, self._home):
            if fd >= 0:
                os.close(fd)
        self._spaces, self._switch, self._home = [], -1, -1


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _is_in(pid: int, space: os.stat_result) -> bool:
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino != space.st_ino:
            return False
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return False
    return state not in "ZX"


def _discipline(device: str, mbits: float | None) -> str:
    if mbits is None:
        return f"qdisc replace dev {device} root pfifo limit 10000"
    rate = mbits * 1e6 / 8
    burst, limit = max(LEAST_BURST, int(rate * BURST_S)), max(1 << 20, int(rate * LIMIT_S))
    return f"qdisc replace dev {device} root tbf rate {mbits:g}mbit burst {burst} limit {limit}"


def _run(tool: str, lines: list[str]) -> None:
    """Run commands of `ip` or `tc` on the host where this thread is. Raises OSError."""
    done = subprocess.run(
        [tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{tool}: {done.stderr.strip() or done.returncode}")


def _output(tool: str, *arguments: str) -> str:
    """Return what a program prints. Raises OSError, or CalledProcessError if it
    fails.
    """
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


_libc = ctypes.CDLL(None, use_errno=True)


def _current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _new(back: int) -> int:
    """Create a network namespace. This thread is in `back` again afterwards.

    Raises OSError.
    """
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(
            ctypes.get_errno(),
            f"no network namespace can be created: {os.strerror(ctypes.get_errno())}",
        )
    try:
        return _current()
    finally:
        _enter(back)


def _enter(space: int) -> None:
    if _libc.setns(space, CLONE_NEWNET):
        raise OSError(
            ctypes.get_errno(),
            f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}",
        )


def enter(path: str) -> None:
    """Move this thread to the host of that `Network.path`. Raises OSError."""
    if path:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(fd)
        finally:
            os.close(fd)
