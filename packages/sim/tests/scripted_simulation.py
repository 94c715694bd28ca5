"""A world in which trajectories follow a table's plans, and which writes a run's
journal and configuration.
"""

from pathlib import Path

from rollweave.record.journal import RunJournal
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Purpose, StopReason
from rollweave_sim.workload import Plan, TurnPlan
from tests.support.random_world import World

MANY = (
    TurnPlan(output_tokens=40, observation_tokens=7, env_s=0.5),
    TurnPlan(output_tokens=3, observation_tokens=2, env_s=1.25),
)
KINDS: list[tuple[StopReason, str]] = [
    (StopReason.FINISHED, ""),
    (StopReason.MAX_TURNS, ""),
    (StopReason.MAX_TOKENS, ""),
    (StopReason.ENV_ERROR, "init"),
    (StopReason.ENV_HANG, "run"),
    (StopReason.REWARD_ERROR, "eval"),
    (StopReason.REWARD_HANG, "eval"),
]


class Table:
    """Plans of every kind, each recognizable by its numbers."""

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        number = index * 31 + member * 7 + attempt * 3
        stop, fails_in = KINDS[number % 11] if number % 11 < len(KINDS) else KINDS[0]
        bad, unborn = fails_in != "", fails_in == "init"
        return Plan(
            prompt_tokens=0 if unborn else 100 + number,
            init_s=0.25 * (1 + number % 5),
            turns=() if unborn else (MANY * 2)[: 1 + number % 4],
            reward_s=0.0 if fails_in in ("init", "run") else 0.125 * (1 + member),
            reward=0.0 if bad else float(number % 3 - 1),
            success=not bad and number % 3 == 2,
            stop=stop,
            fails_in=fails_in,  # type: ignore[arg-type]
        )


class Scripted(World):
    """A world in which trajectories follow a workload's plans, and which writes the
    journal of a run.
    """

    def __init__(self, config: RunConfig, path: Path, *, compact_at: int | None = None) -> None:
        super().__init__(config, seed=3)
        self.doing: dict[tuple[str, int], Plan] = {}
        self.starts: dict[tuple[str, int], c.StartInit] = {}
        self.over: list[tuple[str, int]] = []
        self.cancelled: set[tuple[str, int]] = set()
        self.compact_at = compact_at
        path.mkdir()
        (path / "config.toml").write_text(dumps(config))
        self.log = RunJournal(path / "journal.bin")

    def feed(self, event: e.Event) -> None:
        super().feed(event)
        self.log.append(self.now, event, self.commands[len(self.journal) - 1])
        if self.handled == self.compact_at:
            self.log.rotate(self.core.snapshot())
            self.starts.clear()
        if isinstance(event, e.TrajectoryEnded | e.RewardReady | e.RewardFailed):
            key = (event.trajectory_id, event.attempt)
            failing = self.doing[key].fails_in in ("init", "run")
            if failing == isinstance(event, e.TrajectoryEnded) and key not in self.cancelled:
                self.over.append(key)

    def execute(self, command: c.Command) -> None:
        match command:
            case c.StartInit():
                key = (command.trajectory_id, command.attempt)
                self.launched(command)
                self.starts[key] = command
                plan = self.doing[key] = Table().plan(
                    index=int(command.group_id[1:]),
                    member=command.member,
                    attempt=command.attempt,
                    seed=0,
                )
                ended = e.TrajectoryEnded(
                    trajectory_id=key[0], attempt=key[1], stop_reason=plan.stop
                )
                self.later(
                    ended
                    if plan.fails_in == "init"
                    else e.EnvReady(trajectory_id=key[0], attempt=key[1]),
                    plan.init_s,
                )
            case c.StartRun():
                self.turns_of[command.trajectory_id, command.attempt] = 0
                self.ask((command.trajectory_id, command.attempt), 0.0)
            case c.StartTurn():
                key = (command.trajectory_id, command.attempt)
                turn = self.doing[key].turns[command.turn]
                self.later(
                    e.TurnDone(
                        trajectory_id=key[0],
                        attempt=key[1],
                        turn=command.turn,
                        dispatch=command.dispatch,
                        output_tokens=turn.output_tokens,
                        cached_tokens=0,
                        version=self.engine_version[command.engine_id],
                    ),
                    2.0,
                )
                self.turns_of[key] = command.turn + 1
                self.ask(key, 2.0 + turn.env_s)
            case c.StartEval():
                key = (command.trajectory_id, command.attempt)
                plan = self.doing[key]
                if plan.fails_in:
                    scored: e.Event = e.RewardFailed(
                        trajectory_id=key[0], attempt=key[1], stop_reason=plan.stop, error=""
                    )
                else:
                    success = plan.success if plan.success != (plan.reward > 0) else None
                    scored = e.RewardReady(
                        trajectory_id=key[0], attempt=key[1], reward=plan.reward, success=success
                    )
                self.later(scored, plan.reward_s)
            case _:
                if isinstance(command, c.CancelTrajectory):
                    self.cancelled.add((command.trajectory_id, command.attempt))
                super().execute(command)

    def ask(self, key: tuple[str, int], delay: float) -> None:
        """Request the next turn, or end the trajectory."""
        plan, turn = self.doing[key], self.turns_of[key]
        before = plan.turns[:turn]
        tokens = plan.prompt_tokens + sum(
            turn.output_tokens + turn.observation_tokens for turn in before
        )
        if turn < len(plan.turns):
            event: e.Event = e.TurnRequested(
                trajectory_id=key[0], attempt=key[1], turn=turn, context_tokens=tokens
            )
        else:
            stop = StopReason.FINISHED if plan.fails_in == "eval" else plan.stop
            event = e.TrajectoryEnded(
                trajectory_id=key[0], attempt=key[1], stop_reason=stop, turns=turn, tokens=tokens
            )
        self.later(event, delay)

    def expected(self, name: str | None = None) -> list[list[list[Plan]]]:
        """Return the plans of the training attempts that ended by themselves, by group,
        member and attempt, in the order of launch.
        """
        groups: dict[str, dict[int, list[Plan]]] = {}
        for key, start in self.starts.items():
            if (
                start.purpose is Purpose.TRAIN
                and key in self.over
                and name in (None, self.core_names[start.group_id])
            ):
                groups.setdefault(start.group_id, {}).setdefault(start.member, []).append(
                    self.doing[key]
                )
        return [[members[member] for member in sorted(members)] for members in groups.values()]

    @property
    def core_names(self) -> dict[str, str]:
        return {
            event.group_id: event.task.env
            for _, event in self.journal
            if isinstance(event, e.GroupSubmitted)
        }
