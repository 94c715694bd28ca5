"""Ways of sharing an engine, the extent of bench `coserve`, and its figures."""

from packages.sim.benchmarks.coserve import coming_and_going
from packages.sim.benchmarks.coserve.engine_program import PAGE_BYTES
from packages.sim.benchmarks.coserve.load import BURST
from packages.sim.benchmarks.coserve.serving_engine import KV_TOKENS
from rollweave.schema.base import Struct

WAYS = {
    "dual": (True, True),
    "without_admission": (False, False),
    "ttft_only": (True, False),
    "tpot_only": (False, True),
}
"""Way of sharing → whether the limit of the first token and that of a token are kept:
dual admission, and the ablations of ROSE's Fig. 9.
"""

OF_EACH_WAY = (
    "ttft_p99_over_alone",
    "tpot_p99_over_alone",
    "slo_violations",
    "rollout_tokens_per_s",
    "share_of_idle_harvested",
    "aborted_rollouts",
)
OF_DUAL = (
    "pages_moved_per_s",
    "activation_s",
    "burst_missed",
    "burst_missed_alone",
    "burst_missed_over_alone",
    "burst_seconds_over_alone",
    "burst_yield_ms",
    "burst_delay_ms",
    "burst_cuts",
    "burst_stalls",
    "burst_aborted",
)
COUNTED = ("cuts", "stalls", "aborted")
"""Counters of a lent engine that are read before and after a burst."""


def named(way: str, figure: str) -> str:
    """Return the name of a figure of a way of sharing."""
    if way == "dual":
        return figure
    if way == "without_admission" and figure == "slo_violations":
        return "slo_violations_without_admission"
    return f"{way}_{figure}"


class CoservePlan(Struct, frozen=True, kw_only=True):
    """Length of the bench: seconds of each load, the number of engines that have a
    burst while they are lent and one after the loan, the seconds of a burst and those
    after it, how often a lent engine is taken back, and the ways.
    """

    load_s: float
    bursts: int
    burst_s: float
    after_s: float
    returns: int
    ways: tuple[str, ...]


FULL = CoservePlan(load_s=120.0, bursts=6, burst_s=3.0, after_s=6.0, returns=5, ways=tuple(WAYS))
QUICK = CoservePlan(
    load_s=4.0, bursts=1, burst_s=0.5, after_s=2.0, returns=1, ways=("dual", "without_admission")
)

CONDITIONS = coming_and_going.CONDITIONS | {
    "ttft_p99_over_alone": "P99 of the time to the first token, seen by the load generator, by "
    "that of the engine alone under the same load; so tpot: mean time per further token",
    "slo_violations": "share of requests beyond a limit or unanswered; the limits are 1.2 times "
    "the P99 of the engine alone",
    "share_of_idle_harvested": "seconds of rollout steps by the seconds in which serving computed "
    "nothing. The run asks for no more than its trajectories need",
    "burst_yield_ms": f"from the beginning of a burst of {BURST} times the load until the last "
    "rollout step before a pause, the largest of all bursts; null if there was none",
    "burst_delay_ms": "for how long some request waited for a rollout step in a burst, the mean",
    "burst_missed": "requests of a burst beyond a limit, the mean; burst_missed_alone and "
    "burst_seconds_over_alone: against the same burst after the loan, beside the same run",
    "burst_cuts": "cuts of the rollouts' memory in all bursts; burst_stalls: times at which all "
    "rollouts had made no progress for 2 s; burst_aborted: turns that were given back to the run",
    "activation_s": "from the run's request until its model was ready in the engine",
    "pages_moved_per_s": f"pages of {PAGE_BYTES >> 10} KiB that changed hands under the load; the "
    f"KV cache has {KV_TOKENS} tokens, of which a burst takes most",
}
