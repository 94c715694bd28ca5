"""A simulated engine that advances in macro-steps: its cost grows with events, not
tokens.

It follows the rules of `engine/batching`: slots and KV by rank and arrival,
chunked prefill beside all decodes, eviction of entire turns, prefixes kept for a later
turn. Between two events the composition of a step is fixed, so a *run* of steps is
planned at once: every decoding turn gains a token a step, a heap of last steps gives
the end of the run, and the cost model gives its seconds in closed form. A run ends
where a turn finishes, a prompt is computed or its chunk changes, or KV runs out; a call
in the middle of a step takes effect at the end of that step, as in a real engine. With
noise, the steps of a run are together longer or shorter than the cost model says.

Invariants: `_at` is a step's end, and all state is as of then; of the current run,
`_left` steps remain, and the last ends at `_end`. The engine has no clock: `now` never
decreases, and whatever was due earlier is done first.
"""

import math
from bisect import bisect_left, bisect_right

from rollweave.schema.base import Struct
from rollweave.schema.serving import PROGRESS_S
from rollweave_sim.batch import Batch
from rollweave_sim.cost import EngineCosts
from rollweave_sim.kv import KvCounts, Request, Turn
from rollweave_sim.noise import Noise


class Done(Struct, frozen=True, kw_only=True):
    """A turn that ended at `at`; the prefix cache gave `cached_tokens` of its context.

    For `queue_s` seconds of its time on the engine it had no slot.
    """

    key: str
    at: float
    output_tokens: int
    cached_tokens: int
    queue_s: float = 0.0


