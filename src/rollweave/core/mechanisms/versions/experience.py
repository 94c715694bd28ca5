"""The experience buffer: which groups a step trains on, and which groups have no place
(Laminar §3.1, §6; `core/policy/experience`).

A strategy may be a function of the user's: an error in it ends the run and names it.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from rollweave.core.mechanisms.versions import binding
from rollweave.core.policy.experience import Experience, evict, sample
from rollweave.core.run import Run
from rollweave.core.state import Group
from rollweave.schema.base import GroupId

FUNCTION_MARK = ":"
"""Part of every name of a user's function, `package.module:function`."""


def choose_batch(run: Run, wanted: int) -> list[GroupId]:
    """The groups of the next (mini-)batch: `wanted` groups, or none."""
    state, name = run.state, run.config.buffer.sample
    if name == "fifo":
        return list(state.buffer)[:wanted]
    trainer = state.trainer
    moment = f"{run.config.run.seed}/{trainer.epoch}/{trainer.step}/{trainer.parts_done}"
    draws = [_draw(f"{moment}/{number}") for number in range(wanted)]
    return _by(
        run,
        name,
        lambda rule: sample(
            _views(run), wanted, strategy=rule, version=run.next_version(), draws=draws
        ),
    )


def unmeasured(run: Run, wanted: int) -> list[GroupId]:
    """The groups whose ratios the next (mini-)batch waits for, if there is a choice and
    too few groups are measured to make it. A group that arrives while other groups are
    measured is left for the next step, so that a step is held up only once.
    """
    state = run.state
    if run.config.buffer.sample != "ratio" or len(state.buffer) <= wanted:
        return []
    left = [group_id for group_id in state.buffer if ratio(run, state.groups[group_id]) is None]
    return left if len(state.buffer) - len(left) < wanted else []


def ratio(run: Run, group: Group) -> float | None:
    """The ratio measured under the trainer's current weights; None if it was not
    measured.
    """
    return group.ratio if group.ratio_publication_id == run.state.publication.id else None


def surplus(run: Run) -> list[GroupId]:
    """The buffered groups beyond the limit of the buffer, which have no place."""
    if not run.state.buffer:
        return []
    most = binding.buffer_limit(run)
    if len(run.state.buffer) <= most:
        return []
    return evict(_views(run), version=run.next_version(), max_groups=most)


def _by(run: Run, name: str, choose: Callable[[Any], list[GroupId]]) -> list[GroupId]:
    if FUNCTION_MARK not in name:
        return choose(name)
    try:
        return choose(run.rules[name])
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        run.state.error = (
            run.state.error or f"buffer function {name} failed: {type(error).__name__}: {error}"
        )
        return []


def _draw(key: str) -> float:
    """A number in [0, 1) that follows from the key: the core has no source of
    randomness.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / (1 << 48)


def _views(run: Run) -> list[Experience]:
    state = run.state
    experiences = []
    for arrived, group_id in enumerate(state.buffer):
        group = state.groups[group_id]
        members = [state.trajectories[member] for member in group.chosen]
        experiences.append(
            Experience(
                id=group_id,
                arrived=arrived,
                initiated=min(member.initiated for member in members),
                rewards=tuple(member.reward or 0.0 for member in members),
                tokens=sum(member.tokens for member in members),
                ratio=ratio(run, group),
            )
        )
    return experiences
