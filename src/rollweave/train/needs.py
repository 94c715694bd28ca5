"""The memory that the ranks of a trainer need (`schema/hosts`).

It is exact for weights, gradients and optimizer. The need of a backward pass is an
estimate, which `rollweave bench memory` compares with peaks on a CPU and `rollweave
bench gpu` with peaks on a GPU. Imports no torch.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from rollweave.io.machine import computed_dtype
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Need, computing
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.adapters import adapter_sizes
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.needs import published, trained_parameters

MAX_LOGITS = 1 << 26
"""Maximum number of logits that a rank has in memory at the same time (256 MB in
float32).
"""

CACHE_TOKENS = 2048
"""Maximum tokens of one pass on a CPU: beyond that, a small model's activations leave
the cache (1.6 times slower at 16384).
"""

LOGIT_COPIES = 2
"""Number of float32 tensors as large as the logits: the log-probs, and the gradient."""

MASTER_BYTES = NUMBER_BYTES["float32"]
"""Bytes of a number of the trainer's weights, gradients and moments."""

PUBLISHED = 2
"""Number of weight versions that the trainer keeps, usually: the one that engines have,
and the next one.
"""

STATE = ("weights", "optimizer", "reference", "critic")
"""The uses of memory that leave the devices while the engines of a colocated run have
them.
"""


