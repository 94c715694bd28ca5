"""Heddle's experiments: the same batch whatever the workers' size, and rows for what exists and what does not."""

import pytest

from rollweave.reproduce import heddle
from rollweave.reproduce.cluster import SlowStarts, rollouts
from rollweave.reproduce.heddle import GPUS, MEMBERS, MODELS, TASKS, rollout, setup_of


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("parts", [1, 8])
def test_a_part_of_the_cluster_has_its_part_of_the_batch(task: str, model: str, parts: int) -> None:
    setup = setup_of(task, model, tp=MODELS[model], parts=parts)
    workers = setup.rollout_gpus // setup.tp
    assert setup.rollout_gpus == GPUS // parts
    assert workers * 100 - MEMBERS < setup.batch <= workers * 100
    assert setup.batch % MEMBERS == 0


def test_the_batch_does_not_depend_on_the_size_of_workers() -> None:
    narrow, wide = (setup_of("math", "qwen3-14b", tp=tp, parts=8) for tp in (1, 8))
    assert (narrow.batch, narrow.rollout_gpus) == (wide.batch, wide.rollout_gpus)
    assert narrow.slots * narrow.rollout_gpus == wide.slots  # a slot for every trajectory


def test_throughput_is_of_sampled_tokens_on_the_whole_cluster() -> None:
    found = rollout("math", "qwen3-14b", tp=1, quick=True)
    setup = setup_of("math", "qwen3-14b", tp=1, parts=32)
    mean = found.tokens_per_s * found.seconds / GPUS * setup.rollout_gpus / setup.batch
    assert 500 < mean < 40_960  # tokens of a response


@pytest.mark.parametrize("experiment", heddle.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_what_exists_has_a_row_and_what_does_not_is_missing(experiment: heddle.Experiment) -> None:
    rows = experiment.run(True)
    assert all(row.experiment == experiment.name for row in rows)
    assert [row for row in rows if row.ours is not None]
    missing = [row for row in rows if row.ours is None]
    assert missing
    assert all(row.note.startswith("missing: ") for row in missing)


def test_a_rollout_does_not_depend_on_how_long_nothing_is_asked_of_the_engines() -> None:
    """The first weights do not reach all engines at once, and what comes before all have them would go to the first."""
    setup = setup_of("math", "qwen3-14b", tp=1, parts=32)
    (late,) = rollouts(setup, steps=1, vary=lambda work: SlowStarts(work, rate=1.0, seconds=90.0))
    assert rollout("math", "qwen3-14b", tp=1, quick=True).seconds == pytest.approx(late - 90.0, rel=0.01)
