"""Adapters for TRL 1.16: `rollout_func` of its GRPOTrainer, rollout worker and weight
transfer of its AsyncGRPOTrainer.

Invariants: ids and log-probs reach TRL as they were sampled; tokens that the agent did
not sample are masked out of the loss (`env_mask`, `completion_mask`); a rollout that
failed has no reward, so TRL excludes it from the group's baseline, and no token in the
loss.
"""

import queue
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import TrainerCallback

from rollweave.io.http.fields import NEUTRAL, refused_field
from rollweave.schema.errors import RollweaveError
from rollweave.schema.work import Decoding
from rollweave_service.adapters.dapo import DapoGroup, DapoRollouts
from rollweave_service.adapters.engine import TrainedEngine
from rollweave_service.adapters.rows import Row, row_of
from rollweave_service.client import Rollouts
from rollweave_service.messages import MemberStatus, RolloutRequest

EPSILON = 1e-8
"""Added to a group's standard deviation."""

PUT_S = 0.2
"""Seconds between two checks whether the worker has to stop, while its queue is
full.
"""


# `GRPOTrainer(rollout_func=TrlRollouts(rollouts), reward_funcs=rollout_reward,
# train_dataset=Dataset.from_list(rows(…)))`.


def rows(requests: Iterable[RolloutRequest]) -> list[dict[str, str]]:
    """Return the rows of a dataset whose prompts are requests, for `TrlRollouts`: TRL
    passes nothing but prompts to `rollout_func`.
    """
    return [{"prompt": msgspec.json.encode(request).decode()} for request in requests]


def parse_prompt(prompt: str) -> RolloutRequest:
    """Return the request that `rows` encoded as a prompt.

    Raises ValueError for any other prompt.
    """
    try:
        return msgspec.json.decode(prompt, type=RolloutRequest)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"prompt must be a rollout request as JSON, got {prompt!r:.100}: {error}"
        ) from error


