"""Computes which rank holds which slice of a model, and which rank sends which slice to
which other (ROSE §4.2).

Pure: names, shapes and integers. Every slice is a rectangle of a canonical tensor, that
is a tensor in the payload of a `WeightManifest`, with its transformers name. Invariants
of a plan: the senders' slices are disjoint and together cover every element once,
however many replicas there are; a receiver pulls exactly what its layout holds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollweave.weights.parameters import Model, Part, Rule, itemsize

BUCKET_BYTES = 64 << 20
"""Maximum bytes of a slice that several ranks could send: larger ones are divided among
them. The value is ROSE's push bucket (§4.2).
"""

Ints = tuple[int, ...]
Range = tuple[int, int]
"""(offset, bytes) in a payload."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of canonical `tensor` with corner `start` and `size` elements along
    each dimension, and where a rank keeps it.

    The rank keeps it in its tensor `local`, with corner `at`. If experts are stacked
    there, `at` has one more dimension, the first.
    """

    tensor: str
    start: Ints
    size: Ints
    local: str
    at: Ints


@dataclass(frozen=True, slots=True)
class Shard:
    """The content of one rank: the `shapes` of its own tensors, and the `pieces` of the
    canonical ones in them.

    Elements that no piece covers are padding (vocabulary rows without a token). A shard
    that holds nothing of a tensor has no piece of it.
    """

    shapes: dict[str, Ints]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The full model in one place: an engine on one device, or a relay."""

    @property
    def ranks(self) -> int:
        return 1

    def shard(self, model: Model, rank: int) -> Shard:
        return Fsdp(1).shard(model, rank)


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP2: dimension 0 in chunks as `torch.chunk` makes them, so that the last ranks
    may hold less, or nothing.
    """

    ranks: int

    def __post_init__(self) -> None:
        _positive(ranks=self.ranks)

    def shard(self, model: Model, rank: int) -> Shard:
        """Return the shard of a rank. Raises `ValueError` for a scalar, as FSDP2 does."""
        _check_rank(rank, self.ranks)
        shapes, pieces = {}, []
        for meta in model.tensors:
            start: Ints = (0,) * len(meta.shape)
            size = meta.shape
            if self.ranks > 1:
                if not size:
                    raise ValueError(
                        f"{meta.name} must have a dimension that FSDP can shard, got a scalar"
                    )
                rows = -(-size[0] // self.ranks)
                first = min(rows * rank, size[0])
                start, size = (first, *start[1:]), (min(rows, size[0] - first), *size[1:])
            shapes[meta.name] = size
            if math.prod(size):
                pieces.append(Piece(meta.name, start, size, meta.name, (0,) * len(size)))
        return Shard(shapes, tuple(pieces))


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`dp` replicas of `pp` stages of `tp` ranks; rank = (replica x pp + stage) x tp +
    rank in the stage.

    Layers are assigned to stages in order; remaining ones go to the middle, as in vLLM,
    because the last stage also computes the head and the first one the embedding. A
    tied embedding is on both. With `ep`, whole experts are assigned to `ep` groups of
    each stage, and split inside a group. `fused` keeps q, k and v, gate and up, and a
    rank's experts in one tensor each. The vocabulary is padded to a multiple of
    `vocab_multiple` (vLLM's default).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    fused: bool = False
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        _positive(
            tp=self.tp, pp=self.pp, ep=self.ep, dp=self.dp, vocab_multiple=self.vocab_multiple
        )
        if self.tp % self.ep:
            raise ValueError(f"ep must divide tp ({self.tp}), got {self.ep}")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def shard(self, model: Model, rank: int) -> Shard:
        """Return the shard of a rank. Raises `ValueError` if this layout is not
        possible for the model, or a tensor's rule is unknown.
        """
        _check_rank(rank, self.ranks)
        stage, own = rank // self.tp % self.pp, rank % self.tp
        layers = self._layers(model, stage)
        builder = _ShardBuilder()
        for meta in model.tensors:
            rule = model.rules[meta.name]
            if not self._on_stage(rule, layers, stage):
                continue
            ranks, number, local_experts = self.tp, own, range(0)
            if rule.experts:
                ranks, number = self.tp // self.ep, own % (self.tp // self.ep)
                each = _quotient("ep", self.ep, rule.experts, f"experts of {meta.name}")
                local_experts = range(own // ranks * each, (own // ranks + 1) * each)
                if rule.expert is not None and rule.expert not in local_experts:
                    continue
            for index, part in enumerate(rule.parts):
                builder.add(
                    meta.name,
                    meta.shape,
                    rule,
                    index,
                    local_experts,
                    self._share(meta.name, part, ranks, number),
                    self.fused,
                )
        return builder.shard()

    def _layers(self, model: Model, stage: int) -> range:
        each, left = divmod(model.layers, self.pp)
        if not each and self.pp > 1:
            raise ValueError(
                f"pp must be at most the model's layers ({model.layers}), got {self.pp}"
            )
        counts = [each + (self.pp - 1 - left <= place < self.pp - 1) for place in range(self.pp)]
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def _on_stage(self, rule: Rule, layers: range, stage: int) -> bool:
        if isinstance(rule.where, int):
            return rule.where in layers
        first, last = stage == 0, stage == self.pp - 1
        return {"first": first, "last": last, "ends": first or last}[rule.where]

    def _share(self, name: str, part: Part, ranks: int, number: int) -> "_Share":
        """Return the share of rank `number` of `ranks` in a part."""
        if part.dim is None:
            return _Share(None, 0, 0, 0)
        unit = part.size // part.units if part.units else 0
        if part.kind == "padded":
            padded = -(-part.units // self.vocab_multiple) * self.vocab_multiple
            rows = _quotient("tp", ranks, padded, f"padded rows of {name}")
            first = min(number * rows, part.size)
            return _Share(part.dim, first, min(rows, part.size - first), rows)
        if part.kind == "shared" and ranks > part.units:
            group = _quotient("key-value heads", part.units, ranks, f"tp ranks, for {name}")
            return _Share(part.dim, part.start + number // group * unit, unit, unit)
        size = _quotient("tp", ranks, part.units, f"units of {name}") * unit
        return _Share(part.dim, part.start + number * size, size, size)


Layout = Unsharded | Fsdp | TensorParallel


@dataclass(frozen=True, slots=True)
class _Share:
    """`size` elements from `start` along `dim` of a canonical tensor, in `capacity`
    elements of the local one.
    """

    dim: int | None
    start: int
    size: int
    capacity: int


@dataclass(slots=True)
class _ShardBuilder:
    """Lays out a rank's tensors: the parts of each follow each other along their
    dimension, and experts are stacked.
    """

    _parts: defaultdict[str, list[tuple[int, int, int, str, Ints, Ints, _Share]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self,
        name: str,
        shape: Ints,
        rule: Rule,
        index: int,
        local_experts: range,
        share: _Share,
        fused: bool,
    ) -> None:
        """Add part `index` of the tensor `name`; `local_experts` are those of the rank."""
        start, size = [0] * len(shape), list(shape)
        if rule.experts and rule.expert is None:
            start[0], size[0] = local_experts.start, len(local_experts)
        if share.dim is not None:
            start[share.dim], size[share.dim] = share.start, share.size
        together = fused and bool(rule.fused)
        local = rule.fused if together else name
        row = -1 if not together or rule.expert is None else rule.expert - local_experts.start
        slot = rule.slot if together else 0
        self._parts[local].append((row, slot, index, name, tuple(start), tuple(size), share))

    def shard(self) -> Shard:
        shapes, pieces = {}, []
        for local, parts in self._parts.items():
            # along the dimension of the parts, by row of the stack
            end: defaultdict[int, int] = defaultdict(int)
            for row, _, _, name, start, size, share in sorted(parts, key=lambda part: part[:3]):
                corner = [0] * len(size)
                if share.dim is not None:
                    corner[share.dim] = end[row]
                end[row] += share.capacity
                if math.prod(size):
                    pieces.append(
                        Piece(name, start, size, local, (*((row,) if row >= 0 else ()), *corner))
                    )
            row, *_, size, share = parts[-1]
            shape = list(size)
            if share.dim is not None:
                shape[share.dim] = end[row]
            shapes[local] = (len(end), *shape) if row >= 0 else tuple(shape)
        return Shard(shapes, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Transfer:
    """`size` elements from `start` of canonical `tensor`, from the sender's local
    tensor to the receiver's.
    """

    sender: int
    receiver: int
    tensor: str
    start: Ints
    size: Ints
    source: str
    source_at: Ints
    target: str
    target_at: Ints


@dataclass(frozen=True)
class Plan:
    """The slices that every rank sends (`sends`, by sender) and needs (`pulls`, by
    receiver).
    """

    model: Model
    sends: tuple[tuple[Piece, ...], ...]
    pulls: tuple[tuple[Piece, ...], ...]

    def transfers(self, receiver: int) -> Iterator[Transfer]:
        """Yield the transfers that make up the receiver's shard, each element once."""
        sent: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)
        for sender, pieces in enumerate(self.sends):
            for piece in pieces:
                sent[piece.tensor].append((sender, piece))
        for pulled in self.pulls[receiver]:
            for sender, sent_piece in sent[pulled.tensor]:
                if overlap := _overlap(pulled, sent_piece):
                    start, size = overlap
                    source, target = _local_corner(sent_piece, start), _local_corner(pulled, start)
                    yield Transfer(
                        sender,
                        receiver,
                        pulled.tensor,
                        start,
                        size,
                        sent_piece.local,
                        source,
                        pulled.local,
                        target,
                    )

    def sent_bytes(self, sender: int) -> int:
        """Return the bytes that this sender transmits, counted once."""
        return piece_bytes(self.model, self.sends[sender])

    def sent_ranges(self, sender: int) -> list[Range]:
        """Return where these bytes are in the canonical payload: ascending, disjoint
        and not adjacent.
        """
        return payload_ranges(self.model, self.sends[sender])

    def pulled_ranges(self, receiver: int) -> list[Range]:
        """Return where the bytes that this receiver needs are in the canonical payload."""
        return payload_ranges(self.model, self.pulls[receiver])


