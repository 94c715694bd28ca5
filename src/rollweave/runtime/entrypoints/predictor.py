"""The process of the predictor: `python -m rollweave.runtime.entrypoints.predictor`,
started by `runtime/supervisors/predictor.py`.

Invariants: messages are processed in the order in which they were sent; requests that
wait together are answered together, in one matrix product; every message is counted by
a report.
"""

import functools
import os
import queue
import time
from collections.abc import Callable

from rollweave.core.policy.predict import ProgressivePredictor, Question
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.training import (
    Fit,
    PredictedLength,
    PredictionRequest,
    PredictorMessage,
    PredictorReport,
    PredictorSpec,
    RecordLength,
    StopPredictor,
)
from rollweave.train.lengths import build_regressor

MAX_BATCH = 1024
"""Maximum number of messages that are processed together: some milliseconds of work."""

NICENESS = 10
"""Priority of the process, below engines and trainer: a prediction may take as long as
a step of the environment.
"""


def serve(
    spec: PredictorSpec,
    messages: "queue.SimpleQueue[PredictorMessage]",
    report: Callable[[PredictorReport], None],
) -> None:
    """Work on the calling thread until `StopPredictor`.

    Raises ConfigError for an invalid spec.
    """
    # import what the regressor needs now, not while requests wait
    build_regressor(spec.regressor, checkpoint=spec.checkpoint)
    server = _Server(
        ProgressivePredictor(
            functools.partial(build_regressor, spec.regressor, checkpoint=spec.checkpoint)
        )
    )
    while True:
        batch = [messages.get()]
        while len(batch) < MAX_BATCH and not messages.empty():
            batch.append(messages.get())
        for message in batch:
            if isinstance(message, StopPredictor):
                return
            if isinstance(message, Fit):
                report(server.report())  # earlier requests need not wait for the fit
            server.process(message)
        report(server.report())


class _Server:
    """The predictor, its unanswered requests, and its counters."""

    def __init__(self, predictor: ProgressivePredictor) -> None:
        self._predictor = predictor
        self._requests: list[tuple[int, Question]] = []
        self._processed = 0
        self._fit_s = 0.0

    def process(self, message: PredictionRequest | RecordLength | Fit) -> None:
        self._processed += 1
        match message:
            case PredictionRequest():
                question = self._predictor.remember(
                    (message.trajectory_id, message.attempt), message.context
                )
                self._requests.append((message.number, question))
            case RecordLength():
                self._predictor.observe(
                    (message.trajectory_id, message.attempt), message.output_tokens
                )
            case Fit():
                started = time.perf_counter()
                self._predictor.fit()
                self._fit_s += time.perf_counter() - started

    def report(self) -> PredictorReport:
        """Return the counters, and the answers to the requests since the last
        report.
        """
        values = self._predictor.estimate([question for _, question in self._requests])
        answers = tuple(
            PredictedLength(number=number, remaining_tokens=value)
            for (number, _), value in zip(self._requests, values, strict=True)
        )
        self._requests.clear()
        predictor = self._predictor
        return PredictorReport(
            processed=self._processed,
            answers=answers,
            failed=predictor.failed_fits + predictor.failed_predictions,
            fits=predictor.fits,
            fit_s=self._fit_s,
            pairs=predictor.pairs,
        )


def main() -> None:
    """Serve until the end of the parent."""
    parent = Parent.from_arguments()
    os.nice(NICENESS)
    spec = decoder_of(PredictorSpec)(parent.receive())
    decode = decoder_of(PredictorMessage)
    messages: queue.SimpleQueue[PredictorMessage] = queue.SimpleQueue()
    parent.listen(lambda payload: messages.put(decode(payload)))
    serve(spec, messages, lambda report: parent.send(encode(report)))


if __name__ == "__main__":
    main()
    os._exit(0)
