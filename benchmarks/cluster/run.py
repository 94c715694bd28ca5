"""A run whose hosts are lost: when that is noticed, when training is as far again as it
was, and what became of its trajectories.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import CONTROLLERS, Hosts
from benchmarks.harness import cpu_s
from benchmarks.soak.lineage import unaccounted
from benchmarks.soak.run_under_test import RunUnderTest
from rollweave.core.state import State
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig

LOST_REASONS = ("engine_failure", "world_lost")
"""Reasons for which a trajectory ends because of its host or controller."""

PATIENCE_S = 900.0
"""Maximum seconds of any wait, on a busy machine."""

CLOCKS_S = 0.2
"""Error of a time of a run's line on this process's clock, in seconds."""


class LineFollower:
    """Follows a growing `metrics.jsonl`, with the time at which each line was written
    on this process's clock.

    The run's own clock has another beginning. The smallest delay of any line so far
    tells how far apart they are; lines are read at least ten times a second. Lines that
    are there already are left out: another controller's clock began elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._apart = path, float("inf")
        self._offset = path.stat().st_size if path.exists() else 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the lines written since; an incomplete line is left for later."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(complete) + len(newline)
            now = time.monotonic()
            for line in map(json.loads, complete.splitlines()):
                self.lines.append(line)
                self._apart = min(self._apart, now - line["at"])

    def time_of(self, line: dict[str, Any]) -> float:
        """Return when a line was written, on the clock `time.monotonic`."""
        return float(line["at"]) + self._apart