def rank_needs(config: RunConfig, shape: ModelShape, *, rank: int) -> list[Need]:
    """Return the needs of one rank."""
    trainer, on_gpu = config.trainer, config.model.device == "cuda"
    need = functools.partial(Need, setting="trainer.ranks")
    model = shard = _divided(shape, trainer.first_ranks, trainer.tensor_parallel) * MASTER_BYTES
    if config.lora is not None:
        # a tensor group divides one matrix of each adapter, which is neglected here
        groups = trainer.first_ranks // trainer.tensor_parallel
        shard = -(-trained_parameters(config, shape) // groups) * MASTER_BYTES
        model += shard
    on_device = "optimizer" not in trainer.save_memory
    optimizer = "trainer.save_memory" if on_gpu and on_device else "trainer.ranks"
    passes = activations(config, shape)
    trains = bool(config.run.steps or config.warmup.steps)  # an evaluation does not
    # a failed batch is undone
    undoable = 3 * shard if trainer.epochs * trainer.minibatches > 1 else 0
    kl = bool(config.algorithm.kl)
    copied = 3 * shard * on_gpu  # on a CPU, it is written from the state itself
    # the weights map the newest version until the update, which then drops gradients
    mapped = not (on_gpu or kl or undoable) and trainer.most_ranks == 1
    mapped = mapped and NUMBER_BYTES[config.model.dtype] == MASTER_BYTES
    needs = [
        need(what="weights", nbytes=model),
        need(what="gradients", nbytes=shard),
        need(what="optimizer", nbytes=2 * shard, on_device=on_device, setting=optimizer),
        need(what="activations", nbytes=passes * trains, setting="trainer.micro_tokens"),
        # while it computes with a reference, a rank sets its own weights aside
        need(what="reference", nbytes=2 * shard * kl, setting="algorithm.kl"),
        # with its gradients and the state of its optimizer
        need(what="critic", nbytes=4 * shard * config.has_critic, setting="algorithm.advantage"),
        need(what="copy of the state", nbytes=undoable, setting="trainer.minibatches"),
        need(what="gathered layers", nbytes=gathered_layers(shape, config)),
        need(what="copy for a checkpoint", nbytes=copied, on_device=False),
    ]
    if rank == 0:
        needs.append(published(config, shape, versions=PUBLISHED - mapped))
    if trainer.colocated:
        needs = list(_in_turn(needs, on_gpu=on_gpu))
        if on_gpu and trainer.most_ranks > 1:  # shards are made on the device, and leave it
            restart = model + shard * config.has_critic
            needs.append(
                need(what="weights of a restart", nbytes=restart, in_turn=True, at_restart=True)
            )
    used = [need for need in needs if need.nbytes]
    return [*used, *computing(config.model.device, setting="trainer.ranks")]


def _divided(shape: ModelShape, ranks: int, tensor_parallel: int) -> int:
    """Return the number of weights of a rank in a tensor group, which divides the
    matrices of the layers. All else is divided over the data group alone.
    """
    layered = sum(
        math.prod(size)
        for name, size in shape.tensors().items()
        if ".layers." in name and len(size) > 1
    )
    own = -(-layered // tensor_parallel) + shape.parameters() - layered
    return -(-own // (ranks // tensor_parallel))


def _in_turn(needs: Sequence[Need], *, on_gpu: bool) -> Iterator[Need]:
    """Yield the needs of a rank in a colocated run: its state is in the host's memory
    while the engines have the devices.
    """
    for need in needs:
        yield replace(need, in_turn=need.on_device and (on_gpu or need.what not in STATE))
    if on_gpu:
        nbytes = sum(need.nbytes for need in needs if need.on_device and need.what in STATE)
        yield Need(
            what="state in turn", nbytes=nbytes, on_device=False, setting="trainer.colocated"
        )


def gathered_layers(shape: ModelShape, config: RunConfig) -> int:
    """Return the bytes of the unsharded weights and gradients that each of several
    ranks has at a time: of one layer, the weights of the next layer, and of everything
    outside of the layers. A rank has only its tensor group's part of the layers'
    matrices.
    """
    if config.trainer.most_ranks == 1:
        return 0
    layer = [size for name, size in shape.tensors().items() if ".layers.0." in name]
    outside = shape.parameters() - shape.layers * sum(map(math.prod, layer))
    divisor = config.trainer.tensor_parallel
    within = sum(-(-math.prod(size) // (divisor if len(size) > 1 else 1)) for size in layer)
    return (3 * within + 2 * outside) * MASTER_BYTES


def activations(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes that one packed forward pass keeps for the backward pass.

    The pass has one sequence of the maximum length, or several with `micro_tokens` in
    all. Logits are computed for the tokens that the agent may sample.
    """
    longest, divisor = config.max_tokens, config.trainer.tensor_parallel
    on_cpu = config.model.device != "cuda"
    width = NUMBER_BYTES[computed_dtype(config.model.dtype, config.model.device)]
    shape = dataclasses.replace(
        shape,
        heads=-(-shape.heads // divisor),
        kv_heads=-(-shape.kv_heads // divisor),
        ffn=-(-shape.ffn // divisor),
    )
    micro = config.trainer.micro_tokens
    tokens = min(max(min(micro, CACHE_TOKENS) if on_cpu else micro, longest), config.batch_tokens)
    sampled = math.ceil(tokens * max(map(_sampled_share, config.tasks)))
    kept = logit_bytes(sampled, shape.vocab)
    if config.lora is not None:  # the outputs of each A
        adapters = len(adapter_sizes(shape, config.lora)) // 2
        kept += tokens * adapters * config.lora.rank * width
    if "activations" in config.trainer.save_memory:
        # each layer's input, and one layer at a time
        kept += shape.layers * tokens * shape.hidden * width
        shape = dataclasses.replace(shape, layers=1)
    return kept + layer_bytes(shape, tokens, longest=longest, width=width, on_cpu=on_cpu)


def logit_bytes(tokens: int, vocab: int) -> int:
    """Return the bytes of the logits of `tokens` tokens."""
    return LOGIT_COPIES * MASTER_BYTES * min(MAX_LOGITS, tokens * vocab)


def layer_bytes(shape: ModelShape, tokens: int, *, longest: int, width: int, on_cpu: bool) -> int:
    """Return the bytes that the layers keep for the backward pass over `tokens` of
    sequences of `longest` tokens, computed in numbers of `width` bytes.

    The factors count the numbers that autograd keeps for one token in one layer, and
    for the weights that it converts for a product. The factors of shorter formats count
    numbers kept in float32, such as the inputs of norms, twice.
    """
    hidden, ffn, layers = shape.hidden, shape.ffn, shape.layers
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # attention weights, on a CPU without blocks of later keys below the last layer
    scores = longest + (layers - 1) * longest * 5 // 8 if on_cpu else longest * layers
    if width == MASTER_BYTES:
        row, copied = 4 * hidden + 5 * q + 2 * kv + 2 * ffn, 0
    else:
        row = 6 * hidden + 4 * q + 3 * kv + 2 * ffn
        copied = hidden * (2 * q + 2 * kv + 3 * ffn)
        if on_cpu:  # attention computes in float32
            row += 4 * q + 2 * kv
        else:
            scores = layers  # the sum of each row's exponentials
    normed = q + kv if shape.qk_norm else 0
    numbers = layers * normed + shape.heads * scores
    return (tokens * row + copied) * layers * width + tokens * numbers * MASTER_BYTES


def _sampled_share(task: TaskConfig) -> float:
    """Return the largest share of a trajectory of the maximum length that the agent may
    have sampled.
    """
    return min(1.0, task.max_turns * task.max_turn_tokens / task.max_tokens)
