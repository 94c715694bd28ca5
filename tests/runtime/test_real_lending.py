"""A real run borrows a serving engine that users have requests at, and one of the two
dies, hangs, or is asked to return in the middle of a turn: the trajectories continue on
the run's own engine, and the users see nothing of it.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.run import lost_trajectories
from packages.sim.benchmarks.coserve.borrowing_run import BorrowingRun
from packages.sim.benchmarks.coserve.cores import Cores
from packages.sim.benchmarks.coserve.serving_engine import ServingEngine, save_model
from rollweave.core.state import State
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.schema.base import EngineId
from rollweave.schema.commands import StartEngine, StartTurn
from tests.support.host_agents import SECRET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 480.0
"""Maximum seconds of any wait, on a busy machine."""

TURN_S = 30.0
"""Deadline of a turn: the run notices by it that a lent engine hangs."""

ROLLOUT = {"groups_per_step": 2, "group_size": 4, "max_running": 16}

PROMPT, TOKENS = (5, 9, 17), 24


class Users(threading.Thread):
    """Requests of a serving engine's users, one after another."""

    def __init__(self, engine: ServingEngine) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._over = threading.Event()
        self.answers: list[list[int]] = []
        self.error = ""

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self.answers.append(self._engine.complete(PROMPT, output_tokens=TOKENS))
        except OSError as error:
            self.error = str(error)

    def end(self) -> None:
        """Stop, and check that all answers were the same."""
        self._over.set()
        self.join(LIMIT_S)
        assert not self.error
        assert {len(answer) for answer in self.answers} == {TOKENS}
        assert len(set(map(tuple, self.answers))) == 1


class Loan:
    """A run that trains, and the serving engine that it has borrowed."""

    def __init__(self, run: BorrowingRun, engine: ServingEngine) -> None:
        self.run, self.engine = run, engine

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.run.wait(condition, LIMIT_S, what)

    def lending(self) -> bool:
        """Return whether the engine is lent now."""
        return bool(self.engine.stats()["lending"]["lent"])

    def until_in_turn(self) -> EngineId:
        """Wait until the lent engine computes a turn, and return its id."""
        found: list[EngineId] = []

        def computes() -> bool:
            found.extend(lent_in_turn(self.run.state()))
            return bool(found)

        self.until(lambda: self.run.trained >= 1 and self.run.run.journal.exists(), "a step")
        self.until(computes, "a turn on the lent engine")
        return found[0]

    def train_on(self, steps: int = 2) -> None:
        trained = self.run.trained
        self.until(lambda: self.run.trained >= trained + steps, "more steps")


def lent_in_turn(state: State) -> list[EngineId]:
    """Return the engines of a lending host that have turns."""
    lenders = {number for number, slot in state.hosts.up.items() if slot.name != "own"}
    return [
        engine.id
        for engine in state.engines.values()
        if engine.seat.host in lenders and engine.active
    ]


def continued(run: BorrowingRun, lent: EngineId) -> int:
    """Return how many turns began on the lent engine and again on another one."""
    begun: dict[tuple[str, int], EngineId] = {}
    count = 0
    for _, _, commands in Replay(run.run.journal, run.config, rules=rules_of(run.config)):
        for command in commands:
            if isinstance(command, StartTurn):
                turn = (command.trajectory_id, command.turn)
                count += begun.get(turn) == lent != command.engine_id
                begun[turn] = command.engine_id
    return count


@contextlib.contextmanager
def lent(
    tmp_path: Path, *options: str, tpot: tuple[str, ...] = ("--tpot-ms", "60000")
) -> Iterator[Loan]:
    """Start a run, and a serving engine with these options that it borrows."""
    model = save_model(tmp_path / "serving")
    nowhere = Cores(device=None, others=())
    watchdog = {"turn_s": TURN_S, "train_s": 600.0}
    (tmp_path / "runs").mkdir()
    with (
        BorrowingRun(tmp_path / "runs", watchdog=watchdog, rollout=ROLLOUT) as run,
        ServingEngine(
            model,
            tmp_path / "engine.log",
            nowhere,
            *("--lend", run.address, "--ttft-ms", "60000", *tpot, *options),
        ) as engine,
    ):
        yield Loan(run, engine)
        for pid in run.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture
def loan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loan]:
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET)
    with lent(tmp_path) as loan:
        yield loan


def kill(engine: ServingEngine) -> None:
    os.kill(engine.engine_pid, signal.SIGKILL)


def hang(engine: ServingEngine) -> None:
    os.kill(engine.engine_pid, signal.SIGSTOP)


def take_back(engine: ServingEngine) -> None:
    engine.process.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize("strike", [kill, hang, take_back])
