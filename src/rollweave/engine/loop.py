"""The engine's loop: takes commands between two steps, computes steps while there is
work, sleeps while there is none.

Commands are posted from any thread and never wait for a computation; replies are called
on the loop's thread. Every request is answered exactly once, also when it is refused,
aborted, or its handling raises. New weights are verified before anything is touched;
then all live KV is recomputed under them, and tokens sampled from then on carry the new
version. Whatever breaks the loop itself is said as `EngineFatal`, after which nothing
more is answered.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, assert_never

import torch
from tokenizers import Tokenizer

from rollweave.engine.admission import validate
from rollweave.engine.detokenize import StopStrings, load_tokenizer
from rollweave.engine.exchange import KvExchange
from rollweave.engine.live import Live
from rollweave.engine.measure import step_times
from rollweave.engine.planner.batching import Amounts, Batcher, Entry, StepPlan
from rollweave.engine.planner.blocks import BlockLedger
from rollweave.engine.runner import Runner
from rollweave.engine.sampler import RowParams, pack, sample
from rollweave.schema.errors import EngineError, WeightsError
from rollweave.schema.serving import (
    TELL_S,
    Abort,
    Add,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    EngineStats,
    ExportKv,
    Finish,
    Generated,
    GenerateRequest,
    GenerateResult,
    ImportKv,
    Load,
    Loaded,
    LoadFailed,
    LoadSaved,
    Progress,
    Ready,
    ReleaseKv,
    Rerank,
    Resume,
    Sampled,
    Shutdown,
    Stats,
    Suspend,
    Suspended,
)
from rollweave.weights.publication import read_tensors
from rollweave.weights.staging import on_device
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint


class Between(NamedTuple):
    """A word of our own: call this between two steps. It must not raise."""

    call: Callable[[], None]


class EngineLoop:
    """One engine. `run` blocks until `Shutdown` or a fatal error; `post` may be called
    before, during and after it.

    `watch` is told the work of every step and its seconds, on the loop's thread.
    `clock` counts seconds.
    """

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        watch: Callable[[Amounts, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._reply, self._watch, self._clock = reply, watch, clock
        self._inbox: deque[EngineCommand | Between] = deque()
        self._wake = threading.Condition()
        self._live: dict[str, Live] = {}
        self._streams: dict[str, Live] = {}
        """Those of them whose tokens are told as they come."""
        self._tell_at = math.inf
        self._suspended_at: float | None = None
        self._deadline = math.inf
        self._version = spec.version
        self._tokenizer: Tokenizer | None = None
        self._tainted = False
        self._packed: tuple[list[Entry], RowParams] | None = None
        self._started_s = 0.0
        self._busy_s = self._suspended_s = 0.0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = (
            self._recomputed_tokens
        ) = self._steps = 0

    def post(self, command: EngineCommand) -> None:
        """Hand a command over.

        Commands are taken in this order, all that are there before each step.
        """
        self._put(command)

    def _put(self, word: EngineCommand | Between) -> None:
        with self._wake:
            self._inbox.append(word)
            self._wake.notify()

    def run(self) -> None:
        """Build the engine, say `Ready`, and serve.

        Says `EngineFatal` where building or serving fails.
        """
        try:
            if self.spec.device == "cpu":
                torch.set_num_threads(self.spec.threads)
            with torch.inference_mode():
                self._build()
                with closing(self._exchange):
                    while self._obey():
                        if self._suspended_at is None and self._batcher.live:
                            self._step()
        except Exception as error:
            self._reply(EngineFatal(error=f"{type(error).__name__}: {error}"))

    def _build(self) -> None:
        spec = self.spec
        self._runner = Runner(spec)
        pool = self._runner.pool
        self._ledger = BlockLedger(
            blocks=pool.blocks, block_tokens=pool.block_tokens, caching=spec.prefix_cache
        )
        self._batcher = Batcher(
            self._ledger, slots=spec.max_slots, chunk_tokens=spec.prefill_chunk_tokens
        )
        self._exchange = KvExchange(
            spec,
            self._runner.shape,
            pool=pool,
            ledger=self._ledger,
            call=lambda call: self._put(Between(call)),
            reply=self._reply,
            sound=lambda: not self._tainted,
        )
        capacity = pool.blocks * pool.block_tokens
        self._max_context = min(self._runner.shape.context, capacity)
        self._stop_ids = frozenset(spec.eos_token_ids or self._runner.shape.eos_token_ids)
        ready = Ready(
            version=spec.version,
            kv_total_tokens=capacity,
            max_slots=spec.max_slots,
            max_context=self._max_context,
            profile=step_times(spec, self._runner) if spec.profile else (),
        )
        self._started_s = self._clock()
        self._reply(ready)

    # Commands.

    def _obey(self) -> bool:
        """Take all commands that are there; wait for one while there is nothing to
        compute. False to end.
        """
        with self._wake:
            while not self._inbox and (self._suspended_at is not None or not self._batcher.live):
                self._wake.wait()
            words = list(self._inbox)
            self._inbox.clear()
        return all(self._handle(word) for word in words)

    def _handle(self, word: EngineCommand | Between) -> bool:
        match word:
            case Between(call=call):
                call()
            case Add(request=request, stream=stream):
                self._add(request, stream=stream)
            case Abort(id=id):
                if id in self._live:
                    self._finish(self._live[id], Finish.ABORTED)
            case Rerank(id=id, rank=rank):
                if math.isfinite(rank):
                    self._batcher.rerank(id, rank)
            case Suspend():
                if self._suspended_at is None:
                    self._suspended_at = self._clock()
                    self._tell(self._suspended_at)
                self._reply(Suspended(in_flight=len(self._live)))
            case Resume():
                if self._suspended_at is not None:
                    self._suspended_s += self._clock() - self._suspended_at
                    self._suspended_at = None
            case Load(manifest=manifest):
                self._load(manifest.version, manifest.weights_id, lambda: read_tensors(manifest))
            case LoadSaved(directory=directory, dtype=dtype):
                step, published = word.version, getattr(torch, dtype)
                self._load(
                    step,
                    word.weights_id,
                    lambda: read_trainer_checkpoint(Path(directory), step=step, dtype=published),
                )
            case Stats():
                self._reply(Sampled(stats=self._stats()))
            case ExportKv():
                self._exchange.export(word)
            case ImportKv():
                self._exchange.take(word)
            case ReleaseKv(id=id):
                self._exchange.release(id)
            case Shutdown():
                return False
            case _:
                assert_never(word)
        return True

    def _add(self, request: GenerateRequest, *, stream: bool) -> None:
        now = self._clock()
        try:
            live = self._admit(request, now)
            ended = live.resume()
            self._batcher.add(live.entry)
        except Exception as error:  # also of a tokenizer that cannot decode what is resumed
            why = (
                str(error)
                if isinstance(error, ValueError | EngineError)
                else f"{type(error).__name__}: {error}"
            )
            result = GenerateResult(
                id=request.id, tokens=(), logprobs=(), versions=(), finish=Finish.ERROR, error=why
            )
            self._reply(Generated(result=result))
            return
        self._live[request.id] = live
        if ended is not None:
            self._finish(live, ended)
        elif stream:
            if not self._streams:
                self._tell_at = now + TELL_S
            self._streams[request.id] = live

    def _admit(self, request: GenerateRequest, now: float) -> Live:
        """Validate. Raises ValueError or EngineError with what is wrong."""
        validate(request, vocab=self._runner.shape.vocab, max_context=self._max_context)
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._max_context - len(request.tokens))
        entry = Entry(
            id=request.id,
            tokens=list(request.tokens),
            limit=len(request.tokens) + limit - 1,
            rank=request.rank,
        )
        live = Live(
            request,
            entry=entry,
            limit=limit,
            stop_ids=self._stop_ids.union(sampling.stop_token_ids),
            now=now,
        )
        if any(sampling.stop):
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(Path(self.spec.model))
            live.watch = StopStrings(self._tokenizer, sampling.stop)
        return live

    def _load(
        self, version: int, weights_id: int, read: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        """Verify, then swap.

        Nothing before the swap can leave a trace; the swap itself copies between
        checked shapes.
        """
        started = self._clock()
        try:
            tensors = read()
            self._runner.model.check(tensors)
            staged = on_device(tensors, self._runner.model.device)
        except (WeightsError, OSError, ValueError, torch.OutOfMemoryError) as error:
            self._reply(LoadFailed(version=version, error=str(error)))
            return
        self._runner.model.load(staged)
        self._version = version
        recompute = self._batcher.retag(weights_id)
        self._runner.forget(wipe=self._tainted)
        self._tainted = False
        now = self._clock()
        self._reply(Loaded(version=version, load_s=now - started, recompute_tokens=recompute))

    # Steps.

    def _step(self) -> None:
        started = self._clock()
        plan = self._batcher.plan()
        amounts = plan.amounts if self._watch is not None else None
        for entry in plan.left:
            self._runner.drop(entry)
        if plan.left or plan.entered:
            self._slots_changed(plan, started)
        entries, logits = self._runner.compute(plan)
        for entry in plan.decode:
            self._recomputed_tokens += self._batcher.advance(entry, 1)
        for entry, count in plan.prefill:
            self._recomputed_tokens += self._batcher.advance(entry, count)
        if entries:
            positions = [len(entry.tokens) for entry in entries]
            tokens, logprobs = sample(logits, positions, self._params(entries))
            self._output_tokens += len(tokens)
            for entry, token, logprob in zip(entries, tokens, logprobs, strict=True):
                self._accept(self._live[entry.id], token, logprob)
        self._steps += 1
        ended = self._clock()
        self._busy_s += ended - started
        if ended - self._suspended_s >= self._deadline:
            self._cut(ended - self._suspended_s)
        if self._watch is not None and amounts is not None:
            self._watch(amounts, ended - started)
        if self._streams and ended >= self._tell_at:
            self._tell(ended)

    def _tell(self, now: float) -> None:
        """Say what was sampled since the last time."""
        self._tell_at = now + TELL_S
        pieces = [
            piece
            for live in self._streams.values()
            if (piece := live.news(now - self._suspended_s)) is not None
        ]
        if pieces:
            self._reply(Progress(pieces=tuple(pieces)))

    def _slots_changed(self, plan: StepPlan, now: float) -> None:
        """Note who waits from `now` on, who has a slot, and whose budget ends first."""
        step_clock = now - self._suspended_s
        for entry in plan.left:
            live = self._live.get(entry.id)
            # else it is over; its id may have been given again
            if live is not None and live.entry is entry:
                live.leave(now, step_clock)
        for entry in plan.entered:
            live = self._live[entry.id]
            if not live.served:
                self._prompt_tokens += len(entry.tokens)
                self._cached_tokens += entry.cached or 0
            live.enter(now, step_clock)
        self._deadline = min(
            (self._live[entry.id].deadline for entry in self._batcher.running), default=math.inf
        )

    def _cut(self, step_clock: float) -> None:
        """End the requests whose budget is used up.

        The deadline of the others follows from the slots that these leave.
        """
        for entry in list(self._batcher.running):
            live = self._live[entry.id]
            if live.deadline <= step_clock:
                self._finish(live, Finish.TIME)

    def _params(self, entries: list[Entry]) -> RowParams:
        """Sampling parameters of these rows; most steps sample the rows of the step
        before.
        """
        if self._packed is None or self._packed[0] != entries:
            samplings = [self._live[entry.id].request.sampling for entry in entries]
            params = pack(
                samplings, vocab=self._runner.shape.vocab, device=self._runner.model.device
            )
            self._packed = (list(entries), params)
        return self._packed[1]

    def _accept(self, live: Live, token: int, logprob: float) -> None:
        """Append a sampled token, and finish where it ends the request.

        An exception here is this request's alone.
        """
        if not math.isfinite(logprob):
            self._tainted = True
            self._finish(
                live,
                Finish.ERROR,
                f"the model's logits are not finite at token {len(live.logprobs)}",
            )
            return
        if not live.spans or live.spans[-1][1] != self._version:
            live.spans.append((len(live.logprobs), self._version))
        live.entry.tokens.append(token)
        live.logprobs.append(logprob)
        try:
            stopped = live.stops(token)
        except Exception as error:
            self._finish(live, Finish.ERROR, f"{type(error).__name__}: {error}")
            return
        if stopped:
            self._finish(live, Finish.STOP)
        elif len(live.logprobs) >= live.limit:
            self._finish(live, Finish.LENGTH)

    def _finish(self, live: Live, finish: Finish, error: str = "") -> None:
        now = self._clock()
        step_clock = (now if self._suspended_at is None else self._suspended_at) - self._suspended_s
        del self._live[live.request.id]
        self._streams.pop(live.request.id, None)
        self._batcher.remove(live.request.id)
        self._reply(
            Generated(result=live.result(finish, now=now, step_clock=step_clock, error=error))
        )

    def _stats(self) -> EngineStats:
        now = self._clock()
        suspended = 0.0 if self._suspended_at is None else now - self._suspended_at
        return EngineStats(
            version=self._version,
            running=len(self._batcher.running),
            waiting=len(self._batcher.waiting),
            kv_used_tokens=self._ledger.held * self._ledger.block_tokens,
            kv_total_tokens=self._ledger.total * self._ledger.block_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self._batcher.preemptions,
            busy_s=self._busy_s,
            suspended_s=self._suspended_s + suspended,
            uptime_s=now - self._started_s,
            steps=self._steps,
        )

    def check(self) -> None:
        """Assert the invariants of planner and ledger, and that every live request is
        known to both sides. For tests.
        """
        self._batcher.check()
        assert self._live.keys() == self._batcher.live.keys(), "a request is lost"
