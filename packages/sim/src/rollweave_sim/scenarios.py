"""The scenario of a seed of the fault search: a small run that exposes every component
to faults, and the rates of the faults.

Invariant: everything here follows from the seed alone, so that the seed suffices to
reproduce a failure.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import PARTITIONS, PLACEMENTS, POLICIES, PRIORITIES
from rollweave.schema.config.simulation import ServingFile, Sharing
from rollweave.schema.work import StopReason
from rollweave_sim.workload import Plan, Workload

STORM_S = 900.0
"""Simulated seconds of faults in a scenario of ours: several times its length without
them.
"""

FAULTS_PER_STORM = 22.0
"""Process faults in a storm of heat 1: about one every 40 s in a scenario of ours."""

PROCESS_FAULTS = {
    "engine lost": 4,
    "engine silent": 2,
    "engine stalled": 4,
    "heartbeat lost": 2,
    "load refused": 3,
    "trainer lost": 2,
    "trainer silent": 1,
    "step failed": 3,
    "save failed": 2,
    "checkpoint damaged": 1,
    "controller lost": 2,
}
"""Process faults, by weight.

A silent process has ended without a report; an engine whose heartbeat is lost is
reported as lost while it continues to work.
"""

FLEET_CHANGES = {"engine joins": 2, "engine leaves": 2}
"""Weights of fleet changes, for runs in which no plan fixes the engines.

They are no faults, but strike at the same moments.
"""

RELAY_FAULTS = {"relay lost": 4, "relay silent": 2, "relay hangs": 4, "fetch refused": 3}
"""Additional process faults of runs with relays, by weight."""

WORKER_FAULTS = {"worker lost": 4}
"""Additional process faults of runs whose number of rollout workers changes, by
weight.
"""

HOST_FAULTS = {"host lost": 2, "host joins": 2}
"""Additional faults of runs with several hosts, by weight."""

LENDER_FAULTS = {"lender recalled": 4, "lenders silent": 2}
"""Additional events of runs that borrow engines, by weight: an operator needs one back,
and reports stop for a while.
"""

MAX_HOSTS = 6
"""Maximum number of hosts up to which hosts join."""

MAX_FLEET = 6
"""Maximum number of engines up to which engines join."""

MODES = ("sync", "one_step", "stream", "partial", "bounded", "decoupled")
COUPLED_MODES = MODES[:-1]
DECOUPLED_SHARE = 0.25
"""Share of scenarios in mode decoupled."""


HOSTILE_SHARE = 0.3
"""Share of scenarios in which some turns end their engines."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of faults in a run of seconds, and shares of affected messages."""

    until_s: float  # end of the faults; the rest of the run is free of them
    between_s: float  # mean seconds between two faults of processes
    lost: float  # share of messages that never arrive
    doubled: float
    delayed: float  # the sender's later messages wait behind it
    reordered: float  # the sender's later messages overtake it
    env: float  # share of attempts whose environment or reward fails, hangs or is slow
    hostile: float  # share of trajectories whose turns end their engines
    stop_s: float | None  # time of the user's stop request


def scenario(seed: int) -> RunConfig:
    """Return a run of seconds on one core, with other sizes and modes for every
    seed.
    """
    draw = random.Random(f"scenario/{seed}")
    mode = draw.choice(COUPLED_MODES)
    data: dict[str, Any] = {
        "run": {
            "name": f"faults-{seed}",
            "steps": draw.randint(3, 6),
            "checkpoint_every": draw.choice([None, 1, 2]),
            "seed": seed,
        },
        "sim": {"model": "qwen3-8b", "gpu": "h800"},
        "tasks": [
            {"env": env, "max_turns": 8, "max_tokens": 4096, "max_turn_tokens": 512, "step_s": 90.0}
            for env in draw.sample(["frozenlake", "gem-game", "webshop"], draw.randint(1, 2))
        ],
        "rollout": {
            "mode": mode,
            "alpha": draw.randint(1, 2),
            "groups_per_step": draw.randint(2, 4),
            "group_size": draw.randint(2, 4),
            "spare_groups": draw.choice([0, 0, 1]),
            "spare_members": draw.choice([0, 0, 1]),
            "max_running": draw.choice([4, 12, 32]),
            "dynamic_sampling": draw.random() < 0.2,
        },
        "engines": {
            "count": draw.randint(1, 4),
            "max_slots": draw.choice([2, 8]),
            "kv_tokens": 65536,
        },
        **_scheduling(seed),
        "trainer": {"ranks": 8, "minibatches": draw.choice([1, 2])},
        "eval": {"every": draw.choice([0, 2]), "episodes": 3, "final_episodes": 2},
        "watchdog": {
            "turn_s": 120.0,
            "train_s": 900.0,
            "restarts": 100_000,
        },
    }
    data["rollout"]["scheduling"] = data.pop("scheduling", "turn")
    if data["rollout"]["dynamic_sampling"] and not data["rollout"]["spare_groups"]:
        data["rollout"]["spare_groups"] = "learned"
    if "allocation" in data:
        del data["engines"]["count"]
    if (decoupling := random.Random(f"decoupled/{seed}")).random() < DECOUPLED_SHARE:
        _decouple(data, decoupling)
    relays, whole = _weights(seed, most=data["engines"].get("count", 2))
    data["weights"] = {"relays": relays}
    if whole and relays:
        data["ablation"]["changes"].append("no_deltas")
    if not relays and "allocation" not in data:
        _divide(data, random.Random(f"pools/{seed}"))
    if data["rollout"]["mode"] == "sync" and "allocation" not in data:
        data["trainer"]["colocated"] = random.Random(f"colocated/{seed}").random() < 0.5
    if (
        data["rollout"]["mode"] != "decoupled"
        and data["rollout"]["scheduling"] == "turn"
        and random.Random(f"earliest/{seed}").random() < 0.3
    ):
        policies = data.setdefault("ablation", {}).get("changes", [])
        data["ablation"]["changes"] = [*policies, "earliest"]
    if "allocation" not in data:
        _split(data, random.Random(f"phases/{seed}"))
        _lend(data, random.Random(f"lending/{seed}"))
    _scale(data, random.Random(f"workers/{seed}"))
    _separate(data, random.Random(f"stages/{seed}"))
    _leave_out(data)
    return RunConfig.model_validate(data)


