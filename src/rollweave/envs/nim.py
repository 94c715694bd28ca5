"""Nim against an opponent that sometimes plays perfectly: each move takes one to three
pieces, and taking the last piece wins.

Invariant: the opponent's moves depend on the task's seed and the moves so far alone.
The game is so small that held-out tasks have the piles of training tasks; only the
opponents' seeds differ.
"""

import random
import re
from collections.abc import Sequence

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

MOST_TAKEN = 3
INVALID_REWARD = -0.1
LARGEST_PILE = 40
TRANSCRIPT_TURNS = 12

_ACTION = re.compile(r"\s*<take-([1-3])>\s*")


class Nim:
    """An observation is ` pile=7`; the agent answers `<take-3>`. The reward is 1 for
    taking the last piece, and -0.1 for a message that is no legal move.

    Piles are drawn from `smallest` to `largest`; the opponent plays perfectly with
    probability `skill`, otherwise at random.
    """

    blocking = False

    def __init__(
        self, *, smallest: int = 4, largest: int = 15, skill: float = 0.3, grammar: bool = False
    ) -> None:
        if not 1 <= smallest <= largest <= LARGEST_PILE:
            raise ConfigError(
                f"options.smallest must be 1 to largest, largest to {LARGEST_PILE}, "
                f"got {smallest} and {largest}"
            )
        if not 0 <= skill <= 1:
            raise ConfigError(f"options.skill must be from 0 to 1, got {skill}")
        self._smallest, self._largest, self._skill = smallest, largest, skill
        self._pile = 0
        self._opponent = random.Random(0)

    def reset(self, task: Task) -> Observation:
        self._pile = int(payload_of(task)["pile"])
        self._opponent = random.Random(task.seed)
        return Observation.of(self._view(), state_key=self._view())

    def step(self, action: str) -> Step:
        move = _ACTION.fullmatch(action)
        if move is None or int(move[1]) > self._pile:
            return Step.of(" invalid" + self._view(), reward=INVALID_REWARD, state_key=self._view())
        self._pile -= int(move[1])
        if not self._pile:
            return Step.of(" won", reward=1.0, done=True, success=True)
        self._pile -= self._reply()
        if not self._pile:
            return Step.of(" lost", done=True, success=False)
        return Step.of(self._view(), state_key=self._view())

    def _view(self) -> str:
        return f" pile={self._pile}"

    def _reply(self) -> int:
        winning = self._pile % (MOST_TAKEN + 1)
        if winning and self._opponent.random() < self._skill:
            return winning
        return self._opponent.randint(1, min(MOST_TAKEN, self._pile))

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a random pile and opponent."""
        env, own = cls(**options), mix(seed, split, index)
        return new_task(seed=own, pile=random.Random(own).randint(env._smallest, env._largest))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [
            *(f" pile={pile}" for pile in range(1, cls(**options)._largest + 1)),
            *cls._moves(),
            *(" invalid", " won", " lost"),
        ]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        """Return the three moves with option `grammar = true`."""
        return cls._moves() if options.get("grammar", False) else []

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return uniformly random moves. They show the format of a turn, but not which
        move is good.
        """
        task = cls.make_task(
            index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
        )
        env = cls(**options)
        messages = list(env.reset(task).messages)
        for _ in range(TRANSCRIPT_TURNS):
            action = rng.choice(cls._moves())
            step = env.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.done:
                break
        return messages

    @classmethod
    def _moves(cls) -> list[str]:
        return [f"<take-{count}>" for count in range(1, MOST_TAKEN + 1)]
