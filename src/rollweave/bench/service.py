"""Bench `service`: what asking over HTTP costs beside asking the same pipeline in the same process, and how many it holds.

One service, one embedded engine, the frozen lake. Rounds of equal rollouts, by turns through the service's object and through
a client in another process; then as many at once as `HELD`, in environments that take their time. Invariant: both ways use one
pipeline, one core and one engine, so that what differs between them is the door.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rollweave.bench.contract import Figure, Result
from rollweave.bench.runs import trained
from rollweave.live.launch import Programs
from rollweave.schema.commands import Warn
from rollweave.schema.config import RunConfig
from rollweave.schema.service import EngineRequest, RolloutRequest, RolloutStatus
from rollweave.service import launch
from rollweave.service.client import RolloutClient
from rollweave.service.service import Service

T = TypeVar("T")

Ask = Callable[[RolloutRequest], Coroutine[Any, Any, RolloutStatus]]

HELD = 500
"""Rollouts at once (ProRL's users run that many containers on a node)."""

CONCURRENT = 64
"""Rollouts under way in a round."""

LATENCY_S = 3.0
"""Of each step of an environment, on average, while `HELD` are held."""


def bench_service(*, quick: bool, say: Callable[[str], None]) -> Result:
    """Figures `jobs_per_s`, `jobs_per_s_in_process`, `added_latency_ms_p50`, `…_p99`, `concurrent_held`."""
    rounds, jobs = (2, 96) if quick else (6, 512)
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        model = _model(Path(scratch))
        with _Running(_config(Path(scratch) / "rounds", model)) as running:
            found = _rounds(running, rounds, jobs, say)
        held = HELD if not quick else 100
        with _Running(_config(Path(scratch) / "held", model, held=held)) as running:
            most, seconds = running.call(lambda: _hold(running, held))
    say(f"held {most} at once, done in {seconds:.1f} s")
    inside, outside = found["in process"], found["http"]
    pairs = list(zip(sorted(inside[1]), sorted(outside[1]), strict=True))
    added = [1e3 * (theirs - ours) for ours, theirs in pairs]
    figures: dict[str, Figure] = {
        "jobs_per_s": statistics.median(outside[0]),
        "jobs_per_s_in_process": statistics.median(inside[0]),
        "throughput_over_in_process": statistics.median(outside[0]) / statistics.median(inside[0]),
        "added_latency_ms_p50": added[len(added) // 2],
        "added_latency_ms_p99": added[int(0.99 * (len(added) - 1))],
        "latency_ms_p50": 1e3 * statistics.median(outside[1]),
        "concurrent_held": most,
    }
    conditions = {
        "jobs": f"{rounds} rounds of {jobs} each way, by turns, {CONCURRENT} under way; a rollout is up to 6 turns of 6 tokens",
        "added_latency": "difference of the same percentile of both ways' latencies, from the question to the result",
        "engine": "one embedded engine process with 32 slots, a random model of hidden 32, which takes most of the time",
        "concurrent_held": f"most at once in INIT or RUN, as /health says; steps take {LATENCY_S:g} s on average",
    }
    return Result(bench="service", figures=figures, conditions=conditions)


def _config(directory: Path, model: Path, *, held: int = 0) -> RunConfig:
    slots = max(held, CONCURRENT)
    limits = {"max_turns": 6, "max_tokens": 300, "max_turn_tokens": 6}
    return RunConfig.model_validate(
        {
            "run": {"name": "service", "dir": str(directory)},
            "model": {"path": str(model)},
            "tasks": [{"env": "frozenlake", "tag": "lake", "options": {"maps": "fixed"}, **limits}],
            "rollout": dict.fromkeys(("max_running", "init_slots", "eval_slots"), slots),
            "engines": {"count": 1, "max_slots": 32, "kv_tokens": 16384},
            "faults": {"latency_s": LATENCY_S if held else 0.0},
            "serve": {"port": 0},
        }
    )


def _model(directory: Path) -> Path:
    """Random weights with a tokenizer of the lake's words: a run of no steps leaves them behind."""
    made = _config(directory, directory).model_dump(mode="json", exclude_none=True)
    made |= {"model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64, "context": 512}}}
    made["run"] |= {"name": "model", "steps": 0, "checkpoint_every": 0}
    made |= {"eval": {"final_episodes": 0}}
    run, _ = trained(RunConfig.model_validate(made))
    return run.model


class _Running:
    """A service in a thread; `call` runs a coroutine on its loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="service")
        self._error: BaseException | None = None

    def _serve(self) -> None:
        try:
            launch.serve(self._config, host=self, connect=_nobody, programs=Programs(), observe=self._observe)
        except BaseException as error:
            self._error = error
        finally:
            self._up.set()

    def _observe(self, service: Service) -> None:
        self.service, self.loop = service, asyncio.get_running_loop()

    def ready(self, address: str, stop: Callable[[bool], None]) -> None:
        self.address, self._stop = address, stop
        self._up.set()

    def warned(self, command: Warn) -> None:
        raise AssertionError(f"nothing ails here: {command}")

    def stopping(self, drain: bool) -> None:
        """Nobody asks."""

    def __enter__(self) -> "_Running":
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(False)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    async def ask(self, request: RolloutRequest) -> RolloutStatus:
        """In process."""
        (found,) = await self.service.submit([request])
        while found.state != "done":
            found = await self.service.wait(found.id, 60.0)
        return found


Found = dict[str, tuple[list[float], list[float]]]
"""By way: rollouts a second of each round, and seconds of each rollout."""


def _rounds(running: _Running, rounds: int, jobs: int, say: Callable[[str], None]) -> Found:
    found: Found = {"in process": ([], []), "http": ([], [])}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as outside:
        ways: dict[str, Callable[[str, int], list[float]]] = {
            "in process": lambda name, count: running.call(lambda: _round(running.ask, name, count)),
            "http": lambda name, count: outside.submit(_round_outside, running.address, name, count).result(),
        }
        for number in range(rounds + 1):
            for way, ask in ways.items():
                began = time.perf_counter()
                taken = ask(f"{way[0]}{number}", jobs if number else CONCURRENT)
                if number:  # the first round warms up
                    found[way][0].append(jobs / (time.perf_counter() - began))
                    found[way][1].extend(taken)
            if number:
                say(", ".join(f"{way} {rates[-1]:.0f} rollouts/s" for way, (rates, _) in found.items()))
    return found


def _round_outside(address: str, name: str, jobs: int) -> list[float]:
    """A round by a client that is a process of its own, as a trainer is."""

    async def run() -> list[float]:
        async with RolloutClient(address) as client:
            return await _round(client.rollout, name, jobs)

    return asyncio.run(run())


async def _round(ask: Ask, name: str, jobs: int) -> list[float]:
    room, taken = asyncio.Semaphore(CONCURRENT), []

    async def one(number: int) -> None:
        async with room:
            began = time.perf_counter()
            status = await ask(RolloutRequest(handler="lake", index=number, id=f"{name}-{number}"))
            taken.append(time.perf_counter() - began)
            assert status.state == "done", status

    await asyncio.gather(*(one(number) for number in range(jobs)))
    return taken


async def _hold(running: _Running, count: int) -> tuple[int, float]:
    """The most that are under way at once, and seconds until all are done."""
    most, began = 0, time.perf_counter()
    async with RolloutClient(running.address) as client:
        asked = [asyncio.ensure_future(client.rollout(RolloutRequest(handler="lake", index=number))) for number in range(count)]
        while not all(task.done() for task in asked):
            health = await client.health()
            most = max(most, sum(found["init"] + found["run"] for found in health.values()))
            await asyncio.wait(asked, timeout=0.2)
        await asyncio.gather(*asked)
    return most, time.perf_counter() - began


def _nobody(request: EngineRequest, name: str) -> NoReturn:
    raise AssertionError(f"nobody registers engines here: {name} at {request.address}")
