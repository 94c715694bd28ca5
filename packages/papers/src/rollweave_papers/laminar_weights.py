"""Laminar's experiments on weight transfer (§4, §8.3, App. C): simulated runs with a
relay on each machine, beside closed forms over published links.

The chain, its chunks and its repair are those of our relays
(`mechanisms/relays/fetching`, `rollweave_sim.relays`).
"""

import statistics

from rollweave.core.policy.relay import broadcast_s, chunk_bytes, chunk_count
from rollweave_papers.cluster import Setup, Watched, run_until
from rollweave_papers.laminar_runs import CONTEXT, MEMBERS, PROMPTS, UPDATES, Sliced
from rollweave_papers.results import Row
from rollweave_sim.cost import LINK_EFFICIENCY, EngineCost
from rollweave_sim.hardware import GPUS_PER_MACHINE, gpu, link, model
from rollweave_sim.training import passes_of
from rollweave_sim.world import Costs

RELAYS = 127
"""Relays beside the master, on 1,024 GPUs (Laminar Fig. 19)."""

GPUS = 512
"""GPUs for training, and as many for rollouts, at the largest scale of Fig. 14."""

AT_ONCE = 256
"""Trajectories of an engine in Fig. 14: those of the convergence runs (App. A.3)."""

REPAIR_MESSAGES = 2
"""Messages from the decision to repair a chain to the first bytes: to the successor,
and from it to its new source.
"""

PARTS = 16
"""Parts of the cluster of which one is simulated for Fig. 14."""


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


def broadcast(size: str, *, relays: int, lost: bool = False) -> tuple[float, float]:
    """Simulate the broadcast of the first trained version to so many relays beside the
    master, on machines with an engine each. Returns its seconds, and where the relay in
    the middle is `lost` half-way, those from the loss to the end.
    """
    setup = Setup(
        model=f"qwen2.5-{size}",
        tasks=("dapo-math",),
        context=CONTEXT,
        rollout_gpus=GPUS_PER_MACHINE * (relays + 1),
        trainer_gpus=GPUS,
        batch=2 * MEMBERS,
        group_size=MEMBERS,
        tp=GPUS_PER_MACHINE,
        mode="one_step",
        relayed=True,
        without=("deltas",),
    )
    trainer = Sliced(shape=model(f"qwen2.5-{size}"), gpus=GPUS, share=1)

    def watched() -> tuple[Watched, float]:
        run = Watched(setup.config(steps=3), costs=_costs(size, GPUS_PER_MACHINE, trainer))
        return run, run.until_published(1)

    run, _ = watched()
    seconds = run.until_broadcast()
    if not lost:
        return seconds, 0.0
    run, at = watched()
    run_until(run.world, lambda: run.world.clock.now >= at + seconds / 2)
    middle, struck = f"r{(relays + 1) // 2}", run.world.clock.now
    run.world.relays.lose(middle, "the machine failed")
    return seconds, run.until_broadcast(without=middle) - (struck - at)


