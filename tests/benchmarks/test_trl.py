"""Bench `trl`: episodes in lockstep have the tokens of our own, TRL's process ends in
every case, and figures are compared correctly.
"""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness import MODE_SETTINGS
from benchmarks.runs import example
from benchmarks.trl import bench, process
from benchmarks.trl.episodes import play
from benchmarks.trl.process import FOLDER, VARIABLE, checkpoints, interpreter, trl_version
from benchmarks.trl.protocol import TrlCheckpoint, TrlSpec
from rollweave.envs.frozenlake import FrozenLake
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.schema.chat import Message
from rollweave.schema.config.loading import load
from rollweave.schema.config.training import ScratchModel
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.work import Purpose, SegmentKind, Task
from rollweave.train.scratch import build_checkpoint

OPTIONS = {"maps": "fixed"}
TO_GOAL = ("<down>", "<down>", "<right>", "<right>", "<down>", "<right>")
INVALID = "<down><down>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load(example("frozenlake_fixed.toml"))
    path = tmp_path_factory.mktemp("trl") / "model"
    build_checkpoint(
        path,
        scratch=ScratchModel(hidden=32, layers=1),
        context=config.max_tokens,
        words=TaskSource(config).words(),
        seed=0,
    )
    return path


@pytest.fixture(scope="module")
def codec(model: Path) -> ChatCodec:
    return ChatCodec.from_directory(model)


def at_start(**limits: int) -> Task:
    task = TaskSource(load(example("frozenlake_fixed.toml"))).draw("frozenlake", 0, Purpose.EVAL)
    return msgspec.structs.replace(task, limits=msgspec.structs.replace(task.limits, **limits))


def transcript(task: Task, *moves: str) -> list[Message]:
    """Return the conversation of an episode up to the agent's last message."""
    env = FrozenLake(maps="fixed")
    messages = list(env.reset(task).messages)
    for move in moves:
        messages += [Message(role="assistant", content=move), *env.step(move).messages]
    while messages[-1].role != "assistant":
        messages.pop()
    return messages


class Scripted:
    """Gives each episode its moves, in turn."""

    def __init__(self, codec: ChatCodec, *scripts: tuple[str, ...]) -> None:
        self._codec, self._scripts = codec, [list(script) for script in scripts]
        self.batches: list[int] = []

    def __call__(self, contexts: list[list[int]]) -> list[list[int]]:
        self.batches.append(len(contexts))
        alive = [script for script in self._scripts if script]
        assert len(alive) == len(contexts)
        return [list(self._codec.encode_turn(script.pop(0))) for script in alive]


def test_an_episode_has_the_tokens_and_the_mask_of_our_own(codec: ChatCodec) -> None:
    short = ("<down>", "<right>")  # into a hole
    generate = Scripted(codec, TO_GOAL, short)
    episodes = play([at_start()] * 2, options=OPTIONS, codec=codec, generate=generate)
    assert generate.batches == [2, 2, 1, 1, 1, 1]
    assert [one.reward for one in episodes] == [1.0, 0.0]
    for one, moves in zip(episodes, (TO_GOAL, short), strict=True):
        ours = tokenize_transcript(codec, transcript(at_start(), *moves))
        assert tuple(one.context) == ours.tokens
        sampled = [place for place, bit in enumerate(one.mask, len(one.prompt)) if bit]
        assert sampled == [
            place
            for segment in ours.segments
            if segment.kind is SegmentKind.OUTPUT
            for place in range(segment.start, segment.end)
        ]


def test_an_episode_ends_with_its_turns_or_its_tokens(codec: ChatCodec) -> None:
    (one,) = play(
        [at_start(max_turns=3)],
        options=OPTIONS,
        codec=codec,
        generate=Scripted(codec, (INVALID, "<left>", INVALID)),
    )
    assert (one.turns, one.reward) == (3, pytest.approx(-0.2))
    room = len(one.prompt) + 2
    (cut,) = play(
        [at_start(max_tokens=room)],
        options=OPTIONS,
        codec=codec,
        generate=Scripted(codec, (INVALID,)),
    )
    assert (cut.mask, cut.reward) == ([1, 1], 0.0)  # the environment does not see it
    (whole,) = play(
        [at_start(max_tokens=room)],
        options=OPTIONS,
        codec=codec,
        generate=Scripted(codec, ("<left>",)),
    )
    assert sum(whole.mask) == 2
    assert not whole.running


def spec(directory: Path, model: Path, **settings: object) -> TrlSpec:
    config = load(
        example("frozenlake_fixed.toml"),
        [*bench.COMMON, "run.steps=4", f'model={{path="{model}"}}', "warmup={}"],
    )
    return msgspec.structs.replace(process.spec_of(config, directory), **settings)


def test_the_training_of_trl_is_that_of_the_configuration(tmp_path: Path, model: Path) -> None:
    made = spec(tmp_path, model)
    assert (made.steps, made.save_every, made.groups_per_step, made.group_size) == (4, 4, 8, 8)
    assert (made.lr, made.clip_low, made.clip_high) == (3e-3, 0.2, 0.28)
    assert [task.id for task in made.tasks] == [f"frozenlake-train-{i}" for i in range(32)]
    assert msgspec.json.decode(msgspec.json.encode(made), type=TrlSpec) == made


def test_every_variant_is_a_configuration(model: Path) -> None:
    for settings in MODE_SETTINGS.values():
        own = [*settings, f'model={{path="{model}"}}', "warmup={}"]
        for quick in ((), bench.QUICK):
            config = load(example("frozenlake_fixed.toml"), [*bench.COMMON, *quick, *own])
            assert config.rollout.mode == settings[0].rpartition("=")[2]


