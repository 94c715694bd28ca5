"""A decoder of delta blocks that follows the format's description literally, one
element at a time.
"""

import struct

import zstandard


def slow_apply(block: bytes, base: bytes) -> bytes:
    """Return the result of an undamaged block."""
    _, form, itemsize, _, body, _, _, _, _, _ = struct.unpack_from("<BBBBIIQQQI", block)
    assert len(block) == 40 + body
    return Slow(block[40:], base, itemsize).result(form)


class Slow:
    def __init__(self, body: bytes, base: bytes, itemsize: int) -> None:
        self.body, self.base, self.itemsize, self.bits = body, base, itemsize, 8 * itemsize
        self.old = [
            int.from_bytes(base[at : at + itemsize], "little")
            for at in range(0, len(base), itemsize)
        ]

    def result(self, form: int) -> bytes:
        if form == 0:
            return self.base
        if form == 4:
            return self.body
        if form == 3:
            new = self.integers(self.itemsize)
        elif form == 2:
            new = [
                self.shifted(old, difference)
                for old, difference in zip(self.old, self.integers(self.itemsize), strict=True)
            ]
        else:
            new = self.sparse()
        assert not self.body
        return b"".join(element.to_bytes(self.itemsize, "little") for element in new)

    def sparse(self) -> list[int]:
        new = list(self.old)
        left = list(range(len(new)))
        (count,) = self.take("B")
        for limit in (*self.take(f"{count}Q"), None):
            for position, difference in self.changes():
                new[left[position]] = self.shifted(self.old[left[position]], difference)
            if limit is not None:
                left = [where for where in left if 2 * self.magnitude(self.old[where]) < limit]
        return new

    def changes(self) -> list[tuple[int, int]]:
        count, width = self.take("IB")
        positions, at = [], -1
        for gap in self.integers(width):
            at += gap
            if gap < 2 ** (8 * width) - 1:
                at += 1
                positions.append(at)
        symbols = [byte >> shift & 3 for byte in self.plane() for shift in (0, 2, 4, 6)]
        more = iter(self.integers(self.itemsize))
        differences = [
            (symbol & 1 | (next(more) + 1 << 1 if symbol & 2 else 0)) + 1
            for symbol in symbols[:count]
        ]
        assert len(positions) == len(differences) == count
        assert next(more, None) is None
        return list(zip(positions, differences, strict=True))

    def shifted(self, old: int, difference: int) -> int:
        """Return the element at distance `difference` from `old`."""
        place = -1 - self.magnitude(old) if old >> self.bits - 1 else self.magnitude(old)
        place += -(difference + 1) // 2 if difference % 2 else difference // 2
        half = 1 << self.bits - 1
        place = (place + half) % (2 * half) - half
        return half | -1 - place if place < 0 else place

    def magnitude(self, element: int) -> int:
        return element & (1 << self.bits - 1) - 1

    def integers(self, width: int) -> list[int]:
        planes = [self.plane() for _ in range(width)]
        return [
            sum(byte << 8 * place for place, byte in enumerate(column))
            for column in zip(*planes, strict=True)
        ]

    def plane(self) -> bytes:
        nbytes, stored = self.take("II")
        data, self.body = self.body[:stored], self.body[stored:]
        plane = data if stored == nbytes else zstandard.ZstdDecompressor().decompress(data)
        assert len(plane) == nbytes
        return plane

    def take(self, layout: str) -> tuple[int, ...]:
        fields = struct.unpack_from("<" + layout, self.body)
        self.body = self.body[struct.calcsize("<" + layout) :]
        return fields
