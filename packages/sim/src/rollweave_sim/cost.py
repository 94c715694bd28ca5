"""Costs in seconds: engine steps (`EngineCost`; from measurements: `sim/profile`) and
training (`TrainerCost`).

An engine step is a roofline: the longer of computation and memory reads, then the
tensor-parallel all-reduces, the stalls between kernels and a fixed overhead. The stalls
are as long however the layers are divided among GPUs, so that smaller parts are
computed less efficiently. While a batch only decodes, both sides grow linearly with the
step's number, so that many steps have a closed form. The passes of a training step and
the share of the peak that they reach are in `sim/training`.

The share of the published hardware that software reaches is stated below, once, for
every experiment; no share is fitted to a paper's result. InferSim is Alibaba's
simulator of LLM inference, whose constants its README compares with SGLang's measured
throughput.
"""

import math
from typing import Protocol

from rollweave.core.policy.admission import fewest_slots
from rollweave.core.policy.relay import CHUNK_BYTES
from rollweave.schema.config.engines import PROFILED_SLOTS
from rollweave.schema.errors import FieldError
from rollweave_sim.hardware import BF16, GPUS_PER_MACHINE, Gpu, Link, ModelShape, link
from rollweave_sim.training import ONE_PASS, Passes, mfu

ENGINE_COMPUTE = 0.85
"""Share of a GPU's reachable matmul speed that an engine's prefill keeps: SGLang with
Qwen3-30B-A3B on H20 computes 16,594 tokens/s (InferSim README), 79 % of the peak if
prompts have the README's 4,096 tokens, where H20's matmuls reach 93 %.
"""

HBM_EFFICIENCY = 0.8
"""Share of the published memory bandwidth that is reached: InferSim (`hardware/gpu.py`)
for H20 and H800.
"""

LINK_EFFICIENCY = 0.8
"""Share of a published link's bandwidth that is reached, NVLink and RDMA alike:
InferSim (`hardware/gpu.py`); taken for all links. NCCL's all-reduce of large messages
reaches 0.73 to 0.93 of NVLink on two to six H100 (nccl-collectives-bench).
"""

MEMORY_FRACTION = 0.9
"""Share of a GPU's memory that an engine may use: the default `gpu_memory_utilization`
of vLLM 0.9, Laminar's engine.
"""

ACTIVATION_BYTES = 2e9
"""Bytes of each GPU for activations, workspaces and captured graphs. Assumption."""

STEP_OVERHEAD_S = 1e-3
"""Seconds of scheduling and sampling in one engine step. Assumption."""

LAYER_KERNELS, KERNEL_STALL_S = 7, 5e-6
"""Kernels of a layer, and the seconds for which the GPU does no useful work at the end
of each: stragglers, launch (by a CUDA graph) and memory latencies, for Llama-3.2-1B on
an H100 (Hazy Research, "Look Ma, No Bubbles!", 2025-05-27). InferSim's matrix products
of 16 tokens on H20 (`bench_data/gemm/h20`) agree: a line through those of 4 to 20 MB of
weights has 4.5 to 5.3 µs at 0 bytes.
"""

ALLREDUCE_S = 1.29e-5
"""Seconds of one all-reduce within a machine, however small: NCCL on four H100, in a
CUDA graph (waynehacking8/nccl-collectives-bench, `results/quiet/tp_latency.json`,
2026). Taken for two and eight GPUs, too.
"""

QUERY_TILE = 128
"""Queries that share one read of the KV in prefill: the row tile of FlashAttention-3
for head dimension 128.
"""

FABRIC = link("rdma")
"""Link between the trainer's machines, independent of the weights' link: InfiniBand in
RollArt §7.1, ROSE §6 and Laminar §8.
"""

STATE_BYTES = 16
"""Bytes of training state per parameter: bf16 weight and gradient, float32 weight and
two moments (ZeRO §3.1).
"""

OPTIMIZER_BYTES = 30
"""Bytes that Adam moves per parameter: it reads the float32 gradient, weight and two
moments, and writes the last three and a bf16 weight.
"""

CHECKPOINT_BYTES = 14
"""Bytes saved per parameter: bf16 weight, float32 weight and two moments."""

CHECKPOINT_BYTES_PER_S = 4e9
"""Bytes per second that each machine writes to, or reads from, one NVMe drive.
Assumption.
"""