def fake(directory: Path, script: str) -> str:
    """Write a program that takes the place of TRL's interpreter."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def a_line(step: int) -> str:
    one = TrlCheckpoint(
        step=step, seconds=2.0 * step, step_s=(2.0, 2.0), cpu_s=(2.0, 2.0), path=f"step-{step}"
    )
    return f"echo '{msgspec.json.encode(one).decode()}'; read -r go || exit 7"


def test_the_training_continues_only_when_its_next_checkpoint_is_awaited(
    tmp_path: Path, model: Path
) -> None:
    python = fake(tmp_path, f"{a_line(2)}\ntouch {tmp_path}/continued\n{a_line(4)}")
    saved = checkpoints(python, spec(tmp_path / "trl", model))
    assert next(saved)[0].step == 2
    assert not (tmp_path / "continued").exists()
    assert [one.step for one, _ in saved] == [4]
    assert (tmp_path / "continued").exists()


def test_closing_ends_the_process(tmp_path: Path, model: Path) -> None:
    python = fake(tmp_path, f"echo $$ > {tmp_path}/pid\n{a_line(2)}")
    saved = checkpoints(python, spec(tmp_path / "trl", model))
    next(saved)
    saved.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("script", "status"), [("echo no module >&2\nexit 3", "exit status 3"), ("kill -9 $$", "KILL")]
)
def test_a_process_that_fails_is_an_error_with_its_output(
    tmp_path: Path, model: Path, script: str, status: str
) -> None:
    python = fake(tmp_path, f"{a_line(2)}\n{script}")
    with pytest.raises(RollweaveError, match=status) as failure:
        list(checkpoints(python, spec(tmp_path / "trl", model)))
    assert ("no module" in str(failure.value)) == ("no module" in script)


def test_a_process_that_hangs_is_ended(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CHECKPOINT_S", 0.2)
    with pytest.raises(RollweaveError, match="KILL"):
        list(checkpoints(fake(tmp_path, "exec sleep 600"), spec(tmp_path / "trl", model)))


def test_the_interpreter_is_the_named_one_or_that_of_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert interpreter(tmp_path) is None
    (tmp_path / FOLDER).mkdir()
    assert interpreter(tmp_path) is None  # it is not complete
    (tmp_path / FOLDER / "ready").touch()
    assert interpreter(tmp_path) == str(tmp_path / FOLDER / "bin" / "python")
    monkeypatch.setenv(VARIABLE, "/opt/python")
    assert interpreter(tmp_path) == "/opt/python"


def test_an_interpreter_without_trl_is_refused_with_the_variables_name() -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} must be an interpreter that has TRL, got"):
        trl_version("/nowhere/python")


def test_without_trl_every_figure_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.trl.bench.interpreter", lambda: None)
    result = bench.bench_trl(seeds=None, quick=True, model=None, progress=print)
    assert set(result.figures) == set(bench.FIGURES)
    for name, figure in result.figures.items():
        assert figure is None
        assert result.conditions[name].startswith("not measured: TRL is not installed here")


def learned(step_s: float, steps: int | None) -> bench.Learned:
    """Return a training that reaches the target after `steps`, or never."""
    seconds = None if steps is None else step_s * steps
    return bench.Learned(
        step_s=[step_s] * 3, cpu_s=[2 * step_s] * 3, peak=1 << 30, steps=steps, seconds=seconds
    )


def all_learned(*steps_of_trl: int | None) -> dict[str, list[bench.Learned]]:
    ours = {name: [learned(1.0, 20) for _ in steps_of_trl] for name in MODE_SETTINGS}
    bounded = [learned(0.5 if seed == 0 else 0.7, 20) for seed in range(len(steps_of_trl))]
    return ours | {"bounded": bounded, "trl": [learned(2.0, steps) for steps in steps_of_trl]}


def test_ratios_are_those_of_trl_to_ours() -> None:
    conditions: dict[str, object] = {}
    figures = bench.figures_of(all_learned(30), conditions, quick=False)
    assert set(figures) == set(bench.FIGURES)
    assert (figures["step_ratio"], figures["wall_ratio"], figures["steps_ratio"]) == (4, 6, 1.5)
    assert (figures["step_ratio_sync"], figures["wall_ratio_sync"]) == (2, 3)
    assert (figures["cpu_ratio"], figures["memory_ratio"]) == (4, 1)
    assert not conditions


def test_a_missed_target_has_a_reason() -> None:
    conditions: dict[str, object] = {}
    figures = bench.figures_of(all_learned(30, None), conditions, quick=False)
    assert figures["step_s_bounded"] == 0.6
    for name in ("wall_s_trl", "steps_trl", "wall_ratio", "steps_ratio_sync"):
        assert figures[name] is None
        assert conditions[name] == "not measured: 1 of 2 seeds did not reach the target"


@pytest.mark.slow
@pytest.mark.skipif(interpreter() is None, reason=process.MISSING)
def test_trl_trains_the_model_on_our_episodes(tmp_path: Path, model: Path) -> None:
    python = interpreter()
    assert python is not None
    ((one, peak),) = checkpoints(python, spec(tmp_path / "trl", model))
    assert peak > 1 << 28
    assert (one.step, len(one.step_s)) == (4, 4)
    before, after = (
        load_file(model / "model.safetensors"),
        load_file(f"{one.path}/model.safetensors"),
    )
    assert set(before) == set(after)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert ChatCodec.from_directory(one.path).stop_token_ids
