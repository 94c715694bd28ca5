"""Deterministic fault simulation: everything goes wrong, at moments that a seed chooses, and the books must still balance.

A seed fixes the scenario (mode, sizes, workload) and every fault. After each event the core's invariants are checked; at the
end every started trajectory must be accounted for, no trained one may break its staleness bound or be trained twice in the
lineage that survived, and nothing may wait for ever. Messages of one sender arrive in order, as on a connection; they may be
delayed, doubled or lost.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollweave.core.state import Phase
from rollweave.policy.modes import preset
from rollweave.record.journal import Replay, RunJournal
from rollweave.record.summary import AccountError, summarize
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import StopReason
from rollweave.sim.workload import Plan, Workload
from rollweave.sim.world import World, workloads_of

EVENTS = 100_000
"""Events after which a run of a scenario counts as endless: one without faults has a hundredth of that."""

STORM_S = 900.0
"""Simulated seconds of faults: several times a run's length without them."""

KINDS = {
    "engine lost": 4,
    "engine stalled": 4,
    "load refused": 3,
    "trainer lost": 2,
    "save failed": 2,
    "controller lost": 1,
}
"""Faults of processes, by weight."""

MODES = ("sync", "one_step", "stream", "partial", "bounded")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often what goes wrong: events of a seconds-long run, and shares of messages."""

    until_s: float  # the storm passes: what is not over by then must end without further faults
    between_s: float  # mean seconds between two faults of processes
    lost: float  # share of messages that never arrive
    doubled: float
    delayed: float
    env: float  # share of attempts whose environment or reward fails or hangs


@dataclass(kw_only=True)
class Report:
    """What a seed came to. `violation` is empty where all invariants held."""

    seed: int
    violation: str = ""
    error: str = ""  # with which the run ended, where faults were too many for it
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def scenario(seed: int) -> RunConfig:
    """A small run whose every part a fault may meet."""
    draw = random.Random(f"scenario/{seed}")
    mode = draw.choice(MODES)
    data: dict[str, Any] = {
        "run": {
            "name": f"faults-{seed}",
            "steps": draw.randint(3, 6),
            "checkpoint_every": draw.choice([0, 1, 2]),
            "seed": seed,
        },
        "sim": {"model": "qwen3-8b", "gpu": "h800", "trainer_gpus": 8},
        "tasks": [
            {"env": env, "max_turns": 8, "max_tokens": 4096, "max_turn_tokens": 512, "step_s": 60.0}
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
        "engines": {"count": draw.randint(1, 4), "max_slots": draw.choice([2, 8]), "kv_tokens": 65536},
        "trainer": {"minibatches": draw.choice([1, 2])},
        "eval": {"every": draw.choice([0, 2]), "episodes": 3, "final_episodes": 2},
        "watchdog": {"turn_s": 120.0, "weights_s": 90.0, "train_s": 600.0, "start_s": 200.0, "restarts": 100_000},
    }
    return RunConfig.model_validate(data)


def rates(seed: int) -> Rates:
    """From quiet to absurd."""
    draw = random.Random(f"rates/{seed}")
    heat = draw.choice([0.0, 0.3, 1.0, 3.0])
    return Rates(
        until_s=STORM_S if heat else 0.0,
        between_s=40.0 / heat if heat else 1e9,
        lost=0.002 * heat,
        doubled=0.02 * heat,
        delayed=0.05 * heat,
        env=min(0.5, 0.05 * heat),
    )


def search(seed: int, config: RunConfig | None = None) -> Report:
    """Run the scenario of `seed` (or `config`) under its faults, and say what broke."""
    report = Report(seed=seed)
    with tempfile.TemporaryDirectory(prefix="rollweave-faults-") as scratch:
        chaos = Chaos(config or scenario(seed), seed, report, Path(scratch) / "journal.bin")
        try:
            chaos.run()
        except AssertionError as error:
            report.violation = f"invariant: {error}"
        except (AccountError, RollweaveError) as error:
            report.violation = str(error)
        report.events = chaos.events
    return report


class Chaos:
    """One run under faults. Lives of the controller follow each other; the clock goes on."""

    def __init__(self, config: RunConfig, seed: int, report: Report, journal: Path) -> None:
        self._config, self._report, self._path = config, report, journal
        self._random = random.Random(f"chaos/{seed}")
        self._rates = rates(seed)
        self._journal = RunJournal(journal)
        self._work: dict[str, Workload] = {
            name: _Failing(found, self._rates.env, report.faults) for name, found in workloads_of(config).items()
        }
        self._ready: dict[str, float] = {}  # sender → when its last message arrives
        self._lineage: dict[int, list[str]] = {}  # step → trajectories trained in the lineage that survives
        self.world = World(config, listener=_Deaf(), journal=self._journal, work=self._work)
        self.events = 0
        self._hook()

    def run(self) -> None:
        """To the end. Raises AssertionError or RollweaveError for a violation."""
        world = self.world
        world.start()
        self._plan_next()
        while world.over is None:
            world.step()
            self.events = world.events
            assert world.events < EVENTS, f"no end after {EVENTS} events, at step {world.core.state.trainer.step}"
        self._report.error = world.over
        summary = summarize(world.core, evaluation=None, wall_s=world.clock.now)
        account = summary.account
        trained = [member for members in self._lineage.values() for member in members]
        assert len(trained) == len(set(trained)), "a trajectory was trained twice in one lineage"
        assert account.trained == len(trained), f"{account.trained} counted as trained, {len(trained)} were"
        window = preset(self._config.rollout.mode, self._config.rollout.alpha).window
        assert summary.staleness_max <= window, f"staleness {summary.staleness_max} where {window} is allowed"
        self._journal.close()
        again = Replay(self._path, self._config)
        assert again.finish().snapshot() == world.core.snapshot(), "a replay gives another state"
        assert again.differing == 0, f"a replay decides differently at {again.differing} events"

    def _hook(self) -> None:
        world = self.world
        deliver = world.inbox.append

        def post(event: e.Event) -> None:
            self._send(event, deliver)

        world.post = post  # type: ignore[method-assign]
        for part in (world.fleet, world.rollouts, world.trainer, world.effects):
            part._post = post
        world.each_event = self._after_event
        world.trainer.trained = self._trains

    # Messages.

    def _send(self, event: e.Event, deliver: Callable[[e.Event], None]) -> None:
        draw, rates, now = self._random, self._rates, self.world.clock.now
        if now > rates.until_s or isinstance(event, e.TimerFired | e.RunStarted | e.WorldLost):
            deliver(event)
            return
        if draw.random() < rates.lost:
            self._report.faults["message lost"] += 1
            return
        sender = _sender(event)
        wait = 0.0
        if draw.random() < rates.delayed:
            self._report.faults["message delayed"] += 1
            wait = draw.expovariate(1 / 5.0)
        due = max(now + wait, self._ready.get(sender, 0.0))
        self._ready[sender] = due
        if due > now:
            self.world.clock.at(due, lambda: deliver(event))
        else:
            deliver(event)
        if draw.random() < rates.doubled:
            self._report.faults["message doubled"] += 1
            self.world.clock.at(due + draw.expovariate(1 / 20.0), lambda: deliver(event))

    # Processes.

    def _plan_next(self) -> None:
        self.world.clock.after(self._random.expovariate(1 / self._rates.between_s), self._strike)

    def _strike(self) -> None:
        if self.world.over is not None or self.world.clock.now > self._rates.until_s:
            return
        draw, world = self._random, self.world
        kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
        node = draw.choice(list(world.fleet.nodes.values())) if world.fleet.nodes else None
        match kind:
            case "engine lost" if node is not None:
                world.fleet.lose(node.id, "injected")
            case "engine stalled" if node is not None:
                world.fleet.stall(node.id, draw.choice([5.0, 60.0, 1e6]))
            case "load refused" if node is not None:
                world.fleet.refusals[node.id] = draw.randint(1, 3)
            case "trainer lost":
                world.trainer.lose("injected")
            case "save failed":
                world.trainer.refuse_save = True
            case "controller lost":
                self._restart_controller()
            case _:
                kind = ""
        if kind:
            self._report.faults[kind] += 1
        self._plan_next()

    def _restart_controller(self) -> None:
        """The controller dies between two events, and comes back from its journal."""
        world = self.world
        self._journal.close()
        replay = Replay(self._path, self._config)
        core = replay.finish()
        assert replay.differing == 0, f"a replay decides differently at {replay.differing} events"
        assert core.snapshot() == world.core.snapshot(), "a replay gives another state"
        if self._random.random() < 0.5:
            core = core.restore(core.snapshot(), self._config)
        self._journal = RunJournal(self._path)
        if core.state.phase is not Phase.FINISHED and self._random.random() < 0.5:
            self._journal.rotate(core.snapshot())
        self._ready.clear()
        world.revive(core, self._journal)

    # Checks.

    def _trains(self, command: c.TrainStep, seconds: float) -> None:
        for group in command.groups:
            assert group.trajectory_ids, f"group {group.id} is delivered empty"
            for member in group.trajectory_ids:
                assert member in self.world.rollouts.scored, f"{member} is trained on and not in the store"

    def _after_event(self) -> None:
        world = self.world
        world.core.check()
        lineage = world.core.state.lineage
        groups = world.core.state.groups
        for step in [step for step in self._lineage if step >= world.core.state.trainer.step and step not in lineage]:
            del self._lineage[step]  # its trainer is lost; the groups went back
        for step, ids in lineage.items():
            self._lineage[step] = [member for group_id in ids for member in groups[group_id].chosen]


class _Failing:
    """A workload whose environments and rewards fail now and then, the same for the same attempt."""

    def __init__(self, inner: Workload, rate: float, faults: Counter[str]) -> None:
        self._inner, self._rate, self._faults = inner, rate, faults

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._inner.plan(index=index, member=member, attempt=attempt, seed=seed)
        draw = random.Random(f"env/{seed}/{index}/{member}/{attempt}")
        if plan.fails_in or draw.random() >= self._rate:
            return plan
        where = draw.choice(["init", "run", "eval"])
        hang, raised = (
            (StopReason.REWARD_HANG, StopReason.REWARD_ERROR)
            if where == "eval"
            else (StopReason.ENV_HANG, StopReason.ENV_ERROR)
        )
        hangs = draw.random() < 0.4
        self._faults[f"{'reward' if where == 'eval' else 'environment'} {'hangs' if hangs else 'fails'}"] += 1
        return msgspec.structs.replace(plan, fails_in=where, stop=hang if hangs else raised)


class _Deaf:
    """A listener for runs that nobody watches."""

    def warned(self, command: c.Warn) -> None:
        pass

    def evaluated(self, command: c.RecordEvaluation) -> None:
        pass

    def best(self, command: c.MarkBest) -> None:
        pass


def _sender(event: e.Event) -> str:
    """Who says it: messages of one sender arrive in order."""
    for name in ("trajectory_id", "engine_id", "group_id"):
        found = getattr(event, name, None)
        if found is not None:
            return f"{name}/{found}"
    return "trainer"