class SimEngine:
    """One engine, whose loaded weights are `publication_id` (-1: none yet).

    Times are virtual seconds, in order of the calls. `next_at` gives the time of the
    next `advance`. Figures are as of the last step that had ended at the last
    `advance`.
    """

    def __init__(
        self,
        *,
        cost: EngineCosts,
        slots: int,
        chunk_tokens: int,
        block_tokens: int,
        prefix_cache: bool,
        kv_tokens: int | None = None,
        noise: Noise | None = None,
    ) -> None:
        """`kv_tokens` is the size of the KV cache in tokens; if unset, the cost model's
        limit. Without `noise`, steps take what the cost model says.
        """
        if min(slots, chunk_tokens, block_tokens) < 1:
            raise ValueError(
                f"slots, chunk_tokens and block_tokens must be at least 1, got {slots}, "
                f"{chunk_tokens} and {block_tokens}"
            )
        self.cost = cost
        self.publication_id = -1
        self.busy_s = 0.0
        self.tokens = self.prefill_tokens = self.recomputed_tokens = 0
        self._chunk_tokens = chunk_tokens
        self.kv_tokens = cost.kv_tokens if kv_tokens is None else kv_tokens
        kv = KvCounts(
            total=self.kv_tokens // block_tokens, block_tokens=block_tokens, caching=prefix_cache
        )
        self._batch = Batch(kv, slots=slots)
        self._live: dict[str, Turn] = {}
        self._arrivals = 0
        self._noise = noise
        # The current run of steps, which take `_pace` times what they cost.
        self._pace = self._slowdown = 1.0
        self._at = 0.0
        self._left = 0
        self._end = 0.0
        self._bounds: list[float] = []  # ends of the remaining steps if they prefill
        self._chunk: list[tuple[Turn, int]] = []
        # Applied at the end of the current step.
        self._aborted: list[Turn] = []
        self._loading: int | None = None
        self._suspended = False
        self._done: list[Done] = []

    @property
    def kv_used(self) -> int:
        """Return the token capacity of the blocks in use."""
        return self._batch.kv.held * self._batch.kv.block_tokens

    @property
    def waiting(self) -> int:
        return len(self._batch.waiting)

    @property
    def running(self) -> int:
        return len(self._batch.running)

    @property
    def preemptions(self) -> int:
        return self._batch.preemptions

    # Requests and weights.

    def add(self, now: float, request: Request) -> None:
        """Queue a request.

        Raises ValueError for a key that is live, for bad counts, and for a request that
        could not run even alone.
        """
        self._run_until(now)
        kv = self._batch.kv
        if request.key in self._live:
            raise ValueError(f"key must be unique among live requests, got {request.key!r} again")
        if (
            request.output_tokens < 1
            or not 0 <= request.shared_tokens <= request.context_tokens
            or request.context_tokens < 1
        ):
            raise ValueError(
                "context_tokens (shared ones among them) and output_tokens must be "
                f"at least 1, got {request}"
            )
        most, capacity = (
            request.context_tokens + request.output_tokens - 1,
            kv.total * kv.block_tokens,
        )
        if most > capacity:
            raise ValueError(
                f"tokens must fit the KV cache ({capacity} tokens), got a request of up to {most}"
            )
        common = (
            request.shared_tokens // kv.block_tokens if kv.caching and request.shared_key else 0
        )
        turn = Turn(request, arrival=self._arrivals, common=common)
        self._arrivals += 1
        self._live[request.key] = turn
        self._batch.at = now
        self._batch.wait(turn)
        if not self._left:
            self._at = max(self._at, now)
        elif self._batch.could_run(turn):
            self._cut(now)

    def abort(self, now: float, key: str) -> int | None:
        """Abort a request: it yields no Done, and its KV is free as the running step
        ends.

        Returns the number of its output tokens sampled by then, or None where it is not
        live.
        """
        self._run_until(now)
        turn = self._live.pop(key, None)
        if turn is None:
            return None
        self._cut(now)
        sampled = self._sampled(turn, self._left)
        if self._left and turn.running:
            self._aborted.append(turn)
        else:
            self._batch.drop(turn)
        return sampled

    def reported_tokens(self, now: float) -> dict[str, int]:
        """Return the tokens of each live request that the engine has reported.

        It reports every `PROGRESS_S` and when it is suspended; the count is derived
        from the tokens sampled now, at the pace of the current step.
        """
        self._run_until(now)
        steps, batch, unreported = self._steps_by(now), self._batch, 0
        if self._left and batch.decoding:
            context = batch.context + steps * batch.decoding
            step_s = self.cost.decode_s(decode=batch.decoding, decode_context=context, steps=1)
            unreported = math.ceil(now % PROGRESS_S / (self._pace * step_s))
        return {
            key: max(0, self._sampled(turn, steps) - (unreported if turn.decoding else 0))
            for key, turn in self._live.items()
        }

    def rerank(self, now: float, key: str, rank: float) -> None:
        """Change a request's rank from the next step on. Unknown keys are ignored."""
        self._run_until(now)
        turn = self._live.get(key)
        if turn is not None:
            self._batch.rerank(turn, rank)
            self._cut(now)

    def export_kv(self, now: float, key: str, shared_key: str) -> int:
        """Return the blocks of a trajectory's prefix that another engine can copy.

        Of a turn that has just been aborted, these are all blocks.
        """
        self._run_until(now)
        for turn in self._aborted:
            if turn.request.key == key and turn.decoding:
                return (
                    turn.request.context_tokens + self._sampled(turn, self._left) - 1
                ) // self._batch.kv.block_tokens
        return self._batch.kv.kept(key, shared_key)

    def import_kv(
        self, now: float, key: str, shared_key: str, blocks: int, *, shared_tokens: int
    ) -> int:
        """Keep a prefix that another engine has computed under the same weights, of
        which all trajectories of `shared_key` have the first `shared_tokens`.

        Returns the number of its blocks that the engine then has.
        """
        self._run_until(now)
        kv = self._batch.kv
        return kv.insert(key, shared_key, blocks, common=shared_tokens // kv.block_tokens)

    def reprice(self, now: float, cost: EngineCosts) -> None:
        """Use other costs once the running step has ended."""
        self._run_until(now)
        self._cut(now)
        self.cost = cost

    def slow_down(self, now: float, factor: float) -> None:
        """Let steps take so many times what they cost once the running step has
        ended.
        """
        self._run_until(now)
        self._cut(now)
        self._slowdown = factor

    def suspend(self, now: float) -> float:
        """Compute nothing after the running step. Returns the time at which that
        ends.
        """
        self._run_until(now)
        self._suspended = True
        self._cut(now)
        return self._end if self._left else now

    def load(self, now: float, publication_id: int) -> None:
        """Load new weights once the running step has ended.

        All KV is void, and turns in flight are computed again.
        """
        self._run_until(now)
        self._loading = publication_id
        if self._left:
            self._cut(now)
        else:
            self._load()

    # A device that computes other work between two steps (sim/lender).

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or runs, and may be computed."""
        return bool(self._live) and not self._suspended

    def fits(self, request: Request) -> bool:
        """Return whether the KV cache can hold the request alone."""
        kv = self._batch.kv
        most = request.context_tokens + request.output_tokens - 1
        return most <= kv.total * kv.block_tokens

    def hold(self, now: float) -> None:
        """Discard the plan of steps that have not begun, so that calls take effect at
        once.
        """
        self._run_until(now)
        if self._left and self._at == now:
            self._left, self._chunk = 0, []
            self._bounds.clear()

    def first_end(self, now: float) -> float | None:
        """Return the end of the next step, if it begins now; None without work."""
        self._run_until(now)
        if not self._left:
            if not self._startable(now):
                return None
            self._plan()
        return self._step_end(self._steps_by(now) + 1)

    @property
    def next_work(self) -> tuple[int, int]:
        """Return the prompt tokens and the decoding sequences of the planned step."""
        return sum(count for _, count in self._chunk), self._batch.decoding

    def cut_by(self, now: float, limit: float) -> float:
        """End the current run with the last step that ends by `limit`, but not before
        the one that is computed at `now`. Returns its end.
        """
        if self._left > 1:
            step = max(self._steps_by(limit), self._step_of(now), 1)
            self._end = self._step_end(step)
            self._left = step
            del self._bounds[step:]
        return self._end

    def limit_kv(self, now: float, tokens: int) -> dict[str, int]:
        """Change the size of the KV cache between two steps. Returns the requests that
        are given up for it, the last ones first, and the tokens that each has sampled.
        """
        self.hold(now)
        assert not self._left, "memory changes between two steps"
        kv, given_up = self._batch.kv, {}
        total = tokens // kv.block_tokens
        for turn in sorted(self._live.values(), key=lambda turn: turn.item, reverse=True):
            if kv.held > total or turn.length + turn.left - 1 > total * kv.block_tokens:
                key = turn.request.key
                given_up[key] = self._sampled(turn, 0)
                del self._live[key]
                self._batch.drop(turn)
        kv.resize(total)
        self.kv_tokens = tokens
        return given_up

    def give_all(self, now: float) -> dict[str, int]:
        """Give up all requests between two steps. Returns the tokens that each has
        sampled.
        """
        self.hold(now)
        sampled = {key: self._sampled(turn, 0) for key, turn in self._live.items()}
        for turn in self._live.values():
            self._batch.drop(turn)
        self._live.clear()
        return sampled

    def forget(self, before: float) -> None:
        """Forget the prefixes that were last used before this time."""
        self._batch.kv.forget(before)

    def resume(self, now: float) -> None:
        self._run_until(now)
        self._suspended = False
        if not self._left:
            self._at = max(self._at, now)

    def next_at(self) -> float | None:
        """Return the time of the next report or work of `advance`; None while idle or
        suspended.
        """
        if self._done:
            return self._done[0].at
        if self._left:
            return self._end
        return self._at if self._live and not self._suspended else None

    def advance(self, now: float) -> list[Done]:
        """Process everything up to and including `now`, in order.

        A step that would start at `now`, right after a turn has ended, is left for the
        next call: the turn that follows from this one may be part of it.
        """
        while self._left or self._startable(now):
            if not self._left:
                self._plan()
            if self._end > now:
                self._settle(now)
                break
            already_done = len(self._done)
            self._finish()
            if self._at == now and len(self._done) > already_done:
                break
        done, self._done = self._done, []
        return done

    # Progress of time.

    def _startable(self, now: float) -> bool:
        return bool(self._live) and not self._suspended and self._at <= now

    def _run_until(self, now: float) -> None:
        """Process everything before `now`, for a call that no `advance` preceded."""
        while self._end < now if self._left else self._at < now and self._startable(now):
            if self._left:
                self._finish()
            else:
                self._plan()

    def _step_end(self, step: int) -> float:
        """Return the end time of the `step`th remaining step."""
        if step == self._left:
            return self._end
        if self._bounds:
            return self._bounds[step - 1]
        return self._at + self._decode_s(step)

    def _decode_s(self, steps: int) -> float:
        """Return the seconds of the next `steps` steps of a run that only decodes."""
        batch = self._batch
        return self._pace * self.cost.decode_s(
            decode=batch.decoding, decode_context=batch.context, steps=steps
        )

    def _draw_pace(self) -> None:
        """Draw the noise of the run of `_left` steps."""
        noise = self._noise.factor(self._left) if self._noise is not None else 1.0
        self._pace = self._slowdown * noise

    def _step_of(self, now: float) -> int:
        """Return the number of the first remaining step that ends at or after `now`."""
        if self._bounds:
            return min(bisect_left(self._bounds, now) + 1, self._left)
        low, start, high, end = 0, self._at, self._left, self._end
        tries = 0
        # The ends are nearly evenly spaced: interpolate, and bisect if that fails.
        while high - low > 1:
            tries += 1
            guess = (
                low + math.ceil((now - start) / (end - start) * (high - low))
                if tries < 6
                else (low + high) // 2
            )
            guess = min(max(guess, low + 1), high - 1)
            then = self._step_end(guess)
            if then >= now:
                high, end = guess, then
            else:
                low, start = guess, then
        return high

    def _steps_by(self, now: float) -> int:
        """Return how many of the remaining steps have ended by `now`."""
        if not self._left or now < self._at:
            return 0
        if now >= self._end:
            return self._left
        if self._bounds:
            return bisect_right(self._bounds, now)
        return self._step_of(math.nextafter(now, math.inf)) - 1

    def _sampled(self, turn: Turn, steps: int) -> int:
        """Return the sampled tokens of `turn` once `steps` of the remaining steps have
        ended.
        """
        if turn.decoding:
            return turn.request.output_tokens - (turn.due - self._batch.clock - steps)
        computes = (
            sum(steps * count for other, count in self._chunk if other is turn)
            if turn.running
            else 0
        )
        return (
            turn.request.output_tokens
            - turn.left
            + (computes > 0 and turn.computed + computes == turn.length)
        )

    def _cut(self, now: float) -> None:
        """End the current run with the step that is being computed at `now`."""
        if self._left > 1:
            step = self._step_of(now)
            self._end = self._step_end(step)
            self._left = step
            del self._bounds[step:]

    def _settle(self, now: float) -> None:
        """Account for the steps of the current run that have ended by `now`."""
        step = self._steps_by(now)
        if step:
            then = self._step_end(step)
            self._compute(step, more=True)
            self.busy_s += then - self._at
            self._at = then
            self._left -= step
            del self._bounds[:step]

    # A run of steps.

    def _plan(self) -> None:
        """Assign slots and blocks, and plan the steps with the composition of the next
        one.
        """
        batch = self._batch
        batch.at = batch.kv.at = self._at
        batch.settle(self._chunk)
        budget = self._chunk_tokens
        self._chunk = []
        for _, _, turn in batch.prefilling:
            count = min(turn.length - turn.computed, budget)
            self._chunk.append((turn, count))
            budget -= count
            if not budget:
                break
        if self._chunk:
            self._plan_prefill()
        else:
            self._left = batch.steps(None)
            self._draw_pace()
            self._end = self._at + self._decode_s(self._left)

    def _plan_prefill(self) -> None:
        """Plan the steps in which the first prompt takes the entire chunk; one step
        where a prompt ends in it.
        """
        batch = self._batch
        first, count = self._chunk[0]
        limit = (
            1
            if batch.prompt_pending or count < self._chunk_tokens
            else (first.length - first.computed) // count
        )
        self._left = batch.steps(limit)
        self._draw_pace()
        tokens = sum(count for _, count in self._chunk)
        spans = sum(count * turn.computed + count * (count + 1) // 2 for turn, count in self._chunk)
        end = self._at
        for step in range(self._left):
            end += self._pace * self.cost.step_s(
                prefill_tokens=tokens,
                prefill_context=spans + step * count * tokens,
                decode=batch.decoding,
                decode_context=batch.context + step * batch.decoding,
            )
            self._bounds.append(end)
        self._end = end

    def _compute(self, steps: int, *, more: bool) -> None:
        """Account for `steps` computed steps of the run.

        With `more`, the next one is part of the run and has its blocks.
        """
        self.tokens += steps * self._batch.decoding
        self._batch.advance(steps, more=more)
        for turn, count in self._chunk:
            turn.computed += steps * count
            self.prefill_tokens += steps * count
            again = min(turn.reached, turn.computed) - (turn.computed - steps * count)
            if again > 0:
                self.recomputed_tokens += again
            turn.reached = max(turn.reached, turn.computed)
            self._batch.kv.progress(turn)

    def _finish(self) -> None:
        """End the run: report finished turns and apply the calls deferred to the end of
        the step.
        """
        self._compute(self._left, more=False)
        self.busy_s += self._end - self._at
        self._at = self._end
        self._left = 0
        self._batch.kv.at = self._at
        self._bounds.clear()
        for turn in self._aborted:
            self._batch.drop(turn)
        self._aborted.clear()
        for turn in self._batch.ended():
            self._report(turn)
        for turn, _ in self._chunk:
            if turn.running and turn.computed == turn.length:
                self.tokens += 1
                self._batch.sampled(turn)
                if not turn.left:
                    self._report(turn)
        if self._loading is not None:
            self._load()

    def _report(self, turn: Turn) -> None:
        request = turn.request
        del self._live[request.key]
        self._batch.drop(turn)
        self._done.append(
            Done(
                key=request.key,
                at=self._at,
                output_tokens=request.output_tokens,
                cached_tokens=turn.cached,
                queue_s=turn.queue_s,
            )
        )

    def _load(self) -> None:
        """Discard all KV and requeue every turn, in order."""
        assert self._loading is not None
        self.publication_id, self._loading = self._loading, None
        self._batch.at = self._at
        self._batch.void()
        self._chunk.clear()

    def check(self) -> None:
        """Assert the invariants of slots and KV, and that no request is lost.

        Only tests call this.
        """
        self._batch.check([*self._live.values(), *self._aborted])
