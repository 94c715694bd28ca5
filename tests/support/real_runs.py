"""Whole runs with real engines and the real trainer, small enough to take seconds, and
started by the command line as users do.

As a program, `python -m tests.support.real_runs …` is `rollweave …` with the trainer of
`tests.runtime.halting_trainer`.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.soak.lineage import Lineage as Journals
from benchmarks.soak.lineage import unaccounted
from benchmarks.soak.run_under_test import children_of
from rollweave.cli import main as cli
from rollweave.core.core import Core
from rollweave.core.policy.modes import preset
from rollweave.core.state import EngineStatus, TrainerStatus
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.runtime import launch
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from tests.support.forking import Forked

ROOT = Path(__file__).parents[2]
GROUPS, MEMBERS = 2, 4
LIMIT_S = 120.0
"""Maximum time to wait for anything, in seconds: even on a busy machine, nothing here
takes that long.
"""


def lake(directory: Path, *, task: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Return the configuration of two steps on the fixed frozen lake, from random
    weights.
    """
    data: dict[str, Any] = {
        "run": {"name": "lake", "dir": str(directory), "steps": 2, "checkpoint_every": 1},
        "model": {
            "scratch": {
                "hidden": 32,
                "layers": 1,
            }
        },
        "rollout": {"groups_per_step": GROUPS, "group_size": MEMBERS, "max_running": 8},
        "engines": {"count": 1, "max_slots": 8, "kv_tokens": 4096},
        "warmup": {"steps": 5},
        "eval": {"every": 2, "episodes": 4, "final_episodes": 8},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    if not data["eval"]["every"]:
        del data["eval"]["episodes"]  # it has no effect
    limits = {"max_turns": 6, "max_tokens": 300, "max_turn_tokens": 6}
    data["tasks"] = [
        {"env": "frozenlake", "tag": "lake", "options": {"maps": "fixed"}, **limits, **(task or {})}
    ]
    return RunConfig.model_validate(data)


def hazardous(directory: Path, options: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Return the same configuration on the lake of `tests.runtime.hazards`."""
    return lake(
        directory, task={"env": "tests.runtime.hazards:Lake", "options": options}, **sections
    )


class Life:
    """One controller of a run, in a separate process."""

    def __init__(
        self, config: RunConfig, *, resume: bool = False, program: str = "rollweave.cli.main"
    ) -> None:
        directory = Path(config.run.dir)
        directory.mkdir(parents=True, exist_ok=True)
        self.config, self.run = config, RunDir(directory / config.run.name)
        file = directory / "given.toml"
        file.write_text(dumps(config))
        command = [
            sys.executable,
            "-m",
            program,
            "train",
            str(file),
            *(["--resume"] if resume else []),
        ]
        # not the installed package, if that is another checkout
        python_path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        self._output = directory / "output"
        with self._output.open("wb") as output:
            self.process = Forked(command, env=env, cwd=ROOT, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        """All of its output."""
        return self._output.read_text()

    @property
    def errors(self) -> list[str]:
        """The errors in its output."""
        assert "Traceback" not in self.output, self.output
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    def end(self) -> int:
        """Wait for its exit status, and check that none of its children is left."""
        status = self.process.wait(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while left := self.children():
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.005)
        return status

    def finish(self) -> dict[str, Any]:
        """Wait for its successful end, and return the summary."""
        assert self.end() == 0, self.output
        return summary(self.config)

    def children(self, module: str = "rollweave.") -> list[int]:
        """Return the living processes of `module` that it started, even after its
        end.
        """
        return children_of(self.process.pid, module)

    def child(self, module: str) -> int:
        """Return the one child of that module."""
        (pid,) = self.children(module)
        return pid

    def kill(self) -> None:
        """Kill it with SIGKILL; its children must end by themselves."""
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def until(self, condition: Callable[[Core], object], what: str) -> Core:
        """Wait until the journal describes a core for which this holds."""

        def holds() -> Core | None:
            core = replayed(self.config)
            return core if core is not None and condition(core) else None

        return wait_for(holds, what, self)


def wait_for(condition: Callable[[], Any], what: str, life: Life) -> Any:
    """Wait until `found` returns a true value, while the controller is alive."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        over = time.monotonic() > deadline or (life.process.poll() is not None and not condition())
        assert not over, f"{what} did not come; it output:\n{life.output}"
        time.sleep(0.005)
    return value


@contextlib.contextmanager
def living(
    config: RunConfig, *, resume: bool = False, program: str = "rollweave.cli.main"
) -> Iterator[Life]:
    """Start a controller that does not outlive the test, by a module that is run."""
    life = Life(config, resume=resume, program=program)
    try:
        yield life
    finally:
        if life.process.poll() is None:
            life.process.kill()
            life.process.wait()


def run_to_end(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    with living(config, resume=resume) as life:
        return life.finish()


def run_dir(config: RunConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def summary(config: RunConfig) -> dict[str, Any]:
    """Return summary.json, whose account balances with nothing in flight."""
    content: dict[str, Any] = json.loads((run_dir(config) / "summary.json").read_text())
    account = content["account"]
    assert (unaccounted(account, trained=account["trained"]), account["in_flight"]) == (0, 0)
    return content


def lines(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one kind."""
    entries = [
        json.loads(line) for line in (run_dir(config) / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in entries if line["kind"] == kind]


def replayed(config: RunConfig) -> Core | None:
    """Return the core as the journal describes it; None before there is one.

    Use `Lineage` for the journal at a life's end.
    """
    try:
        return Replay(run_dir(config) / "journal.bin", config).finish()
    except FileNotFoundError:
        return None


def at_gate(life: Life, gate: Path) -> None:
    """Wait until the episodes wait at the gate, and everything else is idle."""
    wait_for(Path(f"{gate}.reached").exists, "the gate", life)
    life.until(
        lambda core: (
            core.state.trainer.status is TrainerStatus.IDLE
            and all(
                engine.status is EngineStatus.SERVING and not engine.active
                for engine in core.state.engines.values()
            )
        ),
        "everyone at the gate",
    )


def check_totals(config: RunConfig, summary_: dict[str, Any], *, losses: int = 0) -> None:
    """Check that the run has trained and evaluated all that its configuration
    requires, except for trajectories that have become stale and left their groups:
    on a slow machine, or where something was lost, at most as many as a step has.

    Each of `losses`, after which a trainer goes back to a checkpoint, adds the
    trajectories in flight and the trajectories that wait for the trainer: at most as
    many as two steps have.
    """
    assert (summary_["error"], summary_["steps"]) == ("", config.run.steps)
    account = summary_["account"]
    left = account["dropped"].get("stale", 0)
    required = GROUPS * MEMBERS * config.run.steps
    assert left <= (1 + 2 * losses) * GROUPS * MEMBERS, account
    # those that left in a step that was lost with the trainer are replaced
    assert account["trained"] <= required <= account["trained"] + left, (account, required)
    assert summary_["eval_episodes"] == {"lake": 8}
    window = preset(config.rollout.mode, config.rollout.alpha).window
    assert window is None or summary_["staleness_max"] <= window


class Lineage(Journals):
    """The trained steps, from the journals of all lives: a resumed run begins its
    journal again.
    """

    def take(self, config: RunConfig) -> None:
        """Read the journal as it is at a life's end."""
        self.read(Replay(run_dir(config) / "journal.bin", config))
        assert self.differing == 0

    def check(self, steps: int) -> None:
        """Check that every step trained a whole batch, except for trajectories that
        became stale (see `check_totals`), and that none is in two steps of the
        surviving lineage.
        """
        ids = self.ids
        assert self.steps == list(range(steps))
        assert len(ids) == len(set(ids))
        assert (steps - 1) * GROUPS * MEMBERS <= len(ids) <= steps * GROUPS * MEMBERS


def longer(config: RunConfig, steps: int, **sections: BaseModel) -> RunConfig:
    """Return the same configuration with more steps, and perhaps other sections."""
    return config.model_copy(
        update={"run": config.run.model_copy(update={"steps": steps}), **sections}
    )


def copied(config: RunConfig, directory: Path) -> RunConfig:
    """Copy the run with all its files except the socket, and return its configuration
    in the other directory.
    """
    no_socket = shutil.ignore_patterns("control.sock")
    shutil.copytree(run_dir(config), directory / config.run.name, symlinks=True, ignore=no_socket)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(directory)})})


if __name__ == "__main__":
    own = launch.Programs(trainer="tests.runtime.halting_trainer")
    launch.Programs = lambda: own  # type: ignore[assignment,misc]
    cli.app()
