"""A stored trajectory for readers: as spans with their text, and as one JSON object
with all tokens, their log-probs and the weight versions that sampled them.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from tokenizers import Tokenizer

from rollweave.io.hub import folder
from rollweave.io.tokenizer import read_tokenizer
from rollweave.record.rundir import RunDir
from rollweave.record.store import StoredAttempt
from rollweave.schema.work import Segment, SegmentKind, TokenSequence, Trajectory


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Adjacent segments of a sequence that belong together: the prompt, one
    observation, or one turn of the agent.
    """

    segments: list[Segment]
    number: int
    reward: float
    cut: bool

    @property
    def kind(self) -> SegmentKind:
        return self.segments[0].kind

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def end(self) -> int:
        return self.segments[-1].end


def spans(sequence: TokenSequence) -> Iterator[TokenSpan]:
    """Yield the spans of a sequence in order.

    A weight update in the middle of a turn does not split its span.
    """
    starts = {
        turn.start: (number, turn.reward, turn.finish_reason == "length")
        for number, turn in enumerate(sequence.turns)
    }
    current: list[Segment] = []
    number, reward, cut = -1, 0.0, False
    for segment in sequence.segments:
        begins = segment.kind is not SegmentKind.OUTPUT or segment.start in starts or not current
        if current and (begins or current[0].kind is not segment.kind):
            yield TokenSpan(current, number, reward, cut)
            current = []
        if segment.start in starts:
            number, reward, cut = starts[segment.start]
        current.append(segment)
    if current:
        yield TokenSpan(current, number, reward, cut)


def versions(trajectory: Trajectory) -> tuple[int, int] | None:
    """Return the lowest and the highest weight version that sampled tokens; None
    without sampled tokens.
    """
    found = [
        sequence.versions() for sequence in trajectory.sequences if sequence.versions() != (-1, -1)
    ]
    if not found:
        return None
    return min(span[0] for span in found), max(span[1] for span in found)


class TokenDecoder:
    """Decodes token ids to text, if the run has a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.one = lru_cache(1 << 16)(self._one)

    @property
    def available(self) -> bool:
        """True if there is a tokenizer."""
        return self._tokenizer is not None

    def text(self, tokens: tuple[int, ...]) -> str:
        """Return the text of `tokens`, special tokens included."""
        if self._tokenizer is None:
            return "(no tokenizer in the run directory)"
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def _one(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def tokenizer_of(run: RunDir) -> Tokenizer | None:
    """Return the tokenizer of the run's model, from the run directory if the run built
    it, else from the checkpoint; None if neither has a tokenizer.

    Raises ConfigError for a damaged tokenizer.
    """
    directories = [run.model]
    if run.config.exists() and (path := run.configuration().model.path) is not None:
        directories.append(folder(path))
    for directory in directories:
        read = read_tokenizer(directory)
        if read is not None:
            return read.tokenizer
    return None


def template_arguments(run: RunDir) -> dict[str, Any]:
    """Return the arguments of the chat template in all conversations of the run."""
    return dict(run.configuration().model.template_arguments) if run.config.exists() else {}


def arguments_of(sequence: TokenSequence, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments that the chat template had in a sequence: the run's
    `arguments`, and the arguments in the sequence's own requests.
    """
    own = sequence.origin.arguments if sequence.origin is not None else ""
    return {**arguments, **(json.loads(own) if own else {})}


def attempt_line(entry: StoredAttempt, trajectory: Trajectory) -> dict[str, Any]:
    """Return everything that is known of an attempt, except its tokens, as a JSON
    object.

    `ignored` are the fields of an agent program's requests that had no effect, and
    `result` is what the handler returned in addition to the reward. Times are in
    seconds.
    """
    task, sampled = trajectory.task, versions(trajectory)
    return {
        "id": trajectory.id,
        "attempt": trajectory.attempt,
        "group": trajectory.group_id,
        "member": entry.member,
        "purpose": entry.purpose.value,
        "ended_s": round(entry.at, 3),
        "task": {
            "id": task.id,
            "env": task.env,
            "domain": task.tag or task.env,
            "seed": task.seed,
            "payload": parsed(task.payload),
        },
        "initiated_version": trajectory.initiated_version,
        "sampled_versions": list(sampled) if sampled is not None else [],
        "engine": trajectory.engine,
        "turns": sum(len(sequence.turns) for sequence in trajectory.sequences),
        "tokens": sum(len(sequence.tokens) for sequence in trajectory.sequences),
        "cut_turns": cut_turns(trajectory),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "blame": trajectory.blame.value,
        "error": trajectory.error,
        "ignored": [
            {**msgspec.structs.asdict(field), "text": str(field)} for field in trajectory.ignored
        ],
        "result": parsed(trajectory.result),
        "timing": {
            name: round(value, 4)
            for name, value in msgspec.structs.asdict(trajectory.timing).items()
        },
    }


def transcript(
    entry: StoredAttempt, trajectory: Trajectory, decoder: TokenDecoder
) -> dict[str, Any]:
    """Return `attempt_line` with two more keys. `sequences` has the spans of each
    sequence with their text and tokens, and the log-probs and weight versions of turns.
    `origins` says why each sequence began, or is null.
    """
    return {
        **attempt_line(entry, trajectory),
        "origins": [_origin_object(sequence) for sequence in trajectory.sequences],
        "sequences": [
            [_span_object(sequence, span, decoder) for span in spans(sequence)]
            for sequence in trajectory.sequences
        ],
    }


def _origin_object(sequence: TokenSequence) -> dict[str, Any] | None:
    origin = sequence.origin
    return None if origin is None else {**msgspec.structs.asdict(origin), "text": str(origin)}


def _span_object(sequence: TokenSequence, span: TokenSpan, decoder: TokenDecoder) -> dict[str, Any]:
    tokens = sequence.tokens[span.start : span.end]
    written: dict[str, Any] = {
        "kind": span.kind.value,
        "start": span.start,
        "end": span.end,
        "text": decoder.text(tokens) if decoder.available else None,
        "tokens": list(tokens),
    }
    if span.kind is not SegmentKind.OUTPUT:
        return written
    return {
        **written,
        "turn": span.number,
        "reward": span.reward,
        "cut": span.cut,
        "pieces": [decoder.one(token) for token in tokens] if decoder.available else None,
        "logprobs": list(sequence.logprobs[span.start : span.end]),
        "versions": [[part.start, part.end, part.version] for part in span.segments],
    }


def cut_turns(trajectory: Trajectory) -> int:
    """Count the turns that a token limit cut."""
    return sum(
        turn.finish_reason == "length"
        for sequence in trajectory.sequences
        for turn in sequence.turns
    )


def parsed(text: str) -> Any:
    """Return the value of a JSON text, the text itself if it is not JSON, and None for
    "".
    """
    if not text:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        # NaN and infinity are not JSON, and could not be written again
        return json.loads(text, parse_constant=str)
    return text
