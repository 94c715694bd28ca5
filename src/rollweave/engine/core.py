"""The core of an engine: its requests, its weights and its steps, as plain calls of one
thread, which `engine/thread` or the co-serving executor has.

Every request is answered exactly once, including one that is refused or aborted, or
whose handling raises. New weights are verified before anything changes, beside the
steps if there is room for a second copy (`engine/staging`); after the swap the KV of
all live requests is recomputed under them, and tokens sampled from then on carry the
new version. An engine that has given back its memory computes nothing until it has
loaded weights.

The masks of constrained turns are computed by another process (`engine/matchers`). A
turn whose next mask is late is held, and the other turns continue without it.
"""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer

from rollweave.engine.batching import Batcher, Entry, StepPlan, StepWork
from rollweave.engine.blocks import BlockLedger
from rollweave.engine.constrained_texts import ConstrainedTexts
from rollweave.engine.exchange import KvExchange
from rollweave.engine.kv import PagedPool
from rollweave.engine.matchers import Matchers
from rollweave.engine.measure import capped_slots, step_times
from rollweave.engine.request_state import RequestState, StopStrings, load_tokenizer, validate
from rollweave.engine.runner import Runner
from rollweave.engine.sampler import RowParams, pack, sample
from rollweave.engine.staging import Incoming, WeightStaging, read_beside
from rollweave.io.machine import computed_dtype, device_named
from rollweave.schema.errors import EngineError, WeightsError
from rollweave.schema.serving import (
    EngineReply,
    EngineSpec,
    EngineStats,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResult,
    LoadCheckpoint,
    Loaded,
    LoadFailed,
    Progress,
    Ready,
    Suspended,
)
from rollweave.schema.weights import WeightManifest
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint

NO_WEIGHTS = -2
"""Weights id of an engine that has given back its memory: no KV has it."""


