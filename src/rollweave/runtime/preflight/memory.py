"""Estimate the memory and disk that a run needs, from its configuration and the model's
shape alone.

The estimate is exact for weights, gradients, optimizer, KV cache and published weights.
The tensors that a forward pass keeps for the backward pass are counted operation by
operation, for passes over a single sequence of the maximum length. Processes, CUDA and
the temporary tensors of one operation are allowed for by constants, which were not
measured on a GPU; `rollweave bench gpu` measures the peaks of the trainer there, and
`rollweave bench memory` compares the estimate with peaks on a CPU.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from rollweave.engine.servers.kinds import kind_of
from rollweave.io.cpu import computed_dtype
from rollweave.schema.base import Struct
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.model import HEAD_DIM, ScratchModel
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.tasks import TaskConfig
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.adapters import adapter_sizes
from rollweave.weights.checkpoint import ModelShape

PROCESS_BYTES = 450 << 20
"""Memory of an interpreter that has imported torch and transformers, and has computed:
350 to 450 MB were measured on a CPU.
"""

SERVER_BYTES = 1200 << 20
"""Memory of an inference server beside weights and KV: 1.1 GB were measured of vLLM on
a CPU. SGLang was not measured.
"""

CUDA_BYTES = 640 << 20
"""Memory on a GPU of one process's CUDA context, kernels and workspaces."""

HEAD_LOGITS = 1 << 26
"""Maximum number of logits that the trainer holds at once
(`train/model.MAX_LOGITS`).
"""

HEAD_COPIES = 3
"""Number of float32 tensors as large as the logits: these, the exponentials, and the
gradient.
"""

CPU_TOKENS = 2048
"""Maximum number of tokens of one pass on a CPU (`train/passes.CACHE_TOKENS`)."""

PUBLICATIONS = 3
"""Number of weight versions that the trainer and each relay keep."""

CHECKPOINTS_KEPT = 3
"""Number of checkpoints on disk: the newest, the best, and the one being written."""

MASTER_BYTES = 4
"""Bytes of a number of the trainer, which keeps its weights, gradients and both moments
in float32.
"""

STORED_TOKEN_BYTES = 16
"""Bytes of one token in the trajectory store: id, log-prob, and its share of the
segments.
"""


class Part(Struct, frozen=True, kw_only=True):
    """One use of memory by a process: GPU memory if `on_device` and it runs on a GPU.

    `setting` is the key that changes it most directly. If `in_turn`, the memory of a
    rank is given back while the engines have the devices, and that of an engine while
    the ranks have them (colocated runs). If `at_restart`, a rank that is restarted
    needs it for a moment while the engines have the devices.
    """

    what: str
    nbytes: int
    on_device: bool = True
    in_turn: bool = False
    at_restart: bool = False
    setting: str


def scratch_shape(
    scratch: ScratchModel, vocab: int, *, context: int, head_dim: int = HEAD_DIM
) -> ModelShape:
    """Return the shape of the model that `[model.scratch]` builds with `vocab`
    tokens.
    """
    return ModelShape(
        vocab=vocab,
        hidden=scratch.hidden,
        layers=scratch.layers,
        heads=scratch.hidden // head_dim,
        kv_heads=scratch.hidden // head_dim // 2,
        head_dim=head_dim,
        ffn=scratch.ffn,
        context=context,
        eps=1e-6,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        inv_freq=(),
        eos_token_ids=(),
    )


