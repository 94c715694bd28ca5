"""Real runs on hosts that are network namespaces, and everything that may happen to a
host: the run succeeds, every trajectory is accounted for, and nothing is left behind.
Agents are started by hand, and in some tests also by Ray.

These tests need root, `ip` and `tc`, and take minutes: `make test-cluster`.
"""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from benchmarks.cluster.run import ClusterRun, lost_trajectories
from packages.ray.benchmarks.ray_hosts import RayHosts
from rollweave.core.mechanisms.relays.state import part_of
from rollweave.core.state import EngineStatus
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.runtime.hosts.remote import SILENT_S
from rollweave.schema.commands import Migrate, StartTurn
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.events import MigrationDone, WeightsFetched
from rollweave.schema.hosts import ALIVE_S
from tests.cluster.agents import HostsByHand, mounts, shared_memory
from tests.support.real_runs import ROOT, lake

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PORT = 7400

NOTICED_S = SILENT_S + 2 * ALIVE_S
"""Maximum seconds until the loss of a host is noticed."""

STEPS = 30
FETCHING = re.compile(
    r"waiting \d+ s for relay r\d on host (?P<host>.): fetching version \d+ from r\d, "
    r"[1-9]\d* of \d+ MB"
)
LIMIT_S = 300.0
"""Maximum seconds to wait for anything on a busy machine."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostsByHand]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the tests' own environment
    memory, mounted = shared_memory(), mounts()
    with HostsByHand(2, tmp_path / "hosts") as made:
        if made.why_not:
            pytest.skip(made.why_not)
        yield made
        made.wait_for_agents()
        assert made.leftovers() == []
    assert shared_memory() - memory == set()
    assert mounts() == mounted


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHosts]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    mounted = mounts()
    with RayHosts([{}, {}]) as made:
        if made.why_not:
            pytest.skip(made.why_not)
        yield made
        made.wait_for_agents()
        assert made.leftovers() == []
    assert mounts() == mounted


H = TypeVar("H", HostsByHand, RayHosts)


class Lakes(Generic[H]):
    """Runs on the braked lake."""

    def __init__(self, hosts: H, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.brake = directory / "brake"
        self.brake.touch()

    @contextlib.contextmanager
    def running(
        self,
        *,
        agents: tuple[int, ...] = (0, 1),
        port: int = PORT,
        name: str = "",
        options: Sequence[str] = (),
        apart: bool = False,
        limits: Mapping[str, int] | None = None,
        **sections: Any,
    ) -> Iterator[ClusterRun]:
        """Start a run on these hosts, and wait until it has trained two steps."""
        config = lake(
            self.directory / "runs",
            task={
                "env": "tests.cluster.lake:Lake",
                "options": {"brake": str(self.brake)},
                **(limits or {}),
            },
            **{
                "run": {"name": f"lake{name}", "steps": STEPS, "checkpoint_every": 2},
                "engines": {"count": 2, "max_slots": 8, "kv_tokens": 4096},
                "eval": {"every": 0, "final_episodes": 8},
                "cluster": self._cluster(port, len(agents)),
                **sections,
            },
        )
        with ClusterRun(config, self.hosts) as run:
            run.start()
            if isinstance(self.hosts, HostsByHand):
                self.hosts.start(*agents, port=port, run=name, options=options, apart=apart)
            run.wait(lambda: run.trained >= 2, LIMIT_S, "two steps")
            yield run

    def end(self, *runs: ClusterRun) -> None:
        """Let the runs end quickly, and check their results."""
        self.brake.unlink(missing_ok=True)
        for run in runs:
            summary = run.finish(LIMIT_S)
            assert (summary["error"], summary["steps"]) == ("", run.config.run.steps)
            assert summary["eval_episodes"] == {"lake": 8}
            assert run.unaccounted(summary["account"]) == 0
            assert lost_trajectories(summary["account"]) == 0
            assert run.leftovers == 0
            assert not run.run.control.exists()

    def _cluster(self, port: int, hosts: int) -> dict[str, Any]:
        if isinstance(self.hosts, RayHosts):
            launched = {"launcher": f"ray:{self.hosts.cluster}"}
        else:
            launched = {"address": f"{self.hosts.controller}:{port}"}
        return {**launched, "hosts": hosts}

    def other(self, run: ClusterRun) -> int:
        """Return the host without the trainer."""
        return 1 - self.hosts.number(run.trainer_host())


@pytest.fixture
def lakes(hosts: HostsByHand, tmp_path: Path) -> Lakes[HostsByHand]:
    return Lakes(hosts, tmp_path)


@pytest.fixture(params=["hosts", "nodes"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Lakes[Any]:
    """Agents that are started by hand, or by Ray."""
    return Lakes(request.getfixturevalue(request.param), tmp_path)


def noticed(run: ClusterRun, name: str, since: float) -> None:
    """Check that the loss of a host is noticed in time, and that training continues."""
    step = run.reached
    seconds = run.wait_for(lambda: run.lost_after(name, since), f"the loss of host {name}")
    assert seconds <= NOTICED_S
    run.wait_for(lambda: run.trained_after(step, since), f"step {step}")


def serves_on(run: ClusterRun, host: str) -> bool:
    """Return whether an engine serves on the host of this name."""
    state = run.state()
    numbers = {number for number, slot in state.hosts.up.items() if slot.name == host}
    return any(
        engine.seat.host in numbers and engine.status is EngineStatus.SERVING
        for engine in state.engines.values()
    )


def crossings(run: ClusterRun) -> Counter[str]:
    """Return how often something has crossed from one host to another: KV ("kv"),
    parts of weights that the relay beside the trainer's first rank has fetched
    ("parts"), and unfinished turns that may continue there ("turns").
    """
    counts: Counter[str] = Counter()
    moves: dict[int, bool] = {}
    turns: dict[tuple[str, int, int], int] = {}
    for path, config in run._journals:
        replay = Replay(path, config, rules=rules_of(config))
        for _, event, commands in replay:
            state = replay.core.state
            host_of = {engine.id: engine.seat.host for engine in state.engines.values()}
            for command in commands:
                match command:
                    case Migrate(number=number, source=source, target=target):
                        moves[number] = host_of[source] != host_of[target]
                    case StartTurn(trajectory_id=trajectory_id, attempt=attempt, turn=turn):
                        key, host = (trajectory_id, attempt, turn), host_of[command.engine_id]
                        counts["turns"] += command.resume and turns.get(key, host) != host
                        turns[key] = host
            match event:
                case MigrationDone(number=number, moved_tokens=moved):
                    counts["kv"] += moved > 0 and moves[number]
                case WeightsFetched(relay_id=relay_id, nbytes=nbytes) if state.hosts.ranks:
                    part = part_of(state)
                    assert part is not None, "a relay has fetched"
                    beside = part.relays[relay_id].host == state.hosts.ranks[0].host
                    counts["parts"] += beside and nbytes > 0
    return counts


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_agent_is_killed(either: Lakes[Any]) -> None:
    with either.running() as run:
        victim = either.other(run)
        name, since = either.hosts.name(victim), run.now()
        before = either.hosts.started_by_agents(victim)
        either.hosts.kill_agent(victim)
        noticed(run, name, since)
        run.wait(
            lambda: not before & either.hosts.started_by_agents(victim),
            LIMIT_S,
            "the end of its processes",
        )
        either.end(run)


def test_a_host_loses_its_power(lakes: Lakes[HostsByHand]) -> None:
    with lakes.running() as run:
        victim = lakes.other(run)
        name, since = lakes.hosts.name(victim), run.now()
        lakes.hosts.fail(victim)
        noticed(run, name, since)
        lakes.end(run)


def test_the_trainers_host_loses_its_power(either: Lakes[Any]) -> None:
    with either.running() as run:
        name, since = run.trainer_host(), run.now()
        either.hosts.fail(either.hosts.number(name))
        noticed(run, name, since)
        assert run.trainer_host() != name
        assert run.warnings("restarted from checkpoint")
        either.end(run)


def test_a_link_is_cut_for_20_seconds(lakes: Lakes[HostsByHand]) -> None:
    with lakes.running() as run:
        victim = lakes.other(run)
        name, since = lakes.hosts.name(victim), run.now()
        lakes.hosts.cut(victim)
        noticed(run, name, since)
        run.wait(lambda: len(lakes.hosts.processes(victim)) == 1, LIMIT_S, "the end of its lease")
        run.wait(lambda: run.now() - since >= 20, LIMIT_S, "20 seconds")
        lakes.hosts.restore(victim)
        run.wait_for(lambda: run.joined_after(name, since), f"host {name} again")
        run.wait(lambda: serves_on(run, name), LIMIT_S, "an engine there")
        lakes.end(run)


def test_a_host_hangs_for_30_seconds(either: Lakes[Any]) -> None:
    with either.running() as run:
        victim = either.other(run)
        name, since = either.hosts.name(victim), run.now()
        before = either.hosts.started_by_agents(victim)
        either.hosts.hang(victim)
        noticed(run, name, since)
        run.wait(lambda: run.now() - since >= 30, LIMIT_S, "30 seconds")
        either.hosts.wake(victim)
        run.wait_for(lambda: run.joined_after(name, since), f"host {name} again")
        run.wait(lambda: serves_on(run, name), LIMIT_S, "an engine there")
        assert not before & either.hosts.started_by_agents(victim)
        if isinstance(either.hosts, HostsByHand):
            assert name in either.hosts.agents_left()
        either.end(run)


def test_the_controller_is_killed_and_resumed_on_the_same_hosts(lakes: Lakes[HostsByHand]) -> None:
    with lakes.running() as run:
        agents = lakes.hosts.agents_left()
        run.kill()
        for host in range(2):
            await_true(lambda host=host: len(lakes.hosts.processes(host)) == 1)  # type: ignore[misc]
        run.start()
        run.wait(lambda: run.trained >= 3, LIMIT_S, "a step of the resumed run")
        assert lakes.hosts.agents_left() == agents
        lakes.end(run)


def test_a_host_is_added_and_takes_over(lakes: Lakes[HostsByHand]) -> None:
    with lakes.running(agents=(0,)) as run:
        since = run.now()
        lakes.hosts.start(1, port=PORT)
        run.wait_for(lambda: run.joined_after("b", since), "host b")
        since = run.now()
        lakes.hosts.fail(0)
        noticed(run, "a", since)
        assert run.trainer_host() == "b"
        lakes.end(run)


def test_two_runs_share_two_hosts_of_which_one_is_lost(lakes: Lakes[HostsByHand]) -> None:
    with (
        lakes.running(name="1") as one,
        lakes.running(name="2", port=PORT + 1) as other,
    ):
        since = one.now()
        lakes.hosts.fail(1)
        for run, name in ((one, "b1"), (other, "b2")):
            noticed(run, name, since)
        lakes.end(one, other)


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"mode": "decoupled"}},
        {"rollout": {"scheduling": "trajectory"}, "ablation": {"changes": ["rank"]}},
    ],
    ids=["decoupled", "trajectory"],
)
def test_ranks_and_trajectories_use_two_hosts(
    lakes: Lakes[HostsByHand], sections: dict[str, Any]
) -> None:
    """One of the hosts is lost while turns run there. Both ranks then run on the
    other.
    """
    with lakes.running(
        options=("--resource", "training=1"),
        apart=True,
        limits={"max_turns": 3, "max_tokens": 4000, "max_turn_tokens": 1000},
        pools={"training": {"resource": "training"}},
        trainer={"ranks": 2, "pool": "training"},
        engines={"count": 2, "max_slots": 8, "kv_tokens": 40_000},
        **sections,
    ) as run:
        state = run.state()
        assert {rank.host for rank in state.hosts.ranks} == {0, 1}
        assert {engine.seat.host for engine in state.engines.values()} == {0, 1}
        # in mode decoupled, KV moves only where engines have little left to do
        decoupled = run.config.rollout.mode is ModeName.DECOUPLED
        expected = {"parts"} if decoupled else {"kv", "parts"}
        run.wait(lambda: {*+crossings(run)} >= expected, LIMIT_S, "what crosses hosts")
        name, since = run.trainer_host(), run.now()
        lakes.hosts.fail(lakes.hosts.number(name))
        noticed(run, name, since)
        assert len({rank.host for rank in run.state().hosts.ranks}) == 1
        lakes.end(run)
        if decoupled:
            assert crossings(run)["turns"]


@pytest.mark.parametrize("with_first_rank", [True, False])
def test_engines_and_ranks_of_two_hosts_take_turns(
    lakes: Lakes[HostsByHand], with_first_rank: bool
) -> None:
    """One of the hosts, which share no memory, is lost. Its rank and its engine then
    take turns with those of the other.
    """
    with lakes.running(
        options=("--resource", "both=1"),
        apart=True,
        pools={"both": {"resource": "both"}},
        rollout={"mode": "sync"},
        trainer={"ranks": 2, "pool": "both", "colocated": True},
        engines={"count": 2, "max_slots": 8, "kv_tokens": 4096, "pool": "both"},
    ) as run:
        state = run.state()
        assert {rank.host for rank in state.hosts.ranks} == {0, 1}
        assert {engine.seat.host for engine in state.engines.values()} == {0, 1}
        assert crossings(run)["parts"]
        lost = run.trainer_host()
        if not with_first_rank:
            lost = lakes.hosts.name(lakes.other(run))
        since = run.now()
        lakes.hosts.fail(lakes.hosts.number(lost))
        noticed(run, lost, since)
        state = run.state()
        (left,) = state.hosts.up
        assert {rank.host for rank in state.hosts.ranks} == {left}
        assert [engine.seat.host for engine in state.engines.values()] == [left, left]
        lakes.end(run)


def test_a_slow_fetch_is_named_with_its_bytes(lakes: Lakes[HostsByHand]) -> None:
    large = {"scratch": {"hidden": 256, "layers": 4}}
    with lakes.running(model=large) as run:
        victim = lakes.other(run)
        name = lakes.hosts.name(victim)
        lakes.hosts.limit(2.0, victim)

        def is_named() -> bool:
            return any(
                (named := FETCHING.search(line)) is not None and named["host"] == name
                for line in run.waiting()
            )

        run.wait(is_named, LIMIT_S, "the name of the wait")
        lakes.hosts.limit(1000.0, victim)
        lakes.end(run)
