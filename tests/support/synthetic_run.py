"""A small run directory, written by the real writers, of a fictitious run: for reports
and traces.
"""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollweave.core.reading.status import Account
from rollweave.core.state import Evaluations, State
from rollweave.record.rundir import RunDir
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.record.summary import Summary, write_summary
from rollweave.record.trace import ENGINES, ENVIRONMENTS, TRAINER, Trace
from rollweave.runtime.metrics import Metrics, Silent
from rollweave.schema import work
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.commands import GroupRef, MarkBest, RecordEvaluation, TrainStep, Warn
from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import EngineStats
from rollweave.schema.training import TrainMetrics
from rollweave.train.scratch import build_tokenizer

CONFIG = """
[run]
name = "made-up"
steps = 40
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
[[tasks]]
env = "calculator"
[eval]
every = 10
"""
WORDS = (" at=a1", " up=wall", "<down>", "<right>")
STEP_S = 1.2
GROUPS, SIZE = 4, 4


def config_of(path: Path) -> RunConfig:
    return loads(CONFIG, [f"run.name={path.name}", f'run.dir="{path.parent}"'])


def write_run(
    path: Path, *, steps: int = 40, error: str = "", finished: bool = True, cut: bool = False
) -> RunDir:
    """Write a run of `steps` steps into `path`, an empty or absent directory.

    With `cut`, first turns end at their limit.
    """
    path.mkdir(parents=True, exist_ok=True)
    run = RunDir(path)
    run.config.write_text(dumps(config_of(path)))
    run.lock.touch()
    run.model.mkdir()
    build_tokenizer(WORDS).save(str(run.model / "tokenizer.json"))
    _Writer(run, steps, error, finished, cut).write()
    return run


