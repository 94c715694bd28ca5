"""docs/METRICS.md describes every key of metrics.jsonl, and no other."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.counters import SchedulingCounters, WeightCounters
from rollweave.core.state import State
from rollweave.record.rundir import RunDir
from rollweave.record.summary import CounterSnapshot
from rollweave.runtime.launch import train
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import EngineStats, LendingStats
from rollweave.schema.training import PredictorStats
from rollweave.schema.work import BLAME_OF
from tests.support import fake_runs, recorded_runs
from tests.support.pages import documented_metrics
from tests.support.real_runs import lake

ROOT = Path(__file__).parents[2]

BY_NAME = ("reward", "rewards", "success", "staleness", "inherent_staleness", "cut_turns")
"""Keys of steps and evaluations whose own keys are names or numbers of the run."""

STRUCTS = {
    "engines": EngineStats,
    "lending": LendingStats,
    "predictor": PredictorStats,
    "scheduling": SchedulingCounters,
    "weights": WeightCounters,
}
"""Sections whose keys are exactly the fields of a struct."""

SOURCES = {
    "step": (
        "runtime/metrics.py",
        "record/summary.py",
        "../../packages/sim/src/rollweave_sim/run.py",
    ),
    "trainer": (
        "train/update.py",
        "train/critic.py",
        "train/rows.py",
        "train/trainer.py",
        "train/update.py",
        "runtime/metrics.py",
    ),
    "idle.engines": ("core/idle.py",),
    "idle.trainer": ("core/idle.py",),
    "workers": ("record/summary.py",),
    "affinity": ("record/summary.py",),
    "evaluation": ("runtime/metrics.py",),
    "other": (
        "runtime/metrics.py",
        "runtime/launch.py",
        "runtime/world.py",
        "../../packages/sim/src/rollweave_sim/run.py",
    ),
}
"""The modules that write the keys of all other sections."""


def keys_of(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a line of metrics.jsonl, each with its section of the page."""
    kind = line["kind"] if line["kind"] in ("step", "evaluation") else "other"
    for key, value in line.items():
        yield kind, key
        if key in BY_NAME or kind != "step" or not isinstance(value, dict):
            continue
        for name, inner in value.items():
            if key == "idle":
                yield from ((f"idle.{name}", cause) for cause in inner)
            elif key == "engines":
                yield from (("engines", field) for field in inner)
            elif key == "trainer":
                yield "trainer", re.sub(r"/\d+$", "/<n>", re.sub(r"/[a-z]\w*$", "/<engine>", name))
            elif key == "affinity":
                yield from (("affinity", field) for field in inner)
            else:
                yield key, name


def undocumented(lines: Iterator[Mapping[str, Any]]) -> set[tuple[str, str]]:
    page = documented_metrics()
    keys = {key for line in lines for key in keys_of(line)}
    assert keys
    return {(section, key) for section, key in keys if key not in page[section]}


def lines_of(config: RunConfig) -> Iterator[dict[str, Any]]:
    file = RunDir(Path(config.run.dir) / config.run.name).metrics
    yield from map(json.loads, file.read_text().splitlines())


def test_keys_that_a_run_writes_are_documented(tmp_path: Path) -> None:
    """A whole run, which is resumed and evaluated."""
    config = fake_runs.make_config(tmp_path, steps=2, eval={"every": 2, "episodes": 2})
    fake_runs.run(config)
    longer = fake_runs.make_config(tmp_path, steps=3, eval={"every": 2, "episodes": 2})
    fake_runs.run(longer, resume=True)
    kinds = {line["kind"] for line in lines_of(longer)}
    assert kinds >= {"started", "step", "evaluation", "best", "resumed", "finished"}
    assert undocumented(lines_of(longer)) == {("trainer", "rank")}, "a key of the fake trainer"


def test_keys_that_a_simulated_run_writes_are_documented(tmp_path: Path) -> None:
    run = RunDir(recorded_runs.recorded_run(tmp_path / "run"))
    assert undocumented(map(json.loads, run.metrics.read_text().splitlines())) == set()


def three(conversation: object, task: object, reward: float) -> float:
    return 3.0


@pytest.mark.slow
def test_keys_of_a_real_trainer_are_documented(tmp_path: Path) -> None:
    """The real engine and the real trainer, with a critic, a correction, a penalty of
    the distance to the starting weights, a reward beside the environment's and
    predicted lengths.
    """
    config = lake(
        tmp_path,
        algorithm={"advantage": "gae", "kl": 0.01, "correction": "tis"},
        rewards=[{"name": "three", "function": "tests.runtime.test_metrics_page:three"}],
        rollout={"scheduling": "trajectory"},
    )
    assert train(config, inproc=True).error == ""
    written = {key for line in lines_of(config) for key in keys_of(line)}
    assert undocumented(lines_of(config)) == set()
    for key in ("critic_loss", "kl_reference", "ess", "age/<n>", "logprob_gap/<engine>"):
        assert ("trainer", key) in written
    assert ("step", "rewards") in written
    assert {key for section, key in written if section == "predictor"} == documented_metrics()[
        "predictor"
    ]


def test_keys_that_are_documented_exist() -> None:
    page = documented_metrics()
    for section, struct in STRUCTS.items():
        assert page.pop(section) == set(struct.__struct_fields__), section
    assert page.pop("stop_reasons") == {reason.value for reason in BLAME_OF}
    counted = CounterSnapshot.of(State(), 1.0).since(CounterSnapshot.of(State(), 0.0))
    assert counted.keys() <= page["step"]
    assert page.keys() == SOURCES.keys()
    for section, keys in page.items():
        code = "".join((ROOT / "src/rollweave" / name).read_text() for name in SOURCES[section])
        for key in keys:
            name = re.sub(r"<.*>", "", key)
            written = re.search(rf'"{name}["{{]|\b{name}=|f"{{GAP}}', code)
            assert written, f"{section}: {key}"


def test_blame_is_that_of_the_code() -> None:
    page = (ROOT / "docs/METRICS.md").read_text()
    for reason, blame in BLAME_OF.items():
        assert re.search(rf"^\| `{reason}` \| {blame} \|", page, re.MULTILINE), reason


def test_a_key_without_a_row_is_noticed() -> None:
    line = {"kind": "step", "at": 1.0, "step": 1, "trainer": {"lost": 1.0}, "idle": {"engines": {}}}
    assert undocumented(iter([line])) == {("trainer", "lost")}
