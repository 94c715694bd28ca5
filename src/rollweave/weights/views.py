"""The tensors of a checkpoint as parts of a model's parameters, where the two differ:
several tensors may be parts of one parameter, such as the experts of a layer.

Invariant: a view describes elements of a contiguous tensor, so that nothing is copied
to read or write a stored tensor.
"""

import math
from collections.abc import Container, Mapping, Sequence

import msgspec
import torch

from rollweave.schema.base import Struct
from rollweave.schema.errors import WeightsError


class View(Struct, frozen=True, kw_only=True):
    """A tensor of a checkpoint as part of a parameter: the tensor begins at `offset` of
    the parameter and has `strides`, both in elements.
    """

    parameter: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of a full parameter, sharing its memory."""
        return parameter.as_strided(
            self.size, self.stride, parameter.storage_offset() + self.offset
        )

    def part(self, shape: Sequence[int], rows: slice) -> "Part":
        """Return the part of this tensor in `rows` of the parameter, whose full shape
        is `shape`. Raises `WeightsError` if rows of the tensor and the parameter do not
        correspond.
        """
        count = self.size[0] if self.size else 1
        if not shape or rows == slice(0, shape[0]):
            return Part(rows=slice(0, count), offset=self.offset)
        row = max(1, math.prod(shape[1:]))
        first = self.offset // row
        inner = sum(
            (size - 1) * stride for size, stride in zip(self.size[1:], self.stride[1:], strict=True)
        )
        if self.size and self.stride[0] == row and self.offset % row + inner < row:
            low, high = (min(max(edge - first, 0), count) for edge in (rows.start, rows.stop))
            return Part(rows=slice(low, high), offset=self.offset + (low - rows.start) * row)
        last = self.offset + inner + ((count - 1) * self.stride[0] if self.size else 0)
        if last // row != first:
            raise WeightsError(
                f"a tensor of shape {self.size} cannot be divided like the rows of "
                f"{self.parameter}, {tuple(shape)}"
            )
        low, high = (0 if edge <= first else count for edge in (rows.start, rows.stop))
        return Part(rows=slice(low, high), offset=self.offset - rows.start * row)


class Part(Struct, frozen=True, kw_only=True):
    """Consecutive rows of a stored tensor, possibly none, and the rows' offset in a
    shard's memory.
    """

    rows: slice
    offset: int

    def of(self, view: View, shard: torch.Tensor) -> torch.Tensor:
        """Return these rows in the memory of `shard`."""
        count = self.rows.stop - self.rows.start
        size = (count, *view.size[1:]) if view.size else ()
        if not count:
            return shard.new_empty(size)
        return shard.as_strided(size, view.stride, shard.storage_offset() + self.offset)


class StoredTensors(Struct, frozen=True, kw_only=True):
    """The tensors of a model's checkpoint: views of its parameters by name, and
    `constants`, which training does not change (name → buffer of the model).
    """

    views: dict[str, View]
    constants: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_identical(self) -> bool:
        """True if the checkpoint has each parameter under its name, and nothing
        else.
        """
        return not self.constants and all(
            name == view.parameter
            and view.offset == 0
            and view.stride == contiguous_strides(view.size)
            for name, view in self.views.items()
        )

    def of(self, parameters: Container[str]) -> "StoredTensors":
        """Return the tensors of a model with some of the parameters only."""
        views = {name: view for name, view in self.views.items() if view.parameter in parameters}
        return StoredTensors(views=views, constants=self.constants)

    @classmethod
    def identical(cls, shapes: Mapping[str, Sequence[int]]) -> "StoredTensors":
        """Return the tensors of a model that stores each parameter under its name."""
        return cls(
            views={
                name: View(
                    parameter=name, offset=0, size=tuple(shape), stride=contiguous_strides(shape)
                )
                for name, shape in shapes.items()
            }
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
