"""Decide whether a server is healthy, from checks of it; which engines each of several
rollout servers uses (ProRL's client); and whether the log-probs of an engine differ
from the trainer's by more than rounding, because it computes with other weights than
the trainer believes.
"""

from collections.abc import Mapping, Sequence

from rollweave.schema.base import Struct

MAX_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean difference that rounding explains, by the least precise number format
among weights and activations.
"""

GAP = "logprob_gap/"
"""Beginning of the names of the metrics by engine (`train/update.py`)."""


def max_gap(*formats: str) -> float:
    """Return the maximum gap where numbers have these formats."""
    return max(MAX_GAP[name] for name in formats)


def wide_gaps(values: Mapping[str, float], limit: float) -> dict[str, float]:
    """Return each engine's gap that is wider than `limit`."""
    gaps = {name.removeprefix(GAP): gap for name, gap in values.items() if name.startswith(GAP)}
    return {engine: gap for engine, gap in gaps.items() if not gap <= limit}


DOWN_AFTER = 3
"""Number of failed checks in a row that make a server unhealthy: one failure may be a
lost packet, two failures a pause.
"""

UP_AFTER = 2
"""Number of good checks in a row that make it healthy again, so that a server that
flaps stays out.
"""


class Hysteresis:
    """Health by checks, which changes only after several contrary checks in a row."""

    def __init__(self, *, healthy: bool = False) -> None:
        self.healthy = healthy
        self._needed = {True: UP_AFTER, False: DOWN_AFTER}
        self._against = 0

    def observe(self, good: bool) -> bool:
        """Record one check and return whether the server is healthy now."""
        self._against = 0 if good is self.healthy else self._against + 1
        if self._against >= self._needed[good]:
            self.healthy, self._against = good, 0
        return self.healthy


class Host(Struct, frozen=True, kw_only=True):
    """A server's address and the host that it runs on."""

    server: str
    host: str


def spread(llms: Sequence[Host], rollouts: Sequence[Host]) -> Mapping[str, tuple[str, ...]]:
    """Assign LLM servers to rollout servers: first the LLM servers of its own host,
    then the rest round-robin (ProRL, RL trainers).

    Every LLM server is used by one rollout server. A rollout server that would get none
    shares the least shared LLM server, so that no rollout server is idle while there is
    any LLM server.
    """
    uses: dict[str, list[str]] = {rollout.server: [] for rollout in rollouts}
    if not uses or not llms:
        return dict.fromkeys(uses, ())
    remote = []
    for llm in llms:
        near = [rollout.server for rollout in rollouts if rollout.host == llm.host]
        if near:
            uses[min(near, key=lambda server: len(uses[server]))].append(llm.server)
        else:
            remote.append(llm.server)
    for server in remote:
        uses[min(uses, key=lambda rollout: len(uses[rollout]))].append(server)
    shared = {llm.server: 1 for llm in llms}
    for own in uses.values():
        if not own:
            least = min(shared, key=lambda server: shared[server])
            shared[least] += 1
            own.append(least)
    return {server: tuple(own) for server, own in uses.items()}
