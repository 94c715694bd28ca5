"""The chain along which weights travel, and the size of their chunks (Laminar §4 and
App. C; ROSE §4.2).

Relays form a chain: the master fetches a version from the trainer, and each other relay
from its predecessor, which forwards the bytes that it has so far. So a chain is a
pipeline, and its time hardly grows with its length. Each relay is ahead of the relays
after it: if a relay is lost, its successor continues from its predecessor, and no other
relay is affected.

A chain is the ids of its relays, each once, the master first.
"""

import math
from collections.abc import Sequence

CHUNK_BYTES = 32 * 2**20
"""Maximum size of a chunk: Laminar's chunk (§7). Longer chunks gain nothing and take
memory on the way.
"""

LEAST_CHUNK_BYTES = 256 * 2**10
"""Minimum size of a chunk: below it, the cost of each chunk for its processes exceeds
App. C's start-up latency.
"""


def join_at(sites: Sequence[str], site: str, *, first: str, master: bool) -> int:
    """Return the place in the chain of a relay that joins at `site`. `sites` are the
    sites of the relays in the chain, and `first` is the trainer's site. A `master` is
    the only relay that can read the trainer's memory.

    Relays of a site are neighbors, the trainer's site first, so that a version crosses
    each link between sites once (RollArt §6.3).
    """
    if master:
        return 0
    same = [place for place, other in enumerate(sites) if other == site]
    if same:
        return same[-1] + 1
    return 0 if site == first else len(sites)


def broadcast_s(nbytes: int, *, nodes: int, chunks: int, start_s: float, byte_s: float) -> float:
    """Return T(p, k) of App. C: seconds from the start of the master's first chunk to
    the end of the last relay's last chunk.

    `nodes` is p, the number of relays including the master; a chunk takes `start_s`,
    and `byte_s` per byte, from one node to the next. Raises ValueError for fewer than
    one node or chunk, and for negative sizes and times.
    """
    _check(nbytes, nodes, start_s, byte_s)
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if nodes == 1:
        return 0.0
    return (nodes + chunks - 2) * (nbytes / chunks * byte_s + start_s)


def chunk_count(nbytes: int, *, nodes: int, start_s: float, byte_s: float) -> int:
    """Return the k, from 1 to the number of bytes, with the least T(p, k); the smaller
    of two equals. T is convex in k, so the best integer is one of the two next to k* =
    sqrt((p − 2) · M · T_byte / T_start). Raises ValueError as `broadcast_s`.
    """
    _check(nbytes, nodes, start_s, byte_s)
    most = max(1, nbytes)
    held = max(0, nodes - 2) * nbytes * byte_s
    best = math.sqrt(held / start_s) if held < most**2 * start_s else float(most)
    if held == 0:
        return 1
    low = max(1, min(most, math.floor(best)))
    both = (low, min(most, low + 1))
    return min(
        both,
        key=lambda k: broadcast_s(nbytes, nodes=nodes, chunks=k, start_s=start_s, byte_s=byte_s),
    )


def chunk_bytes(nbytes: int, *, nodes: int, start_s: float, byte_s: float) -> int:
    """Return the chunk size of the best count, within LEAST_CHUNK_BYTES and
    CHUNK_BYTES.

    Raises ValueError as `broadcast_s`.
    """
    best = chunk_count(nbytes, nodes=nodes, start_s=start_s, byte_s=byte_s)
    return min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, -(-nbytes // best)))


PROBE = 16
"""One of this number of publications is sent in the other form, so that the time of
that form stays known.
"""


def sends_changes(whole_s: float | None, changes_s: float | None, *, number: int) -> bool:
    """Return whether publication `number` is sent as a delta rather than in full (ROSE
    §4.2).

    The decision compares the last time of each form, from the publication until all
    relays had it; None means not known yet. On a fast link the full form is faster
    however little has changed, since encoding reads all weights.
    """
    if whole_s is None or changes_s is None:
        return changes_s is None
    return (changes_s <= whole_s) is not (number % PROBE == PROBE - 1)


def _check(nbytes: int, nodes: int, start_s: float, byte_s: float) -> None:
    if nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    for name, value in (("nbytes", nbytes), ("start_s", start_s), ("byte_s", byte_s)):
        _at_least_0(name, value)


def _at_least_0(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")
