"""verl on rollouts of a service: an agent loop that asks for a rollout in place of
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
   weights that verl syncs: `LLMServerManager.get_addresses()` gives them, `register`
   below tells the service (`serve.engines = "registered"`).
4. The data set's `extra_info` says which task a row is: `{"index": 7}`, or `{"payload":
   {...}, "seed": 7}`.

verl asks for every attempt on its own and waits for all of a step: DAPO's batches
(`docs/TRAINERS.md`) are for loops that ask themselves.
"""

import asyncio
import secrets
from typing import Any

from rollweave import (
    Decoding,
    EngineRequest,
    RolloutClient,
    RolloutRequest,
    RollweaveError,
    Trajectory,
    refused_field,
    row_of,
)

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
"""Of a rollout whose failure was nobody's fault but the infrastructure's: verl has no
sample without a reward.
"""


def fields_of(
    trajectory: Trajectory, *, prompt_length: int, response_length: int
) -> dict[str, Any]:
    """The fields of verl's `AgentLoopOutput`, without `metrics`. Observations have mask
    0, and log-prob 0.

    Raises ValueError for a trajectory that is not one sequence with a reward, or whose
    prompt is too long: verl would cut its left away, so that what is trained on is not
    what was sampled.
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
    """What the service is asked for. verl's top_k of -1 is our 0: all tokens.

    Raises ValueError for what it does not do.
    """
    honored = ("temperature", "top_p", "top_k", "logprobs")  # log-probs always come along
    others = {name: value for name, value in sampling_params.items() if name not in honored}
    found = refused_field(others)
    if found is not None:
        name, rule = found
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
    """Tell the service of verl's servers: vLLM with token ids."""
    async with RolloutClient(service) as client:
        for server in servers:
            await client.register(EngineRequest(address=f"http://{server}", dialect="completions"))


class RollweaveAgentLoop(AgentLoopBase):
    """One attempt at one task, at the service.

    The client is one for each worker, so that load is spread.
    """

    clients: dict[tuple[Any, ...], RolloutClient] = {}  # noqa: RUF012 (shared on purpose: verl makes a loop for each sample)

    def __init__(self, *args: Any, addresses: list[str], handler: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._addresses, self._handler = tuple(addresses), handler

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """verl's `AgentLoopOutput`.

        Raises RollweaveError where the rollout fails again and again.
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