def plan(
    model: Model, senders: Layout, receivers: Layout, *, bucket_bytes: int = BUCKET_BYTES
) -> Plan:
    """Plan the transfer from training layout `senders` to serving layout `receivers`.

    Raises `ValueError` if one of them is not possible for the model.
    """
    pulls = tuple(receivers.shard(model, rank).pieces for rank in range(receivers.ranks))
    return Plan(model, assign_slices(model, senders, bucket_bytes=bucket_bytes), pulls)


def assign_slices(
    model: Model, layout: Layout, *, bucket_bytes: int = BUCKET_BYTES
) -> tuple[tuple[Piece, ...], ...]:
    """Return by rank the slices that it alone sends, so that all are sent once.

    A slice that several ranks hold is sent by the one of them with the least to send,
    largest slices first. If all ranks hold the same, their loads differ by at most the
    largest slice (a bucket, or one row if that is larger).
    """
    _positive(bucket_bytes=bucket_bytes)
    holders: defaultdict[tuple[str, Ints, Ints], list[tuple[int, Piece]]] = defaultdict(list)
    for rank in range(layout.ranks):
        for piece in layout.shard(model, rank).pieces:
            holders[piece.tensor, piece.start, piece.size].append((rank, piece))
    sizes = {meta.name: itemsize(meta) for meta in model.tensors}
    sent_pieces: list[list[Piece]] = [[] for _ in range(layout.ranks)]
    loads = [0] * layout.ranks
    turns = []
    for owners in holders.values():
        rank, piece = owners[0]
        if len(owners) == 1:
            sent_pieces[rank].append(piece)
            loads[rank] += math.prod(piece.size) * sizes[piece.tensor]
            continue
        ranks = [rank for rank, _ in owners]
        piece_of = dict(owners)
        for start, size in _divide(piece, sizes[piece.tensor], bucket_bytes):
            turns.append((math.prod(size) * sizes[piece.tensor], start, size, ranks, piece_of))
    for nbytes, start, size, ranks, piece_of in sorted(turns, key=lambda turn: -turn[0]):
        rank = min(ranks, key=loads.__getitem__)
        own = piece_of[rank]
        sent_pieces[rank].append(
            Piece(own.tensor, start, size, own.local, _local_corner(own, start))
        )
        loads[rank] += nbytes
    order = {meta.name: index for index, meta in enumerate(model.tensors)}
    return tuple(
        tuple(sorted(pieces, key=lambda piece: (order[piece.tensor], piece.start)))
        for pieces in sent_pieces
    )