class ClusterRun(RunUnderTest):
    """A run on hosts of a cluster, or on this machine alone."""

    def __init__(self, config: RunConfig, hosts: Hosts | None = None) -> None:
        super().__init__(config)
        self._hosts = hosts
        self.env = {"OMP_NUM_THREADS": "1"}
        self._follower = LineFollower(self.run.metrics)
        self._cpu: list[tuple[int, float]] = []
        """Turns until a step of the newest controller, and the seconds of CPU that it
        had used by then.
        """

    def start(self, *, steps: int | None = None) -> None:
        self._follower, self._cpu = LineFollower(self.run.metrics), []
        if self._hosts is None:
            super().start(steps=steps)
            return
        self.env |= self._hosts.environment()
        with self._hosts.inside(CONTROLLERS):
            super().start(steps=steps)

    def inspect(self) -> None:
        super().inspect()
        before = len(self._of("step"))
        self._follower.read()
        if len(self._of("step")) > before:
            turns = sum(int(line["turns"]) for line in self._of("step"))
            with contextlib.suppress(OSError):
                self._cpu.append((turns, cpu_s(self.pid)))

    # What happened.

    def warnings(self, pattern: str) -> list[tuple[float, str]]:
        """Return the warnings of the newest controller whose lines match, with their
        times on the clock `time.monotonic`.
        """
        lines = [
            (self._follower.time_of(line), f"{line['component']} {line['message']}")
            for line in self._of("warning")
        ]
        return [(at, line) for at, line in lines if re.search(pattern, line)]

    def waiting(self) -> list[str]:
        """Return the lines that name long waits."""
        return [line["message"] for line in self._of("waiting")]

    def wait_for(self, value: Callable[[], float | None], what: str) -> float:
        """Wait until there is a value, and return it. Raises RollweaveError as `wait`
        does.
        """
        results: list[float] = []

        def is_there() -> bool:
            result = value()
            results.extend([] if result is None else [result])
            return result is not None

        self.wait(is_there, PATIENCE_S, what)
        return results[0]

    def lost_after(self, host: str, since: float) -> float | None:
        """Return the seconds from this time until the loss of this host was noticed;
        None if it is not yet.
        """
        return self._first_after(f"{_named(host)} is lost", since)

    def joined_after(self, host: str, since: float) -> float | None:
        """Return the seconds from this time until this host joined; None if it has
        not.
        """
        return self._first_after(f"{_named(host)} has joined", since)

    def trained_after(self, step: int, since: float) -> float | None:
        """Return the seconds from this time until this step was trained for the first
        time since; None if it is not yet.
        """
        times = [
            self._follower.time_of(line)
            for line in self._of("step")
            if line["step"] >= step and self._follower.time_of(line) > since
        ]
        return times[0] - since if times else None

    def training_s(self, first: int, last: int) -> float:
        """Return the seconds from the end of one step to that of another, as they were
        trained for the first time.
        """
        at = {line["step"]: float(line["at"]) for line in reversed(self._of("step"))}
        return at[last] - at[first]

    def controller_ms_per_turn(self) -> float | None:
        """Return the milliseconds of CPU that the newest controller used for a turn,
        from its first step to its last one; None if it has trained fewer than two.
        """
        if len(self._cpu) < 2:
            return None
        (first_turns, first_s), (turns, seconds) = self._cpu[0], self._cpu[-1]
        return 1000 * (seconds - first_s) / max(1, turns - first_turns)

    def batch_bytes(self) -> tuple[float, float]:
        """Return the bytes of all batches that the newest controller has trained, and
        those that it sent to the trainer's ranks for them.
        """
        values = [line["trainer"] for line in self._of("step")]
        return tuple(sum(each[name] for each in values) for name in ("batch_bytes", "sent_bytes"))

    def weight_bytes(self) -> tuple[float, float]:
        """Return the bytes of weights that relays received from other hosts, and those
        among them of weights that an engine on the relay's host then loaded, each fetch
        counted once.
        """
        received = needed = 0.0
        for path, config in self._journals:
            fetched: dict[tuple[str, int], int] = {}
            for _, event, _ in (replay := Replay(path, config, rules=rules_of(config))):
                match event:
                    case e.WeightsFetched(relay_id=relay, publication_id=id, nbytes=nbytes):
                        received += nbytes
                        fetched[relay, id] = nbytes
                    case e.WeightsLoaded(engine_id=engine_id, publication_id=id):
                        engine = replay.core.state.engines.get(engine_id)
                        if engine is not None:
                            needed += fetched.pop((f"r{engine.seat.host}", id), 0)
        return received, needed

    def unaccounted(self, account: dict[str, Any]) -> int:
        """See `benchmarks.soak.lineage.unaccounted`; trajectories that were trained
        twice count, too.
        """
        ids = self.lineage().ids
        return unaccounted(account, trained=len(ids)) + len(ids) - len(set(ids))

    def most_at_once(self) -> int:
        """Return the greatest number of trajectories whose attempts were under way at
        once.
        """
        most = 0
        for path, config in self._journals:
            replay = Replay(path, config, rules=rules_of(config))
            for _ in replay:
                pools = replay.core.state.pools
                most = max(most, len(pools.init) + len(pools.run) + len(pools.eval))
        return most

    @staticmethod
    def now() -> float:
        """Return the time on the clock of all times of this class."""
        return time.monotonic()

    def state(self) -> State:
        """Return the core's state, as the journal describes it now."""
        return Replay(self.run.journal, self.config, rules=rules_of(self.config)).finish().state

    def trainer_host(self) -> str:
        """Return the name of the host of the trainer's first rank."""
        hosts = self.state().hosts
        return hosts.up[hosts.ranks[0].host].name

    def _first_after(self, pattern: str, since: float) -> float | None:
        times = [at for at, _ in self.warnings(pattern) if at > since - CLOCKS_S]
        return max(0.0, times[0] - since) if times else None

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self._follower.lines if line["kind"] == kind]


def _named(host: str) -> str:
    """Return a pattern for a host's name, which Ray may extend by that of its node."""
    return rf"host {re.escape(host)}(-\w+)?"


def lost_trajectories(account: dict[str, Any]) -> int:
    """Return the trajectories that ended because a host or controller was lost."""
    return sum(account["dropped"].get(reason, 0) for reason in LOST_REASONS)
