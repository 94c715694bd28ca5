"""A paced engine (`scheduling/paced_engine`) of bench `phases`: engine e0 takes as long
as an H800, and all other engines take as long as an H20.
"""

import os

from packages.sim.benchmarks.scheduling.paced_engine import StepPace, serve
from rollweave.engine.batching import StepWork
from rollweave.schema.serving import EngineSpec

COMPUTE, BANDWIDTH, MODEL = "h800", "h20", "qwen3-32b"
"""Modeled GPUs and model (RollArt §7.4)."""

PREFILL = "e0"
"""The engine that computes prompts where phases are apart."""

SLOWER = 3
"""Factor by which steps of bench `phases` take longer than those of the modeled engine:
computing the prompts of ours on two cores must take a small part of the modeled time.
"""


class SlowPace(StepPace):
    """The pace of an engine whose steps take `SLOWER` times as long."""

    def step_s(self, amounts: StepWork) -> float:
        return SLOWER * super().step_s(amounts)


def gpu_of(spec: EngineSpec) -> str:
    """Return the GPU of an engine."""
    return COMPUTE if spec.id == PREFILL else BANDWIDTH


if __name__ == "__main__":
    serve(lambda spec: SlowPace(gpu_of(spec), MODEL))
    os._exit(0)