def parameters(shape: ModelShape) -> int:
    """Return the number of the model's weights."""
    return sum(_size(dimensions) for dimensions in shape.tensors().values())


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Return the number of weights that are trained and published: those of the
    adapters if there are any.
    """
    if config.lora is None:
        return parameters(shape)
    return sum(map(_size, adapter_sizes(shape, config.lora).values()))


def rank_parts(config: RunConfig, shape: ModelShape, *, rank: int) -> list[Part]:
    """Return the uses of memory by one rank of the trainer."""
    trainer = config.trainer
    groups = trainer.ranks // trainer.tensor_parallel
    model = shard = _divided(shape, trainer.ranks, trainer.tensor_parallel) * MASTER_BYTES
    if config.lora is not None:
        # a tensor group divides one matrix of each adapter, which is neglected here
        shard = -(-trained_parameters(config, shape) // groups) * MASTER_BYTES
        model += shard
    offloaded = "optimizer" in trainer.save_memory
    on_gpu = config.model.device == "cuda"
    passes = activations(config, shape)
    parts = [
        Part(what="weights", nbytes=model, setting="trainer.ranks"),
        Part(what="gradients", nbytes=shard, setting="trainer.ranks"),
        Part(
            what="optimizer",
            nbytes=2 * shard,
            on_device=not offloaded,
            setting="trainer.save_memory" if on_gpu and not offloaded else "trainer.ranks",
        ),
        Part(
            what="activations",
            nbytes=passes,
            setting="trainer.micro_tokens",
        ),
    ]
    if config.algorithm.kl:
        # while it computes with them, a rank sets its own weights aside
        parts.append(Part(what="reference", nbytes=2 * shard, setting="algorithm.kl"))
    if config.has_critic:
        # with its gradients and the state of its optimizer
        parts.append(Part(what="critic", nbytes=4 * shard, setting="algorithm.advantage"))
    if trainer.epochs * trainer.minibatches > 1:
        # a failed batch is undone
        parts.append(
            Part(what="copy of the state", nbytes=3 * shard, setting="trainer.minibatches")
        )
    if trainer.ranks > 1:
        parts.append(
            Part(
                what="gathered layers",
                nbytes=gathered_layers(shape, tensor_parallel=trainer.tensor_parallel),
                setting="trainer.ranks",
            )
        )
    # It is made between two steps, on a CPU in the memory that the activations left.
    copied = 3 * shard if on_gpu else 3 * shard - passes
    if copied > 0:
        parts.append(
            Part(
                what="copy for a checkpoint",
                nbytes=copied,
                on_device=False,
                setting="trainer.ranks",
            )
        )
    if rank == 0:
        parts.append(_versions(config, shape))
    if trainer.colocated:
        parts = list(_rank_in_turn(parts, on_gpu=on_gpu))
        if on_gpu and trainer.ranks > 1:  # shards are made on the device, and leave it
            parts.append(
                Part(
                    what="weights of a restart",
                    nbytes=model + shard * config.has_critic,
                    in_turn=True,
                    at_restart=True,
                    setting="trainer.ranks",
                )
            )
    return [*parts, *_process(config, setting="trainer.ranks")]


def _divided(shape: ModelShape, ranks: int, tensor_parallel: int) -> int:
    """Return the number of weights of a rank in a tensor group, which divides the
    matrices of the layers. All else is divided over the data group alone.
    """
    layered = sum(
        _size(dimensions)
        for name, dimensions in shape.tensors().items()
        if ".layers." in name and len(dimensions) > 1
    )
    own = -(-layered // tensor_parallel) + parameters(shape) - layered
    return -(-own // (ranks // tensor_parallel))


def _rank_in_turn(parts: Sequence[Part], *, on_gpu: bool) -> Iterator[Part]:
    """Yield the parts of a rank in a colocated run: its state is in the host's memory
    while the engines have the devices.
    """
    state = ("weights", "optimizer", "reference", "critic")
    for part in parts:
        yield replace(part, in_turn=part.on_device and (on_gpu or part.what not in state))
    if on_gpu:
        nbytes = sum(part.nbytes for part in parts if part.on_device and part.what in state)
        yield Part(
            what="state in turn", nbytes=nbytes, on_device=False, setting="trainer.colocated"
        )


def engine_parts(config: RunConfig, shape: ModelShape, group: EngineConfig) -> list[Part]:
    """Return the uses of memory by one engine."""
    if group.address:
        # the server's memory is its owner's; its process publishes the model once
        each = parameters(shape) * MASTER_BYTES
        first = Part(what="first weights", nbytes=each, on_device=False, setting="model")
        return [first, *_process(config, setting="engines.count")]
    dtype: str = config.model.dtype
    if group.server is None:
        dtype = computed_dtype(dtype, config.model.device)
    width = NUMBER_BYTES[dtype]
    kv = group.kv_tokens * kv_bytes(shape, width)
    parts = [
        Part(what="weights", nbytes=parameters(shape) * width, setting="model"),
        Part(what="KV cache", nbytes=kv, setting="engines.kv_tokens"),
    ]
    if group.server is not None:
        kind, version = (
            kind_of(group.server),
            parameters(shape) * NUMBER_BYTES[config.published_dtype],
        )
        parts.append(
            Part(what=kind.name, nbytes=SERVER_BYTES, on_device=False, setting="engines.count")
        )
        if config.lora is not None:
            parts.append(
                Part(what="merged weights", nbytes=version, on_device=False, setting="model")
            )
        if kind.copies_weights:
            parts.append(Part(what="new weights", nbytes=version, on_device=False, setting="model"))
        return [*parts, *_process(config, setting="engines.count")]
    if config.model.device != "cuda":
        if dtype == "float32" and not group.deterministic:
            parts.append(Part(what="copy of the KV cache", nbytes=kv, setting="engines.kv_tokens"))
    else:
        # attention gathers the blocks of one layer, and new weights arrive one by one
        largest = max(_size(dimensions) for dimensions in shape.tensors().values())
        logits = 2 * group.max_slots * shape.vocab * 4
        parts.append(
            Part(
                what="one step",
                nbytes=kv // shape.layers + largest * width + logits,
                setting="engines.kv_tokens",
            )
        )
    if config.trainer.colocated:
        parts = [replace(part, in_turn=True) for part in parts]
    return [*parts, *_process(config, setting="engines.count")]


def relay_parts(config: RunConfig, shape: ModelShape, *, stores: bool) -> list[Part]:
    """Return the uses of memory by one relay: versions of the weights if it `stores`
    any. Beside the trainer it maps its memory, and on a host without engines it has
    none.
    """
    versions = [_versions(config, shape)] if stores else []
    return [*versions, _interpreter(setting="model")]


def other_parts() -> list[Part]:
    """Return the uses of memory by the controller, or by the predictor of lengths."""
    return [_interpreter(setting="model")]


def worker_parts() -> list[Part]:
    """Return the uses of memory by a rollout worker, without environments and
    sandboxes.
    """
    return [_interpreter(setting="workers.count")]


def kv_bytes(shape: ModelShape, width: int) -> int:
    """Return the bytes of one token's keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width


