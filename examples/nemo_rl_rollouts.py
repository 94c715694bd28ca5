"""NeMo-RL on rollouts of a service: a function with the signature of its
`run_multi_turn_rollout`.

Written against NeMo-RL's source (`nemo_rl/experience/rollouts.py`, 2026), which needs
GPUs and is not on PyPI: it was not run. `message_log_of` and `rollout` are tested with
stand-ins. NeMo-RL has no hook for it, so replace the function before `grpo_train`:

    import nemo_rl.algorithms.grpo as grpo
    with Rollouts(["http://service:8300"]) as rollouts:
        grpo.run_multi_turn_rollout = RollweaveRollouts(rollouts)
        grpo.grpo_train(...)

Rows of the data set name their task: `extra_env_info = {"rollweave":
{"handler": "swe", "index": 7}}`, the fields of a `RolloutRequest`. Rows that NeMo-RL
repeated for a group become the members of one rollout. Register the vLLM servers of
NeMo-RL's generation as the service's engines, so that rollouts come from the weights
that it refits (`docs/ENGINES.md`).
"""

import json
import statistics
from itertools import groupby
from typing import Any

import msgspec
import torch

from rollweave import SegmentKind, StopReason, TokenSequence
from rollweave_service import MemberStatus, RolloutRequest, Rollouts

ROLES = {
    SegmentKind.PROMPT: "user",
    SegmentKind.OUTPUT: "assistant",
    SegmentKind.OBSERVATION: "environment",
}
"""NeMo-RL trains on the tokens of `assistant` messages alone."""


def message_log_of(sequence: TokenSequence) -> list[dict[str, Any]]:
    """Return NeMo-RL's message log: one message per segment with exactly its tokens,
    and `generation_logprobs` for sampled ones.

    Contents are empty: nothing is rendered to be tokenized again.
    """
    log = []
    for segment in sequence.segments:
        tokens = torch.tensor(sequence.tokens[segment.start : segment.end], dtype=torch.int64)
        message: dict[str, Any] = {"role": ROLES[segment.kind], "content": "", "token_ids": tokens}
        if segment.kind is SegmentKind.OUTPUT:
            logprobs = sequence.logprobs[segment.start : segment.end]
            message["generation_logprobs"] = torch.tensor(logprobs, dtype=torch.float32)
        log.append(message)
    return log


def rollout(
    rollouts: Rollouts, batch: Any, *, temperature: float | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the batch with `message_log`, `total_reward`, `truncated`, `length`; and
    metrics.

    A rollout that failed, or that is not one sequence, has `loss_multiplier` 0 and its
    group's mean reward: it is not trained on and does not change the baseline. Raises
    the errors of `Rollouts.run` and of `message_log_of`.
    """
    tasks = [json.dumps(info["rollweave"], sort_keys=True) for info in batch["extra_env_info"]]
    requests = []
    for text, equal in groupby(tasks):
        request = msgspec.json.decode(text, type=RolloutRequest)
        if temperature is not None:
            request = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, temperature=temperature)
            )
        requests.append(msgspec.structs.replace(request, id="", members=len(list(equal))))
    logs, rewards, truncated, valid = list[Any](), list[float](), list[bool](), list[bool]()
    for status in rollouts.run(requests):
        scored = [reward for reward in map(_reward, status.members) if reward is not None]
        stand_in = statistics.fmean(scored) if scored else 0.0
        for member in status.members:
            reward = _reward(member)
            logs.append(
                message_log_of(member.result.sequences[0])
                if member.result and reward is not None
                else None
            )
            rewards.append(stand_in if reward is None else reward)
            valid.append(reward is not None)
            truncated.append(member.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_TURNS))
    merged = batch.copy()
    merged["message_log"] = [
        log or before for log, before in zip(logs, batch["message_log"], strict=True)
    ]
    merged["length"] = torch.tensor(
        [sum(len(message["token_ids"]) for message in log) for log in merged["message_log"]]
    )
    merged["total_reward"] = torch.tensor(rewards, dtype=torch.float32)
    merged["truncated"] = torch.tensor(truncated)
    merged["loss_multiplier"] = batch["loss_multiplier"] * torch.tensor(valid, dtype=torch.float32)
    metrics = {
        "mean_total_reward": statistics.fmean(rewards),
        "failed_rollouts": valid.count(False),
    }
    return merged, metrics


def _reward(member: MemberStatus) -> float | None:
    """Return None for a rollout that cannot be trained on here."""
    if member.result is None or len(member.result.sequences) != 1:
        return None
    return member.result.reward


class RollweaveRollouts:
    """Replaces `nemo_rl.algorithms.grpo.run_multi_turn_rollout`."""

    def __init__(self, rollouts: Rollouts, *, temperature: float | None = None) -> None:
        """`temperature` is that of `policy.generation`, by which NeMo-RL divides the
        logits in training.
        """
        self._rollouts, self._temperature = rollouts, temperature

    def __call__(
        self,
        policy_generation: Any,
        input_batch: Any,
        tokenizer: Any,
        task_to_env: Any,
        max_seq_len: int,
        max_rollout_turns: int = 999999,
        greedy: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Roll out the batch. NeMo-RL's generation and environments are not used: the
        service has both, and its handler's limits.
        """
        del policy_generation, tokenizer, task_to_env, max_seq_len, max_rollout_turns
        return rollout(
            self._rollouts, input_batch, temperature=0.0 if greedy else self._temperature
        )
