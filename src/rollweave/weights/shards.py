"""Who holds which slice of a model, and who sends which slice to whom (ROSE §4.2).

Pure: names, shapes and integers. Every slice is a rectangle of a canonical tensor, that
is one of the payload of a `WeightManifest`, under transformers' name. Invariants of a
plan: the senders' slices are disjoint and together are every element once, however many
replicas there are; a receiver pulls exactly what its layout holds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollweave.weights.parameters import Model, Part, Rule, itemsize

BUCKET_BYTES = 64 << 20
"""Slices that several ranks hold are cut to this before they take turns: ROSE's push
bucket (§4.2).
"""

Ints = tuple[int, ...]
Range = tuple[int, int]
"""(offset, bytes) in a payload."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The rectangle of canonical `tensor` with corner `start`, `size` elements along
    each dimension, and where a rank keeps it.

    That is its tensor `local`, with corner `at`. Where experts are stacked there, `at`
    has one dimension more, the first.
    """

    tensor: str
    start: Ints
    size: Ints
    local: str
    at: Ints


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank keeps: `shapes` of its own tensors, and the `pieces` of the
    canonical ones that are in them.

    What no piece covers is padding (vocabulary rows that no token has). A shard that
    holds nothing of a tensor has no piece.
    """

    shapes: dict[str, Ints]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Unsharded:
    """Everything in one place: an engine on one device, or a relay."""

    @property
    def ranks(self) -> int:
        return 1

    def shard(self, model: Model, rank: int) -> Shard:
        return Fsdp(1).shard(model, rank)


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP2: dimension 0 in chunks as `torch.chunk` makes them, so the last ranks may
    have less, or nothing.
    """

    ranks: int

    def __post_init__(self) -> None:
        _positive(ranks=self.ranks)

    def shard(self, model: Model, rank: int) -> Shard:
        """Raises `ValueError` for a scalar, as FSDP2 does."""
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

    Layers are dealt to stages in order; those left over go to the middle, as in vLLM:
    the last has the head to compute, the first the embedding. A tied embedding is on
    both. With `ep`, experts are dealt whole to `ep` groups of each stage, and split
    inside a group. `fused` keeps q, k and v, gate and up, and a rank's experts each in
    one tensor. Vocabulary is padded to a multiple of `vocab_multiple` (vLLM's default).
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
        """Raises `ValueError` where this layout is not possible for the model, or a
        tensor's rule is not known.
        """
        _check_rank(rank, self.ranks)
        stage, own = rank // self.tp % self.pp, rank % self.tp
        layers = self._layers(model, stage)
        build = _Build()
        for meta in model.tensors:
            rule = model.rules[meta.name]
            if not self._on_stage(rule, layers, stage):
                continue
            ranks, number, mine = self.tp, own, range(0)
            if rule.experts:
                ranks, number = self.tp // self.ep, own % (self.tp // self.ep)
                each = _quotient("ep", self.ep, rule.experts, f"experts of {meta.name}")
                mine = range(own // ranks * each, (own // ranks + 1) * each)
                if rule.expert is not None and rule.expert not in mine:
                    continue
            for index, part in enumerate(rule.parts):
                build.add(
                    meta.name,
                    meta.shape,
                    rule,
                    index,
                    mine,
                    self._dealt(meta.name, part, ranks, number),
                    self.fused,
                )
        return build.shard()

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

    def _dealt(self, name: str, part: Part, ranks: int, number: int) -> "_Dealt":
        """What rank `number` of `ranks` gets of a part."""
        if part.dim is None:
            return _Dealt(None, 0, 0, 0)
        unit = part.size // part.units if part.units else 0
        if part.kind == "padded":
            padded = -(-part.units // self.vocab_multiple) * self.vocab_multiple
            rows = _quotient("tp", ranks, padded, f"padded rows of {name}")
            first = min(number * rows, part.size)
            return _Dealt(part.dim, first, min(rows, part.size - first), rows)
        if part.kind == "shared" and ranks > part.units:
            group = _quotient("key-value heads", part.units, ranks, f"tp ranks, for {name}")
            return _Dealt(part.dim, part.start + number // group * unit, unit, unit)
        held = _quotient("tp", ranks, part.units, f"units of {name}") * unit
        return _Dealt(part.dim, part.start + number * held, held, held)


Layout = Unsharded | Fsdp | TensorParallel


@dataclass(frozen=True, slots=True)
class _Dealt:
    """`size` elements from `start` along `dim` of a canonical tensor, in `room`
    elements of the local one.
    """

    dim: int | None
    start: int
    size: int
    room: int


@dataclass(slots=True)
class _Build:
    """Lays out a rank's tensors: of each, the parts one after the other along their
    dimension, experts stacked.
    """

    _parts: defaultdict[str, list[tuple[int, int, int, str, Ints, Ints, _Dealt]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self,
        name: str,
        shape: Ints,
        rule: Rule,
        index: int,
        mine: range,
        dealt: _Dealt,
        fused: bool,
    ) -> None:
        """Part `index` of the tensor `name`; `mine` are the experts that the rank has."""
        start, size = [0] * len(shape), list(shape)
        if rule.experts and rule.expert is None:
            start[0], size[0] = mine.start, len(mine)
        if dealt.dim is not None:
            start[dealt.dim], size[dealt.dim] = dealt.start, dealt.size
        together = fused and bool(rule.fused)
        local = rule.fused if together else name
        row = -1 if not together or rule.expert is None else rule.expert - mine.start
        slot = rule.slot if together else 0
        self._parts[local].append((row, slot, index, name, tuple(start), tuple(size), dealt))

    def shard(self) -> Shard:
        shapes, pieces = {}, []
        for local, parts in self._parts.items():
            # along the dimension of the parts, by row of the stack
            end: defaultdict[int, int] = defaultdict(int)
            for row, _, _, name, start, size, dealt in sorted(parts, key=lambda part: part[:3]):
                corner = [0] * len(size)
                if dealt.dim is not None:
                    corner[dealt.dim] = end[row]
                end[row] += dealt.room
                if math.prod(size):
                    pieces.append(
                        Piece(name, start, size, local, (*((row,) if row >= 0 else ()), *corner))
                    )
            row, *_, size, dealt = parts[-1]
            shape = list(size)
            if dealt.dim is not None:
                shape[dealt.dim] = end[row]
            shapes[local] = (len(end), *shape) if row >= 0 else tuple(shape)
        return Shard(shapes, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Transfer:
    """`size` elements from `start` of canonical `tensor`, from where the sender has
    them to where the receiver keeps them.
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
    """Who sends what (`sends`, by sender) and who needs what (`pulls`, by receiver)."""

    model: Model
    sends: tuple[tuple[Piece, ...], ...]
    pulls: tuple[tuple[Piece, ...], ...]

    def transfers(self, receiver: int) -> Iterator[Transfer]:
        """What makes up the receiver's shard, each element once."""
        sent: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)
        for sender, pieces in enumerate(self.sends):
            for piece in pieces:
                sent[piece.tensor].append((sender, piece))
        for wanted in self.pulls[receiver]:
            for sender, given in sent[wanted.tensor]:
                if overlap := _overlap(wanted, given):
                    start, size = overlap
                    source, target = _moved(given, start), _moved(wanted, start)
                    yield Transfer(
                        sender,
                        receiver,
                        wanted.tensor,
                        start,
                        size,
                        given.local,
                        source,
                        wanted.local,
                        target,
                    )

    def sent_bytes(self, sender: int) -> int:
        """Bytes that this sender puts on the wire, once."""
        return piece_bytes(self.model, self.sends[sender])

    def pulled_bytes(self, receiver: int) -> int:
        """Bytes that this receiver needs."""
        return piece_bytes(self.model, self.pulls[receiver])

    def sent_ranges(self, sender: int) -> list[Range]:
        """Where these bytes are in the canonical payload: ascending, apart from each
        other.
        """
        return payload_ranges(self.model, self.sends[sender])

    def pulled_ranges(self, receiver: int) -> list[Range]:
        """The same of what this receiver needs."""
        return payload_ranges(self.model, self.pulls[receiver])