def rollout_reward(rollout_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the environments' rewards: a reward function for TRL."""
    return list(rollout_reward)


class TrlRollouts:
    """A `rollout_func`. Equal prompts in a row, as TRL repeats them for a group, become
    members of one rollout.

    Temperature, top-p and top-k are the trainer's, unless the request sets its own.
    """

    def __init__(
        self, rollouts: Rollouts, *, request_of: Callable[[Any], RolloutRequest] = parse_prompt
    ) -> None:
        """`request_of` maps a prompt of the dataset to a rollout request."""
        self._rollouts, self._request_of = rollouts, request_of

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one completion for each prompt, in order, with `env_mask`.
        `rollout_reward` and `stop_reason` are passed to the reward functions.

        Raises the errors of `Rollouts.run`, and ValueError if a context was rewritten,
        because a completion is one sequence, or if the trainer's configuration requires
        sampling that the service does not support.
        """
        requests = []
        for prompt, equal in groupby(prompts):
            request = self._request_of(prompt)
            decoding = decoding_of(trainer, request.sampling)
            requests.append(
                msgspec.structs.replace(request, id="", members=len(list(equal)), sampling=decoding)
            )
        members = [member for status in self._rollouts.run(requests) for member in status.members]
        completions = [_completion(member) for member in members]
        return {
            "prompt_ids": [row.prompt for row in completions],
            "completion_ids": [row.completion for row in completions],
            "logprobs": [row.logprobs for row in completions],
            "env_mask": [row.mask for row in completions],
            "rollout_reward": [
                member.result.reward if member.result is not None else None for member in members
            ],
            "stop_reason": [member.stop_reason for member in members],
        }


def decoding_of(trainer: Any, requested: Decoding) -> Decoding:
    """Complete the request's sampling from the GRPOTrainer's configuration. Raises
    ValueError for settings that the service does not support.
    """
    args = getattr(trainer, "args", None)
    others: dict[str, Any] = {
        "min_p": getattr(trainer, "min_p", None),
        "repetition_penalty": getattr(trainer, "repetition_penalty", None),
    }
    others["generation_kwargs"] = getattr(args, "generation_kwargs", None)
    refused = refused_field(others, neutral={**NEUTRAL, "generation_kwargs": ({},)})
    if refused is not None:
        name, rule = refused
        raise ValueError(f"GRPOConfig.{name} {rule}, got {others[name]!r:.100}")
    defaults: dict[str, Any] = {
        "temperature": float(trainer.temperature),
        "top_p": getattr(trainer, "top_p", None),
    }
    top_k = getattr(trainer, "top_k", None)
    defaults["top_k"] = None if top_k is None else max(0, top_k)
    return msgspec.structs.replace(
        requested,
        **{name: value for name, value in defaults.items() if getattr(requested, name) is None},
    )


def _completion(member: MemberStatus) -> Row:
    sequences = member.result.sequences if member.result is not None else ()
    if len(sequences) > 1:
        raise ValueError(
            f"a rollout must be one sequence for rollout_func, got {len(sequences)} of "
            f"{member.id}: its context was rewritten; AsyncGRPOTrainer with RolloutWorker accepts "
            "any number"
        )
    row = row_of(sequences[0]) if sequences else None
    if row is None:
        # nothing was sampled, but TRL requires a token
        return Row(prompt=[0], completion=[0], mask=[0], logprobs=[0.0])
    if member.result is None or member.result.reward is None:
        return replace(row, mask=[0] * len(row.mask))
    return row


class SyncWeights(TrainerCallback):
    """Loads the policy into `engine` after every optimizer step of a GRPOTrainer, as
    version `global_step`. It supports trainers of one process.
    """

    def __init__(self, engine: TrainedEngine) -> None:
        self._engine = engine

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        self._engine.update(kwargs["model"].named_parameters(), version=state.global_step)


# `AsyncGRPOTrainer(rollout_worker=RolloutWorker(...),
# weight_transfer=WeightTransfer(engine))`.


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol` by asynchronous DAPO: informative groups, as soon
    as they are complete (`dapo.py`).

    Samples carry the version with which their group started, so that TRL can drop
    stale ones.
    """

    def __init__(self, batches: Callable[[], DapoRollouts], *, samples: int) -> None:
        """`batches` opens a source for each training.

        At most `samples` samples, and one batch after them, wait for the trainer.
        """
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=samples)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._open = batches
        self._source: DapoRollouts | None = None
        self._version, self._groups = 0, 0
        self._stopping = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._error = None
        self._source = self._open().__enter__()
        self._thread = threading.Thread(
            target=self._work, args=(self._source,), name="rollout-worker", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End all rollouts. Further calls have no effect."""
        source, self._source = self._source, None
        if source is None:
            return
        self._stopping.set()
        try:
            source.close()
        finally:
            self._thread.join()
            source.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker, if any.

        `stale_after_s` is ignored, because rollouts have time limits.
        """
        del stale_after_s
        if self._error is not None:
            raise RollweaveError(f"the rollout worker ended: {self._error}") from self._error

    def _work(self, source: DapoRollouts) -> None:
        try:
            while not self._stopping.is_set():
                for group in source.next(version=self._version).groups:
                    for sample in self._samples(group):
                        self._put(sample)
        except Exception as error:
            if not self._stopping.is_set():
                self._error = error

    def _put(self, sample: Any) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=PUT_S)
                return
            except queue.Full:
                continue

    def _samples(self, group: DapoGroup) -> Iterator[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        number, self._groups = self._groups, self._groups + 1
        mean, deviation = statistics.fmean(group.rewards), statistics.pstdev(group.rewards)
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            metrics = {"reward": reward, "reward_std": deviation}
            for sequence in trajectory.sequences:
                row = row_of(sequence)
                if row is None:
                    continue
                before = len(row.prompt)
                yield RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.asarray(row.prompt + row.completion, dtype=np.int64),
                    completion_mask=np.asarray([0] * before + row.mask, dtype=np.int64),
                    old_log_probs=np.asarray([0.0] * before + row.logprobs, dtype=np.float32),
                    advantage=(reward - mean) / (deviation + EPSILON),
                    model_version=group.version,
                    group_id=number,
                    metrics=dict(metrics),
                )


class WeightTransfer:
    """TRL's `WeightTransferProtocol` into a `TrainedEngine`.

    TRL counts versions from 1, the first transfer.
    """

    def __init__(self, engine: TrainedEngine) -> None:
        self._engine, self._version = engine, 0

    def init_weight_transfer(self) -> None:
        """Do nothing: the engine already runs."""

    def pause(self) -> None:
        """Do nothing: the engine swaps weights between two steps."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._version += 1
        self._engine.update(iterator, version=self._version)

    def resume(self) -> None:
        """Do nothing: the engine was not paused."""

    def destroy(self) -> None:
        """Do nothing: the engine belongs to the caller."""
