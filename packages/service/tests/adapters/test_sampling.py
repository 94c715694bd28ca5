"""Rollouts use the sampling settings of TRL's trainers, or the adapter refuses them;
their results have the form that these trainers take.
"""

import itertools
import sys
import threading
from types import SimpleNamespace
from typing import Any, Self, cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from packages.service.tests.results import done, result
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import Decoding, SegmentKind, TokenSequence, Trajectory
from rollweave_service.adapters import trl
from rollweave_service.adapters.dapo import DapoBatch, DapoError, DapoGroup
from rollweave_service.messages import RolloutRequest, RolloutStatus
from tests.support.sequences import sequence


def trainer(**more: Any) -> SimpleNamespace:
    """Return the attributes of TRL's GRPOTrainer with its default settings."""
    args = SimpleNamespace(generation_kwargs=more.pop("generation_kwargs", None))
    return SimpleNamespace(
        **{
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "args": args,
            **more,
        }
    )


def test_uses_the_trainers_sampling_unless_the_request_sets_its_own() -> None:
    assert trl.decoding_of(trainer(), Decoding()) == Decoding(temperature=1.0, top_p=1.0, top_k=0)
    trainer_ = trainer(temperature=0.7, top_p=0.9, top_k=-1, generation_kwargs={})
    assert trl.decoding_of(trainer_, Decoding(seed=3)) == Decoding(
        temperature=0.7, top_p=0.9, top_k=0, seed=3
    )
    named = Decoding(temperature=0.1, top_p=0.2, top_k=3)
    assert trl.decoding_of(trainer_, named) == named


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 0.1), ("repetition_penalty", 1.1), ("generation_kwargs", {"typical_p": 0.9})],
)
def test_refuses_unsupported_sampling(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"GRPOConfig\.{field} must be .*, got "):
        trl.decoding_of(trainer(**{field: value}), Decoding())


PROMPT, OUTPUT = SegmentKind.PROMPT, SegmentKind.OUTPUT
SAMPLED = sequence([(PROMPT, 2), (OUTPUT, 1), (SegmentKind.OBSERVATION, 1), (OUTPUT, 1)])
ROW = {"prompt_ids": [100, 101], "completion_ids": [102, 103, 104], "logprobs": [-3.0, 0.0, -5.0]}
NOTHING = {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0]}


def attempt(reward: float | None, *sequences: TokenSequence) -> Trajectory:
    return result(reward=reward, sequences=sequences)


def test_equal_prompts_in_a_row_are_members_of_one_rollout() -> None:
    ran: list[RolloutRequest] = []

    def run(requests: list[RolloutRequest]) -> list[RolloutStatus]:
        ran.extend(requests)
        results = [attempt(0.5, SAMPLED), attempt(None, SAMPLED), attempt(0.0), None]
        return [
            RolloutStatus(id="", handler="game", state="done", members=tuple(map(done, part)))
            for part in (results[:2], results[2:3], results[3:])
        ]

    first, second = (RolloutRequest(handler="game", index=i, id="own") for i in range(2))
    prompts = [row["prompt"] for row in trl.rows([first, first, second, first])]
    answer = trl.TrlRollouts(cast(Any, SimpleNamespace(run=run)))(prompts, trainer(temperature=0.5))
    assert [(one.id, one.index, one.members) for one in ran] == [("", 0, 2), ("", 1, 1), ("", 0, 1)]
    assert {one.sampling.temperature for one in ran} == {0.5}
    expected = [ROW | {"env_mask": [1, 0, 1]}, ROW | {"env_mask": [0, 0, 0]}, NOTHING, NOTHING]
    for name in NOTHING:
        assert answer[name] == [row[name] for row in expected]
    rewards = [0.5, None, 0.0, None]
    assert (
        trl.rollout_reward(answer["rollout_reward"], other=1) == answer["rollout_reward"] == rewards
    )
    assert answer["stop_reason"] == ["finished"] * 3 + [None]
    with pytest.raises(ValueError, match=r"one sequence for rollout_func, got 2 of r1\.0"):
        trl._completion(done(attempt(0.5, SAMPLED, SAMPLED)))
    with pytest.raises(ValueError, match="prompt must be a rollout request as JSON, got 'x'"):
        trl.parse_prompt("x")


class Source:
    """Batches of groups for a worker; then none until it is closed."""

    def __init__(self, *groups: DapoGroup) -> None:
        self.batches = [DapoBatch(version=0, groups=groups)] if groups else []
        self.versions, self.closed = list[int](), threading.Event()
        self.worker: trl.RolloutWorker | None = None
        self.left = False

    def __enter__(self) -> Self:
        return self

    def next(self, *, version: int) -> DapoBatch:
        self.versions.append(version)
        if self.batches:
            return self.batches.pop()
        self.closed.wait()
        raise DapoError("closed")

    def close(self) -> None:
        self.closed.set()

    def __exit__(self, *_: object) -> None:
        assert self.worker is not None
        self.left = not self.worker._thread.is_alive()


def test_a_worker_passes_on_samples_of_groups_and_ends_while_its_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "trl.experimental.async_grpo.async_rollout_worker"
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        known = SimpleNamespace(RolloutSample=lambda **fields: fields)
        monkeypatch.setitem(sys.modules, part, cast(Any, known))
    group = DapoGroup(
        request=RolloutRequest(handler="game", index=0),
        version=7,
        trajectories=(attempt(1.0, SAMPLED, sequence([(PROMPT, 1)])), attempt(0.0, *[SAMPLED] * 2)),
    )
    source = Source(group, replace(group, version=8))
    worker = trl.RolloutWorker(lambda: cast(Any, source), samples=1)
    source.worker = worker
    worker.update_model_version(5)
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
    worker.check_health(1.0)
    worker.stop()
    worker.stop()
    assert (source.left, source.versions) == (True, [5])
    expected = [*[(0, 7)] * 3, (1, 8)]
    assert [(sample["group_id"], sample["model_version"]) for sample in samples] == expected
    assert [sample["advantage"] for sample in samples] == pytest.approx([1.0, -1.0, -1.0, 1.0])
    for sample in samples:
        assert sample["metrics"] == {"reward": sample["advantage"] > 0, "reward_std": 0.5}
        assert (sample["prompt"], sample["completion"]) == ([], [])
        assert sample["input_ids"].tolist() == [100, 101, 102, 103, 104]
        assert sample["completion_mask"].tolist() == [0, 0, 1, 0, 1]
        assert sample["old_log_probs"].tolist() == [0.0, 0.0, -3.0, 0.0, -5.0]


def test_a_worker_reports_what_ended_it_until_it_starts_again() -> None:
    source = Source()
    worker = trl.RolloutWorker(lambda: cast(Any, source), samples=1)
    source.worker = worker
    source.close()
    worker.start()
    worker._thread.join()
    with pytest.raises(RollweaveError, match="the rollout worker ended: closed"):
        worker.check_health(1.0)
    worker.stop()
    source.closed.clear()
    worker.start()
    worker.check_health(1.0)
    worker.stop()
    worker.check_health(1.0)


def test_an_engine_gets_weights_under_the_trainers_versions() -> None:
    engine = Mock()
    transfer = trl.WeightTransfer(engine)
    for version in (1, 2):
        transfer.send_weights(iter([]))
        assert engine.update.call_args.kwargs == {"version": version}
    model = Mock()
    trl.SyncWeights(engine).on_step_end(None, Mock(global_step=9), None, model=model)
    engine.update.assert_called_with(model.named_parameters(), version=9)