def plan(
    model: Model, senders: Layout, receivers: Layout, *, bucket_bytes: int = BUCKET_BYTES
) -> Plan:
    """Training layout `senders` to serving layout `receivers`.

    Raises `ValueError` where one is not possible for the model.
    """
    pulls = tuple(receivers.shard(model, rank).pieces for rank in range(receivers.ranks))
    return Plan(model, deal(model, senders, bucket_bytes=bucket_bytes), pulls)


def deal(
    model: Model, layout: Layout, *, bucket_bytes: int = BUCKET_BYTES
) -> tuple[tuple[Piece, ...], ...]:
    """By rank, the slices that it alone sends, so that all are sent once.

    What several ranks hold goes, the largest slice first, to the one of them that has
    the least to send. Where all ranks hold the same, their loads differ by at most the
    largest slice (a bucket, or one row that is larger).
    """
    _positive(bucket_bytes=bucket_bytes)
    holders: defaultdict[tuple[str, Ints, Ints], list[tuple[int, Piece]]] = defaultdict(list)
    for rank in range(layout.ranks):
        for piece in layout.shard(model, rank).pieces:
            holders[piece.tensor, piece.start, piece.size].append((rank, piece))
    sizes = {meta.name: itemsize(meta) for meta in model.tensors}
    given: list[list[Piece]] = [[] for _ in range(layout.ranks)]
    loads = [0] * layout.ranks
    turns = []
    for held in holders.values():
        rank, piece = held[0]
        if len(held) == 1:
            given[rank].append(piece)
            loads[rank] += math.prod(piece.size) * sizes[piece.tensor]
            continue
        ranks = [rank for rank, _ in held]
        places = dict(held)
        for start, size in _cut(piece, sizes[piece.tensor], bucket_bytes):
            turns.append((math.prod(size) * sizes[piece.tensor], start, size, ranks, places))
    for nbytes, start, size, ranks, places in sorted(turns, key=lambda turn: -turn[0]):
        rank = min(ranks, key=loads.__getitem__)
        own = places[rank]
        given[rank].append(Piece(own.tensor, start, size, own.local, _moved(own, start)))
        loads[rank] += nbytes
    order = {meta.name: index for index, meta in enumerate(model.tensors)}
    return tuple(
        tuple(sorted(pieces, key=lambda piece: (order[piece.tensor], piece.start)))
        for pieces in given
    )


