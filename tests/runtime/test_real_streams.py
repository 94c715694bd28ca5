"""What an agent program reads of streamed turns in whole runs is what is recorded:
across prefill engines, and across the loss of the controller.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollweave.record.store import TrajectoryReader
from rollweave.runtime.launch import train
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import SegmentKind
from tests.runtime.streaming import TURNS
from tests.support.core import always_split
from tests.support.real_runs import lake, lines, living, run_dir, wait_for

pytestmark = pytest.mark.slow

SHARED = 20
"""Characters that two samples of a random model have in common only if one of them
continues the other.
"""


READ = 150
"""Characters of an unfinished turn that programs have read when the controller is
killed: they arrive in several reports, the first of which is recorded by then.
"""


def streaming(directory: Path, *phases: str, **sections: Any) -> RunConfig:
    """Return the configuration of a run with an engine of each phase, whose agents read
    all turns as streams, and note in `directory/read` what they have read.
    """
    read = directory / "read"
    read.mkdir(parents=True)
    engine = {"max_slots": 8, "kv_tokens": 8192}
    return lake(
        directory,
        task={
            "env": "tests.runtime.streaming:Streaming",
            "tag": "streaming",
            "options": {"words": 70, "log": str(read)},
            "max_tokens": 1024,
            "max_turns": TURNS,
            "max_turn_tokens": 400,
        },
        model={"scratch": {"hidden": 128, "layers": 4}},
        warmup={"steps": 0},
        trainer={"lr": 1e-12},
        algorithm={"advantage": "grpo_no_std"},
        eval={"every": 0, "final_episodes": 0},
        engines=[{**engine, "phase": phase} for phase in phases],
        **sections,
    )


def check_texts(config: RunConfig) -> dict[str, list[str]]:
    """Assert that each program has read what is recorded of its attempt, and return all
    of it by the name of the trajectory.
    """
    run = run_dir(config)
    reader = TrajectoryReader(run / "trajectories")
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    texts = {}
    for entry in reader.entries:
        trajectory = reader.load(entry)
        read = json.loads(trajectory.result)["read"]
        outputs = [
            tokenizer.decode(sequence.tokens[part.start : part.end])
            for sequence in trajectory.sequences
            for part in sequence.segments
            if part.kind is SegmentKind.OUTPUT
        ]
        assert read == outputs
        texts[str(trajectory.id)] = read
    return texts


def test_programs_read_each_token_once_with_prefill_engines(tmp_path: Path) -> None:
    config = streaming(tmp_path, "prefill", "decode", rollout={"mode": "sync"})
    with always_split():
        summary = train(config)
    assert summary.error == ""
    assert summary.scheduling["split_turns"] > 16
    assert summary.account.cancelled == 0
    assert len(check_texts(config)) == 16


@pytest.mark.parametrize("phases", [("both",), ("prefill", "decode")])
def test_programs_read_their_turns_on_after_the_controller_is_killed(
    phases: tuple[str, ...], tmp_path: Path
) -> None:
    config = streaming(tmp_path, *phases, rollout={"mode": "sync"})
    read = tmp_path / "read"

    def in_turns() -> bool:
        texts = [file.read_text() for file in read.iterdir()]
        return sum(len(text.split("\n")[-1]) >= READ for text in texts) >= 2

    with living(config) as life:
        wait_for(in_turns, "turns of which programs have read a part", life)
        life.kill()
    before = {file.name: file.read_text() for file in read.iterdir()}
    with living(config, resume=True) as life:
        life.finish()
    (resumed,) = lines(config, "resumed")
    assert resumed["recorded"] >= 1
    check_texts(config)
    after = [file.read_text() for file in read.iterdir() if file.name not in before]
    assert any(continues(new, old) for new in after for old in before.values())


def continues(new: str, old: str) -> bool:
    """Return whether a program that has read `old` was in the middle of a turn, and
    another one has read all of it, with the rest of that turn.
    """
    (*whole, part), turns = old.split("\n"), new.split("\n")
    last = turns[len(whole)] if len(turns) > len(whole) else ""
    return (
        turns[: len(whole)] == whole
        and len(last) > len(part) >= READ
        and last.startswith(part[:SHARED])
    )
