"""Gymnasium's FrozenLake (4×4, not slippery) in words: find the goal, avoid the holes.

Invariants: with `maps = "random"` a map belongs to exactly one split by its own hash,
so no training map is ever held out; the tasks of a held-out split are distinct maps
until all (more than 400) have come; equal arguments give equal tasks. Held-out tasks
always begin at the map's start.
"""

import copy
import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from rollweave.envs.base import (
    Observation,
    Options,
    Split,
    Step,
    mix,
    new_task,
    payload_of,
    split_of,
)
from rollweave.io.extras import from_extra
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

with from_extra("envs"):
    import gymnasium

SIZE = 4
FROZEN = 0.8
"""Share of frozen cells of a random map: gymnasium's own."""

FIXED = ("SFFF", "FHFH", "FFFH", "HFFG")
"""Gymnasium's default map."""

DIRECTIONS = ("left", "down", "right", "up")  # gymnasium's action numbers
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
SEEN_AS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
INVALID_REWARD = -0.1
AWAY = {"random": 0.3, "fixed": 0.5}
"""Share of training tasks that begin at some other cell that has a way to the goal: so
that the agent also meets places which its own habits would avoid.
"""
TRANSCRIPT_TURNS = 14

_ACTION = re.compile(r"\s*<(left|down|right|up)>\s*")

Map = tuple[str, ...]


class FrozenLake:
    """` hole=b2 … at=a1 left=wall down=ice right=ice up=wall`; the agent answers
    `<down>`. Reward 1 at the goal.

    Words that are no move cost 0.1 and a turn. Holes are named in the first message
    only, cells that were visited in this episode are `seen`; columns are letters, rows
    numbers.
    """

    blocking = False

    def __init__(
        self, *, maps: Literal["random", "fixed"] = "random", grammar: bool = False
    ) -> None:
        _known(maps)
        self._lake: Any = None
        self._map: Map = ()
        self._visited: set[tuple[int, int]] = set()

    def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        self._map = tuple(payload["map"])
        self._lake = copy.copy(_lake(self._map))  # the table of moves is shared, the place is not
        self._lake.reset(seed=task.seed % 2**31)
        self._lake.s = payload.get("start", 0)
        self._visited = {self._place()}
        holes = "".join(f" hole={_name(row, column)}" for row, column in _cells(self._map, "H"))
        return Observation.of(holes + self._look(), state_key=self._look())

    def step(self, action: str) -> Step:
        found = _ACTION.fullmatch(action)
        if found is None:
            return Step.of(" invalid" + self._look(), reward=INVALID_REWARD, state_key=self._look())
        _, reward, done, _, _ = self._lake.step(DIRECTIONS.index(found[1]))
        self._visited.add(self._place())
        if not done:
            return Step.of(self._look(), state_key=self._look())
        return Step.of(
            " goal" if reward > 0 else " fell", reward=float(reward), done=True, success=reward > 0
        )

    def _place(self) -> tuple[int, int]:
        return divmod(int(self._lake.s), SIZE)

    def _look(self) -> str:
        """Where the agent is and what lies around; also what two situations on one map
        must share to be equal.
        """
        row, column = self._place()
        around = ""
        for direction, (down, right) in zip(DIRECTIONS, MOVES, strict=True):
            place = (row + down, column + right)
            around += (
                f" {direction}={'seen' if place in self._visited else _seen(self._map, *place)}"
            )
        return f" at={_name(row, column)}{around}"

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """A solvable map.

        Held-out maps are distinct; training maps come as often as they are likely.
        """
        maps = _known(options.get("maps", "random"))
        if split is Split.TRAIN:
            rng = random.Random(mix(seed, split, index))
            lake = FIXED if maps == "fixed" else _training_map(rng)
            start = _somewhere(lake, rng) if rng.random() < AWAY[maps] else 0
            return new_task(seed=mix(seed, index), map=lake, start=start)
        if maps == "fixed":
            return new_task(seed=mix(seed, index), map=FIXED)
        held_out = _held_out_maps(seed, split)
        return new_task(map=held_out[index % len(held_out)])

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        cells = [_name(row, column) for row in range(SIZE) for column in range(SIZE)]
        return [
            *(f" {what}={cell}" for what in ("at", "hole") for cell in cells),
            *(
                f" {direction}={what}"
                for direction in DIRECTIONS
                for what in ("wall", "ice", "hole", "goal", "seen")
            ),
            *(f"<{direction}>" for direction in DIRECTIONS),
            *(" invalid", " goal", " fell"),
        ]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        """With option `grammar = true`: one of the four moves."""
        return (
            [f"<{direction}>" for direction in DIRECTIONS] if options.get("grammar", False) else []
        )

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Uniformly random moves on a training map: the format of a turn and what moves
        do, not which move is good.
        """
        task = cls.make_task(
            index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
        )
        env = cls(**options)
        said = list(env.reset(task).messages)
        for _ in range(TRANSCRIPT_TURNS):
            action = f"<{rng.choice(DIRECTIONS)}>"
            step = env.step(action)
            said += [Message(role="assistant", content=action), *step.messages]
            if step.done:
                break
        return said


@functools.lru_cache(64)
def _known(maps: Any) -> str:
    if maps not in ("random", "fixed"):
        raise ConfigError(f"options.maps must be random or fixed, got {maps!r}")
    return str(maps)


def _lake(rows: Map) -> Any:
    """Gymnasium's environment on a map.

    Making one takes a millisecond, and the members of a group have the same map.
    """
    return gymnasium.make(
        "FrozenLake-v1", desc=list(rows), is_slippery=False, disable_env_checker=True
    ).unwrapped


def _name(row: int, column: int) -> str:
    return "abcd"[column] + str(row + 1)


def _cells(lake: Map, kind: str) -> list[tuple[int, int]]:
    return [
        (row, column) for row in range(SIZE) for column in range(SIZE) if lake[row][column] == kind
    ]


def _seen(lake: Map, row: int, column: int) -> str:
    return SEEN_AS[lake[row][column]] if 0 <= row < SIZE and 0 <= column < SIZE else "wall"


def solvable(lake: Map) -> bool:
    """True if a path of ice leads from the start to the goal."""
    return (0, 0) in _ways_to_goal(lake)


def _ways_to_goal(lake: Map) -> set[tuple[int, int]]:
    """Every cell from which the goal can be reached, the goal included."""
    goal = (SIZE - 1, SIZE - 1)
    frontier, reached = [goal], {goal}
    while frontier:
        row, column = frontier.pop()
        for down, right in MOVES:
            place = (row + down, column + right)
            if place not in reached and _seen(lake, *place) == "ice":
                reached.add(place)
                frontier.append(place)
    return reached


def _somewhere(lake: Map, rng: random.Random) -> int:
    """A random cell with a way to the goal, by gymnasium's number."""
    row, column = rng.choice(sorted(_ways_to_goal(lake) - {(SIZE - 1, SIZE - 1)}))
    return row * SIZE + column


