"""Time of the core's decisions on a turn, at the size of a large cluster: the core
alone, in the simulated world.

A turn is three events, whose handling is summed: its request (is there a slot, and on
which engine?), its end, and the prediction of the remaining length (rank, partition,
migration).
"""

import statistics
import time

from rollweave.core.core import Core
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics
from rollweave_sim.world import World

TRAJECTORIES, ENGINES, SLOTS = 10_000, 256, 32
MEMBERS = 16
TURNS, QUICK_TURNS = 40_000, 4_000
"""Numbers of measured turns. Before them, each concurrent trajectory has had its first
turn.
"""

CONDITION = (
    "handling of a turn's events (request, end, prediction) by the core alone, scheduling "
    f"trajectory, {TRAJECTORIES:,} concurrent trajectories on {ENGINES} simulated engines of "
    f"{SLOTS} slots: median, with _p99 and _mean"
)


class TimedCore(Core):
    """Records the seconds of every event about a turn, by turn."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.seconds: dict[tuple[TrajectoryId, int, int], float] = {}
        self.done = 0

    def handle(self, now: float, event: e.Event) -> list[Command]:
        began = time.perf_counter()
        commands = super().handle(now, event)
        took = time.perf_counter() - began
        if isinstance(event, e.TurnRequested | e.TurnDone | e.PredictionReady):
            # A prediction is of the turn that comes next.
            key = (event.trajectory_id, event.attempt, event.turn)
            self.seconds[key] = self.seconds.get(key, 0.0) + took
            self.done += isinstance(event, e.TurnDone)
        return commands


def config(*, trajectories: int = TRAJECTORIES, engines: int = ENGINES) -> RunConfig:
    groups = trajectories // MEMBERS
    task = {"env": "tool-calling", "max_turns": 9, "max_tokens": 18_432, "max_turn_tokens": 16_384}
    return RunConfig.model_validate(
        {
            "run": {"name": "router", "steps": 8},
            "sim": {"model": "qwen3-14b", "gpu": "h100"},
            "trainer": {"ranks": 64},
            "tasks": [task | {"step_s": 600.0, "time_s": 1e6}],
            "rollout": {
                "groups_per_step": groups,
                "group_size": MEMBERS,
                "max_running": groups * MEMBERS,
                "scheduling": "trajectory",
            },
            "engines": {"count": engines, "max_slots": SLOTS, "prefill_chunk_tokens": 8192},
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 1e5, "train_s": 1e5},
        }
    )


def router_figures(*, quick: bool) -> dict[str, float | int | list[float] | None]:
    """Return the microseconds of a turn."""
    seconds = sorted(turn_seconds(config(), turns=QUICK_TURNS if quick else TURNS))
    return {
        "router_us_10000x256": 1e6 * statistics.median(seconds),
        "router_us_10000x256_p99": 1e6 * seconds[int(0.99 * (len(seconds) - 1))],
        "router_us_10000x256_mean": 1e6 * statistics.fmean(seconds),
    }


def turn_seconds(made: RunConfig, *, turns: int) -> list[float]:
    """Return the seconds of each of `turns` turns, after the warm-up."""
    metrics = SimMetrics()
    world = World(made, observer=metrics)
    world.core = core = TimedCore(made)
    metrics.watch(world)
    world.start()
    for count in (made.rollout.places.alive, turns):
        core.seconds.clear()
        core.done = 0
        while core.done < count:
            world.step()
    return list(core.seconds.values())
