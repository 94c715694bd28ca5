"""Laminar's experiments on weight transfer (§4, §8.3, App. C): closed forms over
published links, without a run.

The chain, its chunks and its repair are those of our relays (`core/policy/relay`).
"""

from rollweave.core.policy.relay import broadcast_s, chunk_bytes, chunk_count
from rollweave.sim.cost import LINK_EFFICIENCY
from rollweave.sim.hardware import GPUS_PER_MACHINE, link
from rollweave.sim.models import model
from rollweave.sim.papers.laminar_runs import MEMBERS, PROMPTS, UPDATES, Sliced
from rollweave.sim.papers.rows import Row
from rollweave.sim.workload import workload

RELAYS = 127
"""Relays beside the master, on 1,024 GPUs (Laminar Fig. 19)."""

GPUS = 512
"""GPUs for training, and as many for rollouts, at the largest scale of Fig. 14."""

SAMPLE = 64
"""Groups of the workload whose lengths give a training step's tokens."""

REPAIR_MESSAGES = 2
"""Messages from the decision to repair a chain to the first bytes: to the successor,
and from it to its new source.
"""


def machine_bytes_per_s() -> float:
    """Return the bytes per second between two machines with all adapters of each
    (Laminar §8: 8 x 400 Gb/s).
    """
    return GPUS_PER_MACHINE * link("rdma").bytes_per_s * LINK_EFFICIENCY


def chunks_s(size: int, nodes: int, chunks: int) -> float:
    """Return the seconds of `size` bytes along a chain of machines, in that many chunks
    (App. C, eq. 1).
    """
    start_s, byte_s = link("rdma").latency_s, 1 / machine_bytes_per_s()
    return broadcast_s(size, nodes=nodes, chunks=chunks, start_s=start_s, byte_s=byte_s)


