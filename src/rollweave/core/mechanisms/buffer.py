"""The strategy by which a step chooses among the groups of the experience buffer
(Laminar §3.1, §6; `core/policy/experience`). It may be a function of the user's, and an
error in it ends the run and names it.

In mode decoupled the buffer often holds more than a batch, in modes bounded and partial
only with `rollout.alpha` of at least 2. There, no group becomes too old by the choice.
"""

import hashlib
from typing import Any

from rollweave.core.pacing import SharedPacing
from rollweave.core.policy.experience import Experience, due_now, is_measured, sample
from rollweave.core.policy.modes import staleness
from rollweave.core.run import Mechanism, Run
from rollweave.schema.base import GroupId
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Measures


def used(config: RunConfig) -> bool:
    """True if engines share one pace, and steps choose otherwise than by arrival."""
    decoupled = config.rollout.mode is ModeName.DECOUPLED
    return config.chooses_groups and config.buffer.sample != "fifo" and not decoupled


class ChoosingPacing(SharedPacing):
    """All engines load the same version, and a step chooses its groups."""

    def choose_batch(self, run: Run, wanted: int) -> list[GroupId]:
        """The groups that the strategy chooses, after those that must be taken now."""
        chosen, version, window = choose(run, wanted), run.next_version(), run.mode.window or 0
        left = {one.id: window - staleness(one.initiated, version) for one in views(run)}
        due = due_now(left, chosen, per_step=run.config.rollout.groups_per_step)
        return list(dict.fromkeys([*due, *chosen]))[:wanted] if chosen else []

    def unmeasured(self, run: Run, wanted: int) -> list[GroupId]:
        return unmeasured(run, wanted)


def views(run: Run) -> list[Experience]:
    """Return the groups of the buffer, in order of arrival."""
    state = run.state
    experiences = []
    for arrived, group_id in enumerate(state.buffer):
        group = state.groups[group_id]
        members = [state.trajectories[member] for member in group.chosen]
        experiences.append(
            Experience(
                id=group_id,
                arrived=arrived,
                initiated=min(member.origin for member in members),
                rewards=tuple(member.reward or 0.0 for member in members),
                tokens=sum(member.tokens for member in members),
                measures=group.measures or Measures(),
            )
        )
    return experiences


def choose(run: Run, wanted: int) -> list[GroupId]:
    """Return `wanted` groups for the next (mini-)batch, or no groups."""
    state, name = run.state, run.config.buffer.sample
    if name == "fifo":
        return list(state.buffer)[:wanted]
    trainer = state.trainer
    moment = f"{run.config.run.seed}/{trainer.epoch}/{trainer.step}/{trainer.parts_done}"
    draws = [_draw(f"{moment}/{number}") for number in range(wanted)]
    rule: Any = run.rules.get(name, name)
    version = run.next_version()
    try:
        return sample(views(run), wanted, strategy=rule, version=version, draws=draws)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if name not in run.rules:
            raise
        state.error = (
            state.error or f"buffer function {name} failed: {type(error).__name__}: {error}"
        )
        return []


def unmeasured(run: Run, wanted: int) -> list[GroupId]:
    """Return the groups that are measured before the next (mini-)batch, if there is a
    choice by what is measured and too few groups are measured to make it. Groups that
    arrive meanwhile wait, so that a step is held up only once.
    """
    state, name = run.state, run.config.buffer.sample
    if len(state.buffer) <= wanted or not is_measured(run.rules.get(name, name)):
        return []
    left = [group_id for group_id in state.buffer if state.groups[group_id].measures is None]
    return left if len(state.buffer) - len(left) < wanted else []


def _draw(key: str) -> float:
    """A number in [0, 1) that follows from the key: the core draws none."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / (1 << 48)


MECHANISM = Mechanism(name="buffer", used=used, pacing=ChoosingPacing())
