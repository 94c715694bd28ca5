"""Ways in which a serving model and a rollout model share a simulated engine, and what
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


class Sharing(Struct, frozen=True, kw_only=True):
    """A way in which the two models share a serving engine.

    Rollouts compute if serving then still meets the limits on `ttft` and `tpot`; with
    `turns`, the two take turns step by step instead, and with `factor`, the one
    computes whose next token is due first, rollouts by a limit that many times as long.
    Without `shrinks`, rollouts have a fixed half of the memory. With `reloads`, the
    engine holds one of the models at a time, and loads the other one to compute it.
    """

    ttft: bool = True
    tpot: bool = True
    turns: bool = False
    factor: float = 0.0
    prefix_cache: bool = True
    shrinks: bool = True
    reloads: bool = False


SHARING = {
    "cooperative": Sharing(),
    "ttft": Sharing(tpot=False),
    "tpot": Sharing(ttft=False),
    "spatial": Sharing(turns=True),
    "preemption": Sharing(turns=True, prefix_cache=False),
    "partition": Sharing(turns=True, prefix_cache=False, shrinks=False),
    "multiplexing": Sharing(factor=4.0, prefix_cache=False),
    "autoscaling": Sharing(shrinks=False, reloads=True),
}
"""The ways of `ablation.sharing`: ROSE's, its admission by one limit, the stages of its
Table 2, Prism's, and autoscaling in both directions (§6.1).
"""


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
