"""The harness of all benches: contenders in turn, programs, slow moves, and ratios."""

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from benchmarks.contract import Figure, Result
from rollweave.io.boot import PR_SET_PDEATHSIG
from rollweave.io.locked_folders import temporary_folder

ROOT = Path(__file__).parents[1]

END_S = 30.0
"""Maximum seconds for a child to end after its input has."""

QUICK = ("run.steps=4", "eval={final_episodes=0}", "warmup.steps=5")
"""Settings of a training run of `--quick`."""
MODE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "sync": ("rollout.mode=sync",),
    "one_step": ("rollout.mode=one_step",),
    "partial": ("rollout.mode=partial", "rollout.alpha=1"),
    "bounded": ("rollout.mode=bounded", "rollout.alpha=1"),
    "decoupled": ("rollout.mode=decoupled",),
}
"""Mode → its settings in benches that compare modes."""

Progress = Callable[[str], None]
T = TypeVar("T")


def in_turn(
    contenders: Mapping[str, Callable[[int], T]], rounds: int, *, warm_up: int = 0
) -> dict[str, list[T]]:
    """Call every contender with the round's number, then every contender again, and
    return the results of the rounds after the first `warm_up` by contender.
    """
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name, contender in contenders.items():
            result = contender(number)
            if number >= 0:
                results[name].append(result)
    return results


def ratio(above: Figure, below: Figure) -> float | None:
    """Return `above / below`, or None where one of them was not measured."""
    if not isinstance(above, int | float) or not isinstance(below, int | float) or not below:
        return None
    return round(above / below, 4)


def add_ratio(
    name: str, above: str, below: str, figures: dict[str, Figure], conditions: dict[str, Any]
) -> None:
    """Add the ratio of two figures, or the reason for which one of them is missing."""
    figures[name] = ratio(figures[above], figures[below])
    if figures[name] is None:
        conditions[name] = conditions.get(above) or conditions[below]


def load_average() -> str:
    """Return the condition of a machine that other processes may use."""
    return (
        f"{os.getloadavg()[1]:.1f} processes wanted a core in the last five minutes, this "
        "bench's included"
    )


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the median of the ratios of equal rounds; None without rounds."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return statistics.median(ratios) if ratios else None


def rounded(value: Figure) -> Figure:
    """Return a figure with four significant digits."""
    if isinstance(value, list):
        return [float(f"{item:.4g}") for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def scratch_folder() -> contextlib.AbstractContextManager[Path]:
    """Return a temporary folder; the next bench removes those of killed benches."""
    return temporary_folder("rollweave-bench-")


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a program of this checkout, which precedes an installed
    package.
    """
    paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def die_with_us() -> None:
    """Let the kernel end a child that is about to start when this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def kept_if_broken(bench: str, measure: Callable[[Path], Result], progress: Progress) -> Result:
    """Measure with a directory for runs, which is removed unless that fails or a
    promise is broken. Raises what `measure` raises.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"rollweave-{bench}-"))
    result = measure(directory)
    if result.broken:
        progress(f"broken: {', '.join(result.broken)}; {directory} has the runs")
    else:
        shutil.rmtree(directory)
    return result


def program(module: str, *arguments: str, limit_s: float) -> Any:
    """Run a module of this folder as a process, and return the JSON of its last line.

    Raises RuntimeError where it fails, and subprocess.TimeoutExpired.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Child:
    """A process that prints one line when it is ready, and ends with its standard
    input.

    It begins and ends with the context, and ends with this process.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module, self._arguments = module, arguments

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self._module, *self._arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    @functools.cached_property
    def line(self) -> str:
        """Wait for the process's line and return it.

        Raises RuntimeError where it ends without one.
        """
        assert self._process.stdout is not None, "the output is a pipe"
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with {self._process.wait(END_S)} before it was ready"
            )
        return line

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def slow_lake(latency_s: float, sigma: float = 1.0) -> tuple[str, ...]:
    """Return the overrides by which the moves of an example's frozen lake take time."""
    options = f"tasks.0.options.latency_s={latency_s}", f"tasks.0.options.latency_sigma={sigma}"
    return ("tasks.0.env=rollweave.envs.frozenlake:SlowLake", "tasks.0.tag=frozenlake", *options)
