"""A game whose stages wait for the test.

`folder` is a directory. The start, each step and the reward wait until it has the file
`init`, `run` or `eval`. Its file `log` has a line for each stage that an attempt enters
(`+init`) and leaves (`-init`).
"""

import asyncio
import os
from pathlib import Path

from rollweave.envs.base import Episode, Observation, Options, Step
from rollweave.schema.work import Task


class Staged:
    blocking = False

    def __init__(self, *, folder: str) -> None:
        self._folder, self._left = folder, 2

    async def reset(self, task: Task) -> Observation:
        await stage(self._folder, "init")
        return Observation.of("go")

    async def step(self, action: str) -> Step:
        if self._left == 2:
            record(self._folder, "+run")
        await opened(self._folder, "run")
        self._left -= 1
        if self._left:
            return Step.of("on")
        record(self._folder, "-run")
        return Step(done=True)

    @staticmethod
    async def score(episode: Episode, options: Options) -> float:
        await stage(options["folder"], "eval")
        return 1.0


async def stage(folder: str, name: str) -> None:
    """Enter a stage, and leave it once its file is there."""
    record(folder, f"+{name}")
    await opened(folder, name)
    record(folder, f"-{name}")


async def opened(folder: str, name: str) -> None:
    while not (Path(folder) / name).exists():  # noqa: ASYNC110 (a test opens the gate)
        await asyncio.sleep(0.01)


def record(folder: str, line: str) -> None:
    """Append a line: those of several processes are in the order of their writes."""
    file = os.open(Path(folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line} {os.getpid()}\n".encode())
    finally:
        os.close(file)


def at_once(folder: Path) -> list[dict[str, int]]:
    """Return the number of attempts in each stage, at first and after each line."""
    counts = [{"init": 0, "run": 0, "eval": 0}]
    file = folder / "log"
    for line in file.read_text().splitlines() if file.exists() else ():
        name = line[1:].split()[0]
        counts.append(counts[-1] | {name: counts[-1][name] + (1 if line[0] == "+" else -1)})
    return counts


def processes(folder: Path) -> set[str]:
    """Return the processes in which attempts ran."""
    return {line.split()[1] for line in (folder / "log").read_text().splitlines()}
