"""A training run as a process whose children may be killed: `rollweave train`, killed
and resumed, and what it leaves on disk.

Invariants: only processes started by this run's own controllers are signaled; the end
of this process ends the run; every journal of every controller is kept, so that all
training can be reconstructed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import die_with_us, environment
from benchmarks.soak.lineage import Lineage, versions_of
from rollweave.envs.tasks import rules_of
from rollweave.io.boot import INTERRUPTED
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.loading import dumps, load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError

ENGINE, RELAY, TRAINER = (
    f"rollweave.runtime.entrypoints.{name}" for name in ("engine", "relay", "trainer")
)

INSPECT_S = 0.1
"""Seconds between two inspections of the run: too short for a controller to begin two
journals.
"""

CHILDREN_END_S = 60.0
"""Maximum seconds for children to end after their controller: far more than the
kernel's signal takes.
"""

START_S = 300.0
"""Maximum seconds until a required kind of process exists."""

TAIL_LINES = 20
"""Number of lines of its output that an error quotes."""


class RunUnderTest:
    """One run with its successive controllers. As a context it leaves no controller
    behind.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run = RunDir((Path(config.run.dir) / config.run.name).absolute())
        self.env: dict[str, str] = {}
        """Environment variables that its controllers have beyond ours."""
        self.leftovers = 0
        """Processes that outlived their controller."""
        self._config_file = self.run.path.with_suffix(".toml")
        self._output = self.run.path.with_suffix(".out")
        self._journal_copies = self.run.path.with_suffix(".journals")
        self._journals: list[tuple[Path, RunConfig]] = []
        self._inode = -1
        self._steps = StepCounter(self.run.metrics)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._journal_copies.mkdir(parents=True)
        self._config_file.write_text(dumps(self.config))
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    # Controllers.

    def start(self, *, steps: int | None = None) -> None:
        """Start the run, or resume it after a kill; with `steps` it ends after that
        many.
        """
        resume = self._process is not None
        settings = [] if steps is None else [f"run.steps={steps}"]
        self.config = load(self._config_file, settings)
        command = [sys.executable, "-m", "rollweave.cli.main", "train", str(self._config_file)]
        command += [argument for setting in settings for argument in ("--set", setting)] + (
            ["--resume"] if resume else []
        )
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment(**self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_us,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, "the run was started"
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the controller; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def children(self, module: str = "rollweave.") -> list[int]:
        """Return `children_of` the current controller."""
        return children_of(self.pid, module)

    def strike(
        self, module: str, number: signal.Signals, choose: Callable[[list[int]], int]
    ) -> None:
        """Send the signal to a process of `module`, once there is one.

        Raises RollweaveError as `wait` does.
        """

        def struck() -> bool:
            # The process may have ended, and another is about to start.
            with contextlib.suppress(ProcessLookupError):
                if victims := self.children(module):
                    os.kill(choose(victims), number)
                    return True
            return False

        self.wait(struck, START_S, f"a process of {module}")

    def kill(self) -> None:
        """Send SIGKILL to the controller alone: all other processes must follow by
        themselves.
        """
        self.inspect()
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def finish(self, limit_s: float) -> dict[str, Any]:
        """Wait until the run ends by itself, and return its summary.

        Raises RollweaveError where it fails, or does not end in time.
        """
        self.wait(lambda: self.status is not None, limit_s, "end")
        self._reap()
        if self._process is None or self._process.returncode != 0:
            raise RollweaveError(self._failure("the run failed"))
        self.inspect()
        summary: dict[str, Any] = json.loads(self.run.summary.read_text())
        return summary

    def stop(self, limit_s: float) -> dict[str, Any]:
        """End the run in order, and return its summary.

        Raises RollweaveError where it does not end in time.
        """
        os.kill(self.pid, signal.SIGINT)
        self.wait(lambda: self.status is not None, limit_s, "end after SIGINT")
        self._reap()
        self.inspect()
        if self.status not in (0, INTERRUPTED):
            raise RollweaveError(self._failure("the run failed"))
        summary: dict[str, Any] = json.loads(self.run.summary.read_text())
        return summary

    def wait(
        self,
        condition: Callable[[], object],
        limit_s: float,
        what: str,
        *,
        every_s: float = INSPECT_S,
    ) -> None:
        """Inspect the run every `every_s` seconds until the condition holds.

        Raises RollweaveError where the run ends before, and at the limit.
        """
        until = time.monotonic() + limit_s
        while not condition():
            self.inspect()
            if self.status is not None and not condition():
                raise RollweaveError(
                    self._failure(f"the run ended before this condition held: {what}")
                )
            if time.monotonic() > until:
                raise RollweaveError(
                    self._failure(f"this condition did not hold within {limit_s:g} s: {what}")
                )
            time.sleep(every_s)

    def _reap(self) -> None:
        assert self._process is not None, "the run was started"
        self._process.wait()
        until = time.monotonic() + CHILDREN_END_S
        while (left := self.children()) and time.monotonic() < until:
            time.sleep(INSPECT_S)
        self.leftovers += len(left)

    def _failure(self, what: str) -> str:
        tail = "\n".join(self._output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        return f"{what}; its directory is {self.run.path}; its last output:\n{tail}"

    # The run's records.

    def inspect(self) -> None:
        """Keep a link to the current journal, which another may replace."""
        self._steps.read()
        with contextlib.suppress(FileNotFoundError):
            inode = self.run.journal.stat().st_ino
            if inode != self._inode:
                copy = self._journal_copies / f"{len(self._journals):04d}.bin"
                os.link(self.run.journal, copy)
                self._inode = copy.stat().st_ino
                self._journals.append((copy, self.config))

    @property
    def trained(self) -> int:
        """Return the steps trained so far, including those lost and trained again."""
        return self._steps.count

    @property
    def reached(self) -> int:
        """Return the number of the run's current step."""
        return self._steps.last + 1

    def lineage(self) -> Lineage:
        """Return the training recorded in the journals of all controllers."""
        lineage = Lineage()
        for path, config in self._journals:
            lineage.read(Replay(path, config, rules=rules_of(config)))
        return lineage

    def mixed_versions(self) -> int:
        """Return the attempts that contain tokens of more than one version."""
        reader = TrajectoryReader(self.run.trajectories)
        return sum(len(versions_of(reader.load(entry).sequences)) > 1 for entry in reader.entries)


class StepCounter:
    """Follows the steps of a growing `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.count, self.last = 0, -1
        """Number of recorded steps, and the number of the last one."""

    def read(self) -> None:
        """Read the lines written since; an incomplete line is left for later."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(complete) + len(newline)
            for line in complete.splitlines():
                entry = json.loads(line)
                if entry["kind"] == "step":
                    self.count, self.last = self.count + 1, entry["step"]


def children_of(controller: int, module: str = "rollweave.") -> list[int]:
    """Return the processes of `module` that this controller started, even if it has
    ended: their command line has its id.
    """
    children = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            place = arguments.index(b"-m") + 1
            if arguments[place + 2] == str(controller).encode() and arguments[
                place
            ].decode().startswith(module):
                children.append(int(entry.name))
    return sorted(children)
