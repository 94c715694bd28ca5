"""The memory that an engine needs (`schema/hosts`). It is exact for weights and KV."""

import math

from msgspec.structs import replace

from rollweave.engine.server_kinds import kind_of
from rollweave.io.machine import computed_dtype
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Need, computing
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.needs import packed_head, published

SERVER_BYTES = 1200 << 20
"""Memory of an inference server beside weights and KV: 1.1 GB were measured of vLLM on
a CPU. SGLang was not measured.
"""


def engine_needs(config: RunConfig, shape: ModelShape, group: EngineConfig) -> list[Need]:
    """Return the needs of one engine of this group."""
    process = computing(config.model.device, setting="engines.count")
    if group.address:
        # the server's memory is its owner's; its process publishes the model once
        nbytes = shape.parameters() * NUMBER_BYTES["float32"]
        first = Need(what="first weights", nbytes=nbytes, on_device=False, setting="model")
        return [first, *process]
    dtype: str = config.model.dtype
    if group.server is None:
        dtype = computed_dtype(dtype, config.model.device)
    width = NUMBER_BYTES[dtype]
    kv = group.kv_tokens * shape.kv_bytes(width)
    needs = [
        Need(what="weights", nbytes=shape.parameters() * width, setting="model"),
        Need(what="KV cache", nbytes=kv, setting="engines.kv_tokens"),
    ]
    if group.server is not None:
        return [*needs, *_server_needs(config, shape, group), *process]
    if config.model.device != "cuda":
        if dtype == "float32" and not group.deterministic:
            what = "copy of the KV cache"
            needs.append(Need(what=what, nbytes=kv, setting="engines.kv_tokens"))
        if not group.deterministic and (head := packed_head(shape) * width):
            needs.append(Need(what="output head in another layout", nbytes=head, setting="model"))
    else:
        # attention gathers the blocks of one layer, and new weights arrive one by one
        largest = max(map(math.prod, shape.tensors().values()))
        logits = 2 * group.most_slots * shape.vocab * NUMBER_BYTES["float32"]
        step = kv // shape.layers + largest * width + logits
        needs.append(Need(what="one step", nbytes=step, setting="engines.kv_tokens"))
    if config.weights.collective:
        arriving = published(config, shape, versions=1)
        needs.append(replace(arriving, what="version in transit", on_device=True))
    if config.trainer.colocated:
        needs = [replace(need, in_turn=True) for need in needs]
    return [*needs, *process]


def _server_needs(config: RunConfig, shape: ModelShape, group: EngineConfig) -> list[Need]:
    """Return the needs of a server, and of copies of a version of the weights."""
    assert group.server is not None, "the group has servers"
    kind, version = kind_of(group.server), shape.parameters() * NUMBER_BYTES[config.model.dtype]
    sizes = {
        kind.name: (SERVER_BYTES, "engines.count"),
        "merged weights": (version if config.lora is not None else 0, "model"),
        "new weights": (version if kind.copies_weights else 0, "model"),
    }
    return [
        Need(what=what, nbytes=nbytes, on_device=False, setting=setting)
        for what, (nbytes, setting) in sizes.items()
        if nbytes
    ]
