"""Memory of a simulated engine that a serving model and a rollout model share, and what
the serving model knows of itself (ROSE §4.1, §6.1).
"""

from rollweave.core.policy.admission import Curve, Profile
from rollweave.schema.base import Struct
from rollweave.sim.cost import EngineCosts

PROFILED_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192)
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Prompts and batches whose steps are profiled."""

PROFILED_CONTEXT = 1200
"""Tokens of each context in the profile: about those of a request half answered."""


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes of an engine: all, those for KV beside the weights of both models, and of a
    token of each.
    """

    total: float
    kv: float
    serving_token: float
    rollout_token: float


def profiled(cost: EngineCosts) -> Profile:
    """Return what a serving model would measure of itself before it lends."""
    prompts = Curve(
        tuple(
            (
                tokens,
                cost.step_s(
                    prefill_tokens=tokens,
                    prefill_context=tokens * (tokens + 1) // 2,
                    decode=0,
                    decode_context=0,
                ),
            )
            for tokens in PROFILED_TOKENS
        )
    )
    decode = Curve(
        tuple(
            (batch, cost.decode_s(decode=batch, decode_context=batch * PROFILED_CONTEXT, steps=1))
            for batch in PROFILED_BATCHES
        )
    )
    return Profile(mono=prompts, chunked=prompts, decode=decode)
