"""The ledger of the paged KV cache: which blocks are free, shared, or keep a prefix for
a later turn. Pure bookkeeping.

Invariants (`check`): every block is exactly one of *blank* (free, without content),
*idle* (free, but its content is indexed and may be hit), *held* (reference count above
zero) or *absent* (without memory, after `remove`). An index entry names a block that
holds exactly the tokens of its key. Keys chain over the whole prefix and start from the
id of the weights that computed it, and a change of weights clears the index: KV of old
weights can never be hit after an update.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Key = bytes
"""Digest of one full block: of its tokens, of all tokens before it, and of the weights
that computed it (16 bytes).
"""


def root_key(publication_id: int) -> Key:
    """Return the parent key of a sequence's first block under these weights."""
    return hashlib.blake2b(b"weights:%d" % publication_id, digest_size=16).digest()


def child_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of the block that holds `tokens` right after the block
    `parent`.
    """
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockLedger:
    """Allocates `blocks` blocks of `block_tokens` tokens.

    With `caching` off, nothing is indexed and there are no hits.
    """

    def __init__(
        self, *, blocks: int, block_tokens: int, caching: bool = True, publication_id: int = -1
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"blocks and block_tokens must be at least 1, got {blocks} and {block_tokens}"
            )
        self.total = blocks
        self.block_tokens = block_tokens
        self.caching = caching
        self.publication_id = publication_id
        self.root = root_key(publication_id)
        self._refs = [0] * blocks
        self._key_of: list[Key | None] = [None] * blocks
        self._index: dict[Key, int] = {}
        self._blank = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._absent: set[int] = set()

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated now: blank ones, and idle ones whose
        content would be evicted.
        """
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free - len(self._absent)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def keys(self, tokens: Sequence[int], *, known: Sequence[Key] = ()) -> list[Key]:
        """Return the keys of all full blocks of `tokens`; `known` are those of its
        first blocks, which are not hashed again.
        """
        keys = list(known)
        parent = keys[-1] if keys else self.root
        size = self.block_tokens
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            parent = child_key(parent, tokens[start : start + size])
            keys.append(parent)
        return keys

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Return the blocks of the longest prefix of `keys` that is cached.

        They are not held until `share`.
        """
        blocks: list[int] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unused(self, blocks: Iterable[int]) -> int:
        """Count the idle ones among `blocks`: holding them reduces `free` by that
        number.
        """
        return sum(1 for block in blocks if not self._refs[block])

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of the blocks, which `match` returned."""
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks without content, evicting the least recently used idle
        ones if there are too few blank ones.

        Raises ValueError, with nothing changed, if fewer than `count` are free.
        """
        if count > self.free:
            raise ValueError(f"count must be at most the {self.free} free blocks, got {count}")
        taken: list[int] = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._evict(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def commit(self, block: int, key: Key) -> None:
        """Index the held `block`, whose tokens have all been computed, under `key`.

        The first block of a key stays indexed.
        """
        if self.caching and self._key_of[block] is None and key not in self._index:
            self._key_of[block] = key
            self._index[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of `blocks`.

        The last block of a prefix is the first to be evicted, because the prefix is
        useful without it.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                if self._key_of[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def retag(self, publication_id: int) -> None:
        """Switch to new weights: clear all content.

        Held blocks stay held, and are no longer indexed.
        """
        self.publication_id = publication_id
        self.root = root_key(publication_id)
        self._index.clear()
        self._key_of = [None] * self.total
        self._blank.extend(self._idle)
        self._idle.clear()

    def remove(self, blocks: Iterable[int]) -> None:
        """Make free blocks absent, and forget their content: they lose their memory.

        Raises ValueError, with nothing changed, if one of them is held or absent.
        """
        removed = set(blocks)
        for block in removed:
            if self._refs[block] or block in self._absent:
                raise ValueError(f"a removed block must be free, got {block}")
        for block in removed & self._idle.keys():
            del self._idle[block]
            self._evict(block)
        self._blank = [block for block in self._blank if block not in removed]
        self._absent |= removed

    def restore(self, blocks: Iterable[int]) -> None:
        """Make absent blocks blank: they have memory again. Raises ValueError, with
        nothing changed, if one of them is not absent.
        """
        restored = set(blocks)
        if not restored <= self._absent:
            raise ValueError(f"restored blocks must be absent, got {restored - self._absent}")
        self._absent -= restored
        self._blank.extend(sorted(restored, reverse=True))

    def references(self, block: int) -> int:
        return self._refs[block]

    def _evict(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._index[key]

    def check(self) -> None:
        """Assert the invariants of this module."""
        blank, idle = set(self._blank), set(self._idle)
        held = {block for block in range(self.total) if self._refs[block]}
        assert len(blank) == len(self._blank), "a block is blank twice"
        states = (blank, idle, held, self._absent)
        assert sum(map(len, states)) == len(set().union(*states)) == self.total, (
            "a block is lost, or in two states"
        )
        assert min(self._refs) >= 0, "a block was released too often"
        assert all(self._key_of[block] is not None for block in idle), (
            "an idle block is not indexed"
        )
        assert all(self._key_of[block] is None for block in blank), "a blank block is indexed"
        assert {block: key for key, block in self._index.items()} == {
            block: key for block, key in enumerate(self._key_of) if key is not None
        }, "index and blocks disagree"
        assert self.caching or not self._index, "indexed with caching off"
