"""A module with what `rollweave_envs.textworld` uses of TextWorld, written after
textworld 1.7.0 (textworld/core.py, textworld/envs/wrappers/tw_inform7.py).

The game is the name of the file: its second part is what the player must say.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BANNER, PROMPT = "  $$ TextWorld $$\n\n", "\n\n>                     -= Cellar =-0/2\n"
GameState = SimpleNamespace
_parser = threading.Lock()


def parse() -> None:
    """Fail as TextWorld's parser does that another thread uses."""
    assert _parser.acquire(blocking=False), "expecting '('"
    threading.Event().wait(0.002)
    _parser.release()


class EnvInfos:
    def __init__(self, **wanted: bool) -> None:
        self.wanted = wanted


class Game:
    def __init__(self, path: str, infos: EnvInfos) -> None:
        self.word, self.infos, self.closed = Path(path).stem.split("-")[1], infos, False
        self.score, self.seeded = 0, -1

    def seed(self, seed: int | None = None) -> None:
        assert seed is not None
        self.seeded = seed

    def reset(self) -> Any:
        objective = f"First say hello, then {self.word}."
        return self._state(f"{BANNER}{objective}\n\n-= Cellar =-{PROMPT}", objective=objective)

    def step(self, command: str) -> tuple[Any, int, bool]:
        parse()
        if command == ("hello", self.word)[self.score]:
            self.score += 1
            return self._state(f"\nYou did it.{PROMPT}"), self.score, self.score == 2
        if command == "die":
            return self._state(f"\nYou died.{PROMPT}", lost=True), self.score, True
        return self._state(f"\nThat's not a verb I recognise.{PROMPT}"), self.score, False

    def close(self) -> None:
        self.closed = True

    def _state(self, feedback: str, *, objective: str = "", lost: bool = False) -> Any:
        commands = ["hello", self.word] if self.infos.wanted["admissible_commands"] else None
        return GameState(
            feedback=feedback,
            objective=objective,
            max_score=2,
            won=self.score == 2,
            lost=lost,
            admissible_commands=commands,
        )


def start(path: str, infos: EnvInfos) -> Game:
    assert Path(path).exists()
    parse()
    return Game(path, infos)
