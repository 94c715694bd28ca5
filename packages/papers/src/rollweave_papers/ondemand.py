"""Simulated engines without users that come and go: serverless GPUs, and spot instances
(ROSE §6, baselines λRL and RLBoost+).

A run borrows them like serving engines, but has all of their GPUs. None has the run's
model in memory before: each starts a process, and loads its weights. A serverless
engine ends after its lease, and another one begins in its place at once. Spot instances
are there as a trace says, or as they are drawn.

Turns of an engine that ends continue elsewhere with the tokens that they have.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave.sim.clock import Clock
from rollweave.sim.engine import SimEngine
from rollweave.sim.lending import Lending
from rollweave.sim.traffic import count, timed_rows

START_S = 60.0
"""Seconds until an engine is ready that the run starts on a GPU which it did not have
before, without its weights: as long as for any engine that starts in a simulation. ROSE
has "tens of seconds" (§2.3; the values of its Fig. 3c are not in the text).
"""

LEASE_S = 900.0
"""Seconds after which a serverless engine ends (ROSE §6)."""

UP_S, DOWN_S = 1800.0, 600.0
"""Mean seconds for which a drawn spot instance is there and not there; both are
exponentially distributed. Assumption: ROSE's trace (App. B) is a figure alone.
"""

COLUMNS = ("TIMESTAMP", "Engines")
"""Columns of a trace of spot instances."""


class OnDemand(Lending):
    """The engines without users of a simulation, serverless or spot. Raises
    ConfigError.
    """

    def __init__(
        self,
        config: RunConfig,
        serving: ServingFile,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
    ) -> None:
        names = [f"s{number}" for number in range(serving.engines)]
        super().__init__(names, run=config.run.name, clock=clock, post=post)
        self._lent: set[str] = set()
        self._absent: set[str] = set()
        self._draw = random.Random(f"spot/{config.run.seed}")
        self._serverless = serving.sharing == "serverless"
        self._counts: Iterator[tuple[float, int]] | None = None
        if serving.trace is not None:
            self._counts = iter(available(Path(serving.trace)))

    def start(self) -> None:
        """Begin to report, and to come and go."""
        if self._serverless:
            self._clock.after(LEASE_S, self._end_leases)
        elif self._counts is not None:
            self._follow()
        else:
            for name in self.names:
                there = self._draw.random() < UP_S / (UP_S + DOWN_S)
                if not there:
                    self._absent.add(name)
                self._change_later(name)
        super().start()

    def _lender(self, name: str) -> e.Lender:
        return e.Lender(
            name=name,
            kv_use=0.0,
            lent_to=self._run if name in self._lent else "",
            recalled=name in self.recalled or name in self._absent,
        )

    def activate(self, name: str) -> float:
        self._lent.add(name)
        return START_S

    def lend(self, name: str, engine: SimEngine) -> SimEngine | None:
        return None if name in self.recalled or name in self._absent else engine

    def take_back(self, name: str) -> None:
        self._lent.discard(name)

    # Coming and going.

    def _end_leases(self) -> None:
        """End all serverless engines. Others may begin at once."""
        self._absent.update(self.names)
        self.report()
        self._absent.clear()
        self._clock.after(LEASE_S, self._end_leases)

    def _change_later(self, name: str) -> None:
        """Let a spot instance end, or come, after a time that is drawn."""
        mean_s = DOWN_S if name in self._absent else UP_S
        self._clock.after(self._draw.expovariate(1 / mean_s), lambda: self._change(name))

    def _change(self, name: str) -> None:
        self._absent ^= {name}
        self.report()
        self._change_later(name)

    def _follow(self) -> None:
        """Have as many spot instances as the trace says, from now on."""
        assert self._counts is not None, "there is a trace"
        for at, engines in self._counts:
            if at > self._clock.now:
                self._clock.at(at, lambda engines=engines: self._set(engines))  # type: ignore[misc]
                return
            self._choose(engines)

    def _set(self, engines: int) -> None:
        self._choose(engines)
        self.report()
        self._follow()

    def _choose(self, engines: int) -> None:
        """Draw which of the instances end, or which come."""
        there = [name for name in self.names if name not in self._absent]
        if len(there) > engines:
            self._absent.update(self._draw.sample(there, len(there) - engines))
        else:
            come = min(engines - len(there), len(self._absent))
            self._absent.difference_update(self._draw.sample(sorted(self._absent), come))


def available(path: Path) -> list[tuple[float, int]]:
    """Return the numbers of engines of a trace, each with the seconds since its first
    line. Raises ConfigError, which names the line.
    """
    rows = timed_rows(path, COLUMNS)
    first = rows[0][1]
    return [
        (at - first, count(where, COLUMNS[1], row[COLUMNS[1]], least=0)) for where, at, row in rows
    ]
