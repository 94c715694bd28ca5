"""The memory that versions of the weights need (`schema/hosts`)."""

import math

from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Need, interpreter
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.adapters import adapter_sizes
from rollweave.weights.checkpoint import ModelShape

PUBLICATIONS = 3
"""Number of weight versions that a relay keeps, usually."""

PACKED_WEIGHTS = 1 << 22
"""Fewest weights of an output head that an engine on a CPU keeps in oneDNN's layout,
too.
"""


def packed_head(shape: ModelShape) -> int:
    """Return the number of weights of the output head that are kept twice."""
    head = shape.vocab * shape.hidden
    return head if head >= PACKED_WEIGHTS else 0


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Return the number of weights that are trained and published: the adapters'
    weights if there are adapters, else the model's.
    """
    if config.lora is None:
        return shape.parameters()
    return sum(map(math.prod, adapter_sizes(shape, config.lora).values()))


def published(config: RunConfig, shape: ModelShape, *, versions: int) -> Need:
    """Return the need of so many versions that are kept in a host's memory."""
    each = trained_parameters(config, shape) * NUMBER_BYTES[config.model.dtype]
    return Need(what="published weights", nbytes=versions * each, on_device=False, setting="model")


def relay_needs(config: RunConfig, shape: ModelShape, *, stores: bool) -> list[Need]:
    """Return the memory that a relay needs for versions of the weights, if it `stores`
    any. On the trainer's host a relay maps the trainer's memory, and on a host without
    engines it stores none.
    """
    versions = [published(config, shape, versions=PUBLICATIONS)] if stores else []
    return [*versions, interpreter(setting="model")]