def _random_map(rng: random.Random) -> Map:
    """A solvable map, drawn as gymnasium's `generate_random_map` draws: every cell by
    itself, again until solvable.
    """
    while True:
        cells = ["F" if rng.random() < FROZEN else "H" for _ in range(SIZE * SIZE)]
        cells[0], cells[-1] = "S", "G"
        lake = _rows(cells)
        if solvable(lake):
            return lake


def _rows(cells: Sequence[str]) -> Map:
    return tuple("".join(cells[row * SIZE : (row + 1) * SIZE]) for row in range(SIZE))


def _training_map(rng: random.Random) -> Map:
    while split_of("/".join(lake := _random_map(rng))) is not Split.TRAIN:
        pass
    return lake


@functools.lru_cache(8)
def _held_out_maps(seed: int, split: Split) -> list[Map]:
    """Every solvable map of a held-out split, in the order of drawing without
    replacement.

    Each key is exponential with the map's probability as rate: sorting by it is drawing
    in proportion to probability.
    """
    rng = random.Random(mix(seed, split))
    drawn: list[tuple[float, Map]] = []
    for cells in itertools.product("FH", repeat=SIZE * SIZE - 2):
        lake = _rows(["S", *cells, "G"])
        if split_of("/".join(lake)) is split and solvable(lake):
            holes = cells.count("H")
            drawn.append(
                (rng.expovariate(FROZEN ** (len(cells) - holes) * (1 - FROZEN) ** holes), lake)
            )
    return [lake for _, lake in sorted(drawn)]
