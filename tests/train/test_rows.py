"""Rows contain the batch's data; divisions keep trajectories whole and loads even."""

import random

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema import work
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.train.rows import balance, batch_rows, minibatches, overlong_fraction, teacher_kl
from tests.support.properties import examples
from tests.support.trainers import make_batch, make_sequence, make_trajectory


def batch_of(*sequences: tuple[work.TokenSequence, ...], version: int = 0) -> work.Batch:
    trajectories = tuple(
        make_trajectory(f"t{i}", each, float(i)) for i, each in enumerate(sequences)
    )
    group = work.ScoredGroup(id=trajectories[0].group_id, env="none", trajectories=trajectories)
    return work.Batch(step=0, version=version, part=0, parts=1, groups=(group,))


def test_rows_hold_the_outputs_of_every_sequence() -> None:
    batch = make_batch(3)
    rows = batch_rows(batch, AlgorithmConfig())
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    assert [row.trajectory for row in rows] == list(range(len(trajectories)))
    for row, trajectory in zip(rows, trajectories, strict=True):
        (sequence,) = trajectory.sequences
        positions = [i for i, sampled in enumerate(sequence.output_mask()) if sampled]
        assert row.example.tokens.tolist() == list(sequence.tokens)
        assert row.example.targets.tolist() == positions
        assert torch.equal(row.behavior, torch.tensor([sequence.logprobs[i] for i in positions]))
        assert len(row.advantages) == row.outputs == len(positions)
        assert row.current.all()
        assert row.engine == trajectory.engine


def test_omits_sequences_without_output_and_unpredicted_first_tokens() -> None:
    silent = work.TokenSequence(
        tokens=(1, 2),
        segments=(work.Segment(start=0, end=2, kind=work.SegmentKind.PROMPT),),
        logprobs=(0.0, 0.0),
    )
    bare = work.TokenSequence(
        tokens=(5, 6),
        segments=(work.Segment(start=0, end=2, kind=work.SegmentKind.OUTPUT, version=0),),
        logprobs=(-1.0, -2.0),
    )
    rows = batch_rows(batch_of((silent, bare), (silent,), (bare,)), AlgorithmConfig())
    assert [row.trajectory for row in rows] == [0, 2]
    assert [row.example.targets.tolist() for row in rows] == [[1], [1]]
    assert [row.behavior.tolist() for row in rows] == [[-2.0], [-2.0]]


def test_in_a_turn_of_two_versions_only_the_newer_half_is_current() -> None:
    sequence = work.TokenSequence(
        tokens=(1, 2, 3, 4),
        segments=(
            work.Segment(start=0, end=1, kind=work.SegmentKind.PROMPT),
            work.Segment(start=1, end=3, kind=work.SegmentKind.OUTPUT, version=6),
            work.Segment(start=3, end=4, kind=work.SegmentKind.OUTPUT, version=7),
        ),
        logprobs=(0.0, -1.0, -1.0, -1.0),
    )
    rows = batch_rows(batch_of((sequence,), (sequence,), version=7), AlgorithmConfig())
    assert rows[0].current.tolist() == [False, False, True]
    assert rows[0].ages.tolist() == [1, 1, 0]


def test_tokens_of_discarded_weights_are_not_current_when_new_weights_have_their_number() -> None:
    """The trainer was at step 7, was restored to step 5, and is at step 7 again."""
    sequence = work.TokenSequence(
        tokens=(1, 2, 3),
        segments=(
            work.Segment(start=0, end=1, kind=work.SegmentKind.PROMPT),
            work.Segment(start=1, end=2, kind=work.SegmentKind.OUTPUT, version=5),
            work.Segment(start=2, end=3, kind=work.SegmentKind.OUTPUT, version=7),
        ),
        logprobs=(0.0, -1.0, -1.0),
    )
    batch = batch_of((sequence,), (sequence,), version=7)
    (group,) = batch.groups
    group = msgspec.structs.replace(group, restored_to={group.trajectories[0].id: 5})
    rows = batch_rows(msgspec.structs.replace(batch, groups=(group,)), AlgorithmConfig())
    assert [row.ages.tolist() for row in rows] == [[2, 4], [2, 0]]
    assert [row.current.tolist() for row in rows] == [[False, False], [False, True]]


def cut(batch: work.Batch, *indices: int) -> work.Batch:
    """Return the batch after `max_tokens` has cut these trajectories of its groups."""
    groups = [
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(each, stop_reason=work.StopReason.MAX_TOKENS)
                if index in indices
                else each
                for index, each in enumerate(group.trajectories)
            ),
        )
        for group in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=tuple(groups))


