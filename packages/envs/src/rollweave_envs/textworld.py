"""Text games in files, played by TextWorld: those that `tw-make` writes, and others in
Z-code that Jericho supports.

Invariant: a game belongs to exactly one split by the name of its file.

TextWorld's parsers are not thread-safe, so games of one process are loaded and advanced
one at a time.
"""

import functools
import random
import re
import threading
from pathlib import Path

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of, split_of
from rollweave.io.extras import MissingExtraError
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

try:
    import textworld
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"{error.name} is not installed (pip install 'rollweave-envs[textworld]')"
    ) from error

GAMES = re.compile(r".*\.z[1-8]")
"""The names of files with games."""

_playing = threading.Lock()


class TextWorld:
    """A game of the folder `games`; the agent's message is its command.

    The reward of a step is its share of the game's points, and the episode succeeded if
    the game was won. `held_out` is a folder of games for evaluations; without it two
    eighths of `games` are held out. `prompt` precedes the first text, and with
    `commands` each text names the commands that the game admits.
    """

    def __init__(
        self, *, games: str, held_out: str = "", prompt: str = "", commands: bool = False
    ) -> None:
        for option, folder in (("games", games), ("held_out", held_out)):
            if folder:
                _files(folder, option)
        self._prompt, self._commands = prompt, commands

    def reset(self, task: Task) -> Observation:
        infos = textworld.EnvInfos(
            feedback=True,
            objective=True,
            score=True,
            max_score=True,
            won=True,
            lost=True,
            admissible_commands=self._commands,
        )
        with _playing:
            self._env = textworld.start(payload_of(task)["game"], infos)
            self._env.seed(task.seed % 2**31)
            state = self._env.reset()
        self._points = 0
        text = state.feedback
        if state.objective and state.objective in text:  # what precedes it is a banner
            text = text[text.index(state.objective) :]
        text = self._written(text, state)
        return Observation.of(f"{self._prompt}{text}", state_key=text)

    def step(self, action: str) -> Step:
        with _playing:
            state, points, done = self._env.step(" ".join(action.split()))
        gained, self._points = points - self._points, points
        text = self._written(state.feedback, state)
        return Step.of(
            text,
            reward=gained / (state.max_score or 1),
            done=bool(done),
            success=bool(state.won) if done else None,
            state_key=text,
        )

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next game of the split, each once in an epoch.

        Raises ConfigError for an empty split.
        """
        held_out = options.get("held_out", "")
        option = "held_out" if held_out and split is not Split.TRAIN else "games"
        games = _files(options[option], option)
        if not held_out:
            games = tuple(game for game in games if split_of(Path(game).name) is split)
        if not games:
            raise ConfigError(
                f"options.games must have games for split {split}, {options['games']} has none: "
                "add games, or set held_out"
            )
        epoch, place = divmod(index, len(games))
        order = random.Random(mix(seed, split, epoch)).sample(games, len(games))
        return new_task(seed=mix(seed, split, index), game=order[place])

    def _written(self, text: str, state: "textworld.GameState") -> str:
        """Return the text of a game without its prompt at the end and the status line
        that follows it, and the commands if they are wanted.
        """
        before, newline, last = text.rstrip().rpartition("\n")
        text = (before if newline and last.startswith(">") else text).strip()
        if self._commands and state.admissible_commands:
            text += f"\nCommands: {', '.join(state.admissible_commands)}"
        return text


@functools.lru_cache(16)
def _files(folder: str, option: str) -> tuple[str, ...]:
    """Return the games in a folder, by name. Raises ConfigError if it has none."""
    try:
        games = sorted(str(path) for path in Path(folder).iterdir() if GAMES.fullmatch(path.name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"options.{option} must be a folder, got {folder!r}: {error}") from error
    if not games:
        raise ConfigError(
            f"options.{option} must have games (.z8, or another version), {folder} has none"
        )
    return tuple(games)
