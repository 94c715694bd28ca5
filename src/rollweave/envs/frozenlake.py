"""Gymnasium's FrozenLake (4×4, not slippery) in words: find the goal, avoid the holes.

Invariants: with `maps = "random"` a map belongs to exactly one split by its hash, so no
training map is ever held out; the tasks of a held-out split are distinct maps until all
(more than 400) have been used; equal arguments give equal tasks. Held-out tasks always
begin at the map's start.
"""

import asyncio
import copy
import functools
import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of, split_of
from rollweave.envs.games import random_play
from rollweave.io.extras import from_extra
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

with from_extra("envs"):
    import gymnasium

SIZE = 4
FROZEN = 0.8
"""Share of frozen cells of a random map: gymnasium's default."""

FIXED = ("SFFF", "FHFH", "FFFH", "HFFG")
"""Gymnasium's default map."""

DIRECTIONS = ("left", "down", "right", "up")  # gymnasium's action numbers
ACTIONS = tuple(f"<{direction}>" for direction in DIRECTIONS)
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
SEEN_AS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
INVALID_REWARD = -0.1
AWAY = {"random": 0.3, "fixed": 0.5}
"""Share of training tasks that begin at another cell than the map's start, with a path
to the goal, so that the agent also visits states that its policy would avoid.
"""
TRANSCRIPT_TURNS = 14

_ACTION = re.compile(r"\s*<(left|down|right|up)>\s*")

Map = tuple[str, ...]


class FrozenLake:
    """An observation is ` hole=b2 … at=a1 left=wall down=ice right=ice up=wall`; the
    agent answers `<down>`. The reward at the goal is 1.

    A message that is not a move costs 0.1 and a turn. Only the first message names the
    holes; cells that were visited in this episode are `seen`; columns are letters, and
    rows are numbers.
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
        self._lake = copy.copy(_lake(self._map))  # shares the table of moves, not the position
        self._lake.reset(seed=task.seed % 2**31)
        self._lake.s = payload.get("start", 0)
        self._visited = {self._place()}
        holes = "".join(f" hole={_name(row, column)}" for row, column in _cells(self._map, "H"))
        return Observation.of(holes + self._view(), state_key=self._view())

    def step(self, action: str) -> Step:
        move = _ACTION.fullmatch(action)
        if move is None:
            return Step.of(" invalid" + self._view(), reward=INVALID_REWARD, state_key=self._view())
        _, reward, done, _, _ = self._lake.step(DIRECTIONS.index(move[1]))
        self._visited.add(self._place())
        if not done:
            return Step.of(self._view(), state_key=self._view())
        return Step.of(
            " goal" if reward > 0 else " fell", reward=float(reward), done=True, success=reward > 0
        )

    def _place(self) -> tuple[int, int]:
        return divmod(int(self._lake.s), SIZE)

    def _view(self) -> str:
        """Return the agent's position and its neighborhood.

        Two states on one map are equal if their views are equal.
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
        """Return a solvable map.

        Held-out maps are distinct; training maps occur in proportion to their
        probability.
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
            *ACTIONS,
            *(" invalid", " goal", " fell"),
        ]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        """Return the four moves with option `grammar = true`."""
        return ACTIONS if options.get("grammar", False) else ()

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return uniformly random moves on a training map. They show the format of a
        turn and the effect of moves, but not which move is good.
        """
        return random_play(cls, rng, options, actions=ACTIONS, turns=TRANSCRIPT_TURNS)


class SlowLake(FrozenLake):
    """The same lake with slow tools: a move takes a log-normal time, of `latency_s`
    seconds in the median; `latency_sigma` is the sigma of its logarithm.
    """

    blocking = False

    def __init__(self, *, latency_s: float, latency_sigma: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._latency = latency_s, latency_sigma

    async def step(self, action: str) -> Step:  # type: ignore[override]  # it may be async
        median_s, sigma = self._latency
        if median_s:
            await asyncio.sleep(random.lognormvariate(math.log(median_s), sigma))
        return super().step(action)

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        return FrozenLake.transcript(rng, {"maps": options.get("maps", "random")})


@functools.lru_cache(64)
def _known(maps: Any) -> str:
    if maps not in ("random", "fixed"):
        raise ConfigError(f"options.maps must be random or fixed, got {maps!r}")
    return str(maps)


def _lake(rows: Map) -> Any:
    """Return gymnasium's environment on a map.

    Its construction takes a millisecond, and the members of a group have the same map.
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
    """Return whether a path of ice leads from the start to the goal."""
    return (0, 0) in _ways_to_goal(lake)


def _ways_to_goal(lake: Map) -> set[tuple[int, int]]:
    """Return every cell from which the goal can be reached, the goal included."""
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
    """Return gymnasium's number of a random cell with a path to the goal."""
    row, column = rng.choice(sorted(_ways_to_goal(lake) - {(SIZE - 1, SIZE - 1)}))
    return row * SIZE + column


def _random_map(rng: random.Random) -> Map:
    """Return a solvable map, drawn like gymnasium's `generate_random_map`: every cell
    is drawn independently, again and again until the map is solvable.
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
    """Return every solvable map of a held-out split, in the order of drawing without
    replacement.

    Each map has an exponentially distributed key, whose rate is the map's probability.
    Sorting by the keys is equivalent to drawing in proportion to probability.
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
