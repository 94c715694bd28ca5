"""Estimate the memory and disk that a run needs, from its configuration and the model's
shape alone.

The estimate is exact for weights, gradients, optimizer and KV cache. It counts the
activations that a forward pass keeps for the backward pass, and a fixed amount for each
interpreter with its libraries.
"""

from rollweave.core.membership import first_engines
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import HEAD_DIM, ScratchModel
from rollweave.weights.checkpoint import ModelShape

PROCESS_BYTES = 450 << 20
"""Memory of an interpreter that has imported torch and transformers, and has computed:
350 to 450 MB were measured on a CPU.
"""

HEAD_ROWS_BYTES = 64 << 20
"""Maximum size of the logits, log-probs and their gradient at a time: the trainer
computes the head in bounded parts.
"""

PUBLICATIONS = 3
"""Number of weight versions that the trainer keeps published."""

CHECKPOINTS_KEPT = 3
"""Number of checkpoints on disk: the newest, the best, and the one being written."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 4
"""Bytes of a number of the trainer, which keeps its weights, gradients and both moments
in float32.
"""

STORED_TOKEN_BYTES = 16
"""Bytes of one token in the trajectory store: id, log-prob, and its share of the
segments.
"""


class Need(Struct, frozen=True, kw_only=True):
    """One use of memory: `count` times `each` bytes, in GPU memory (`on_device`) if
    there is a GPU.
    """

    what: str
    count: int
    each: int
    on_device: bool

    @property
    def total(self) -> int:
        return self.count * self.each


def scratch_shape(scratch: ScratchModel, vocab: int, *, context: int) -> ModelShape:
    """Return the shape of the model that `[model.scratch]` builds with `vocab` tokens."""
    return ModelShape(
        vocab=vocab,
        hidden=scratch.hidden,
        layers=scratch.layers,
        heads=scratch.heads,
        kv_heads=scratch.kv_heads,
        head_dim=HEAD_DIM,
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
    """Return the number of trained parameters."""
    total = 0
    for dimensions in shape.tensors().values():
        size = 1
        for dimension in dimensions:
            size *= dimension
        total += size
    return total


def memory(config: RunConfig, shape: ModelShape) -> list[Need]:
    """Return the run's uses of memory, except for the user's environments."""
    trainer, engines = config.trainer, first_engines(config)
    kv_tokens = [config.engines[engine.group].kv_tokens for engine in engines]
    count = parameters(shape)
    width = DTYPE_BYTES[config.model.dtype]
    shard = -(-count // trainer.ranks)
    needs = [
        Need(
            what="trainer: weights", count=trainer.ranks, each=shard * MASTER_BYTES, on_device=True
        ),
        Need(
            what="trainer: gradients",
            count=trainer.ranks,
            each=shard * MASTER_BYTES,
            on_device=True,
        ),
        Need(
            what="trainer: optimizer (AdamW)",
            count=trainer.ranks,
            each=2 * shard * MASTER_BYTES,
            on_device=True,
        ),
        Need(
            what="trainer: activations",
            count=trainer.ranks,
            each=activations(config, shape),
            on_device=True,
        ),
        Need(
            what="trainer: copy for a checkpoint",
            count=1,
            each=3 * count * MASTER_BYTES,
            on_device=False,
        ),
        Need(
            what="trainer: published weights",
            count=PUBLICATIONS,
            each=count * MASTER_BYTES,
            on_device=False,
        ),
        Need(what="engines: weights", count=len(engines), each=count * width, on_device=True),
        *(
            Need(
                what="engines: KV cache",
                count=kv_tokens.count(tokens),
                each=tokens * kv_bytes(shape, width),
                on_device=True,
            )
            for tokens in dict.fromkeys(kv_tokens)
        ),
        Need(
            what="processes",
            count=1 + len(engines) + trainer.ranks,
            each=PROCESS_BYTES,
            on_device=False,
        ),
    ]
    if config.algorithm.kl:
        needs.insert(
            3,
            Need(
                what="trainer: reference",
                count=trainer.ranks,
                each=shard * MASTER_BYTES,
                on_device=True,
            ),
        )
    return needs


def kv_bytes(shape: ModelShape, width: int) -> int:
    """Return the bytes of one token's keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width


def activations(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes that one packed forward pass of `micro_tokens` keeps for the
    backward pass.

    Each layer keeps its two inputs, their norms and the two sums (6 hidden), queries twice
    and the attended values, keys and values twice, gate, up, their product and its
    activation (4 ffn), and the attention weights of the longest sequence.
    """
    longest = max(task.max_tokens for task in config.tasks)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    per_token = shape.layers * (
        6 * shape.hidden + 3 * q + 4 * kv + 4 * shape.ffn + shape.heads * longest
    )
    tokens = min(config.trainer.micro_tokens, batch_tokens(config))
    return tokens * per_token * DTYPE_BYTES[config.model.dtype] + HEAD_ROWS_BYTES


def batch_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens of one training batch."""
    longest = max(task.max_tokens for task in config.tasks)
    return (
        config.rollout.groups_per_step
        * max(config.group_size(task.name) for task in config.tasks)
        * longest
    )


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the disk space of the checkpoints, each with float32 weights and moments,
    and an export in the model's format.
    """
    each = parameters(shape) * (3 * MASTER_BYTES + MASTER_BYTES)
    return CHECKPOINTS_KEPT * each


def trajectory_bytes(config: RunConfig) -> int:
    """Return the maximum disk space of the trajectory store: each trajectory has its
    maximum length.
    """
    started = config.run.steps * batch_tokens(config)
    return int(started * STORED_TOKEN_BYTES)
