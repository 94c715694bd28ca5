"""A paced engine: `python -m packages.sim.benchmarks.scheduling.paced_engine`, in the
place of `runtime/entrypoints/engine`, for benches on few cores.

It samples real tokens with a real engine, whose steps are padded to the time that a
large one would take: two engines that share two cores with all other processes then
wait for the modeled GPU instead of for each other. Invariants: a step's results leave
when its padded time is over; the profile that the engine reports is the padded one.
"""

import os
import time
from collections.abc import Callable

import msgspec

from rollweave.engine.batching import StepWork
from rollweave.engine.thread import EngineThread
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.events import StepTime
from rollweave.schema.serving import (
    EngineCommand,
    EngineReply,
    EngineSpec,
    FinishReason,
    Generated,
    Ready,
)
from rollweave_sim.cost import EngineCost
from rollweave_sim.hardware import gpu, model

GPU, MODEL = "h100", "qwen3-14b"
"""Modeled hardware and model: those of Heddle's ablations (§7.2, §7.3)."""

TOKENS = 40
"""Number of tokens of the modeled engine that one of ours stands for, and the factor by
which time is sped up. A turn of 12 tokens is one of 480.
"""


class StepPace:
    """Duration of a step: that of `TOKENS` steps of the modeled engine, on contexts
    `TOKENS` times as long, divided by `TOKENS`.

    So prompt tokens keep their cost, and attention to a context costs `TOKENS` times as
    much.
    """

    def __init__(self, on: str = GPU, of: str = MODEL) -> None:
        self.cost = EngineCost(gpu=gpu(on), model=model(of), tp=1)

    def step_s(self, amounts: StepWork) -> float:
        return self.cost.step_s(
            prefill_tokens=amounts.prefill_tokens,
            prefill_context=TOKENS * amounts.prefill_context,
            decode=amounts.decode,
            decode_context=TOKENS * amounts.decode_context,
        )

    def padded(self, point: StepTime) -> StepTime:
        """Return a measured step with its paced duration."""
        modeled = self.step_s(StepWork(0, 0, point.batch, point.batch * point.context))
        return msgspec.structs.replace(point, seconds=max(point.seconds, modeled))


class Pacer:
    """Delays the replies of an engine's loop.

    Its methods are called on the loop's thread.
    """

    def __init__(
        self,
        reply: Callable[[EngineReply], None],
        *,
        pace: StepPace | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._reply, self._sleep, self._pace = reply, sleep, pace or StepPace()
        self._held_back: list[EngineReply] = []

    def reply(self, reply: EngineReply) -> None:
        """Hold back a completed request until the end of its step. All other replies
        happen between steps and pass.
        """
        if isinstance(reply, Generated) and reply.result.finish in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        ):
            self._held_back.append(reply)
        elif isinstance(reply, Ready):
            self._reply(
                msgspec.structs.replace(reply, profile=tuple(map(self._pace.padded, reply.profile)))
            )
        else:
            self._reply(reply)

    def watch(self, amounts: StepWork, seconds: float) -> None:
        """Pad a step that was computed in `seconds`, and send its results."""
        self._sleep(max(0.0, self._pace.step_s(amounts) - seconds))
        for reply in self._held_back:
            self._reply(reply)
        self._held_back.clear()


def serve(pace_of: Callable[[EngineSpec], StepPace] = lambda spec: StepPace()) -> None:
    """Run like `runtime/entrypoints/engine.main`, at the pace of the engine."""
    parent = Parent.from_arguments()
    spec = decoder_of(EngineSpec)(parent.receive())
    decode = decoder_of(EngineCommand)
    pacer = Pacer(lambda reply: parent.send(encode(reply)), pace=pace_of(spec))
    engine = EngineThread(spec, pacer.reply, watch=pacer.watch)
    parent.listen(lambda payload: engine.post(decode(payload)))
    engine.run()


if __name__ == "__main__":
    serve()
    os._exit(0)
