"""The process of the predictor: `python -m rollweave.runtime.entrypoints.predictor`,
started by `runtime/supervisors/predictor.py`.

Invariants: words are taken in the order in which they were said; questions that wait
together are answered together, in one product; every word is accounted for by a report.
"""

import functools
import os
import queue
import time
from collections.abc import Callable

from rollweave.core.policy.predict import ProgressivePredictor, Question
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.prediction import (
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

TOGETHER = 1024
"""Words that are taken at once: some milliseconds of work."""

NICENESS = 10
"""Engines and trainer come first: a prediction has the time that the environment takes."""


def serve(
    spec: PredictorSpec,
    words: "queue.SimpleQueue[PredictorMessage]",
    report: Callable[[PredictorReport], None],
) -> None:
    """Work on the calling thread until `StopPredictor`.

    Raises ConfigError for a spec that cannot be.
    """
    # imports what it needs now, and not while questions wait
    build_regressor(spec.regressor, checkpoint=spec.checkpoint)
    serving = _Serving(
        ProgressivePredictor(
            functools.partial(build_regressor, spec.regressor, checkpoint=spec.checkpoint)
        )
    )
    while True:
        batch = [words.get()]
        while len(batch) < TOGETHER and not words.empty():
            batch.append(words.get())
        for word in batch:
            if isinstance(word, StopPredictor):
                return
            if isinstance(word, Fit):
                report(serving.report())  # whoever asked before waits for no fit
            serving.take(word)
        report(serving.report())


class _Serving:
    """The predictor, the questions that it has not answered yet, and its books."""

    def __init__(self, predictor: ProgressivePredictor) -> None:
        self._predictor = predictor
        self._asked: list[tuple[int, Question]] = []
        self._taken = 0
        self._fit_s = 0.0

    def take(self, word: PredictionRequest | RecordLength | Fit) -> None:
        self._taken += 1
        match word:
            case PredictionRequest():
                question = self._predictor.remember(
                    (word.trajectory_id, word.attempt), word.context
                )
                self._asked.append((word.number, question))
            case RecordLength():
                self._predictor.observe((word.trajectory_id, word.attempt), word.output_tokens)
            case Fit():
                began = time.perf_counter()
                self._predictor.fit()
                self._fit_s += time.perf_counter() - began

    def report(self) -> PredictorReport:
        """With the answers to what was asked since the last one."""
        values = self._predictor.estimate([question for _, question in self._asked])
        answers = tuple(
            PredictedLength(number=number, remaining_tokens=value)
            for (number, _), value in zip(self._asked, values, strict=True)
        )
        self._asked.clear()
        predictor = self._predictor
        return PredictorReport(
            processed=self._taken,
            answers=answers,
            failed=predictor.failed_fits + predictor.failed_predictions,
            fits=predictor.fits,
            fit_s=self._fit_s,
            pairs=predictor.pairs,
        )


def main() -> None:
    """Serve until our parent is gone."""
    parent = Parent.from_arguments()
    os.nice(NICENESS)
    spec = decoder_of(PredictorSpec)(parent.receive())
    decode = decoder_of(PredictorMessage)
    words: queue.SimpleQueue[PredictorMessage] = queue.SimpleQueue()
    parent.listen(lambda payload: words.put(decode(payload)))
    serve(spec, words, lambda report: parent.send(encode(report)))


if __name__ == "__main__":
    main()
    os._exit(0)