def serving_of(seed: int) -> ServingFile:
    """Return the serving engines beside the scenario of a seed that borrows."""
    draw = random.Random(f"serving/{seed}")
    ways: tuple[Sharing, ...] = ("cooperative", "cooperative", "ttft", "tpot")
    return ServingFile(
        model="qwen2.5-7b",
        engines=draw.randint(2, 4),
        prefill=draw.choice([0, 1]),
        rate=draw.choice([0.05, 0.3, 1.0]),
        sharing=draw.choice(ways),
    )


def _separate(data: dict[str, Any], draw: random.Random) -> None:
    """Give INIT, RUN and EVAL pools of their own in a third of the runs."""
    most = data["rollout"]["max_running"]
    if draw.random() < 1 / 3:
        sizes = {stage: draw.randint(1, most) for stage in ("init", "run", "eval")}
        data["rollout"]["max_running"] = sizes


def _leave_out(data: dict[str, Any]) -> None:
    """Leave out what has no effect beside the settings that were drawn."""
    rollout = data["rollout"]
    if rollout["mode"] not in ("partial", "bounded", "decoupled"):
        del rollout["alpha"]
    if rollout["mode"] in ("partial", "decoupled"):
        rollout.pop("spare_groups", None)
    if not data["eval"]["every"]:
        del data["eval"]["episodes"]


def _split(data: dict[str, Any], draw: random.Random) -> None:
    """Let some engines of a third of the runs compute prompts for the others."""
    if draw.random() > 1 / 3:
        return
    engines = data["engines"]
    groups = engines if isinstance(engines, list) else [engines, dict(engines)]
    data["engines"] = [
        {**group, "phase": phase}
        for group, phase in zip(groups, draw.sample(["prefill", "decode"], 2), strict=True)
    ]
    if groups[0] == groups[1] and data["rollout"]["mode"] != "decoupled" and draw.random() < 0.5:
        data["engines"] = {**groups[0], "phase": "either", "count": 2 * groups[0]["count"]}


def _lend(data: dict[str, Any], draw: random.Random) -> None:
    """Let a third of the runs borrow engines that serve bursts of users at the same
    time, where the mode and the placement of the trainer allow it.
    """
    if (
        draw.random() > 1 / 3
        or data["rollout"]["mode"] == "decoupled"
        or data["trainer"].get("colocated")
        or data["weights"]["relays"]
    ):
        return
    data["loans"] = {"engines": draw.randint(1, 3)}


def _scale(data: dict[str, Any], draw: random.Random) -> None:
    """Let a third of the runs have a changing number of rollout workers."""
    if draw.random() < 1 / 3:
        data["workers"] = {"count": {"minimum": 0, "maximum": draw.randint(1, 4)}}


def _decouple(data: dict[str, Any], draw: random.Random) -> None:
    """Turn the run into one of mode decoupled, which fixes some settings and adds
    others.
    """
    data["rollout"].pop("spare_groups")
    policies = data["ablation"]["changes"]
    data["ablation"]["changes"] = [one for one in policies if one in PRIORITIES]
    if data.pop("allocation", None) is not None:
        data["engines"]["count"] = draw.randint(1, 4)
    data["rollout"] |= {
        "mode": "decoupled",
        "alpha": draw.choice([None, None, 1, 2]),
    }
    data["buffer"] = {
        "sample": draw.choice(["fifo", "newest", "advantage", "ratio", "entropy", "staleness"]),
    }