def piece_bytes(model: Model, pieces: Iterable[Piece]) -> int:
    sizes = {meta.name: itemsize(meta) for meta in model.tensors}
    return sum(math.prod(piece.size) * sizes[piece.tensor] for piece in pieces)


def payload_ranges(model: Model, pieces: Iterable[Piece]) -> list[Range]:
    """Where disjoint pieces lie in the model's payload: (offset, bytes), ascending,
    neighbours joined.
    """
    metas = {meta.name: meta for meta in model.tensors}
    found: list[Range] = []
    for piece in pieces:
        meta = metas[piece.tensor]
        each = itemsize(meta)
        found.extend(
            (meta.offset + first * each, count * each)
            for first, count in runs(meta.shape, piece.start, piece.size)
        )
    joined: list[Range] = []
    for offset, nbytes in sorted(found):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    return joined


def runs(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[Range]:
    """A rectangle of a row-major tensor as (first element, elements) of its contiguous
    stretches, ascending.
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


def _cut(piece: Piece, each: int, bucket_bytes: int) -> Iterator[tuple[Ints, Ints]]:
    """The piece in slices of at most `bucket_bytes` (or one row) along its first
    dimension of more than one.
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


def _moved(piece: Piece, start: Ints) -> Ints:
    """Where the element at `start` of the canonical tensor is in the rank's own."""
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
