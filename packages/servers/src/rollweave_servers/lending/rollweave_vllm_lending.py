"""The scheduler of a vLLM that lends the time between its steps: `vllm serve MODEL
--scheduler-cls rollweave_vllm_lending.LendingScheduler --no-async-scheduling`.

It schedules as vLLM's own scheduler does. Before a step it waits for the rollout step
that is under way, if there is one; after a step it publishes its load and offers the
baton (`rollweave_lending`). Without a lender it does neither. An error in lending ends
lending, and not the server.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollweave_lending import VARIABLE, Counts, Row, Serving, Step
from vllm.v1.core.sched.scheduler import Scheduler

QUEUED = 256
"""Number of requests without a slot in a snapshot. Nothing is lent while there are
more.
"""


class LendingScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler whose engine lends the time between its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.began = 0
        self.failed = False
        """True once lending has failed, and ended."""
        self.step: tuple[int, int, int] = (0, 0, 0)
        """Prompt tokens, decoded sequences and the longest prompt of the step."""
        self.sampled: dict[str, tuple[int, int, int]] = {}
        """The times of the first and the newest token of each request that has tokens,
        and their number.
        """
        self.cached: dict[str, int] = {}
        """The number of tokens of each request that the prefix cache had."""
        self.kv_total = self.kv_cache_config.num_blocks * self.block_size
        config = self.vllm_config
        self.lending = Serving(
            path_of(config),
            {
                "model": str(config.model_config.model),
                "chunk_tokens": config.scheduler_config.max_num_batched_tokens,
                "kv_tokens": self.kv_total,
                "slots": self.max_num_running_reqs,
            },
            rows=self.max_num_running_reqs + QUEUED,
        )

    def schedule(self, *args: Any, **options: Any) -> Any:
        self.lend(self.lending.begin_step)
        self.began = time.monotonic_ns()
        output = super().schedule(*args, **options)
        self.lend(lambda: self.note_work(output.num_scheduled_tokens))
        return output

    def update_from_output(self, output: Any, *args: Any, **options: Any) -> Any:
        results = super().update_from_output(output, *args, **options)
        self.lend(lambda: self.publish(output.num_scheduled_tokens))
        return results

    def shutdown(self) -> None:
        super().shutdown()
        self.lending.close()

    def lend(self, work: Callable[[], None]) -> None:
        """Do what lending needs. After an error the lender is dropped at the end of its
        rollout step, and the engine goes on as vLLM alone.
        """
        if self.failed:
            return
        try:
            work()
        except Exception as error:
            self.failed = True
            text = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"{VARIABLE}: nothing is lent any more, after an error: {text}\n")
            for end in (self.lending.begin_step, self.lending.close):
                with contextlib.suppress(Exception):
                    end()

    def note_work(self, scheduled: dict[str, int]) -> None:
        """Note what the step that was just scheduled computes."""
        self.step = self.work_of(scheduled)

    def publish(self, scheduled: dict[str, int]) -> None:
        """Publish the load after a step, and offer the baton."""
        now = time.monotonic_ns()
        self.note_tokens(scheduled, now)
        running, waiting = self.get_request_counts()
        used = round(self.get_kv_cache_usage() * self.kv_total)
        counts = Counts(running, waiting, used, self.kv_total)
        prefill_tokens, decode, longest = self.step
        computed = prefill_tokens or decode
        step = Step(now - self.began, prefill_tokens, decode, longest) if computed else None
        self.lending.end_step(step, counts, self.rows)

    def work_of(self, scheduled: dict[str, int]) -> tuple[int, int, int]:
        """Return the prompt tokens of a step, the number of sequences that it decodes,
        and the tokens of its longest prompt without those from the prefix cache.
        """
        prefill_tokens = decode = longest = 0
        for id, count in scheduled.items():
            request = self.requests[id]
            before = request.num_computed_tokens - count  # vLLM counts this step already
            cached = self.cached.setdefault(id, before)
            if request.num_output_tokens and before >= request.num_tokens - 1:
                decode += 1
                continue
            prefill_tokens += count
            longest = max(longest, request.num_tokens - cached)
        return prefill_tokens, decode, longest

    def note_tokens(self, scheduled: dict[str, int], now: int) -> None:
        """Note the tokens that a step has sampled, and forget requests that ended."""
        for id in scheduled:
            request = self.requests.get(id)
            if request is None:
                self.sampled.pop(id, None)
                self.cached.pop(id, None)
                continue
            first, _, count = self.sampled.get(id, (now, now, 0))
            if request.num_output_tokens > count:
                self.sampled[id] = first, now, request.num_output_tokens
        if len(self.cached) > 2 * len(self.requests) + QUEUED:  # some were aborted
            self.cached = {id: seen for id, seen in self.cached.items() if id in self.requests}
            self.sampled = {id: seen for id, seen in self.sampled.items() if id in self.requests}

    def rows(self) -> Iterator[Row]:
        """Yield the requests that have not ended, in the order of their arrival."""
        offset = time.monotonic() - time.time()
        for id, request in self.requests.items():
            if request.is_finished():
                continue
            missing = max(1, request.num_tokens - request.num_computed_tokens)
            arrived = int(1e9 * (request.arrival_time + offset))
            yield Row(arrived, missing, *self.sampled.get(id, (0, 0, 0)))


def path_of(config: Any) -> str:
    """Return the path of the socket. Raises ValueError for a vLLM that cannot lend."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        raise ValueError(f"{VARIABLE} must be the path of a socket for lenders, got nothing")
    if config.scheduler_config.async_scheduling:
        raise ValueError(
            "async_scheduling must be false (--no-async-scheduling) to lend: otherwise the device "
            "has no time between steps, got true"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ValueError(f"pipeline_parallel_size must be 1 to lend, got {stages}")
    # vLLM gives the ranks of a dense model a size of 1, and leaves them their numbers
    parallel = config.parallel_config
    ranks = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    if ranks > 1:
        raise ValueError(f"data_parallel_size must be 1 to lend, got at least {ranks}")
    return path
