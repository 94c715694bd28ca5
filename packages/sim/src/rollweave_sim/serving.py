"""Simulated serving engines beside a run: their users' requests, their latencies, and
what they lend (ROSE §3.2, §4).

Requests go to the engine with the fewest tokens among those that compute prompts, and
from there to the one with the fewest among those that sample; the KV moves in between.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from rollweave.core.policy.admission import CHUNK_TOKENS, Slo
from rollweave.io.extras import without_distribution
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave.schema.errors import ConfigError
from rollweave_sim.clock import Clock
from rollweave_sim.cost import ACTIVATION_BYTES, MEMORY_FRACTION, EngineCost
from rollweave_sim.engine import SimEngine
from rollweave_sim.hardware import Gpu, ModelShape, gpu, model
from rollweave_sim.hosts import NO_POOL, gpu_of
from rollweave_sim.lender import ACTIVATION_S, Lender, Served
from rollweave_sim.lending import Latencies, Lending, LentEngine
from rollweave_sim.noise import Noise
from rollweave_sim.traffic import Arrival, Memory, drawn, recorded

OWN = ("cooperative", "ttft", "tpot")
"""The ways of `sharing` that are here: ROSE's, and its admission by one limit.
"""

ENTRY_POINTS = "rollweave.sharing"
"""The entry points of modules that add to `SHARING`."""

USE_REPORTS = 360
"""Reports over which the use of KV is averaged: an hour (ROSE §4)."""


class ServingCluster(Lending):
    """The serving engines of a simulation. They serve as long as the run lasts."""

    chunk_tokens = CHUNK_TOKENS

    lender: type[Lender] = Lender
    """The class of its engines."""

    def __init__(
        self,
        config: RunConfig,
        serving: ServingFile,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
    ) -> None:
        """Raises ConfigError."""
        names = [f"s{number}" for number in range(serving.engines)]
        super().__init__(names, run=config.run.name, clock=clock, post=post)
        self._config = serving
        cost, memory = _engine(config, serving)
        self._cost = cost
        limits = Slo(ttft_s=serving.ttft_s, tpot_s=serving.tpot_s)
        self.lenders: dict[str, Lender] = {}
        for number, name in enumerate(names):
            phase = "both"
            if serving.prefill:
                phase = "prefill" if number < serving.prefill else "decode"
            lender = self.lender(
                name,
                phase=phase,
                cost=cost,
                limits=limits,
                memory=memory,
                ttft=serving.sharing != "tpot",
                tpot=serving.sharing != "ttft",
                lease_s=serving.lease_s,
                noise=Noise(f"{config.run.seed}/serving/{name}"),
            )
            lender.on_first, lender.on_last = self._first(lender), self._last
            lender.on_returned = self._returner(lender.name)
            self.lenders[lender.name] = lender
        self._prompt_engines = [one for one in self.lenders.values() if one.phase != "decode"]
        self._token_engines = [one for one in self.lenders.values() if one.phase != "prefill"]
        self._uses: dict[str, deque[float]] = {
            name: deque(maxlen=USE_REPORTS) for name in self.lenders
        }
        self._choices, self._chosen = itertools.count(1), dict.fromkeys(self.lenders, 0)
        """A counter of placements, and the number of each engine's latest one."""
        self._lent: dict[str, LentEngine] = {}
        self._tickets: dict[str, int] = {}
        self._arrivals: Iterator[Arrival] = iter(_requests(serving, seed=config.run.seed))
        self.returned, self.lent_s = 0, 0.0
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    def start(self) -> None:
        self._next_arrival()
        super().start()

    def _lender(self, name: str) -> e.Lender:
        lender, uses = self.lenders[name], self._uses[name]
        uses.append(lender.use(self._clock.now))
        return e.Lender(
            name=name,
            kv_use=sum(uses) / len(uses),
            lent_to=self._run if name in self._lent else "",
            takes=lender.takes,
            recalled=name in self.recalled,
        )

    # Lending.

    def activate(self, name: str) -> float:
        return ACTIVATION_S

    def lend(self, name: str, engine: SimEngine) -> LentEngine | None:
        if name not in self.lenders or name in self._lent or name in self.recalled:
            return None
        self._clock.cancel(self._tickets.pop(name, 0))
        lent = self._lent[name] = LentEngine(self.lenders[name], engine, now=self._clock.now)
        return lent

    def take_back(self, name: str) -> None:
        lent = self._lent.pop(name, None)
        if lent is not None:
            self.lent_s += lent.busy_s
            self.lenders[name].take_back(self._clock.now)
            self._reschedule(self.lenders[name])

    # Requests.

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._clock.at(arrival.at, lambda: self._arrived(arrival))

    def _arrived(self, arrival: Arrival) -> None:
        now = self._clock.now
        request = Served(
            arrived=now, prompt_tokens=arrival.prompt_tokens, output_tokens=arrival.output_tokens
        )
        lender = self._engine_for(request, self._prompt_engines, prompt=True)
        lender.arrive(now, request)
        self._touched(lender)
        self._next_arrival()

    def _engine_for(self, request: Served, engines: list[Lender], *, prompt: bool) -> Lender:
        """Return the engine that takes the prompt or the answer of a request: the one
        with the fewest tokens, of several the one that has waited longest.
        """
        del request, prompt
        engine = min(engines, key=lambda one: (one.load, self._chosen[one.name]))
        self._chosen[engine.name] = next(self._choices)
        return engine

    def _first(self, lender: Lender) -> Callable[[Served, float], None]:
        def first(request: Served, at: float) -> None:
            self._ttft.append(at - request.arrived)
            if request.output_tokens < 2:
                return
            target = lender
            if lender.phase == "prefill":
                target = self._engine_for(request, self._token_engines, prompt=False)
            delay = 0.0 if target is lender else self._cost.move_s(request.prompt_tokens)
            when = max(at + delay, self._clock.now)
            self._clock.at(when, lambda: self._joins(target, request))

        return first

    def _joins(self, lender: Lender, request: Served) -> None:
        lender.join(self._clock.now, request)
        self._touched(lender)

    def _last(self, request: Served, at: float) -> None:
        self._tpot.append((at - request.first_at) / (request.output_tokens - 1))

    def _returner(self, name: str) -> Callable[[dict[str, int]], None]:
        def returned(turns: dict[str, int]) -> None:
            self.returned += len(turns)
            self.on_returned(name, turns)

        return returned

    # Time.

    def _touched(self, lender: Lender) -> None:
        if lender.name in self._lent:
            self.on_touched(lender.name)
        else:
            self._reschedule(lender)

    def _reschedule(self, lender: Lender) -> None:
        self._clock.cancel(self._tickets.pop(lender.name, 0))
        due = lender.next_at()
        if due is not None:
            self._tickets[lender.name] = self._clock.at(due, lambda: self._wake(lender))

    def _wake(self, lender: Lender) -> None:
        lender.advance(self._clock.now)
        self._reschedule(lender)

    # What was measured.

    def latencies(self) -> Latencies:
        seconds = max(1e-9, self._clock.now) * len(self.lenders)
        lenders = self.lenders.values()
        lent = self.lent_s + sum(one.busy_s for one in self._lent.values())
        return Latencies(
            requests=len(self._ttft),
            ttft_s=_percentiles(self._ttft),
            tpot_s=_percentiles(self._tpot),
            late_first=_share_above(self._ttft, self._config.ttft_s),
            late_tokens=_share_above(self._tpot, self._config.tpot_s),
            serving_share=sum(lender.serving_s for lender in lenders) / seconds,
            lent_share=lent / seconds,
            returned=self.returned,
            cuts=sum(lender.cuts for lender in lenders),
            stalls=sum(lender.stalls for lender in lenders),
        )


