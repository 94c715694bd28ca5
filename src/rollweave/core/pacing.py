"""The way engines and trajectories keep pace with the trainer.

In every mode but decoupled engines share one pace: all load the same version when the
mode allows it, and any engine can run any turn. In mode decoupled each engine updates
independently (`mechanisms/versions`). The other sub-machines ask `run.pacing` and
never which mode it is.
"""

from collections.abc import Iterator

from rollweave.core import evaluation, weights
from rollweave.core.policy.modes import acceptable, update_now
from rollweave.core.policy.redundancy import capacity
from rollweave.core.run import Pacing, Run
from rollweave.core.state import Engine, EngineStatus, Trajectory
from rollweave.schema.base import GroupId
from rollweave.schema.work import Purpose


class SharedPacing(Pacing):
    """All engines load the same version, when the mode allows it."""

    def admits(self, run: Run) -> bool:
        return acceptable(run.serving_origin(), run.next_version(), run.mode.window)

    def room(self, run: Run) -> int:
        """Return as many groups as the mode's window and the spare groups allow."""
        state, rollout = run.state, run.config.rollout
        assert run.mode.window is not None, "only mode decoupled has no window"
        room = capacity(
            window=run.mode.window,
            serving_version=run.serving_origin(),
            next_version=run.next_version(),
            open_version=run.open_version(),
            groups_per_step=rollout.groups_per_step,
            spare_groups=state.drawing.spare
            if rollout.spare_groups == "learned"
            else rollout.spare_groups,
            last_step=run.config.run.steps,
        )
        if room > 0:
            room -= run.taken_groups()
        return room - len(state.drawing.active) - len(state.buffer)

    def launch(self, run: Run, trajectory: Trajectory, purpose: Purpose) -> tuple[int, int] | None:
        return run.fleet.oldest

    def wanted_weights(self, run: Run, engine: Engine) -> int | None:
        return weights.newest(run, engine)

    def updates(self, run: Run) -> Iterator[tuple[Engine, int | None]]:
        """Yield engines that take no turns, because they are stale or lag behind the
        others, at once, and serving engines when the mode allows it.
        """
        state = run.state
        if not state.publication.retained:
            return  # nothing is published yet, or its holders are gone
        if run.fleet.publication_ids <= {state.publication.id}:
            return
        outdated = [
            engine
            for engine in state.engines.values()
            if engine.status in (EngineStatus.STALE, EngineStatus.SERVING)
            and not engine.draining
            and weights.newest(run, engine) not in (None, engine.publication_id)
        ]
        held = evaluation.holds_weights(run)
        may_update = not held and update_now(
            run.mode,
            batch_ready=len(state.buffer) >= run.config.rollout.groups_per_step
            or run.next_version() > state.trainer.step,  # it is in training
            in_flight=len(state.drawing.active),
            too_old=not run.admits_training(),
        )
        for engine in outdated:
            newest = weights.newest(run, engine)
            lags = run.fleet.oldest is not None and engine.version < run.fleet.oldest[0]
            takes_none = lags or engine.status is EngineStatus.STALE
            if may_update or (takes_none and not self.holds_back(run, newest)):
                yield engine, newest

    def holds_back(self, run: Run, publication_id: int | None) -> bool:
        if publication_id is None or not evaluation.holds_weights(run):
            return False
        state = run.state
        assert state.evaluations.current is not None, (
            "an evaluation that holds weights is under way"
        )
        version = state.publication.retained.get(
            publication_id, state.publication.checkpointed.get(publication_id)
        )
        return version != state.evaluations.current.version

    def choose_batch(self, run: Run, wanted: int) -> list[GroupId]:
        """Return the groups that were complete first."""
        return list(run.state.buffer)[:wanted]
