"""Trajectories of Heddle's tasks, drawn from the simulator's families, and their costs
on its GPUs.
"""

import functools
from collections.abc import Sequence

from packages.papers.benchmarks.placement.whole_lists import simulated_s
from rollweave.core.mechanisms.costs.interference import CostTable, tabulate
from rollweave.schema.base import Struct
from rollweave.schema.events import StepTime
from rollweave_sim.cost import EngineCost
from rollweave_sim.hardware import MODELS, gpu
from rollweave_sim.workload import workload

MODEL, GPU = "qwen3-14b", "h100"
"""Model and GPU. Heddle §7: 8B, 14B and 32B on NVIDIA Hopper; the middle one."""

DEGREES = (1, 2, 4, 8)
"""Degrees to choose from: the powers of two of a machine."""

DOMAINS = ("coding", "search", "math")
MEMBERS = 16
"""Samples of a prompt (Heddle §7)."""

MAX_SLOTS = 1024
"""Maximum sequences that an engine decodes at once, where its memory permits more
(vLLM's maximum default).
"""


class Workload(Struct, frozen=True, kw_only=True):
    """Trajectories of one task: lengths in sampled tokens, and their costs on engines
    of each degree.
    """

    lengths: list[float]
    profile: dict[int, tuple[StepTime, ...]]
    slots: dict[int, int]

    def table(self) -> CostTable:
        return tabulate(
            self.profile,
            lengths=self.lengths,
            slots=self.slots,
            largest=len(self.lengths),
        )

    def simulated(self, degrees: Sequence[int], groups: Sequence[Sequence[float]]) -> float:
        return simulated_s(
            zip(degrees, groups, strict=True), profile=self.profile, slots=self.slots
        )


@functools.cache
def draw_workload(domain: str, count: int) -> Workload:
    """Draw `count` trajectories of a family.

    Every sequence of a batch is assumed to have the mean context of a sampled token.
    """
    family = workload(domain)
    plans = [
        family.plan(index=index // MEMBERS, member=index % MEMBERS, attempt=0, seed=0)
        for index in range(count)
    ]
    lengths = [float(sum(turn.output_tokens for turn in plan.turns)) for plan in plans]
    held = sum(
        length
        * (
            plan.prompt_tokens
            + sum(turn.output_tokens + turn.observation_tokens for turn in plan.turns) / 2
        )
        for length, plan in zip(lengths, plans, strict=True)
    )
    context = round(held / sum(lengths))
    engines = {d: EngineCost(gpu=gpu(GPU), model=MODELS[MODEL], tp=d) for d in DEGREES}
    slots = {d: min(MAX_SLOTS, engine.kv_tokens // context) for d, engine in engines.items()}
    return Workload(
        lengths=lengths,
        slots=slots,
        profile={
            d: tuple(_step(engine, batch, context) for batch in _batches(slots[d]))
            for d, engine in engines.items()
        },
    )


def _batches(largest: int) -> list[int]:
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


def _step(engine: EngineCost, batch: int, context: int) -> StepTime:
    seconds = engine.step_s(
        prefill_tokens=0, prefill_context=0, decode=batch, decode_context=batch * context
    )
    return StepTime(batch=batch, seconds=seconds)
