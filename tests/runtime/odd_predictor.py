"""A predictor process that misbehaves according to its regressor's name."""

import os

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.training import (
    PredictedLength,
    PredictionRequest,
    PredictorMessage,
    PredictorReport,
    PredictorSpec,
)


def main() -> None:
    parent = Parent.from_arguments()
    kind = decoder_of(PredictorSpec)(parent.receive()).regressor
    decode = decoder_of(PredictorMessage)
    if kind == "stillborn":
        raise RuntimeError("the odd predictor cannot start")
    count = 0
    while True:
        message = decode(parent.receive())
        count += 1
        number = message.number if isinstance(message, PredictionRequest) else 0
        match kind:
            case "crash":
                os._exit(3)
            case "garbage":
                parent.send(b"\xc1 is no msgpack")
            case "noise":
                os.write(parent._socket.fileno(), b"\xff" * 64)
            case "boast":  # counts messages that were never sent
                parent.send(encode(PredictorReport(processed=count + 7)))
            case "nan":
                parent.send(
                    encode(
                        PredictorReport(processed=count, answers=(_answer(number, float("nan")),))
                    )
                )
            case "stranger":  # answers a request that was never sent
                parent.send(
                    encode(PredictorReport(processed=count, answers=(_answer(number + 50, 7.0),)))
                )
            case "echo":
                answers = (_answer(number, 7.0), _answer(number, 8.0)) if number else ()
                parent.send(encode(PredictorReport(processed=count, answers=answers)))
            case "mute":
                pass


def _answer(number: int, tokens: float) -> PredictedLength:
    return PredictedLength(number=number, remaining_tokens=tokens)


if __name__ == "__main__":
    main()
