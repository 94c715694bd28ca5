"""verl on rollouts of a service: an agent loop that requests a rollout instead of
driving one.

Written against the source of verl 0.9.1 (`verl.experimental.agent_loop`), which needs
GPUs: it was not run with verl. It is tested with a stand-in for verl's base class. To
use it:

1. `agent.yaml`, named by `actor_rollout_ref.rollout.agent.agent_loop_config_path`:

       - name: rollweave
         _target_: verl_agent_loop.RollweaveAgentLoop
         addresses: [http://service:8300]
         handler: swe

2. `actor_rollout_ref.rollout.agent.default_agent_loop=rollweave`, and
   `rollout.calculate_log_probs=True`.
3. Register verl's own servers as the service's engines, so that rollouts come from the
   weights that verl syncs: `LLMServerManager.get_addresses()` returns them, and
   `register` below registers them (`rollweave serve --registered`).
4. The data set's `extra_info` names the task of a row: `{"index": 7}`, or `{"payload":
   {...}, "seed": 7}`.

verl requests every attempt separately and waits for all of a step: DAPO's batches
(`docs/TRAINERS.md`) are for loops that request batches.
"""

import asyncio
import secrets
from typing import Any

from rollweave import Decoding, RollweaveError, Trajectory
from rollweave.io.http.fields import refused_field
from rollweave_service import EngineRequest, RolloutClient, RolloutRequest
from rollweave_service.adapters.rows import row_of

try:
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopMetrics,
        AgentLoopOutput,
    )
except ImportError:  # to read and to test the conversion without verl
    AgentLoopBase = object
    AgentLoopMetrics = AgentLoopOutput = dict

TRIES = 3
"""Maximum attempts at a rollout that fails because of the infrastructure: verl has no
sample without a reward.
"""


def fields_of(
    trajectory: Trajectory, *, prompt_length: int, response_length: int
) -> dict[str, Any]:
    """Return the fields of verl's `AgentLoopOutput`, without `metrics`. Observations
    have mask 0 and log-prob 0.

    Raises ValueError for a trajectory that is not one sequence with a reward, or whose
    prompt is too long: verl would cut off its beginning, and would then train on a
    sequence that was not sampled.
    """
    if trajectory.reward is None or len(trajectory.sequences) != 1:
        raise ValueError(
            "trajectory must be one sequence with a reward, got "
            f"{len(trajectory.sequences)}, {trajectory.reward}"
        )
    (sequence,) = trajectory.sequences
    row = row_of(sequence)
    if row is None:
        raise ValueError(f"trajectory must have sampled tokens, got none in {trajectory.id}")
    if len(row.prompt) > prompt_length:
        raise ValueError(
            f"prompt must be at most rollout.prompt_length ({prompt_length}) tokens, "
            f"got {len(row.prompt)}"
        )
    oldest, newest = sequence.versions()
    return {
        "prompt_ids": row.prompt,
        "response_ids": row.completion[:response_length],
        "response_mask": row.mask[:response_length],
        "response_logprobs": row.logprobs[:response_length],
        "reward_score": trajectory.reward,
        "num_turns": 2 * max(1, len(sequence.turns)),
        "extra_fields": {
            "turn_scores": [turn.reward for turn in sequence.turns],
            "tool_rewards": [],
            "min_global_steps": oldest,
            "max_global_steps": newest,
        },
    }


def request_of(
    handler: str, extra_info: dict[str, Any], sampling_params: dict[str, Any]
) -> RolloutRequest:
    """Return the request for the service. verl's top_k of -1 is our 0: all tokens.

    Raises ValueError for parameters that the service does not support.
    """
    honored = ("temperature", "top_p", "top_k", "logprobs")  # log-probs are always returned
    others = {name: value for name, value in sampling_params.items() if name not in honored}
    refused = refused_field(others)
    if refused is not None:
        name, rule = refused
        raise ValueError(f"sampling_params.{name} {rule}, got {others[name]!r:.100}")
    decoding = Decoding(
        temperature=float(sampling_params["temperature"]),
        top_p=float(sampling_params["top_p"]),
        top_k=max(0, int(sampling_params["top_k"])),
    )
    task = {name: extra_info[name] for name in ("index", "payload", "seed") if name in extra_info}
    if "index" in task:
        task["index"] = int(task["index"])  # of numpy
    return RolloutRequest(
        handler=handler, id=f"verl-{secrets.token_hex(8)}", sampling=decoding, **task
    )


async def register(service: str, servers: list[str]) -> None:
    """Register verl's servers at the service: vLLM with token ids."""
    async with RolloutClient(service) as client:
        for server in servers:
            await client.register(EngineRequest(address=f"http://{server}", dialect="completions"))


class RollweaveAgentLoop(AgentLoopBase):
    """Request one attempt at one task from the service.

    Each worker has one client, so that load is distributed.
    """

    clients: dict[tuple[Any, ...], RolloutClient] = {}  # noqa: RUF012 (shared on purpose: verl creates a loop for each sample)

    def __init__(self, *args: Any, addresses: list[str], handler: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._addresses, self._handler = tuple(addresses), handler

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return verl's `AgentLoopOutput`.

        Raises RollweaveError if the rollout fails repeatedly.
        """
        client = await self._client()
        for _ in range(TRIES):
            status = await client.rollout(
                request_of(self._handler, kwargs["extra_info"], sampling_params)
            )
            result = status.members[0].result
            if result is not None and result.reward is not None:
                fields = fields_of(
                    result,
                    prompt_length=self.rollout_config.prompt_length,
                    response_length=self.rollout_config.response_length,
                )
                timing = result.timing
                metrics = AgentLoopMetrics(
                    generate_sequences=timing.generate_s, tool_calls=timing.env_s
                )
                return AgentLoopOutput(metrics=metrics, **fields)
        raise RollweaveError(
            f"a rollout failed {TRIES} times; last: "
            f"{result.error if result is not None else 'it never began'}"
        )

    async def _client(self) -> RolloutClient:
        key = (self._addresses, id(asyncio.get_running_loop()))
        if key not in self.clients:
            self.clients[key] = await RolloutClient(list(self._addresses)).__aenter__()
        return self.clients[key]