def test_drops_overlong_trajectories_but_not_from_the_baseline() -> None:
    batch = cut(make_batch(4, groups=2, size=3), 1)
    whole = batch_rows(batch, AlgorithmConfig())
    kept = batch_rows(batch, AlgorithmConfig(overlong="drop"))
    assert [row.trajectory for row in whole] == [0, 1, 2, 3, 4, 5]
    assert [row.trajectory for row in kept] == [0, 2, 3, 5]
    for row in kept:
        assert torch.equal(row.advantages, whole[row.trajectory].advantages)
    assert overlong_fraction(batch) == pytest.approx(1 / 3)
    assert batch_rows(cut(batch, 0, 1, 2), AlgorithmConfig(overlong="drop")) == []


def test_each_domain_has_its_own_algorithm() -> None:
    batch = make_batch(5, groups=4, size=3, envs=("none", "other"))
    everywhere = AlgorithmConfig(advantage="reinforce_pp")
    own = AlgorithmConfig(advantage="rloo", loss="cispo")
    rows = batch_rows(batch, everywhere, {"other": own})
    assert [row.algorithm for row in rows] == [everywhere] * 3 + [own] * 3 + [everywhere] * 3 + [
        own
    ] * 3

    def part(names: slice, algorithm: AlgorithmConfig) -> list[torch.Tensor]:
        groups = batch.groups[names]
        alone = msgspec.structs.replace(batch, groups=groups)
        return [row.advantages for row in batch_rows(alone, algorithm)]

    # the batch statistics of an estimator are those of its domains
    of_run, of_other = part(slice(0, None, 2), everywhere), part(slice(1, None, 2), own)
    expected = [*of_run[:3], *of_other[:3], *of_run[3:], *of_other[3:]]
    assert all(torch.equal(row.advantages, e) for row, e in zip(rows, expected, strict=True))


def test_the_budget_is_what_the_agent_may_sample() -> None:
    batch = make_batch(1)
    limits = batch.groups[0].trajectories[0].task.limits
    (budget,) = {row.budget for row in batch_rows(batch, AlgorithmConfig())}
    assert budget == min(limits.max_tokens, limits.max_turns * limits.max_turn_tokens) == 1024


@settings(max_examples=examples(80))
@given(count=st.integers(1, 12), parts=st.integers(1, 5), seed=st.integers(0, 99))
def test_minibatches_keep_trajectories_whole(count: int, parts: int, seed: int) -> None:
    rng = random.Random(seed)
    batch = batch_of(
        *(tuple(make_sequence(rng) for _ in range(rng.randint(1, 3))) for _ in range(count))
    )
    rows = batch_rows(batch, AlgorithmConfig())
    parts_made = minibatches(rows, parts=parts, seed="x")
    assert sorted(index for part in parts_made for index in part) == list(range(len(rows)))
    assert len(parts_made) == min(parts, count)
    homes = [{rows[index].trajectory for index in part} for part in parts_made]
    assert sum(len(bins_of_one) for bins_of_one in homes) == count
    assert parts_made == minibatches(rows, parts=parts, seed="x")


def test_another_seed_gives_another_split() -> None:
    rows = batch_rows(make_batch(0, size=8), AlgorithmConfig())
    splits = {str(minibatches(rows, parts=2, seed=str(seed))) for seed in range(8)}
    assert len(splits) > 1


@settings(max_examples=examples(100))
@given(sizes=st.lists(st.integers(1, 100), max_size=30), bins=st.integers(1, 6))
def test_balanced_bins_differ_by_one_item_at_most(sizes: list[int], bins: int) -> None:
    balanced = balance(sizes, bins)
    assert sorted(index for part in balanced for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in balanced]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_distance_from_a_teacher_is_that_of_the_tokens_it_has_seen() -> None:
    rng = random.Random(5)
    plain, seen = make_sequence(rng), make_sequence(rng)
    mask = seen.output_mask()
    teacher = tuple(-rng.uniform(0, 9) if sampled else 0.0 for sampled in mask)
    differences = [
        own - other
        for own, other, sampled in zip(seen.logprobs, teacher, mask, strict=True)
        if sampled
    ]
    taught = msgspec.structs.replace(seen, teacher=teacher)
    expected = sum(differences) / len(differences)
    assert teacher_kl(batch_of((plain,), (taught,))) == {"kl_teacher": pytest.approx(expected)}
    assert teacher_kl(batch_of((plain,))) == {}