def chain_s(size: int, nodes: int) -> float:
    """Return the chain's seconds with the chunk size of our relays."""
    start_s, byte_s = link("rdma").latency_s, 1 / machine_bytes_per_s()
    chunk = chunk_bytes(size, nodes=nodes, start_s=start_s, byte_s=byte_s)
    return chunks_s(size, nodes, -(-size // chunk))


def best_chain_s(size: int, nodes: int) -> float:
    """Return the chain's seconds with the optimal number of chunks (App. C.3)."""
    start_s, byte_s = link("rdma").latency_s, 1 / machine_bytes_per_s()
    return chunks_s(size, nodes, chunk_count(size, nodes=nodes, start_s=start_s, byte_s=byte_s))


def repair_s(size: int, nodes: int) -> float:
    """Return the seconds from the decision until the successor has a chunk that the
    lost relay had not forwarded (§4.3).
    """
    start_s, byte_s = link("rdma").latency_s, 1 / machine_bytes_per_s()
    return (
        REPAIR_MESSAGES * start_s
        + start_s
        + byte_s * chunk_bytes(size, nodes=nodes, start_s=start_s, byte_s=byte_s)
    )


def mean_wait_s(*, local_s: float, spread_s: float, period_s: float) -> float:
    """Return the mean wait of an engine that requests the newest version at any time
    between two versions, `period_s` apart.

    For the first `spread_s` the version is still on its way to the engine's machine: a
    request then waits for the rest, on average half of it. Then the engine loads it
    from the machine's memory, `local_s`.
    """
    waiting_s = min(spread_s, period_s)
    return local_s + waiting_s / period_s * (spread_s - waiting_s / 2)


def fig19(quick: bool) -> list[Row]:
    """Reproduce the chain broadcast between relays."""
    del quick
    name, size = "laminar-fig19", model("qwen2.5-72b").weight_bytes
    all_s = chain_s(size, RELAYS + 1)
    formula = "closed form (App. C, eq. 1), 32 MiB chunks, eight 400 Gb/s adapters at 80 %"
    return [
        Row(
            experiment=name,
            row=f"72B to {RELAYS} relays",
            published=(0.0, 1.6),
            ours=all_s,
            unit="s",
            note=f"{formula}; published as less than 1.6 s",
        ),
        Row(
            experiment=name,
            row=f"{RELAYS} relays over one relay",
            published=None,
            ours=all_s / chain_s(size, 2),
            note=f"{formula}; published: nearly constant",
        ),
        Row(
            experiment=name,
            row="with the best number of chunks",
            published=None,
            ours=best_chain_s(size, RELAYS + 1),
            unit="s",
            note="App. C.3, T*(p)",
            own=True,
        ),
        Row(
            experiment=name,
            row="repair of the chain, once a loss is known",
            published=(0.0, 1.0),
            ours=repair_s(size, RELAYS + 1),
            unit="s",
            note="closed form: two messages and a chunk that is sent again, as the loss is noticed "
            "instantly (§3.3); published as less than one second. `rollweave bench relay` measures "
            "ours from the kill on",
        ),
    ]


def fig14(quick: bool) -> list[Row]:
    """Wait of an engine for new weights, from a relay beside it or from a global
    synchronization.
    """
    return [
        row
        for size, tp, stall in (("32b", 4, 0.64), ("72b", 8, 1.40))
        for row in _waits(size, tp, stall, quick=quick)
    ]


def _waits(size: str, tp: int, stall: float, *, quick: bool) -> list[Row]:
    name, shape = "laminar-fig14", model(f"qwen2.5-{size}")
    cost = Sliced(shape=shape, gpus=GPUS, share=1, updates=UPDATES)
    machines = GPUS // GPUS_PER_MACHINE
    at_once = best_chain_s(shape.weight_bytes, machines)
    local = cost.load_s(engines=1, tp=tp, over=link("pcie"))
    pulled = cost.load_s(engines=GPUS // tp, tp=tp)
    spread = chain_s(shape.weight_bytes, machines)
    period = _period_s(cost, groups=SAMPLE // 8 if quick else SAMPLE)
    mean = mean_wait_s(local_s=local, spread_s=spread, period_s=period)
    against = (
        f"a broadcast by all adapters at 80 % to {machines} machines, {at_once:.2f} s, is the "
        "optimum of a global one; the measured NCCL broadcast is far from that, and its seconds "
        "are not in text. Published is the maximum over all sizes"
    )

    def saved(row: str, seconds: float, other: float, published: float | None, note: str) -> Row:
        ours = 100 * (1 - seconds / other)
        return Row(
            experiment=name,
            row=row,
            published=published,
            ours=ours,
            unit="%",
            note=note,
            own=published is None,
        )

    return [
        Row(
            experiment=name,
            row=f"actor stall, {size}",
            published=stall,
            ours=cost.publish_s(),
            unit="s",
            note="weights over size of eight adapters; resharding and copies between host and GPU "
            "are not modeled",
        ),
        saved(
            f"wait saved, best case, {size}, over a global broadcast",
            local,
            at_once,
            47,
            f"closed form: PCIe {local:.2f} s; {against}",
        ),
        saved(
            f"wait saved, average, {size}, over a global broadcast",
            mean,
            at_once,
            37,
            "closed form: engines request weights at any time of a step (the trainer's "
            f"{period:.0f} s) and wait for those in transfer ({spread:.2f} s): {mean - local:.4f} "
            f"s more than the best case; {against}",
        ),
        saved(
            f"wait saved, best case, {size}, over all engines pulling at once",
            local,
            pulled,
            None,
            f"closed form: PCIe {local:.2f} s; engines on {GPUS} GPUs pull from one machine in "
            f"{pulled:.2f} s, without relays",
        ),
    ]


def _period_s(cost: Sliced, *, groups: int) -> float:
    """Return the seconds of a training step on 8,192 trajectories of the mathematical
    tasks.

    Versions cannot follow each other faster.
    """
    plans = workload("dapo-math")
    lengths = [
        plan.prompt_tokens
        + sum(turn.output_tokens + turn.observation_tokens for turn in plan.turns)
        for index in range(groups)
        for plan in (
            plans.plan(index=index, member=member, attempt=0, seed=0) for member in range(MEMBERS)
        )
    ]
    share = PROMPTS / groups
    contexts = sum(length * (length + 1) // 2 for length in lengths)
    return cost.step_s(tokens=round(share * sum(lengths)), context=round(share * contexts))