def _divide(data: dict[str, Any], draw: random.Random) -> None:
    """Divide the engines of a third of the runs between two pools, and let task domains
    name one where a policy allows it.
    """
    if draw.random() > 1 / 3:
        return
    data["pools"] = {
        "compute": {"resource": "H800"},
        "bandwidth": {"resource": "H20", "fallback": draw.choice([[], ["compute"]])},
    }
    data["engines"] = [{**data["engines"], "pool": pool} for pool in data["pools"]]
    rollout, policies = data["rollout"], data["ablation"]["changes"]
    placement = next(
        (one for one in policies if one in PLACEMENTS),
        POLICIES[rollout.get("scheduling", "turn")][1],
    )
    if rollout["mode"] != "decoupled" and placement not in PARTITIONS:
        for task in data["tasks"]:
            task["pool"] = draw.choice([None, *data["pools"]])


def _scheduling(seed: int) -> dict[str, Any]:
    """Draw the scheduling settings.

    Half of the runs schedule turns, the default; the others trajectories, on fleets of
    any kind.
    """
    draw = random.Random(f"scheduling/{seed}")
    if draw.random() < 0.5:
        return {"ablation": {"changes": []}}
    priority = draw.choice([None, "fcfs", "round_robin", "shortest_first"])
    placement = draw.choice([None, None, "presorted", "pinned", "affinity", "least_load", "hybrid"])
    migration = None
    if placement in (None, "presorted"):
        migration = draw.choice([None, "rank", "never"])
    chosen = [one for one in (priority, placement, migration) if one is not None]
    data: dict[str, Any] = {"scheduling": "trajectory", "ablation": {"changes": chosen}}
    if draw.random() < 0.3:
        data["allocation"] = {"budget": draw.randint(2, 6)}
    return data


def _weights(seed: int, *, most: int) -> tuple[int, bool]:
    """Draw the number of relays, of which half of the runs have any, and whether they
    send whole weights alone.
    """
    draw = random.Random(f"weights/{seed}")
    return min(most, draw.choice([0, 0, 0, 1, 2, 4])), draw.random() >= 0.7


def rates(seed: int, *, storm_s: float = STORM_S) -> Rates:
    """Return fault rates between none and extreme."""
    draw = random.Random(f"rates/{seed}")
    heat = draw.choice([0.0, 0.3, 1.0, 3.0])
    return Rates(
        until_s=storm_s if heat else 0.0,
        between_s=storm_s / (FAULTS_PER_STORM * heat) if heat else 0.0,
        lost=0.002 * heat,
        doubled=0.02 * heat,
        delayed=0.05 * heat,
        reordered=0.005 * heat,
        env=min(0.5, 0.05 * heat),
        hostile=0.05 if random.Random(f"hostile/{seed}").random() < HOSTILE_SHARE else 0.0,
        stop_s=storm_s * draw.random() if draw.random() < 0.1 else None,
    )


class FaultyWorkload:
    """A workload whose environments and rewards sometimes fail, hang or are slow.

    The same attempt always has the same fault.
    """

    def __init__(self, inner: Workload, rate: float, faults: Counter[str]) -> None:
        self._inner, self._rate, self._faults = inner, rate, faults

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._inner.plan(index=index, member=member, attempt=attempt, seed=seed)
        draw = random.Random(f"env/{seed}/{index}/{member}/{attempt}")
        if plan.fails_in or draw.random() >= self._rate:
            return plan
        if draw.random() < 0.3:
            return self._slow(plan, draw)
        where = draw.choice(["init", "run", "eval"])
        hang, raised = (
            (StopReason.REWARD_HANG, StopReason.REWARD_ERROR)
            if where == "eval"
            else (StopReason.ENV_HANG, StopReason.ENV_ERROR)
        )
        hangs = draw.random() < 0.4
        self._faults[
            f"{'reward' if where == 'eval' else 'environment'} {'hangs' if hangs else 'fails'}"
        ] += 1
        return msgspec.structs.replace(plan, fails_in=where, stop=hang if hangs else raised)

    def _slow(self, plan: Plan, draw: random.Random) -> Plan:
        """Slow all parts of an attempt, some beyond their limits."""
        self._faults["environment slow"] += 1

        def slowed(seconds: float) -> float:
            return seconds + draw.expovariate(1 / 20.0)

        turns = tuple(
            msgspec.structs.replace(turn, env_s=slowed(turn.env_s)) for turn in plan.turns
        )
        return msgspec.structs.replace(
            plan, init_s=slowed(plan.init_s), turns=turns, reward_s=slowed(plan.reward_s)
        )
