"""What every live world is made of: pump, engines and rollout pipeline, wired together
under one task group.
"""

from collections.abc import Callable

from rollweave.core.core import Core
from rollweave.engine.clients.base import EngineBackend
from rollweave.record.journal import RunJournal
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import ENVIRONMENTS, Trace
from rollweave.rollout.driver import MakeEpisode
from rollweave.rollout.pipeline import Pipeline
from rollweave.runtime.clock import RunClock
from rollweave.runtime.effects import Draws, Effects, Listener, Predicts, Relays, Trains
from rollweave.runtime.manifests import Manifests
from rollweave.runtime.pump import Pump
from rollweave.runtime.supervisors.engines import Fleet
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot
from rollweave.schema.serving import LoadSaved

WAITING_PER_SLOT = 8
"""Rolled-out attempts remembered for each living environment: rewards queue at most
about that far behind.
"""


class LiveWorld:
    """A world begins with these; it makes its `_effects`, and has its own way to begin
    and to end.
    """

    _effects: Effects

    def __init__(
        self,
        config: RunConfig,
        *,
        core: Core,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        trace: Trace,
        make_engine: Callable[[EngineSlot, int], EngineBackend],
        make_episode: MakeEpisode,
        keep_partial_turns: bool = False,
        machines: int = 0,
        silence_s: float | None = None,
        saved: Callable[[int, int], LoadSaved] | None = None,
    ) -> None:
        """`keep_partial_turns` as in `rollout/pipeline.py`, `silence_s` and `saved` as in
        `runtime/supervisors/engines.py`.
        """
        self.core, self.clock, self.store = core, clock, store
        self._journal, self._trace = journal, trace
        self._tasks = Tasks()
        self._error: str | None = None
        self.pump = Pump(core, journal=journal, clock=clock.now, execute=self._execute)
        self.manifests = Manifests(machines)
        self.fleet = Fleet(
            make=make_engine,
            tasks=self._tasks,
            post=self.pump.post,
            clock=clock.now,
            trace=trace,
            manifests=self.manifests,
            silence_s=silence_s,
            saved=saved,
        )
        self.pipeline = Pipeline(
            make_episode=make_episode,
            engine=self.fleet.backend,
            store=store,
            post=self.pump.post,
            spawn=self._tasks.spawn,
            clock=clock.now,
            spans=_EpisodeSpans(trace),
            waiting_limit=WAITING_PER_SLOT * config.rollout.max_running,
            keep_partial_turns=keep_partial_turns,
        )

    def _make_effects(
        self, *, seat: Trains, relays: Relays, predictor: Predicts, draws: Draws, listener: Listener
    ) -> Effects:
        return Effects(
            pipeline=self.pipeline,
            fleet=self.fleet,
            seat=seat,
            relays=relays,
            predictor=predictor,
            draws=draws,
            listener=listener,
            tasks=self._tasks,
            post=self.pump.post,
            clock=self.clock.now,
            finish=self._finish,
        )

    def _execute(self, command: Command) -> None:
        self._effects.execute(command)

    def _finish(self, error: str) -> None:
        self._error = error
        self.pump.stop()


class _EpisodeSpans:
    """The pipeline's spans as rows of the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        self._trace.span(ENVIRONMENTS, lane, name, start, end, trajectory=lane)

    def episode_over(self, lane: str) -> None:
        self._trace.release(ENVIRONMENTS, lane)