ENCODE_BYTES_PER_S, ENCODERS, APPLY_BYTES_PER_S = 1.4e9, 4, 1.8e9
"""Bytes of weights per second in which one thread finds changes, the number of such
threads (`weights/relay`), and those in which the thread of a relay applies changes:
`rollweave bench delta` with SmolLM2-135M at 1e-6, beside other work on an AMD EPYC
(2026-11-30, docs/results/delta.md).
"""

SAVED_WEIGHT_BYTES = 4
"""Bytes per parameter that an engine reads from a checkpoint: float32, as
`train/checkpoint.py` writes them.
"""


class EngineCosts(Protocol):
    """The costs that a simulated engine needs. `kv_tokens` is the capacity of its KV
    cache.
    """

    @property
    def kv_tokens(self) -> int: ...

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """Return the seconds of one step.

        `prefill_tokens` prompt tokens are computed, whose attention spans sum to
        `prefill_context`; `decode` sequences compute one token each, whose contexts sum
        to `decode_context`.
        """

    def move_s(self, tokens: int) -> float:
        """Return the seconds in which the KV of `tokens` tokens reaches another such
        engine.
        """

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """Return the seconds of `steps` steps that only decode.

        The summed context grows by `decode` a step: this is the sum of `step_s`.
        """