SHARING: dict[str, Callable[..., Lending]] = dict.fromkeys(OWN, ServingCluster)
"""Value of `sharing` → what makes the engines that lend themselves, from the
configuration, the file, the clock and what receives their reports. Further
distributions add theirs.
"""


def lending_of(sharing: str) -> Callable[..., Lending]:
    """Return what makes the engines of a way of sharing. Raises ConfigError if the
    distribution that has it is not installed.
    """
    if sharing not in SHARING:
        for entry in entry_points(group=ENTRY_POINTS):
            entry.load()
    if sharing not in SHARING:
        raise without_distribution(f'`sharing = "{sharing}"`', "rollweave-papers")
    return SHARING[sharing]


def _requests(serving: ServingFile, *, seed: int) -> Iterator[Arrival] | list[Arrival]:
    if serving.trace is not None:
        return recorded(Path(serving.trace))
    assert serving.rate is not None, "a rate or a trace is given"
    return drawn(serving.rate, seed=seed)


def _engine(config: RunConfig, serving: ServingFile) -> tuple[EngineCost, Memory]:
    """Return the costs and the memory of a serving engine, on as many GPUs as the first
    of the run's own. Raises ConfigError.
    """
    assert config.sim is not None, "a simulation has [sim]"
    group = config.engines[0]
    assert serving.model is not None, "engines with users have a model for them"
    name, key = gpu_of(config, group.pool or NO_POOL)
    if name.endswith(".json"):
        raise ConfigError(f"{key} must name a GPU beside serving engines, got {name}")
    try:
        shape = model(serving.model)
    except ConfigError as error:
        raise ConfigError(
            str(error).replace("model must", "the serving engines' model must", 1)
        ) from error
    device, rollout = gpu(name), model(config.sim.model)
    kv = _kv_bytes(device, (shape, rollout), group.degree)
    memory = Memory(
        total=device.hbm_bytes * group.degree,
        kv=kv,
        serving_token=shape.kv_bytes_per_token,
        rollout_token=rollout.kv_bytes_per_token,
    )
    longest = config.max_tokens * memory.rollout_token
    if kv < longest:
        raise ConfigError(
            f"the serving engines' model must leave memory for one trajectory beside "
            f"{rollout.name} on {group.degree} {device.name} ({longest / 1e9:.1f} GB), "
            f"got {shape.name}, which leaves {max(0.0, kv) / 1e9:.1f} GB"
        )
    return EngineCost(gpu=device, model=shape, tp=group.degree), memory


def _kv_bytes(device: Gpu, shapes: Sequence[ModelShape], degree: int) -> float:
    """Return the bytes for KV beside the weights of these models."""
    free = device.hbm_bytes * MEMORY_FRACTION - ACTIVATION_BYTES
    return free * degree - sum(shape.weight_bytes for shape in shapes)


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    if not ordered:
        return (0.0, 0.0, 0.0)
    p50, p95, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95, 0.99))
    return p50, p95, p99


def _share_above(values: list[float], limit: float) -> float:
    return sum(value > limit for value in values) / len(values) if values else 0.0
