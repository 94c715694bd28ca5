"""Bench `coserve --engine vllm`: a real vLLM serves a load alone, and then the same
load while a run's rollouts are computed between its steps (ROSE §5), with the same
model on both sides; and what is lost when either side is killed or stopped.

The limits are those of `bench coserve`: 1.2 times the P99 of the server alone.
"""

import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cluster.run import lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.engine.vllm_server import MISSING, interpreter
from benchmarks.harness import Progress, load_average, scratch_folder
from benchmarks.runs import run_secret
from packages.servers.benchmarks.lending.rollouts import (
    POLL_S,
    PROMPT,
    ROLLOUTS,
    WAIT_S,
    Rollouts,
)
from packages.servers.benchmarks.lending.server import Beside, LendingVllm
from packages.sim.benchmarks.coserve.bench import FEWEST, MARGIN, UTILIZATION
from packages.sim.benchmarks.coserve.borrowing_run import BorrowingRun
from packages.sim.benchmarks.coserve.figures import quantile, tpot_p99, ttft_p99
from packages.sim.benchmarks.coserve.load import OUTPUT_MEDIAN, PROMPT_MEDIAN, Served, bursty
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.io.child import child_of
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, LendSpec
from rollweave.weights.checkpoint import read_shape

ENGINE = "rollweave.runtime.entrypoints.engine"
BORROWED = "rollweave.runtime.entrypoints.lent_engine"

LOAD_S = {True: 20.0, False: 120.0}
"""Seconds of a load, with `--quick` or without."""

START_S = 300.0
CALIBRATIONS = 5
WARM = 12
"""Requests before any that counts: the server's first steps are slower."""

FAULTS = ("lender_stopped", "lender_killed", "server_stopped", "server_killed")
FIGURES = (
    *("ttft_p50_alone_ms", "ttft_p99_alone_ms", "tpot_p50_alone_ms", "tpot_p99_alone_ms"),
    *("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"),
    *("ttft_p99_over_alone", "tpot_p99_over_alone", "slo_violations_alone", "slo_violations"),
    *("rollout_tokens_per_s", "rollout_share_of_time", "returned_rollouts", "lost_rollouts"),
    *("faults_survived", "unanswered_after_faults", "lost_trajectories"),
)
CONDITIONS = {
    "ttft_p99_over_alone": "P99 of the time to the first token, seen by the client, by that of "
    "the server alone under the same load; so tpot: mean time per further token",
    "slo_violations": f"share of requests beyond a limit or unanswered; the limits are {MARGIN} "
    "times the P99 of the server alone",
    "rollout_share_of_time": "seconds of rollout steps by the seconds of the load",
    "lost_rollouts": "rollouts that ended with an error; those that were returned were continued",
    "faults_survived": f"of {len(FAULTS)}: {', '.join(FAULTS)}; a side that was stopped continues, "
    "and a side that was killed is started again; each time the run borrows the engine again",
    "unanswered_after_faults": "requests of the server's users that were not answered, of one "
    "during each fault of the lender and one after each fault",
}


def bench_vllm_lends(*, quick: bool, progress: Progress, model: Path | None = None) -> Result:
    """Return the figures of a load alone and beside rollouts, and of the faults."""
    python = interpreter()
    model = model or Path("build/smollm2")
    name = "coserve"
    if python is None:
        return Result.not_measured(name, FIGURES, MISSING)
    if not (model / "config.json").is_file():
        return Result.not_measured(
            name, FIGURES, f"{model} must be a model (make {model}/config.json)"
        )
    with scratch_folder() as scratch, run_secret():
        return _Bench(python, model.absolute(), scratch, progress).result(LOAD_S[quick])