def piece_bytes(model: Model, pieces: Iterable[Piece]) -> int:
    sizes = {meta.name: itemsize(meta) for meta in model.tensors}
    return sum(math.prod(piece.size) * sizes[piece.tensor] for piece in pieces)


def payload_ranges(model: Model, pieces: Iterable[Piece]) -> list[Range]:
    """Return where disjoint pieces lie in the model's payload: (offset, bytes),
    ascending, adjacent ones merged.
    """
    metas = {meta.name: meta for meta in model.tensors}
    ranges: list[Range] = []
    for piece in pieces:
        meta = metas[piece.tensor]
        each = itemsize(meta)
        ranges.extend(
            (meta.offset + first * each, count * each)
            for first, count in runs(meta.shape, piece.start, piece.size)
        )
    joined: list[Range] = []
    for offset, nbytes in sorted(ranges):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    return joined


def runs(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[Range]:
    """Yield the contiguous stretches of a rectangle of a row-major tensor as (first
    element, elements), ascending.
    """
    if not math.prod(size):
        return
    solid = len(shape)  # from this dimension on, the rectangle is as wide as the tensor
    while solid and size[solid - 1] == shape[solid - 1]:
        solid -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not solid:
        yield 0, math.prod(shape)
        return
    outer, count = solid - 1, size[solid - 1] * strides[solid - 1]
    for number in range(math.prod(size[:outer])):
        first = start[outer] * strides[outer]
        for dim in reversed(range(outer)):
            number, place = divmod(number, size[dim])
            first += (start[dim] + place) * strides[dim]
        yield first, count


def _divide(piece: Piece, each: int, bucket_bytes: int) -> Iterator[tuple[Ints, Ints]]:
    """Divide the piece into slices of at most `bucket_bytes` (or one row) along its
    first dimension of more than one.
    """
    dim = next((dim for dim, size in enumerate(piece.size) if size > 1), None)
    if dim is None:
        yield piece.start, piece.size
        return
    row = math.prod(piece.size) // piece.size[dim] * each
    step = max(1, bucket_bytes // row)
    for first in range(0, piece.size[dim], step):
        start, size = list(piece.start), list(piece.size)
        start[dim], size[dim] = piece.start[dim] + first, min(step, piece.size[dim] - first)
        yield tuple(start), tuple(size)


def _overlap(one: Piece, other: Piece) -> tuple[Ints, Ints] | None:
    start = tuple(map(max, one.start, other.start))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.size, other.start, other.size, strict=True)
    )
    size = tuple(end - first for end, first in zip(ends, start, strict=True))
    return (start, size) if all(length > 0 for length in size) else None


def _local_corner(piece: Piece, start: Ints) -> Ints:
    """Return where the rank keeps the element at `start` of the canonical tensor."""
    stacked = len(piece.at) - len(start)
    moved = (
        at + here - first
        for at, here, first in zip(piece.at[stacked:], start, piece.start, strict=True)
    )
    return (*piece.at[:stacked], *moved)


def _quotient(field: str, value: int, of: int, what: str) -> int:
    if of % value:
        raise ValueError(f"{field} must divide the {of} {what}, got {value}")
    return of // value


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}), got {rank}")
