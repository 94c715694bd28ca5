"""The run that borrows the serving engine: real training on the fixed frozen lake, with
an engine of its own beside the lent one.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from benchmarks.cluster.run import ClusterRun
from benchmarks.harness import die_with_us, environment, free_port
from rollweave.schema.config.root import RunConfig

END_S = 120.0
"""Maximum seconds for the run to end once it was asked to."""

NICE = 10
"""Niceness of the run's processes above that of this one: the load generator beside
them is on time.
"""

ENDLESS_STEPS = 1_000_000

GROUPS, MEMBERS, TURN_TOKENS = 4, 8, 48


def configuration(directory: Path, port: int, *, loans: int = 0, **sections: Any) -> RunConfig:
    """Return the configuration of a run that waits for its own host and for the one
    that lends at this port; or, with `loans`, only for its own host, and borrows up to
    this number of the engines that are lent. `sections` come in addition.
    """
    engine = {"max_slots": 32, "kv_tokens": 16384}
    own = {**engine, "pool": "own", "max_slots": 4}
    return RunConfig.model_validate(
        {
            "run": {
                "name": "borrower",
                "dir": str(directory),
                "steps": ENDLESS_STEPS,
                "checkpoint_every": 0,
                "sinks": [],
            },
            "model": {"scratch": {"hidden": 64, "layers": 2}, "device": "cpu"},
            "cluster": {"address": f"127.0.0.1:{port}", "hosts": 1 if loans else 2},
            "pools": {"own": {"resource": "own"}, "serving": {"resource": "serving"}},
            "loans": {"engines": loans} if loans else None,
            "tasks": [
                {
                    "env": "frozenlake",
                    "options": {"maps": "fixed"},
                    "max_turns": 16,
                    "max_tokens": 1024,
                    "max_turn_tokens": TURN_TOKENS,
                }
            ],
            "rollout": {
                "groups_per_step": GROUPS,
                "group_size": MEMBERS,
                "max_running": 3 * GROUPS * MEMBERS,
            },
            "trainer": {"pool": "own"},
            "engines": [own, *([] if loans else [{**engine, "pool": "serving"}])],
            "eval": {"final_episodes": 0},
            **sections,
        }
    )


class BorrowingRun(ClusterRun):
    """A run and the agent of its own host. As a context it is started."""

    def __init__(self, directory: Path, **sections: Any) -> None:
        self.port = free_port()
        super().__init__(configuration(directory, self.port, **sections))
        self._directory = directory

    @property
    def address(self) -> str:
        """The address to which engines are lent."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        super().__enter__()
        self.start()
        _make_nice(self.pid)
        with (self._directory / "agent.out").open("wb") as output:
            self._agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rollweave.cli.main", "host"),
                    *("--join", self.address, "--name", "own", "--resource", "own"),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_us,
                env=environment(OMP_NUM_THREADS="1"),
            )
        _make_nice(self._agent.pid)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(END_S)
        self._agent.kill()
        self._agent.wait()

    @property
    def output(self) -> str:
        """The output of the run and of its host's agent."""
        return self._output.read_text() + (self._directory / "agent.out").read_text()

    def ended(self) -> dict[str, Any]:
        """End the run in order, and return its summary.

        Raises RollweaveError where it fails.
        """
        return self.stop(END_S)


def _make_nice(pid: int) -> None:
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