class EngineCore:
    """One engine, from `build` to `close`.

    `reply` is called with results, and with what is answered later. Helper threads pass
    on what they have done by `between_steps`, which queues a call of a function on the
    thread of the engine. `doing` is called with what this thread begins to do, `watch`
    with the work of every step and its seconds. `clock` returns seconds. `make_pool`
    returns the pool of its blocks. With `loads_beside`, all weights are read on another
    thread, so that nothing waits.
    """

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        between_steps: Callable[[Callable[[], None]], None],
        doing: Callable[[str], None],
        watch: Callable[[StepWork, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_pool: Callable[..., PagedPool] = PagedPool,
        loads_beside: bool = False,
    ) -> None:
        self.spec, self._make_pool, self._loads_beside = spec, make_pool, loads_beside
        self.reply, self._watch, self._clock = reply, watch, clock
        self._between_steps, self.doing = between_steps, doing
        self.live: dict[str, RequestState] = {}
        """The live requests by their ids."""
        self._streams: dict[str, RequestState] = {}
        """The live requests whose tokens are reported as they are sampled."""
        self._progress_at = math.inf
        """The time of the next report of their tokens: `report_s` after the last one,
        as the most impatient of them asks.
        """
        self._progressed_at = -math.inf
        self._suspended_at: float | None = None
        self._deadline = math.inf
        self._version = spec.version
        self._tokenizer: Tokenizer | None = None
        self._tainted = False
        self._packed: tuple[list[Entry], RowParams] | None = None
        self._started_s = 0.0
        self._busy_s = self._suspended_s = 0.0
        self._prompt_tokens = self._cached_tokens = self._recomputed_tokens = self._steps = 0
        self.output_tokens = 0
        """Number of tokens sampled since the engine was built."""

    @torch.inference_mode()
    def build(self) -> Ready:
        """Build the engine, before any other call."""
        dtype = computed_dtype(self.spec.dtype, device_named(self.spec.device).type)
        self.spec = spec = msgspec.structs.replace(self.spec, dtype=dtype)
        self.runner = Runner(spec, self._make_pool)
        pool = self.runner.pool
        self._ledger = BlockLedger(
            blocks=pool.blocks,
            block_tokens=pool.block_tokens,
            caching=spec.prefix_cache,
            publication_id=NO_WEIGHTS if spec.released else -1,
        )
        self.planner = Batcher(
            self._ledger, slots=spec.max_slots, chunk_tokens=spec.prefill_chunk_tokens
        )
        self.exchange = KvExchange(
            spec,
            self.runner.shape,
            pool=pool,
            ledger=self._ledger,
            call_between_steps=self._between_steps,
            reply=self.reply,
            is_finite=lambda: not self._tainted,
        )
        self._incoming = Incoming(self.runner.model.device)
        self.staging = WeightStaging(
            self.runner.model,
            read=self._incoming.read,
            call_between_steps=self._between_steps,
            reply=self.reply,
        )
        vocab = self.runner.shape.vocab
        self.texts = ConstrainedTexts(
            lambda reply: Matchers(Path(spec.model), vocab=vocab, reply=reply),
            vocab=vocab,
            between_steps=self._between_steps,
            finish=self._finish,
        )
        capacity = pool.blocks * pool.block_tokens
        self._max_context = min(self.runner.shape.context, capacity)
        self._eos_ids = spec.eos_token_ids or self.runner.shape.eos_token_ids
        ready = Ready(
            version=spec.version,
            kv_total_tokens=capacity,
            max_slots=capped_slots(spec, self.runner),
            max_context=self._max_context,
            profile=step_times(spec, self.runner) if spec.profile and not spec.released else (),
            stages=not spec.released and self.staging.has_room(),
        )
        self._started_s = self._clock()
        return ready

    def close(self) -> None:
        """End the threads of the engine, and the process of its masks."""
        for part in ("exchange", "staging", "texts"):
            if hasattr(self, part):
                getattr(self, part).close()

    @property
    def has_work(self) -> bool:
        """True if there is a step to compute."""
        stands_still = self._suspended_at is not None or self.runner.released
        return not stands_still and len(self.planner.live) > self.texts.held

    # Requests

    def submit(self, request: GenerateRequest, *, report_s: float | None = None) -> None:
        """Run a request. With `report_s`, its tokens are reported as they are sampled,
        at most this many seconds after the step that sampled them.
        """
        now = self._clock()
        try:
            state = self._admit(request, now)
            finished = state.resume()
            self.planner.add(state.entry)
            if finished is None and request.sampling.constraint is not None:
                self.texts.begin(state, request.sampling.constraint)
        except Exception as error:  # the tokenizer may fail to decode the resumed tokens
            speaks = isinstance(error, ValueError | EngineError)
            text = str(error) if speaks else f"{type(error).__name__}: {error}"
            result = GenerateResult.empty(request.id, FinishReason.ERROR, text)
            self.reply(Generated(result=result))
            return
        self.live[request.id] = state
        if finished is not None:
            self._finish(state, finished)
        elif report_s is not None:
            state.report_s = report_s
            if not self._streams:
                self._progressed_at = now
            self._streams[request.id] = state
            self._schedule_progress()

    def _admit(self, request: GenerateRequest, now: float) -> RequestState:
        """Validate a request and build its state. Raises ValueError or EngineError if
        it is invalid.
        """
        validate(request, vocab=self.runner.shape.vocab, max_context=self._max_context)
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._max_context - len(request.tokens))
        entry = Entry(
            id=request.id,
            tokens=list(request.tokens),
            limit=len(request.tokens) + limit - 1,
            rank=request.rank,
            scored=len(request.tokens) if request.prompt_logprobs else 0,
            scored_top=request.top_logprobs,
        )
        state = RequestState(request, entry=entry, limit=limit, eos_ids=self._eos_ids, now=now)
        if any(sampling.stop):
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(Path(self.spec.model))
            state.stop_strings = StopStrings(self._tokenizer, sampling.stop)
        return state

    def abort(self, id: str, finish: FinishReason = FinishReason.ABORTED) -> None:
        """End a live request with the tokens that it has. Unknown ids are ignored."""
        if id in self.live:
            self._finish(self.live[id], finish)

    def rerank(self, id: str, rank: float) -> None:
        """Change the rank of a live request. Other ids and ranks are ignored."""
        if math.isfinite(rank):
            self.planner.rerank(id, rank)

    # Suspension and weights

    def suspend(self, *, release: bool) -> Suspended:
        """Have no work until `resume`. With `release`, give back the memory of weights
        and KV until weights are loaded.
        """
        if self._suspended_at is None:
            self._suspended_at = self._clock()
            self._report_progress(self._suspended_at)
        if release and not self.runner.released:
            # the KV of live requests is recomputed under the weights that come next
            self.staging.cancel()
            self._packed = None
            self.planner.retag(NO_WEIGHTS)
            self.runner.release()
            self._tainted = False
        return Suspended(in_flight=len(self.live))

    def resume(self) -> None:
        """Have work again."""
        if self._suspended_at is not None:
            self._suspended_s += self._clock() - self._suspended_at
            self._suspended_at = None

    def load(self, manifest: WeightManifest) -> None:
        """Swap in the weights if they are staged, wait if they are being received, else
        load them now. Replies `Loaded` or `LoadFailed`, now or later.
        """
        started = self._clock()
        if self.staging.is_receiving(manifest):
            self.staging.when_received(lambda: self.load(manifest))
            return
        staged = self.staging.take(manifest)
        if staged is None:
            self._load(
                manifest.version, manifest.publication_id, lambda: self._incoming.read(manifest)
            )
            return
        self.runner.update(staged)
        self._loaded(manifest.version, manifest.publication_id, started)
        del staged
        if self.runner.model.device.type == "cuda":
            torch.cuda.empty_cache()  # give the memory of the former copy back

    def load_checkpoint(self, command: LoadCheckpoint) -> None:
        """Load the weights of a trainer's checkpoint, with the same replies."""
        step, directory = command.version, Path(command.directory)
        dtype: torch.dtype = getattr(torch, command.dtype)
        read = functools.partial(read_trainer_checkpoint, directory, step=step, dtype=dtype)
        self._load(step, command.publication_id, read)

    def _load(
        self, version: int, publication_id: int, read: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        """Verify the weights, then copy them over those in use.

        A failure before the copy changes nothing; the copy itself is between checked
        shapes.
        """
        started, model, released = self._clock(), self.runner.model, self.runner.released
        if self._loads_beside and not released:
            read_beside(
                model,
                read,
                update=self.runner.update,
                between_steps=self._between_steps,
                loaded=lambda: self._loaded(version, publication_id, started),
                failed=lambda error: self.reply(LoadFailed(version=version, error=error)),
            )
            return
        try:
            tensors = read()
            model.check(tensors)
            if released:
                self.runner.reclaim()
            staged = model.incoming(tensors)
        except (WeightsError, OSError, ValueError, torch.OutOfMemoryError) as error:
            if released:
                self.runner.release()
            self.reply(LoadFailed(version=version, error=str(error)))
            return
        model.weights.load(staged)
        self._loaded(version, publication_id, started)

    def _loaded(self, version: int, publication_id: int, started: float) -> None:
        """Continue to serve, with the weights that have just been swapped in."""
        self._version = version
        self.staging.loaded(publication_id)
        recompute = self.planner.retag(publication_id)
        self.runner.forget(wipe=self._tainted)
        self._tainted = False
        load_s = self._clock() - started
        self.reply(Loaded(version=version, load_s=load_s, recompute_tokens=recompute))

    # Steps

    def step(self) -> bool:
        """Compute one step. Return False if no request could have a slot and blocks."""
        started = self._clock()
        plan = self.planner.plan()
        work = plan.work if self._watch is not None else None
        self._track_slots(plan, started)
        prompts = sum(count for _, count in plan.prefill)
        self.doing(f"a step of {len(plan.decode)} sequences and {prompts} prompt tokens")
        if not plan.decode and not plan.prefill:
            return False  # blocks are absent, or prompts have no share of this step
        self._compute(plan)
        self._steps += 1
        ended = self._clock()
        self._busy_s += ended - started
        self._enforce_budgets(ended - self._suspended_s)
        if self._watch is not None and work is not None:
            self._watch(work, ended - started)
        if self._streams and ended >= self._progress_at:
            self._report_progress(ended)
        return True

    def _compute(self, plan: StepPlan) -> None:
        """Run the model over the plan, and sample the next token of each sequence that
        is complete.
        """
        entries, logits, scores = self.runner.compute(plan)
        for entry, start, logprobs, tops in scores:
            self.live[entry.id].add_scores(start, logprobs, tops)
        for entry in plan.decode:
            self._recomputed_tokens += self.planner.advance(entry, 1)
        for entry, count in plan.prefill:
            self._recomputed_tokens += self.planner.advance(entry, count)
        if entries:
            positions = [len(entry.tokens) for entry in entries]
            forbidden = self.texts.forbidden([self.live[entry.id] for entry in entries])
            tokens, logprobs, reports = sample(logits, positions, self._params(entries), forbidden)
            self.output_tokens += len(tokens)
            for row, report in reports.items():
                self.live[entries[row].id].top_logprobs.append(report)
            for row, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
                self._accept(self.live[entry.id], token, logprobs[row], row)

    def _report_progress(self, now: float) -> None:
        """Send the tokens sampled since the last `Progress`."""
        self._progressed_at = now
        self._schedule_progress()
        deltas = [
            delta
            for state in self._streams.values()
            if (delta := state.take_delta(now - self._suspended_s)) is not None
        ]
        if deltas:
            self.reply(Progress(pieces=tuple(deltas)))

    def _schedule_progress(self) -> None:
        shortest_s = min((state.report_s for state in self._streams.values()), default=math.inf)
        self._progress_at = self._progressed_at + shortest_s

    def _track_slots(self, plan: StepPlan, now: float) -> None:
        """Account for the requests that lost or took a slot, and find the earliest
        deadline of a budget.
        """
        if not (plan.left or plan.entered):
            return
        step_clock = now - self._suspended_s
        for entry in plan.left:
            self.runner.drop(entry)
            state = self.live.get(entry.id)
            # Otherwise the request has ended, and its id may have been used again.
            if state is not None and state.entry is entry:
                state.release_slot(now, step_clock)
        for entry in plan.entered:
            state = self.live[entry.id]
            if not state.served:
                self._prompt_tokens += len(entry.tokens)
                self._cached_tokens += entry.cached or 0
            state.take_slot(now, step_clock)
        self._deadline = min(
            (self.live[entry.id].deadline for entry in self.planner.running), default=math.inf
        )

    def _enforce_budgets(self, step_clock: float) -> None:
        """End the requests that have used up their budget.

        Their slots change hands in the next plan, which yields the next deadline.
        """
        if step_clock < self._deadline:
            return
        for entry in list(self.planner.running):
            state = self.live[entry.id]
            if state.deadline <= step_clock:
                self._finish(state, FinishReason.TIME)

    def _params(self, entries: list[Entry]) -> RowParams:
        """Return the sampling parameters of these rows, cached because most steps
        sample the rows of the step before.
        """
        if self._packed is None or self._packed[0] != entries:
            states = [self.live[entry.id] for entry in entries]
            params = pack(
                [state.request.sampling for state in states],
                vocab=self.runner.shape.vocab,
                device=self.runner.model.device,
                states=states,
            )
            self._packed = (list(entries), params)
        return self._packed[1]

    def _accept(self, state: RequestState, token: int, logprob: float, row: int) -> None:
        """Append the token that was sampled in this row of the step, and finish the
        request if the token ends it.

        An exception here fails this request alone.
        """
        if logprob == -math.inf:
            text = "sampling.adjustments must leave a token that can be sampled, and leave none"
            self._finish(state, FinishReason.ERROR, f"ValueError: {text}")
            return
        if not math.isfinite(logprob):
            self._tainted = True
            text = f"the model's logits are not finite at token {len(state.logprobs)}"
            self._finish(state, FinishReason.ERROR, text)
            return
        if not state.version_starts or state.version_starts[-1][1] != self._version:
            state.version_starts.append((len(state.logprobs), self._version))
        state.entry.tokens.append(token)
        state.logprobs.append(logprob)
        if not state.first_token_s:
            state.first_token(self._clock())
        try:
            stopped = state.ends_with(token)
        except Exception as error:
            self._finish(state, FinishReason.ERROR, f"{type(error).__name__}: {error}")
            return
        if stopped:
            self._finish(state, FinishReason.STOP, row=row)
        elif len(state.logprobs) >= state.limit:
            self._finish(state, FinishReason.LENGTH, row=row)
        elif state.text_id:
            self.texts.extend(state, token)

    def _finish(
        self,
        state: RequestState,
        finish: FinishReason,
        error: str = "",
        *,
        row: int | None = None,
    ) -> None:
        """Answer a request. A turn that ends in this row of the step has a state."""
        now = self._clock()
        step_clock = (now if self._suspended_at is None else self._suspended_at) - self._suspended_s
        del self.live[state.request.id]
        if state.text_id:
            self.texts.end(state)
        if self._streams.pop(state.request.id, None) is not None:
            self._schedule_progress()
        self.planner.remove(state.request.id)
        result = state.result(finish, now=now, step_clock=step_clock, error=error)
        if row is not None and self.spec.states:
            result = msgspec.structs.replace(result, state=self.runner.state(row))
        self.reply(Generated(result=result))

    @property
    def kv_used(self) -> int | None:
        """Tokens in the KV blocks that requests hold; None before the engine is built.
        May be read on any thread.
        """
        ledger: BlockLedger | None = getattr(self, "_ledger", None)
        return None if ledger is None else ledger.used * ledger.block_tokens

    def stats(self) -> EngineStats:
        """Return a sample of the engine's state."""
        now = self._clock()
        suspended = 0.0 if self._suspended_at is None else now - self._suspended_at
        return EngineStats(
            version=self._version,
            running=len(self.planner.running),
            waiting=len(self.planner.waiting),
            kv_used_tokens=self.kv_used or 0,
            kv_total_tokens=self._ledger.total * self._ledger.block_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self.output_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self.planner.preemptions,
            busy_s=self._busy_s,
            suspended_s=self._suspended_s + suspended,
            uptime_s=now - self._started_s,
            steps=self._steps,
        )
