"""Text games in files: by a module with TextWorld's interface, and by TextWorld itself
where it is installed.
"""

import importlib
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Split, Step, new_task, split_of
from rollweave.schema.errors import ConfigError

from . import textworld_like

INSTALLED = importlib.util.find_spec("textworld") is not None
MODULE = "rollweave_envs.textworld"


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment, over the module that stands for TextWorld."""
    monkeypatch.setitem(sys.modules, "textworld", textworld_like)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE).TextWorld
    sys.modules.pop(MODULE, None)


def games(folder: Path, *names: str) -> str:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
        (folder / name).with_suffix(".json").touch()
    return str(folder)


def task_of(folder: str, name: str) -> Any:
    return new_task(seed=2**40 + 7, game=f"{folder}/{name}")


def test_a_game_is_played_in_words(kind: Any, tmp_path: Path) -> None:
    folder = games(tmp_path / "games", "simple-open.z8")
    env = kind(games=folder, prompt="Play.\n")
    first = env.reset(task_of(folder, "simple-open.z8")).messages[0].content
    assert first == "Play.\nFirst say hello, then open.\n\n-= Cellar =-"
    assert env._env.seeded == (2**40 + 7) % 2**31
    text = "That's not a verb I recognise."
    assert env.step("fly") == Step.of(text, state_key=text)
    assert env.step(" hello \n").reward == 0.5
    end = env.step("open")
    assert (end.reward, end.done, end.success) == (0.5, True, True)
    env.close()
    assert env._env.closed


def play_in_threads(kind: Any, folder: str, name: str, *commands: str) -> None:
    """Play a game to its end in eight threads at once. Raises what any of them does."""

    def play(_: int) -> Step:
        env = kind(games=folder)
        env.reset(task_of(folder, name))
        return [env.step(command) for command in commands][-1]

    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(play, range(16)))
    assert all(end.success for end in ends)


def test_games_in_several_threads_do_not_disturb_each_other(kind: Any, tmp_path: Path) -> None:
    folder = games(tmp_path / "games", "simple-open.z8")
    play_in_threads(kind, folder, "simple-open.z8", "hello", "open")


def test_a_lost_game_is_no_success(kind: Any, tmp_path: Path) -> None:
    folder = games(tmp_path / "games", "simple-open.z8")
    env = kind(games=folder, commands=True)
    first = env.reset(task_of(folder, "simple-open.z8")).messages[0].content
    assert first.endswith("-= Cellar =-\nCommands: hello, open")
    end = env.step("die")
    assert (end.reward, end.done, end.success) == (0.0, True, False)


@pytest.mark.extended
def test_each_split_has_games_of_its_own(kind: Any, tmp_path: Path) -> None:
    """Every game of a split is drawn once in an epoch; a new game moves no other."""

    def drawn(folder: str) -> dict[Split, list[set[str]]]:
        counts = dict.fromkeys(Split, 0)
        found: dict[Split, list[set[str]]] = {}
        for split in Split:
            every = {draw(folder, split, index) for index in range(400)}
            counts[split] = len(every)
            found[split] = [
                {draw(folder, split, epoch * len(every) + place) for place in range(len(every))}
                for epoch in range(3)
            ]
            assert all(len(epoch) == len(every) for epoch in found[split])
        assert sum(counts.values()) == len(list(Path(folder).glob("*.z8")))
        return found

    def draw(folder: str, split: Split, index: int) -> str:
        task = kind.make_task(index=index, seed=3, split=split, options={"games": folder})
        return str(task.payload)

    folder = games(tmp_path / "games", *(f"simple-{number}.z8" for number in range(60)))
    before = drawn(folder)
    more = games(tmp_path / "more", *(f"simple-{number}.z8" for number in range(61)))
    after = drawn(more)
    for split in Split:
        moved = {game.replace("/games/", "/more/") for game in before[split][0]}
        assert moved <= after[split][0]


def test_held_out_games_serve_both_evaluations(kind: Any, tmp_path: Path) -> None:
    options = {
        "games": games(tmp_path / "games", "a-x.z8"),
        "held_out": games(tmp_path / "others", "b-x.z8"),
    }
    for split, name in zip(Split, ("a-x.z8", "b-x.z8", "b-x.z8"), strict=True):
        task = kind.make_task(index=5, seed=0, split=split, options=options)
        assert name in task.payload


def test_refuses_invalid_options(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options\.games must be a folder, got 'nowhere'"):
        kind(games="nowhere")
    empty = games(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"options\.held_out must have games .* has none"):
        kind(games=games(tmp_path / "games", "a-x.z8"), held_out=empty)
    own = split_of("a-x.z8")
    other = next(split for split in Split if split is not own)
    with pytest.raises(ConfigError, match=rf"must have games for split {other}, .* has none: add"):
        kind.make_task(index=0, seed=0, split=other, options={"games": str(tmp_path / "games")})


@pytest.mark.skipif(INSTALLED, reason="TextWorld is installed")
def test_names_the_extra_that_is_missing() -> None:
    sys.modules.pop(MODULE, None)
    with pytest.raises(ConfigError, match=r"textworld is not installed \(pip install"):
        importlib.import_module(MODULE)


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the extra textworld")
def test_the_games_of_textworld_itself(tmp_path: Path) -> None:
    """A game that it makes is won by the commands that solve it."""
    import textworld

    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.quest_length = 3, 2, 2
    options.path = str(tmp_path / "made.z8")
    path, _ = textworld.make(options)
    solution = textworld.start(path, textworld.EnvInfos(policy_commands=True)).reset()
    kind = importlib.import_module(MODULE).TextWorld
    env, other = (kind(games=str(tmp_path), commands=True) for _ in range(2))
    first = env.reset(task_of(str(tmp_path), "made.z8")).messages[0].content
    assert other.reset(task_of(str(tmp_path), "made.z8")).messages[0].content == first
    assert first.startswith(solution.objective)
    assert "$$" not in first
    assert "\nCommands: " in first
    wrong = env.step("fly to the moon")
    assert (wrong.reward, wrong.done) == (0.0, False)
    steps = [env.step(command) for command in solution.policy_commands]
    assert sum(step.reward for step in steps) == 1.0
    assert (steps[-1].done, steps[-1].success) == (True, True)
    assert not other.step("look").done
    env.close()
    other.close()
    play_in_threads(kind, str(tmp_path), "made.z8", *solution.policy_commands)