def activations(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes that one packed forward pass keeps for the backward pass.

    The pass has one sequence of the maximum length, or several with `micro_tokens` in
    all. Weights that are converted or concatenated for a product are kept, too. Logits
    are those of the tokens that the agent may sample.
    """
    longest = max(task.max_tokens for task in config.tasks)
    on_cpu = config.model.device != "cuda"
    divided = config.trainer.tensor_parallel
    shape = dataclasses.replace(
        shape,
        heads=-(-shape.heads // divided),
        kv_heads=-(-shape.kv_heads // divided),
        ffn=-(-shape.ffn // divided),
    )
    micro = min(config.trainer.micro_tokens, CPU_TOKENS) if on_cpu else config.trainer.micro_tokens
    tokens = min(max(micro, longest), batch_tokens(config))
    width = _computed_width(config)
    sampled = max(_sampled_share(task) for task in config.tasks)
    logits = min(HEAD_LOGITS, math.ceil(tokens * sampled) * shape.vocab)
    kept = HEAD_COPIES * 4 * logits
    if "activations" in config.trainer.save_memory:
        # each layer's input, and one layer at a time
        kept += shape.layers * tokens * shape.hidden * width
        shape = dataclasses.replace(shape, layers=1)
    kept += saved_bytes(shape, tokens, longest=longest, width=width, on_cpu=on_cpu)
    return kept + _adapter_bytes(config, shape, tokens)


def saved_bytes(shape: ModelShape, tokens: int, *, longest: int, width: int, on_cpu: bool) -> int:
    """Return the bytes that the layers keep for the backward pass over `tokens` of
    sequences of `longest` tokens, computed in numbers of `width` bytes.
    """
    hidden, ffn, layers = shape.hidden, shape.ffn, shape.layers
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # both norms before their weights and after, in float32 and as the inputs of
    # products
    row = 2 * hidden * (4 + width)
    # queries and keys: the norm before its weight, the rotations, and the rotated
    # values
    row += (q + kv) * ((4 if shape.qk_norm else 0) + 4 + width)
    # values with what they are a part of, attended values, and those as an input
    row += (q + 2 * kv) * width + 2 * q * width
    # gate and up, and their product
    row += 3 * ffn * width
    scores = shape.heads * longest * width
    if width == 4 and on_cpu:
        row += q * width  # scaled queries
        # the attention weights: later keys of whole blocks are left out below the last
        # layer
        attention = (layers - 1) * scores * 5 // 8 + scores
    elif width == 4:
        attention = layers * scores
    else:
        # torch's kernels keep the sum of each row's exponentials instead of weights
        attention = layers * shape.heads * 4
    qkv, gate_up = hidden * (q + 2 * kv), 2 * hidden * ffn
    copied = qkv + gate_up + (0 if width == 4 else hidden * q + hidden * ffn)
    return tokens * (layers * row + attention) + layers * copied * width


def _sampled_share(task: TaskConfig) -> float:
    """Return the largest share of a trajectory of the maximum length that the agent may
    have sampled.
    """
    return min(1.0, task.max_turns * task.max_turn_tokens / task.max_tokens)


def _adapter_bytes(config: RunConfig, shape: ModelShape, tokens: int) -> int:
    """Return the bytes that adapters keep for the backward pass: the output of A."""
    if config.lora is None:
        return 0
    layers = len(adapter_sizes(shape, config.lora)) // 2
    return tokens * layers * config.lora.rank * _computed_width(config)


def _computed_width(config: RunConfig) -> int:
    """Return the bytes of a number with which the trainer computes."""
    return NUMBER_BYTES[computed_dtype(config.model.dtype, config.model.device)]


def gathered_layers(shape: ModelShape, *, tensor_parallel: int = 1) -> int:
    """Return the bytes of the weights and gradients that a rank has of whole layers at
    a time: those of one layer, the weights of the next, and those outside of the
    layers. Of the layers' matrices it has its part in its tensor group.
    """
    layer = [dims for name, dims in shape.tensors().items() if ".layers.0." in name]
    outside = parameters(shape) - shape.layers * sum(map(_size, layer))
    within = sum(
        -(-_size(dims) // tensor_parallel) if len(dims) > 1 else _size(dims) for dims in layer
    )
    return (3 * within + 2 * outside) * MASTER_BYTES


def batch_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens of one training batch."""
    longest = max(task.max_tokens for task in config.tasks)
    return (
        config.rollout.groups_per_step
        * max(config.group_size(task.name) for task in config.tasks)
        * longest
    )


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the disk space of the checkpoints, each with trained weights and moments
    in float32, and an export in the model's format.
    """
    each = (3 * trained_parameters(config, shape) + parameters(shape)) * MASTER_BYTES
    return CHECKPOINTS_KEPT * each


def trajectory_bytes(config: RunConfig) -> int:
    """Return the maximum disk space of the trajectory store: each trajectory has its
    maximum length.
    """
    started = config.run.steps * batch_tokens(config)
    return int(started * STORED_TOKEN_BYTES)


def _versions(config: RunConfig, shape: ModelShape) -> Part:
    each = trained_parameters(config, shape) * NUMBER_BYTES[config.published_dtype]
    return Part(
        what="published weights",
        nbytes=PUBLICATIONS * each,
        on_device=False,
        setting="model",
    )


def _process(config: RunConfig, *, setting: str) -> list[Part]:
    """Return what a process needs that computes."""
    if config.model.device != "cuda":
        return [_interpreter(setting=setting)]
    return [Part(what="CUDA", nbytes=CUDA_BYTES, setting=setting), _interpreter(setting=setting)]


def _interpreter(*, setting: str) -> Part:
    return Part(what="process", nbytes=PROCESS_BYTES, on_device=False, setting=setting)


def _size(dimensions: tuple[int, ...]) -> int:
    size = 1
    for dimension in dimensions:
        size *= dimension
    return size