class _Bench:
    def __init__(self, python: str, model: Path, folder: Path, progress: Progress) -> None:
        self._python, self._model, self._folder, self._progress = python, model, folder, progress
        self._vocabulary = read_shape(model).vocab
        self._figures: dict[str, Figure] = {}

    def result(self, load_s: float) -> Result:
        before = load_average()
        with self._server() as server:
            asyncio.run(self._measure(server, load_s))
            self._faults(server)
        conditions: dict[str, Any] = {
            **CONDITIONS,
            "model": f"{self._model.name} on both sides, float32 on CPUs, one thread each",
            "load": f"{load_s:g} s, {self._requests} requests, {self._rate:.2f} a second, of which "
            f"the server alone computes a share of {UTILIZATION:g}",
            "load_average": f"{before} before, {load_average()} after",
        }
        return Result(bench="coserve", figures=self._figures, conditions=conditions)

    def _server(self) -> LendingVllm:
        return LendingVllm(self._python, self._model, self._folder)

    async def _measure(self, server: LendingVllm, load_s: float) -> None:
        draw = random.Random(0)
        seconds = []
        for _ in range(WARM + CALIBRATIONS):
            prompt = [draw.randrange(100, self._vocabulary) for _ in range(PROMPT_MEDIAN)]
            began = time.monotonic()
            await asyncio.to_thread(server.complete, prompt, OUTPUT_MEDIAN)
            seconds.append(time.monotonic() - began)
        self._rate = max(UTILIZATION / statistics.median(seconds[WARM:]), FEWEST / load_s)
        arrivals = bursty(self._rate, load_s, seed=0)
        self._requests = len(arrivals)
        alone = await server.offer(arrivals, vocabulary=self._vocabulary)
        limits = MARGIN * ttft_p99(alone), MARGIN * tpot_p99(alone)
        self._note("alone_", alone, limits)
        async with self._rollouts(server, *limits) as rollouts:
            before, began = await rollouts.stats(), time.monotonic()
            served = await server.offer(arrivals, vocabulary=self._vocabulary)
            after, seconds_of_load = await rollouts.stats(), time.monotonic() - began
        self._note("", served, limits)
        tokens = after.rollout_tokens - before.rollout_tokens
        busy_s = after.rollout_busy_s - before.rollout_busy_s
        self._figures |= {
            "ttft_p99_over_alone": ttft_p99(served) / ttft_p99(alone),
            "tpot_p99_over_alone": tpot_p99(served) / tpot_p99(alone),
            "rollout_tokens_per_s": tokens / seconds_of_load,
            "rollout_share_of_time": busy_s / seconds_of_load,
            "returned_rollouts": rollouts.returned,
            "lost_rollouts": rollouts.lost,
        }
        self._progress(f"beside rollouts: {self._figures}")

    def _note(self, what: str, served: list[Served], limits: tuple[float, float]) -> None:
        answered = [one for one in served if one.tokens]
        tpots = [one.tpot_s for one in answered if one.tpot_s is not None]
        beyond = sum(
            not one.tokens or one.first_s > limits[0] or (one.tpot_s or 0.0) > limits[1]
            for one in served
        )
        for share in (0.5, 0.99):
            name = f"p{100 * share:.0f}_{what}ms"
            self._figures[f"ttft_{name}"] = 1e3 * quantile([one.first_s for one in answered], share)
            self._figures[f"tpot_{name}"] = 1e3 * quantile(tpots, share)
        self._figures[f"slo_violations{'_alone' * bool(what)}"] = beyond / len(served)
        self._progress(f"{what or 'beside rollouts'}: {len(served)} requests, {beyond} too late")

    @contextlib.asynccontextmanager
    async def _rollouts(self, server: LendingVllm, ttft_s: float, tpot_s: float) -> Any:
        """Lend to a borrower of the same model, and keep its rollouts going."""
        socket = str(self._folder / "loan")
        lend = LendSpec(socket=socket, ttft_s=ttft_s, tpot_s=tpot_s, beside=str(server.socket))
        spec = EngineSpec(id=EngineId("lender"), model=str(self._model), kv_tokens=4096, lend=lend)
        own = EngineSpec(
            id=EngineId("r"), model=str(self._model), kv_tokens=4096, max_slots=ROLLOUTS, version=0
        )
        async with self._client("the lender", spec, ENGINE) as lender:
            await lender.ready()
            async with self._client("the borrower", own, BORROWED, socket) as borrower:
                await borrower.ready()
                rollouts = Rollouts(lender, borrower, self._vocabulary)
                await rollouts.start()
                yield rollouts
                await rollouts.end()

    @contextlib.asynccontextmanager
    async def _client(self, name: str, spec: EngineSpec, module: str, *arguments: str) -> Any:
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        spawn = child_of(module, arguments=arguments, env={"OMP_NUM_THREADS": "1"})
        log = self._folder / f"{spec.id}.log"
        link = in_process(spec, spawn=spawn, log=log, model_ready=ready)
        client = EngineClient(name, link, start_s=START_S, reply_s=WAIT_S)
        try:
            yield client
        finally:
            await client.close()

    def _faults(self, server: LendingVllm) -> None:
        """Lose each side while a run borrows the engine, and count what is lost."""
        directory, survived, unanswered = self._folder / "run", 0, 0
        directory.mkdir()
        prompt = list(range(100, 100 + PROMPT))

        def ask(server: LendingVllm) -> int:
            try:
                server.complete(prompt, OUTPUT_MEDIAN)
            except OSError as error:
                self._progress(f"a user's request was not answered: {error}")
                return 1
            return 0

        with contextlib.ExitStack() as stack:
            run = stack.enter_context(BorrowingRun(directory, loans=1))

            def lend() -> Beside:
                limits = ("--ttft-ms", "60000", "--tpot-ms", "60000")
                lender = Beside(server, self._model, self._folder, "--lend", run.address, *limits)
                stack.callback(lender.kill)
                return lender

            def samples(lender: Beside) -> None:
                before = lender.stats()["rollout_tokens"]
                _await(run, lambda: lender.stats()["rollout_tokens"] > before, "rollouts")

            def missed(lender: Beside) -> None:
                _await(run, lambda: not lender.stats()["budget_pages"], "the missing server")

            lender = lend()
            for fault in FAULTS:
                samples(lender)
                side = server if fault.startswith("server") else lender
                if fault.endswith("killed"):
                    side.kill()
                    if side is lender:
                        unanswered += ask(server)
                        lender = lend()
                    else:
                        server = stack.enter_context(self._server())
                else:
                    side.signal(signal.SIGSTOP)
                    if side is lender:
                        unanswered += ask(server)
                    else:
                        missed(lender)
                    side.signal(signal.SIGCONT)
                unanswered += ask(server)
                samples(lender)
                survived += 1
                self._progress(f"{fault}: survived")
            account = run.ended()["account"]
        self._figures |= {
            "faults_survived": survived,
            "unanswered_after_faults": unanswered,
            "lost_trajectories": lost_trajectories(account) + run.unaccounted(account),
        }


def _await(run: BorrowingRun, condition: Callable[[], Any], what: str) -> None:
    run.wait(condition, limit_s=WAIT_S, every_s=POLL_S, what=what)