def fig19(quick: bool) -> list[Row]:
    """Reproduce the chain broadcast between relays."""
    relays = 31 if quick else RELAYS
    size = model("qwen2.5-72b").weight_bytes
    all_s, after_loss_s = broadcast("72b", relays=relays, lost=True)
    one_s, _ = broadcast("72b", relays=1)
    later_s = max(0.0, after_loss_s - all_s / 2)
    repaired_s = later_s + repair_s(size, relays + 1)
    links = "eight 400 Gb/s adapters at 80 %, 32 MiB chunks"
    return [
        Row(
            row=f"72B to {relays} relays",
            ours=all_s,
            unit="s",
            note=f"simulated run, {links}; closed form (App. C, eq. 1): "
            f"{chain_s(size, relays + 1):.3f} s; published as less than 1.6 s",
        ),
        Row(
            row=f"{relays} relays over one relay",
            ours=all_s / one_s,
            note=f"simulated runs, {links}; published: nearly constant",
        ),
        Row(
            row="with the best number of chunks",
            ours=best_chain_s(size, relays + 1),
            unit="s",
            note="closed form, App. C.3, T*(p)",
            own=True,
        ),
        Row(
            row="repair of the chain, once a loss is known",
            ours=repaired_s,
            unit="s",
            note="simulated run: the relay in the middle is lost half-way, and the broadcast to "
            f"the others ends {later_s:.4f} s later than without; added are two messages and the "
            "chunk that is sent again, which the simulator leaves out; the loss is noticed "
            "instantly (§3.3); published as less than one second. `rollweave bench relay` "
            "measures ours from the kill on",
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
    shape = model(f"qwen2.5-{size}")
    machines = GPUS // GPUS_PER_MACHINE
    run = _part(size, tp, quick=quick)
    at_once = best_chain_s(shape.weight_bytes, machines)
    pulled = Sliced(shape=shape, gpus=GPUS, share=1).load_s(engines=GPUS // tp, tp=tp)
    best, mean = min(run.waits_s), statistics.fmean(run.waits_s)
    simulated = (
        f"simulated part of the cluster (1/{PARTS}), {len(run.waits_s)} loads of engines with "
        f"{AT_ONCE} trajectories; mode decoupled, in which an engine keeps its weights until its "
        "relay has newer ones"
    )
    against = (
        f"a broadcast by all adapters at 80 % to {machines} machines, {at_once:.2f} s, is the "
        "optimum of a global one (closed form), where theirs is a measured NCCL broadcast. "
        "Published is the maximum over all sizes"
    )

    def saved(row: str, seconds: float, other: float, note: str, *, own: bool = False) -> Row:
        value = 100 * (1 - seconds / other)
        return Row(row=row, ours=value, unit="%", is_change=True, note=note, own=own)

    return [
        Row(
            row=f"actor stall, {size}",
            ours=statistics.fmean(run.stall_s),
            unit="s",
            note="simulated run: the weights over eight adapters of 400 Gb/s at 80 %",
        ),
        saved(
            f"wait saved, best case, {size}, over a global broadcast",
            best,
            at_once,
            f"{best:.2f} s over PCIe; {simulated}; {against}",
        ),
        saved(
            f"wait saved, average, {size}, over a global broadcast",
            mean,
            at_once,
            f"{mean:.2f} s over PCIe, with the wait for others on the machine; {simulated}; "
            f"{against}",
        ),
        saved(
            f"wait saved, average, {size}, over all engines pulling at once",
            mean,
            pulled,
            f"{mean:.2f} s; {simulated}; engines on {GPUS} GPUs pull from one machine in "
            f"{pulled:.2f} s, without relays (closed form)",
            own=True,
        ),
    ]


def _part(size: str, tp: int, *, quick: bool) -> Watched:
    """Return a finished run of a part of the cluster of Fig. 14."""
    engines = GPUS // tp // PARTS
    rounds = -(-engines * AT_ONCE * PARTS // (PROMPTS * MEMBERS))
    setup = Setup(
        model=f"qwen2.5-{size}",
        tasks=("dapo-math",),
        context=CONTEXT,
        rollout_gpus=GPUS // PARTS,
        trainer_gpus=GPUS,
        batch=PROMPTS * MEMBERS // PARTS,
        group_size=MEMBERS,
        environments=engines * AT_ONCE,
        tp=tp,
        mode="decoupled",
        slots=AT_ONCE,
        reference=False,
        without=("deltas",),
        relayed=True,
    )
    config = setup.config(steps=3 if quick else 4 * rounds)
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"minibatches": UPDATES})}
    )
    trainer = Sliced(
        shape=model(f"qwen2.5-{size}"), gpus=GPUS, share=PARTS, passes=passes_of(config)
    )
    run = Watched(config, costs=_costs(size, tp, trainer))
    run.finish()
    return run


def _costs(size: str, tp: int, trainer: Sliced) -> Costs:
    engine = EngineCost(gpu=gpu("h800"), model=model(f"qwen2.5-{size}"), tp=tp)
    return {("h800", tp): engine}, trainer
