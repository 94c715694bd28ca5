"""Bench `rewards`: a slow reward in the controller, in rollout workers and behind a
URL, beside a run without it; a URL whose server is killed and started again in the
middle of a run; and a function on Ray Serve, from its first call to its last instance.

All runs train FrozenLake for a few steps. Each round makes every run once.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.rewards.functions import SECONDS
from benchmarks.rewards.serve import FULL as SERVE_FULL
from benchmarks.rewards.serve import QUICK as SERVE_QUICK
from benchmarks.rewards.serve import measure_serverless
from benchmarks.runs import MeasuredRun, trained
from rollweave.io.sockets import bound_socket
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader, unscored_attempts
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError

KINDS = ("none", "inline", "workers", "url")
"""The runs that are compared: without the reward, and where it is computed."""

START_S = 30.0
"""Maximum seconds until a server listens."""

POLL_S = 0.05
"""Seconds between two looks at the requests of the server that is to be killed."""


class RewardsPlan(Struct, frozen=True, kw_only=True):
    """Length of the bench. A reward takes `reward_s`; the server is killed at its
    request number `kill_at`, and is away for `away_s`.
    """

    rounds: int
    steps: int
    reward_s: float
    kill_at: int
    away_s: float


FULL = RewardsPlan(rounds=5, steps=12, reward_s=0.5, kill_at=60, away_s=5.0)
QUICK = RewardsPlan(rounds=1, steps=4, reward_s=0.2, kill_at=20, away_s=1.0)


def bench_rewards(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return `overhead_ms_…` and `rollout_s_…` of each kind of run, `lost_rewards`,
    `repeated_calls`, and the figures of Ray Serve (`benchmarks/rewards/serve.py`).
    """
    plan = QUICK if quick else FULL
    result = _bench_runs(plan, progress)
    serve_plan = SERVE_QUICK if quick else SERVE_FULL
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        os.environ[SECONDS] = str(serve_plan.reward_s)
        config = _config(Path(scratch), "serverless", plan, "")
        figures, conditions = measure_serverless(serve_plan, config, progress)
    lost = [result.figures["lost_rewards"], figures.pop("lost_serverless")]
    figures["lost_rewards"] = sum(one for one in lost if isinstance(one, int))
    return Result(
        bench=result.bench,
        figures={**result.figures, **figures},
        conditions={**result.conditions, **conditions},
    )


def _bench_runs(plan: RewardsPlan, progress: Callable[[str], None]) -> Result:
    overheads: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    os.environ[SECONDS] = str(plan.reward_s)
    lost = repeated = rewards = 0
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        for number in range(plan.rounds):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            with Server(plan.reward_s, folder / "keys") as server:
                for kind in KINDS:
                    _, measured = trained(_config(folder / kind, kind, plan, server.url))
                    seconds[kind].append(measured.trained_s - measured.ready_s)
                    if kind != "none":
                        overheads[kind].append(_overhead_ms(measured, plan))
                    progress(f"{kind}: {seconds[kind][-1]:.1f} s for {plan.steps} steps")
            with Server(plan.reward_s, folder / "killed") as server, server.killed(plan):
                run, _ = trained(_config(folder / "killed-run", "url", plan, server.url))
                lost += _lost(run)
                asked = server.keys()
                rewards += len(set(asked))
                repeated += len(asked) - len(set(asked))
            progress(f"killed: {lost} of {rewards} rewards lost, {repeated} calls repeated")
    figures: dict[str, Figure] = {
        "lost_rewards": lost,
        "repeated_calls": repeated,
        **{f"overhead_ms_{kind}": statistics.median(each) for kind, each in overheads.items()},
        **{f"rollout_s_{kind}": statistics.median(each) for kind, each in seconds.items()},
    }
    return Result(bench="rewards", figures=figures, conditions=conditions_of(plan))


def conditions_of(plan: RewardsPlan) -> dict[str, str]:
    """Return the meaning of the figures."""
    return {
        "lost_rewards": "trajectories that ended without a reward because that of the URL failed, "
        f"whose server was killed by SIGKILL at its request number {plan.kill_at} and started "
        f"again {plan.away_s:g} s later; all of {plan.rounds} rounds, and calls of Ray Serve",
        "repeated_calls": "requests in these runs that had the key of an earlier one",
        "overhead_ms": f"time of a reward less the {plan.reward_s:g} s that it waits; median over "
        "all of a run, and over the rounds. inline: a function on a thread of the controller; "
        "workers: in one of two rollout workers; url: a server on this host",
        "rollout_s": f"from the trainer's readiness to the end of step {plan.steps}, with 4 groups "
        "of 4 trajectories a step in mode bounded; none: without the slow reward",
    }


class Server:
    """A slow URL, as a process."""

    def __init__(self, reward_s: float, file: Path) -> None:
        self._reward_s, self._file = reward_s, file
        with bound_socket("127.0.0.1", 0) as probe:
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}/score"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens. Raises RollweaveError."""
        module = "benchmarks.rewards.server"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(self._port), str(self._reward_s), str(self._file)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        assert self._process.stdout is not None, "its output is a pipe"
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self.kill()
            raise RollweaveError("the server of rewards did not start")

    def kill(self) -> None:
        """Kill it, with the requests that it computes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def keys(self) -> list[str]:
        """Return the keys of all requests so far."""
        return self._file.read_text().splitlines() if self._file.exists() else []

    @contextlib.contextmanager
    def killed(self, plan: RewardsPlan) -> Iterator[None]:
        """Kill it once in the context, and start it again."""
        over = threading.Event()

        def watch() -> None:
            while len(self.keys()) < plan.kill_at:
                if over.wait(POLL_S):
                    return
            self.kill()
            time.sleep(plan.away_s)
            self.start()

        watcher = threading.Thread(target=watch, name="killer")
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _lost(run: RunDir) -> int:
    return len(unscored_attempts(TrajectoryReader(run.trajectories).entries))


def _overhead_ms(measured: MeasuredRun, plan: RewardsPlan) -> float:
    spans = [span for span in measured.data.spans if span.kind == "reward"]
    return 1e3 * (statistics.median(span.end - span.start for span in spans) - plan.reward_s)


def _config(directory: Path, kind: str, plan: RewardsPlan, url: str) -> RunConfig:
    where: dict[str, dict[str, Any]] = {
        "inline": {"function": "benchmarks.rewards.functions:slow"},
        "workers": {"function": "benchmarks.rewards.functions:slow"},
        "url": {"url": url, "run": "serverless"},
        "serverless": {"function": "benchmarks.rewards.functions:slow", "run": "serverless"},
    }
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "dir": str(directory), "steps": plan.steps, "checkpoint_every": 0},
            "model": {"scratch": {}},
            "tasks": [
                {
                    "env": "frozenlake",
                    "options": {"maps": "fixed"},
                    "max_turns": 14,
                    "max_tokens": 400,
                    "max_turn_tokens": 4,
                }
            ],
            "rollout": {"groups_per_step": 4, "group_size": 4},
            "trainer": {"lr": 3e-3},
            "warmup": {"steps": 20, "batch": 8},
            "workers": {"count": 2 if kind == "workers" else 0},
            "eval": {"final_episodes": 0},
            "rewards": [{"name": "slow", **where[kind]}] if kind in where else [],
        }
    )
