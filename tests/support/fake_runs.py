"""Whole runs with fake engines and a fake trainer, so that they take a second. Also a
program that runs a controller: `python -m tests.support.fake_runs CONFIG [resume]`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rollweave.record.journal import Replay
from rollweave.record.summary import Summary
from rollweave.runtime.launch import train
from rollweave.runtime.metrics import Silent
from rollweave.schema.config.loading import dumps, load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import TurnDone
from rollweave.schema.hosts import Programs
from tests.support.forking import Forked
from tests.support.pipelines import TEMPLATE
from tests.support.processes import process_state

FAKES = Programs(
    engine="tests.support.echo_engine",
    trainer="tests.runtime.fake_trainer",
    relay="tests.runtime.fake_relay",
)
TASK: dict[str, Any] = {"env": "tests.support.game:Game", "tag": "game", "max_turn_tokens": 4}
ROOT = Path(__file__).parents[2]


def make_model(directory: Path) -> Path:
    """Create a model directory with nothing but a tokenizer; fakes look for faults in
    it, and write their logs to it.
    """
    directory.mkdir()
    special = ["<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n", "⁂"]
    tokenizer = Tokenizer(
        models.WordLevel(
            {token: i for i, token in enumerate([*special, *characters])}, unk_token=" "
        )
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def make_config(
    directory: Path,
    *,
    steps: int = 4,
    options: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    **sections: Any,
) -> RunConfig:
    """Return the configuration of `steps` steps of 2 groups of 2."""
    model = directory / "model"
    if not model.exists():
        make_model(model)
    data: dict[str, Any] = {
        "run": {
            "name": "run",
            "dir": str(directory),
            "steps": steps,
            "seed": 5,
            "checkpoint_every": 1,
        },
        "model": {"path": str(model)},
        "tasks": [{**TASK, "options": dict(options or {}), **dict(task or {})}],
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_running": 8},
        "eval": {"final_episodes": 4},
        "engines": {"count": 2},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(data)


def run(config: RunConfig, *, resume: bool = False) -> Summary:
    return train(config, resume=resume, programs=FAKES)


def fault(config: RunConfig, name: str) -> None:
    """Ask the fakes for a fault, once."""
    assert config.model.path is not None
    (Path(config.model.path) / name).touch()


def run_dir(config: RunConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def lines(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one kind."""
    parsed = [
        json.loads(line) for line in (run_dir(config) / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in parsed if line["kind"] == kind]


def trained(config: RunConfig) -> dict[int, list[str]]:
    """Return the trajectories by step, as the fake trainer trained them last: the
    surviving lineage.
    """
    assert config.model.path is not None
    log = (Path(config.model.path) / "trained.jsonl").read_text().splitlines()
    return {entry["step"]: entry["ids"] for entry in map(json.loads, log)}


def pids(config: RunConfig) -> list[tuple[int, int]]:
    """Return the id and start time of every child that ever started (`sign_in`)."""
    assert config.model.path is not None
    lines = (Path(config.model.path) / "pids").read_text().splitlines()
    return [(int(pid), int(began)) for pid, began in map(str.split, lines)]


def assert_no_processes(config: RunConfig) -> None:
    """Check that no child of any life is left. The kernel takes a moment to end
    them.
    """
    deadline, left = time.monotonic() + 30, pids(config)
    assert left
    while left and time.monotonic() < deadline:
        states = [(process_state(pid), (pid, began)) for pid, began in left]
        left = [child for (state, began), child in states if began == child[1] and state != "Z"]
        time.sleep(0.01)
    assert not left


def replay(config: RunConfig) -> Replay:
    """Replay the run's journal."""
    replayed = Replay(run_dir(config) / "journal.bin", load(run_dir(config) / "config.toml"))
    replayed.finish()
    return replayed


def turns_done(config: RunConfig, *, name: str = "") -> list[TurnDone]:
    """Return the finished turns in the journal, which another process may be writing,
    of trajectories whose names begin with `name`.
    """
    journal = run_dir(config) / "journal.bin"
    events = [event for _, event, _ in Replay(journal, config)] if journal.exists() else []
    return [
        event
        for event in events
        if isinstance(event, TurnDone) and event.trajectory_id.startswith(name)
    ]


def until_turns_done(config: RunConfig, number: int, *, name: str = "") -> None:
    """Wait until this many trajectories have a finished turn."""
    deadline = time.monotonic() + 60
    while len({event.trajectory_id for event in turns_done(config, name=name)}) < number:
        assert time.monotonic() < deadline, "no turns"
        time.sleep(0.01)


def write(config: RunConfig) -> Path:
    """Write the configuration to a file beside the run."""
    path = Path(config.run.dir) / "config.toml"
    path.write_text(dumps(config))
    return path


def assert_trained_once(config: RunConfig, *, count: int | None = None) -> None:
    """Check that every step of the surviving lineage trained a whole batch, and that no
    trajectory is in two of them. There must be `count` steps, by default those that
    were configured.
    """
    steps, expected = trained(config), config.run.steps if count is None else count
    assert sorted(steps) == list(range(expected))
    ids = [trajectory for batch in steps.values() for trajectory in batch]
    assert len(ids) == len(set(ids)) == 4 * expected


def controller(config: RunConfig) -> subprocess.Popen[bytes]:
    """Start a controller in a separate process, whose output goes to a file beside the
    run.
    """
    command = [sys.executable, "-m", "tests.support.fake_runs", str(write(config))]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (Path(config.run.dir) / "printed").open("wb") as printed:
        return Forked(command, env=env, cwd=ROOT, stdout=printed, stderr=printed)


def killed(config: RunConfig) -> None:
    """Run `config` in a separate controller until a fault kills it, and check that its
    children are gone.
    """
    assert controller(config).wait(60) == -signal.SIGKILL
    assert_no_processes(config)


class Phases(Silent):
    """Shows the phases of a run."""

    def phase(self, text: str) -> None:
        print(text, flush=True)


if __name__ == "__main__":
    shown = Phases() if "phases" in sys.argv[2:] else None
    summary = train(
        load(sys.argv[1]), resume="resume" in sys.argv[2:], programs=FAKES, progress=shown
    )
    print(
        json.dumps(
            {"steps": summary.steps, "interrupted": summary.interrupted, "error": summary.error}
        )
    )


def reached(config: RunConfig, step: int) -> bool:
    """Return whether the run has trained this step."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return len(lines(config, "step")) > step
    return False


def events(config: RunConfig, *kinds: type) -> list[Any]:
    replayed = Replay(run_dir(config) / "journal.bin", load(run_dir(config) / "config.toml"))
    return [event for _, event, _ in replayed if isinstance(event, kinds)]
