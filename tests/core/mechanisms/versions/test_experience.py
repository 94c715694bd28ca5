"""The buffer's strategies are asked for what is missing, when it is missing."""

import hashlib

from rollweave.core.mechanisms.versions import experience
from rollweave.core.run import Run
from rollweave.core.state import Group, GroupStatus, Stage, Trajectory
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.work import Purpose
from tests.support.hand import Hand, decoupled_config


def buffered(*groups: tuple[int, float], sample: str = "newest") -> Run:
    """A run whose buffer has groups of two members, given by the oldest version that
    they started on and the measured ratio.
    """
    run_config = decoupled_config(buffer={"sample": sample, "groups": 2})
    run = Hand(run_config).core._run
    state = run.state
    for number, (initiated, ratio) in enumerate(groups):
        group = Group(
            id=GroupId(f"b{number}"),
            name="a",
            index=number,
            purpose=Purpose.TRAIN,
            since=0.0,
            status=GroupStatus.BUFFERED,
            ratio=ratio,
            ratio_publication_id=state.publication.id,
        )
        for member, reward in enumerate((None, 1.0, 0.5)):
            trajectory = Trajectory(
                id=TrajectoryId(f"{group.id}.{member}"),
                group_id=group.id,
                member=member,
                stage=Stage.SCORED,
                initiated=initiated + member,
                reward=reward,
                tokens=10 * (number + 1),
            )
            state.trajectories[trajectory.id] = trajectory
            group.members.append(trajectory.id)
            if member < 2:
                group.chosen.append(trajectory.id)
        state.groups[group.id] = group
        state.buffer[group.id] = None
    return run


def test_a_group_is_seen_by_its_chosen_members() -> None:
    run = buffered((3, 0.5), (1, 2.0))
    views = experience._views(run)
    assert [(one.id, one.arrived, one.initiated) for one in views] == [("b0", 0, 3), ("b1", 1, 1)]
    assert [(one.rewards, one.tokens, one.ratio) for one in views] == [
        ((0.0, 1.0), 20, 0.5),
        ((0.0, 1.0), 40, 2.0),
    ]


def test_a_ratio_counts_under_the_weights_of_its_measurement() -> None:
    run = buffered((0, 0.5))
    (group,) = [run.state.groups[group_id] for group_id in run.state.buffer]
    assert experience.ratio(run, group) == 0.5
    run.state.publication.id += 1
    assert experience.ratio(run, group) is None


def test_a_batch_is_chosen_by_the_strategy_or_by_arrival() -> None:
    run = buffered((0, 1.0), (1, 1.0), (2, 1.0))
    assert experience.choose_batch(run, 2) == ["b2", "b1"]
    assert experience.choose_batch(run, 4) == []
    run = buffered((0, 1.0), (1, 1.0), (2, 1.0), sample="fifo")
    assert experience.choose_batch(run, 2) == ["b0", "b1"]


def test_ratios_are_waited_for_only_while_there_is_a_choice() -> None:
    def waited_for(*groups: tuple[int, float | None], wanted: int, sample: str = "ratio") -> list:
        return experience.unmeasured(buffered(*groups, sample=sample), wanted)  # type: ignore[arg-type]

    known, unknown = (0, 1.0), (0, None)
    assert waited_for(known, unknown, unknown, wanted=2) == ["b1", "b2"]
    assert waited_for(known, known, unknown, wanted=2) == [], "enough are measured"
    assert waited_for(known, unknown, wanted=2) == [], "all are taken"
    assert waited_for(known, unknown, unknown, wanted=2, sample="newest") == []


def test_groups_beyond_the_limit_have_no_place() -> None:
    run = buffered((0, 1.0), (1, 1.0))
    assert experience.surplus(run) == []
    most = run.config.buffer.groups + run.config.rollout.max_running
    run = buffered(*[(number, 1.0) for number in range(most)])
    assert experience.surplus(run) == []
    run = buffered(*[(most - number, 1.0) for number in range(most + 2)])
    run.state.trainer.step = most
    assert experience.surplus(run) == [f"b{most + 1}", f"b{most}"], "the stalest go first"


def test_a_draw_follows_from_its_key_and_is_uniform() -> None:
    draws = [experience._draw(f"1/{number}") for number in range(2000)]
    assert draws == [experience._draw(f"1/{number}") for number in range(2000)]
    assert all(0 <= draw < 1 for draw in draws)
    for below in (0.1, 0.5, 0.9):
        assert abs(sum(draw < below for draw in draws) / len(draws) - below) < 0.05
    digest = hashlib.sha256(b"1/0").hexdigest()
    assert draws[0] == int(digest[:12], 16) / 2**48