def test_trajectories_of_a_lent_engine_continue_elsewhere(
    loan: Loan, strike: Callable[[ServingEngine], None]
) -> None:
    lent = loan.until_in_turn()
    users = Users(loan.engine)
    if strike is take_back:
        users.start()
    strike(loan.engine)
    loan.train_on()
    if strike is take_back:
        loan.until(lambda: not loan.lending(), "the return of the engine")
        users.end()
    summary = loan.run.ended()
    assert lost_trajectories(summary["account"]) == 0
    assert loan.run.unaccounted(summary["account"]) == 0
    assert continued(loan.run, lent)
    if strike is hang:
        with contextlib.suppress(ProcessLookupError):  # it is ended after a minute
            os.kill(loan.engine.engine_pid, signal.SIGCONT)


def test_a_run_borrows_one_of_two_engines_and_the_other_when_it_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run chooses among the engines that are lent (ROSE §4): as many as it may
    borrow at once, and never one that was taken back or has died.
    """
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET)
    model, nowhere = save_model(tmp_path / "serving"), Cores(device=None, others=())
    (tmp_path / "runs").mkdir()
    with contextlib.ExitStack() as stack:
        borrowing = BorrowingRun(tmp_path / "runs", loans=1, rollout=ROLLOUT)
        run = stack.enter_context(borrowing)
        limits = ("--lend", run.address, "--ttft-ms", "60000", "--tpot-ms", "60000")
        engines = [
            stack.enter_context(ServingEngine(model, tmp_path / name, nowhere, *limits))
            for name in ("a.log", "b.log")
        ]
        loans = [Loan(run, engine) for engine in engines]
        loans[0].until(lambda: any(loan.lending() for loan in loans), "a loan")
        first, second = loans if loans[0].lending() else loans[::-1]
        first.until_in_turn()
        assert not second.lending()
        users = Users(first.engine)
        users.start()
        take_back(first.engine)
        second.until(second.lending, "a loan of the other engine")
        second.until_in_turn()
        assert not first.lending()
        users.end()
        kill(second.engine)
        second.train_on()
        summary = run.ended()
    assert lost_trajectories(summary["account"]) == 0
    assert run.unaccounted(summary["account"]) == 0
    borrowed = [
        command.lender
        for _, _, commands in Replay(run.run.journal, run.config, rules=rules_of(run.config))
        for command in commands
        if isinstance(command, StartEngine) and command.lender
    ]
    assert len(borrowed) == len(set(borrowed)) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_users_see_nothing_of_a_run_that_dies_or_hangs(loan: Loan, number: signal.Signals) -> None:
    loan.until_in_turn()
    users = Users(loan.engine)
    users.start()
    os.kill(loan.run.pid, number)
    while loan.lending():
        assert users.is_alive()
    before = len(users.answers)
    while len(users.answers) < before + 3:
        assert users.is_alive()
    users.end()
    lending = loan.engine.stats()["lending"]
    assert (lending["lent"], lending["rollout_pages"]) == (False, 0)
    if number is signal.SIGSTOP:
        os.kill(loan.run.pid, signal.SIGKILL)
        os.kill(loan.run.pid, signal.SIGCONT)


@pytest.mark.parametrize("lends", ["prefill", "decode"])
def test_one_phase_of_a_pair_of_serving_engines_is_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lends: str
) -> None:
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET)
    prompt, nowhere = tuple(range(1, 66)), Cores(device=None, others=())
    model, log = tmp_path / "serving", tmp_path / "other.log"
    with contextlib.ExitStack() as stack:
        if lends == "prefill":
            loan = stack.enter_context(lent(tmp_path, "--prefill-only", tpot=()))
            shutil.copy(loan.engine.token_file, log.with_suffix(".token"))
            options = ("--prefill-at", loan.engine.url)
            users = stack.enter_context(ServingEngine(model, log, nowhere, *options))
        else:
            save_model(model)
            other = stack.enter_context(ServingEngine(model, log, nowhere, "--prefill-only"))
            shutil.copy(other.token_file, tmp_path / "engine.token")
            loan = stack.enter_context(lent(tmp_path, "--prefill-at", other.url))
            users = loan.engine
        loan.until_in_turn()
        before = users.stats()["cached_tokens"]
        answers = [users.complete((*prompt, end), output_tokens=TOKENS) for end in (1, 2, 1)]
        assert users.stats()["cached_tokens"] - before == 3 * 64
        assert answers[0] == answers[2]
        loan.train_on()
        lending = loan.engine.stats()["lending"]
        assert (lending["lent"], lending["stalls"]) == (True, 0)
        assert lending["rollout_tokens"]
        summary = loan.run.ended()
    assert lost_trajectories(summary["account"]) == 0
