"""A burst of serving beside rollouts, in virtual time: the steps of an engine that
computes prompts and tokens together, by the times of the bench's serving model.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from packages.sim.benchmarks.coserve.load import with_burst
from rollweave.core.policy.admission import Admission, Curve, Profile, Slo
from rollweave.engine.batching import StepWork
from rollweave.engine.core import EngineCore
from rollweave.engine.coserving.serving_load import ServingLoad
from rollweave_sim.traffic import Arrival

PROMPTS = Curve(((16, 0.0084), (32, 0.012), (64, 0.0175), (128, 0.035), (256, 0.056), (512, 0.109)))
TOKENS = Curve(((1, 0.0064), (2, 0.0067), (4, 0.0088), (8, 0.0109), (16, 0.015), (32, 0.024)))
ROLLOUTS = Curve(((1, 0.0021), (32, 0.0027)))
SERVING = Profile(mono=PROMPTS, chunked=PROMPTS, decode=TOKENS)
SLO = Slo(ttft_s=0.124, tpot_s=0.028)

RATE, FROM_S, BURST_S = 1.54, 1.0, 3.0
SLOTS, CHUNK, ROLLOUT_SLOTS = 32, 512, 32


@dataclasses.dataclass
class Request:
    arrival: Arrival
    id: str
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def late(self) -> bool:
        mean_s = (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)
        return self.times[0] - self.arrival.at > SLO.ttft_s or mean_s > SLO.tpot_s


class VirtualEngine:
    """The loop of the executor, with times instead of computations."""

    def __init__(self, arrivals: tuple[Arrival, ...], *, lent: bool) -> None:
        self.pending = [Request(arrival, str(n)) for n, arrival in enumerate(arrivals)]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.now = self.rollout_s = 0.0
        self.lent, self.load = lent, ServingLoad()
        rollout = Profile(mono=ROLLOUTS, chunked=ROLLOUTS, decode=ROLLOUTS)
        self.admission = Admission(slo=SLO, profile=SERVING, rollout=rollout)

    def run(self) -> None:
        while self.pending or self.waiting or self.running:
            while self.pending and self.pending[0].arrival.at <= self.now:
                request = self.pending.pop(0)
                self.waiting.append(request)
                arrival = request.arrival
                self.load.arrive(request.id, arrival.at)
            if self.waiting or self.running:
                self.serve()
            elif not self.lent:
                self.now = self.pending[0].arrival.at
            if self.lent and not self.roll() and not self.waiting and not self.running:
                self.now += 0.001

    def serve(self) -> None:
        prompts: list[Request] = []
        tokens = 0
        for request in self.waiting[: SLOTS - len(self.running)]:
            if tokens + request.arrival.prompt_tokens > CHUNK:
                break
            prompts.append(request)
            tokens += request.arrival.prompt_tokens
        decode = len(self.running)
        seconds = PROMPTS.seconds(tokens) + TOKENS.seconds(decode)
        self.now += seconds
        self.waiting = self.waiting[len(prompts) :]
        self.running += prompts
        for request in self.running:
            request.times.append(self.now)
        longest = max((one.arrival.prompt_tokens for one in prompts), default=0)
        work = StepWork(tokens, 0, decode, 0, longest)
        self.load.measured(self.admission, work, seconds)
        over = [one for one in self.running if len(one.times) >= one.arrival.output_tokens]
        self.done += over
        self.running = [one for one in self.running if one not in over]
        self.load.stepped(self.as_core(), self.now)

    def roll(self) -> bool:
        slack = self.load.slack(self.as_core(), self.admission, self.now)
        decode = self.admission.decoding(slack, most=ROLLOUT_SLOTS)
        if not decode:
            return False
        seconds = ROLLOUTS.seconds(decode)
        self.now += seconds
        self.rollout_s += seconds
        return True

    def as_core(self) -> EngineCore:
        def entry(request: Request) -> Any:
            prompt = request.arrival.prompt_tokens
            tokens = prompt + len(request.times)
            missing = 1 if request.times else tokens
            return SimpleNamespace(id=request.id, missing=missing)

        live = {
            one.id: SimpleNamespace(logprobs=one.times) for one in [*self.running, *self.waiting]
        }
        planner = SimpleNamespace(
            running=list(map(entry, self.running)),
            waiting=list(map(entry, self.waiting)),
            chunk_tokens=CHUNK,
        )
        return cast(EngineCore, SimpleNamespace(planner=planner, live=live))


@pytest.mark.parametrize("seed", [1, 2, 10, 18])
def test_a_burst_beside_rollouts_makes_few_requests_late(seed: int) -> None:
    """By the equations of the paper alone, 5, 2, 4 and 3 requests more are late."""
    arrivals = with_burst(RATE, before_s=FROM_S, burst_s=BURST_S, after_s=5.0, seed=seed)
    engines = [VirtualEngine(arrivals, lent=lent) for lent in (False, True)]
    for engine in engines:
        engine.run()
        assert len(engine.done) == len(arrivals)
    alone, lent = (sum(one.late for one in engine.done) for engine in engines)
    assert lent <= alone + 1
    assert engines[1].rollout_s > 0.4 * engines[1].now


@pytest.mark.parametrize("tokens", [16, 512])
def test_each_step_of_a_long_prompt_tells_the_seconds_of_the_whole(tokens: int) -> None:
    """The last one may compute few tokens, each of which takes many times longer."""
    admission = Admission(slo=SLO, profile=SERVING, rollout=SERVING)
    load = ServingLoad()
    seconds = 2 * (PROMPTS.seconds(tokens) + TOKENS.seconds(4))
    load.measured(admission, StepWork(tokens, 0, 4, 0, 528), seconds)
    assert load.longest_s(admission) == pytest.approx(2 * PROMPTS.seconds(528))


def test_a_request_with_the_id_of_a_former_one_waits_for_its_first_token() -> None:
    admission = Admission(slo=SLO, profile=SERVING, rollout=SERVING)

    def seen(*, tokens: int, sampled: int) -> EngineCore:
        entry = SimpleNamespace(id="again", missing=1 if sampled else tokens)
        live = {"again": SimpleNamespace(logprobs=[0.0] * sampled)}
        planner = SimpleNamespace(running=[entry], waiting=[], chunk_tokens=CHUNK)
        return cast(EngineCore, SimpleNamespace(planner=planner, live=live))

    load, fresh = ServingLoad(), ServingLoad()
    load.arrive("again", 1.0)
    load.stepped(seen(tokens=20, sampled=1), 1.1)
    for one in (load, fresh):
        one.arrive("again", 5.0)
        waiting = one.slack(seen(tokens=20, sampled=0), admission, 5.0)
        assert waiting == pytest.approx(fresh.slack(seen(tokens=20, sampled=0), admission, 5.0))
        assert waiting > 0
        one.stepped(seen(tokens=20, sampled=1), 5.05)
        decoding = one.slack(seen(tokens=20, sampled=1), admission, 5.05)
        assert decoding == pytest.approx(SLO.tpot_s - 1.25 * TOKENS.seconds(1), rel=0.01)