def capped_slots(cost: EngineCosts, *, context: int, room: int) -> int:
    """Return the fewest sequences of `context` tokens each that decode nearly as many
    tokens in a second as any other number (`core/policy/admission`): at most
    `PROFILED_SLOTS`, and as many as a KV cache of `room` tokens holds.
    """
    return fewest_slots(
        lambda count: cost.decode_s(decode=count, decode_context=count * context, steps=1),
        most=max(1, min(PROFILED_SLOTS, room // max(1, context))),
    )


class SharedCost:
    """The costs of one of `engines` that share their GPUs.

    Each has an equal share of the KV cache, and of the time, even while others are
    idle.
    """

    def __init__(self, cost: EngineCosts, *, engines: int) -> None:
        self._cost, self._engines = cost, engines
        self.kv_tokens = cost.kv_tokens // engines

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """See `EngineCosts`."""
        return self._engines * self._cost.step_s(
            prefill_tokens=prefill_tokens,
            prefill_context=prefill_context,
            decode=decode,
            decode_context=decode_context,
        )

    def move_s(self, tokens: int) -> float:
        """See `EngineCosts`."""
        return self._cost.move_s(tokens)

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """See `EngineCosts`."""
        return self._engines * self._cost.decode_s(
            decode=decode, decode_context=decode_context, steps=steps
        )


class EngineCost:
    """An engine of `tp` GPUs of one machine.

    Raises FieldError where the model cannot be split so, or does not fit.
    """

    kv_tokens: int

    def __init__(self, *, gpu: Gpu, model: ModelShape, tp: int) -> None:
        if not 1 <= tp <= GPUS_PER_MACHINE:
            raise FieldError("tp", f"be from 1 to {GPUS_PER_MACHINE}, the GPUs of a machine", tp)
        if not _splits(model, tp):
            raise FieldError(
                "tp",
                f"divide the {model.heads} heads of {model.name}, and divide or be a multiple of "
                f"its {model.kv_heads} key-value heads",
                tp,
            )
        self.kv_tokens = _kv_tokens(gpu, model, tp)
        if self.kv_tokens < 1:
            raise _misfit(gpu, model, tp)
        compute = tp * gpu.bf16_flops * gpu.matmul_efficiency * ENGINE_COMPUTE
        memory = tp * gpu.hbm_bytes_per_s * HBM_EFFICIENCY
        # Seconds per unit of work of the entire engine. The head is computed where a
        # token is sampled and read in every step.
        self._prefill_token = 2 * model.layer_parameters / compute
        self._decode_token = 2 * (model.layer_parameters + model.head_parameters) / compute
        self._pair = model.attention_flops / compute
        self._dense = BF16 * (model.dense_parameters + model.head_parameters) / memory
        self._experts = BF16 * model.expert_parameters / memory
        self._missed = 1 - model.experts_active / model.experts if model.experts else 0.0
        self._kv = _kv_bytes(model, tp) / memory
        # Each GPU sends the part of its heads over its own NIC, possibly to another
        # machine (Heddle §5.3: GPUDirect RDMA).
        self._move_token = model.kv_bytes_per_token / _bytes_per_s(FABRIC, tp)
        # A ring all-reduce sends 2 (tp - 1) / tp of the activations from each GPU, in
        # one direction of NVLink; each layer has two.
        reduces = 2 * model.layers if tp > 1 else 0
        stalls = model.layers * LAYER_KERNELS * KERNEL_STALL_S
        sent = 2 * (tp - 1) / tp * model.hidden * BF16
        self._reduce_token = reduces * sent / (gpu.nvlink_bytes_per_s / 2 * LINK_EFFICIENCY)
        self._fixed = STEP_OVERHEAD_S + stalls + reduces * ALLREDUCE_S

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """See `EngineCosts`.

        The KV that prefill reads is counted as if its tokens belonged to one sequence.
        """
        tokens = prefill_tokens + decode
        computing = (
            prefill_tokens * self._prefill_token
            + decode * self._decode_token
            + (prefill_context + decode_context) * self._pair
        )
        read = decode_context + (
            prefill_context / min(prefill_tokens, QUERY_TILE) if prefill_tokens else 0.0
        )
        return (
            max(computing, self._weights(tokens) + read * self._kv)
            + tokens * self._reduce_token
            + self._fixed
        )

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """See `EngineCosts`."""
        roofline = _sum_of_max(
            (decode * self._decode_token + decode_context * self._pair, decode * self._pair),
            (self._weights(decode) + decode_context * self._kv, decode * self._kv),
            steps,
        )
        return roofline + steps * (decode * self._reduce_token + self._fixed)

    def move_s(self, tokens: int) -> float:
        """See `EngineCosts`."""
        return FABRIC.latency_s + tokens * self._move_token

    def _weights(self, tokens: int) -> float:
        """Return the seconds to read the weights that `tokens` use.

        Of a layer's experts, those are read that an even draw by each token is expected
        to hit; training balances the experts' load, so an even draw is assumed.
        """
        return self._dense + self._experts * (1 - self._missed**tokens)


def _splits(model: ModelShape, tp: int) -> bool:
    """Return whether attention heads divide among the GPUs.

    More GPUs than key-value heads store copies of them (as in vLLM).
    """
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def _kv_bytes(model: ModelShape, tp: int) -> int:
    """Return the KV bytes of one token on all GPUs of an engine, copies included."""
    return model.kv_bytes_per_token * max(1, tp // model.kv_heads)


def _kv_tokens(gpu: Gpu, model: ModelShape, tp: int) -> int:
    """Return the tokens whose KV fits beside the weights.

    A negative result means that the weights do not fit.
    """
    free = gpu.hbm_bytes * MEMORY_FRACTION - model.weight_bytes / tp - ACTIVATION_BYTES
    return math.floor(free * tp / _kv_bytes(model, tp))


def _misfit(gpu: Gpu, model: ModelShape, tp: int) -> FieldError:
    enough = [
        n
        for n in range(tp + 1, GPUS_PER_MACHINE + 1)
        if _splits(model, n) and _kv_tokens(gpu, model, n) >= 1
    ]
    usable = (gpu.hbm_bytes * MEMORY_FRACTION - ACTIVATION_BYTES) / 1e9
    sizes = f"{model.weight_bytes / 1e9:.1f} GB of weights, {usable:.1f} GB usable on each GPU"
    if not enough:
        rule = f"fit one machine of {GPUS_PER_MACHINE} {gpu.name} ({sizes})"
        return FieldError("model", rule, model.name)
    rule = f"be at least {enough[0]} for {model.name} on {gpu.name} ({sizes})"
    return FieldError("tp", rule, tp)


def _sum_of_max(one: tuple[float, float], other: tuple[float, float], steps: int) -> float:
    """Return the sum over i < `steps` of the larger of two lines at i.

    A line is its value at 0 and its slope; two lines cross at most once.
    """
    first, then = (one, other) if one >= other else (other, one)
    lead = steps
    if then[1] > first[1]:
        crossing = (first[0] - then[0]) / (then[1] - first[1])
        lead = min(steps, math.floor(min(crossing, steps)) + 1)
    return sum_of_line(first, 0, lead) + sum_of_line(then, lead, steps)


def sum_of_line(line: tuple[float, float], start: int, end: int) -> float:
    """Return the sum of a line at i in start .. end - 1."""
    return (end - start) * (line[0] + line[1] * (start + end - 1) / 2)


def slowdown_between_sites(name: str) -> float:
    """Return how many times as long weights travel between machines over this link as
    over the fabric of one site.
    """
    fabric, between = (_bytes_per_s(way, GPUS_PER_MACHINE) for way in (FABRIC, link(name)))
    return max(1.0, fabric / between)


class TrainerCosts(Protocol):
    """The costs that a simulated trainer, and the engines that fetch its weights,
    need.
    """

    def step_s(self, *, tokens: int, context: int) -> float:
        """Return the seconds of one step, with all its passes and updates, on `tokens`
        tokens whose attention spans sum to `context`.
        """

    def forward_s(self, *, tokens: int, context: int) -> float:
        """Return the seconds of one forward pass over these tokens."""

    def publish_s(self) -> float:
        """Return the seconds until new weights can be fetched."""

    def load_s(self, *, engines: int, tp: int) -> float:
        """Return the seconds in which an engine of `tp` GPUs fetches them while
        `engines` do, itself included.
        """

    def hop_s(self, *, share: float) -> float:
        """Return the seconds in which a relay receives `share` of the bytes of new
        weights from another machine's relay.
        """

    def delta_s(self) -> float:
        """Return the minimum seconds in which a relay receives the changes to weights
        that it has, however fast the link is.
        """

    def lag_s(self) -> float:
        """Return the minimum seconds by which a relay trails its source: one chunk."""

    def beside_s(self, *, engines: int, tp: int) -> float:
        """Return the seconds in which an engine of `tp` GPUs fetches them from its
        machine's relay, while `engines` there do.
        """

    def swap_s(self, *, engines: int, tp: int) -> float:
        """Return the seconds for which an engine of `tp` GPUs stops to swap in weights
        that it has received, if `engines` on its machine do so at once.
        """

    def copy_s(self) -> float:
        """Return the seconds to copy a checkpoint into the host's memory, for which
        training waits.
        """

    def checkpoint_s(self) -> float:
        """Return the seconds to write the copy, for which training does not wait."""

    def saved_s(self, *, engines: int) -> float:
        """Return the seconds in which an engine loads weights from a checkpoint while
        `engines` do, itself included.
        """


class TrainerCost:
    """A trainer sharded over `gpus` GPUs, which makes `passes` in a step, and whose
    weights leave by `link`.

    A reference has no state: its weights wait in the host's memory, and moving them
    takes no time. Raises FieldError where the state does not fit.
    """

    def __init__(
        self, *, gpu: Gpu, model: ModelShape, gpus: int, link: Link, passes: Passes = ONE_PASS
    ) -> None:
        state = passes.models * STATE_BYTES * model.parameters
        needed = math.ceil(state / (gpu.hbm_bytes * MEMORY_FRACTION))
        if gpus < needed:
            need = f"{state / 1e9:.0f} GB of training state"
            rule = f"be at least {needed} to train {model.name} on {gpu.name} ({need})"
            raise FieldError("gpus", rule, gpus)
        self._gpu, self._model, self._gpus, self._link = gpu, model, gpus, link
        self._passes = passes

    def of_ranks(self, ranks: int) -> "TrainerCost":
        """Return the costs of a trainer with so many ranks."""
        return TrainerCost(
            gpu=self._gpu, model=self._model, gpus=ranks, link=self._link, passes=self._passes
        )

    def step_s(self, *, tokens: int, context: int) -> float:
        """Model the passes of a step, which all have the speed of training (see
        `sim/training`), and its updates, each with a gradient reduction.
        """
        passes = self._passes
        computing = passes.units * self.forward_s(tokens=tokens, context=context)
        return computing + passes.updates * passes.models * self._update_s()

    def forward_s(self, *, tokens: int, context: int) -> float:
        """Model a forward pass of which every token's log-prob is used.

        Model-parallel communication is inside the share of the peak.
        """
        if not tokens:
            return 0.0
        model = self._model
        multiplied = model.layer_parameters + model.head_parameters
        flops = 2 * multiplied * tokens + model.attention_flops * context
        # a sequence of n tokens has n (n + 1) / 2 pairs; a long one weighs more
        length = 2 * context / tokens - 1
        reached = mfu(self._gpu, parameters=multiplied, length=length)
        return flops / (self._gpus * self._gpu.bf16_flops * reached)

    def _update_s(self) -> float:
        """Model one step of the optimizer for one model."""
        moved = OPTIMIZER_BYTES * self._model.parameters
        moving = moved / (self._gpus * self._gpu.hbm_bytes_per_s * HBM_EFFICIENCY)
        return self._reduce_s() + moving

    def publish_s(self, *, over: Link | None = None) -> float:
        """Model each GPU sending its shard to one machine that forwards the weights
        (Laminar §4.2).

        They travel by the link, or by `over`.
        """
        way = over or self._link
        return way.latency_s + self._model.weight_bytes / _bytes_per_s(
            way, min(self._gpus, GPUS_PER_MACHINE)
        )

    def load_s(self, *, engines: int, tp: int, over: Link | None = None) -> float:
        """Model an engine of `tp` GPUs pulling the weights from one machine while
        `engines` do, itself included.

        The time is the slower of what the engine's GPUs receive and what that machine
        sends. An engine beside a relay pulls `over` PCIe.
        """
        way = over or self._link
        receiving = self._model.weight_bytes / _bytes_per_s(way, tp)
        sending = engines * self._model.weight_bytes / _bytes_per_s(way, GPUS_PER_MACHINE)
        return way.latency_s + max(receiving, sending)

    def hop_s(self, *, share: float) -> float:
        """Use the fabric between machines, whichever link the weights leave the trainer
        by.
        """
        return FABRIC.latency_s + share * self._model.weight_bytes / _bytes_per_s(
            FABRIC, GPUS_PER_MACHINE
        )

    def delta_s(self) -> float:
        """Model the slower of finding and applying changes, which all read the whole
        weights.
        """
        slower = min(ENCODERS * ENCODE_BYTES_PER_S, APPLY_BYTES_PER_S)
        return self._model.weight_bytes / slower

    def lag_s(self) -> float:
        """Use a chunk of Laminar's (§7)."""
        return FABRIC.latency_s + CHUNK_BYTES / _bytes_per_s(FABRIC, GPUS_PER_MACHINE)

    def beside_s(self, *, engines: int, tp: int) -> float:
        """Use PCIe, from the memory of the host."""
        return TrainerCost.load_s(self, engines=engines, tp=tp, over=link("pcie"))

    def swap_s(self, *, engines: int, tp: int) -> float:
        """Assume that the KV cache leaves no room for a second copy on the GPUs: the
        weights wait in the host's memory, and come from there over PCIe.
        """
        return TrainerCost.load_s(self, engines=engines, tp=tp, over=link("pcie"))

    def copy_s(self) -> float:
        """Model each GPU copying its share over PCIe."""
        machines, way = math.ceil(self._gpus / GPUS_PER_MACHINE), link("pcie")
        per_machine = CHECKPOINT_BYTES * self._model.parameters / machines
        return way.latency_s + per_machine / _bytes_per_s(way, min(self._gpus, GPUS_PER_MACHINE))

    def checkpoint_s(self) -> float:
        """Model each machine writing its share of weights and optimizer state."""
        machines = math.ceil(self._gpus / GPUS_PER_MACHINE)
        return CHECKPOINT_BYTES * self._model.parameters / (machines * CHECKPOINT_BYTES_PER_S)

    def saved_s(self, *, engines: int) -> float:
        """Assume that one drive has the entire checkpoint."""
        return engines * SAVED_WEIGHT_BYTES * self._model.parameters / CHECKPOINT_BYTES_PER_S

    def _reduce_s(self) -> float:
        """Model a ring all-reduce of bf16 gradients between machines.

        Each machine has the model once, with a share on each GPU.
        """
        machines = math.ceil(self._gpus / GPUS_PER_MACHINE)
        sent = 2 * (machines - 1) / machines * self._model.weight_bytes
        return 2 * (machines - 1) * FABRIC.latency_s + sent / _bytes_per_s(FABRIC, GPUS_PER_MACHINE)


def _bytes_per_s(link: Link, gpus: int) -> float:
    """Return the bytes per second that `gpus` GPUs of one machine send or receive
    together over `link`.
    """
    return (gpus if link.per_gpu else 1) * link.bytes_per_s * LINK_EFFICIENCY
