"""Processes that share the cores of a machine: embedded engines on CPUs and the trainer
compute with one thread each.
"""

from rollweave_sim.fleet import SimFleet
from rollweave_sim.trainer import SimTrainer


def slowdown(computing: int, cores: int) -> float:
    """Return the seconds that a second of work takes while so many processes compute.
    With 0 cores, each process has its own.
    """
    return max(1.0, computing / cores) if cores else 1.0


class SharedCores:
    """The processes of a world that share `cores`; with 0, each has its own."""

    def __init__(self, *, cores: int, fleet: SimFleet, trainer: SimTrainer) -> None:
        self._cores, self._fleet, self._trainer = cores, fleet, trainer
        self._slowdown = 1.0

    def settle(self) -> None:
        """Slow down all processes by as many as compute now."""
        if not self._cores:
            return
        now = slowdown(self._fleet.computing + self._trainer.computing, self._cores)
        if now != self._slowdown:
            self._slowdown = now
            self._fleet.slow_down(now)
            self._trainer.slow_down(now)