class _Writer:
    def __init__(self, run: RunDir, steps: int, error: str, finished: bool, cut: bool) -> None:
        self._run, self._steps, self._error, self._finished = run, steps, error, finished
        self._first = "length" if cut else "stop"
        defining = dict.fromkeys(("frozenlake", "calculator"))
        self._state, self._now, self._rng = (
            State(evaluations=Evaluations(defines_success=defining)),
            0.0,
            random.Random(7),
        )
        self._ids = build_tokenizer(WORDS)

    def write(self) -> None:
        run = self._run
        metrics = Metrics(
            run.metrics, clock=lambda: self._now, state=lambda: self._state, progress=Silent()
        )
        trace = Trace(run.trace)
        metrics.event("started", inproc=False, engines=2)
        trace.span(TRAINER, "trainer", "start", 0.0, 2.0, epoch=0)
        self._now = 2.0
        with TrajectoryStore(run.trajectories) as store:
            for step in range(self._steps):
                self._step(step, metrics, trace, store)
                if (step + 1) % 10 == 0:
                    metrics.evaluated(self._evaluation(step + 1, final=False))
                    metrics.best(MarkBest(step=step + 1))
            metrics.warned(Warn(component="engine e1", message="lost; restarted as epoch 1"))
        if self._finished:
            self._now += 3.0
            metrics.evaluated(self._evaluation(self._steps, final=True))
            write_summary(run.summary, self._summary())
        metrics.close()
        trace.close()

    def _step(self, step: int, metrics: Metrics, trace: Trace, store: TrajectoryStore) -> None:
        began, self._now = self._now, self._now + STEP_S
        groups = []
        for index, env in enumerate(("frozenlake", "frozenlake", "calculator", "calculator")):
            members = tuple(self._trajectory(step, index, member, env) for member in range(SIZE))
            for member, trajectory in enumerate(members):
                slot = f"{trajectory.id}/0"
                self._spans(trace, slot, began + self._rng.uniform(0, 0.3))
                store.append(
                    Ended(
                        at=self._now,
                        purpose=work.Purpose.TRAIN,
                        member=member,
                        trajectory=_unscored(trajectory),
                    )
                )
                store.score(_score(trajectory, self._now))
            groups.append(work.ScoredGroup(id=members[0].group_id, env=env, trajectories=members))
        trace.span(
            TRAINER, "trainer", f"train {step}.0", self._now - 0.6, self._now - 0.1, groups=GROUPS
        )
        trace.span(TRAINER, "trainer", f"publish v{step + 1}", self._now - 0.1, self._now - 0.05)
        for engine in ("e0", "e1"):
            trace.span(ENGINES, engine, f"load v{step + 1}", self._now - 0.05, self._now)
        self._count()
        refs = tuple(
            GroupRef(
                id=group.id,
                name=group.env,
                trajectory_ids=tuple(member.id for member in group.trajectories),
            )
            for group in groups
        )
        stats = EngineStats(
            version=step,
            running=5,
            waiting=2,
            kv_used_tokens=400,
            kv_total_tokens=4096,
            busy_s=self._now,
        )
        metrics.sampled({EngineId("e0"): stats, EngineId("e1"): stats})
        metrics.trained(
            TrainStep(step=step, part=0, parts=1, groups=refs),
            work.Batch(step=step, version=step, part=0, parts=1, groups=tuple(groups)),
            TrainMetrics(values=self._values(step), tokens=900, train_s=0.5),
        )

    def _spans(self, trace: Trace, slot: str, at: float) -> None:
        begin = at
        for name, seconds in (
            ("init", 0.05),
            ("turn 0 e0", 0.2),
            ("step 0", 0.02),
            ("turn 1 e1", 0.25),
            ("eval", 0.05),
        ):
            end = begin + seconds * self._rng.lognormvariate(0, 0.5)
            trace.span(ENVIRONMENTS, slot, name, begin, end, trajectory=slot)
            begin = end
        trace.release(ENVIRONMENTS, slot)

    def _trajectory(self, step: int, index: int, member: int, env: str) -> work.Trajectory:
        good = self._rng.random() < self._skill(step, env)
        name = f"g{step * GROUPS + index}"
        return work.Trajectory(
            id=TrajectoryId(f"{name}.{member}"),
            group_id=GroupId(name),
            task=work.Task(id=TaskId(f"{env}-{step}"), env=env, seed=step, tag=env),
            attempt=0,
            initiated_version=max(0, step - (1 if self._rng.random() < 0.6 else 0)),
            sequences=(self._sequence(step),),
            reward=1.0 if good else 0.0,
            stop_reason=work.StopReason.FINISHED if good else work.StopReason.MAX_TURNS,
            blame=work.BLAME_OF[work.StopReason.FINISHED if good else work.StopReason.MAX_TURNS],
            engine="e0",
            success=good,
            timing=work.Timing(
                init_s=0.05, run_s=0.5, eval_s=0.05, queue_s=0.1, generate_s=0.45, env_s=0.05
            ),
        )

    def _sequence(self, step: int) -> work.TokenSequence:
        """Return a prompt, a turn that a weight update splits, an observation and a
        last turn.
        """
        prompt, turn = self._tokens(" at=a1 up=wall"), self._tokens("go<down>")
        seen, last = self._tokens(" at=a1"), self._tokens("<right>")
        ends = []
        for part in (prompt, turn[:1], turn[1:], seen, last):
            ends.append((ends[-1] if ends else 0) + len(part))
        kinds = (
            work.SegmentKind.PROMPT,
            work.SegmentKind.OUTPUT,
            work.SegmentKind.OUTPUT,
            work.SegmentKind.OBSERVATION,
            work.SegmentKind.OUTPUT,
        )
        versions = (-1, max(0, step - 1), step, -1, step)
        segments = tuple(
            work.Segment(start=start, end=end, kind=kind, version=version)
            for start, end, kind, version in zip([0, *ends], ends, kinds, versions, strict=False)
        )
        messages = [
            kind is work.SegmentKind.OUTPUT
            for kind, a, b in zip(kinds, [0, *ends], ends, strict=False)
            for _ in range(b - a)
        ]
        return work.TokenSequence(
            tokens=(*prompt, *turn, *seen, *last),
            segments=segments,
            logprobs=tuple(-0.5 if output else 0.0 for output in messages),
            turns=(
                work.TurnSpan(start=ends[0], end=ends[2], reward=0.25, finish_reason=self._first),
                work.TurnSpan(start=ends[3], end=ends[4], reward=0.75),
            ),
        )

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._ids.encode(text, add_special_tokens=False).ids
        return ids

    def _skill(self, step: int, env: str) -> float:
        pace = 8.0 if env == "frozenlake" else 14.0
        return 0.95 / (1 + math.exp(-(step - pace) / 4))

    def _values(self, step: int) -> dict[str, float]:
        return {
            "loss": 0.1 * math.exp(-step / 15) + self._rng.gauss(0, 0.01),
            "kl_rollout": 0.004 + self._rng.random() * 0.002,
            "entropy": 1.4 * math.exp(-step / 20),
            "clip_fraction": 0.02 + 0.01 * self._rng.random(),
            "ess": 0.97,
            "grad_norm": 0.6 + 0.2 * self._rng.random(),
            "logprob_gap_mean": 3e-7 * self._rng.random(),
        }

    def _count(self) -> None:
        counters, idle = self._state.counters, self._state.idle
        counters.started += GROUPS * SIZE + 1
        counters.trained += GROUPS * SIZE
        counters.cancelled += 1
        counters.turns += 2 * GROUPS * SIZE
        counters.output_tokens += 3 * GROUPS * SIZE
        for reason, count in (("finished", 12), ("max_turns", 4), ("cancelled", 1)):
            counters.stop_reasons[reason] = counters.stop_reasons.get(reason, 0) + count
        for causes, added in (
            (
                idle.engines,
                {
                    "busy": 1.5,
                    "environment": 0.5,
                    "window": 0.2 + 0.1 * self._rng.random(),
                    "weights": 0.1,
                },
            ),
            (idle.trainer, {"busy": 0.5, "batch": 0.6, "publishing": 0.1}),
        ):
            for cause, seconds in added.items():
                causes[cause] = causes.get(cause, 0.0) + seconds

    def _evaluation(self, step: int, *, final: bool) -> RecordEvaluation:
        success = {env: round(self._skill(step, env), 3) for env in ("frozenlake", "calculator")}
        episodes = dict.fromkeys(success, 200 if final else 64)
        return RecordEvaluation(
            version=step,
            final=final,
            success=success,
            reward=success,
            episodes=episodes,
            distinct=episodes,
            failed={"calculator": 1},
        )

    def _summary(self) -> Summary:
        counters, evaluation = self._state.counters, self._evaluation(self._steps, final=True)
        account = Account(
            started=counters.started,
            trained=counters.trained,
            dropped={},
            cancelled=counters.cancelled,
            buffered=0,
            in_flight=0,
        )
        fields: dict[str, Any] = {
            "success_rate": dict(evaluation.success),
            "mean_reward": dict(evaluation.reward),
            "eval_episodes": dict(evaluation.episodes),
            "steps": self._steps,
            "trajectories": counters.started,
            "tokens": counters.output_tokens,
            "wall_s": self._now,
            "staleness_max": 1,
            "inherent_staleness": {"0": counters.started},
            "stop_reasons": dict(counters.stop_reasons),
            "account": account,
            "best_step": self._steps // 10 * 10,
            "retried": {"engine_failure": 2},
            "watchdog": {"engine_restarted": 1},
            "idle": _idle(self._state),
            "error": self._error,
        }
        return Summary(**fields)


def _idle(state: State) -> dict[str, Mapping[str, float]]:
    return {"engines": dict(state.idle.engines), "trainer": dict(state.idle.trainer)}


def _unscored(trajectory: work.Trajectory) -> work.Trajectory:
    import msgspec

    return msgspec.structs.replace(trajectory, reward=None)


def _score(trajectory: work.Trajectory, at: float) -> Scored:
    return Scored(
        at=at,
        trajectory_id=trajectory.id,
        attempt=trajectory.attempt,
        reward=trajectory.reward,
        success=trajectory.success,
        stop_reason=trajectory.stop_reason,
        blame=trajectory.blame,
        eval_s=0.05,
    )
