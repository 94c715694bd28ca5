"""Constrained decoding: the tokens that may continue a text which must be JSON of a
schema, or match a regular expression. llguidance computes them, in the process
`python -m rollweave.engine.constraints`, which `engine/matchers.py` starts.

The work that a grammar takes is not bounded by its size: a pattern of 40 kB can take
half a minute and gigabytes before the first token, and another one as long at a later
token. So grammars are compiled, and masks computed, in a process that can be ended. It
reads the tokenizer, which may take a second, and forks a worker that executes the
commands one by one. The kernel ends a worker that exceeds the bounds on CPU time and
memory; the process then says so in its place, and forks the next worker.

Invariant: log-probs are not affected. A token's log-prob is that of the model's full
distribution, as the trainer computes it, and not that of the distribution from which
the constraint lets the engine sample (docs/ENGINES.md#constrained-turns).
"""

import contextlib
import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rollweave.engine.matchers import (
    CANNOT,
    MEMORY_BYTES,
    NEXT_S,
    BeginText,
    ContinueText,
    EndText,
    MaskReply,
    TextCommand,
    Vocabulary,
    read_frame,
)
from rollweave.io.boot import die_with
from rollweave.io.tokenizer import read_tokenizer
from rollweave.io.wire import decoder_of, encode, frame
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.serving import Constraint

MOST_MULTIPLE = 10_000
"""Maximum of the least common multiple of a schema's `multipleOf` values, taken without
their decimal points. llguidance builds an automaton with that many states before the
first token: 10,000 take 0.2 s, 99,991 take 1.7 s.
"""

LIMITS = LLParserLimits(max_grammar_size=30_000)
"""Limits of one grammar: llguidance reads 30,000 symbols, those of a schema of some
thousand properties, in 0.3 s.
"""

CACHED_MATCHERS = 32
"""Number of cached matchers, which are copied for each turn: a large one takes
milliseconds to build, and some megabytes.
"""

FIRST_S, TOKEN_S = 5.0, 0.02
"""CPU seconds that the masks of one turn may take: `FIRST_S` in all, and `TOKEN_S` more
for each token. The first mask of a schema of 300 optional properties takes 7 ms.
"""

UNUSED = "<|end of a constrained text|>"
"""A special token that no tokenizer has."""

SILENT = 0
"""llguidance's level of messages to the standard error."""


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint in llguidance's form.

    Raises ValueError, in one line, for what cannot be constrained.
    """
    is_json, text = constraint.kind == "json", constraint.text
    if not text:
        raise ValueError("it is empty")
    if is_json:
        try:
            _check_multiples(json.loads(text, parse_float=Decimal))
        except RecursionError as error:
            raise ValueError("it has too many levels") from error
    if constraint.kind == "lark":
        grammar = LLMatcher.grammar_from_lark(text)
    elif is_json:
        grammar = LLMatcher.grammar_from_json_schema(text)
    else:
        grammar = LLMatcher.grammar_from_regex(text)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if wrong:
        raise ValueError(_in_one_line(messages[0]))
    if is_json and '"$ref"' in text:
        _check_begins(LLMatcher.grammar_from_json_schema(text))
    return grammar


class Grammars:
    """The constraints of one model's texts. `vocab` is the size of the model's
    vocabulary. Without a checkpoint, a token is a byte.

    Raises EngineError for a checkpoint whose tokenizer cannot be read.
    """

    def __init__(self, checkpoint: Path | None, *, vocab: int = 0) -> None:
        self._matchers: dict[Constraint, LLMatcher] = {}
        """A matcher of an empty text for each of the last constraints."""
        if checkpoint is None:
            self._tokenizer = LLTokenizer("byte")
            self._vocab = self._unused = self._tokenizer.vocab_size
            return
        path, self._vocab = checkpoint / "tokenizer.json", vocab
        try:
            read = read_tokenizer(checkpoint)
        except ConfigError as error:
            raise EngineError(
                f"sampling.constraint needs a tokenizer, and {path} cannot be used: {error}"
            ) from error
        if read is None:
            raise EngineError(f"sampling.constraint needs a tokenizer, and {path} is missing")
        tokenizer = read.tokenizer
        try:
            # The library's own end of a text is a token that is never sampled. The
            # tokens that end a turn are those of its request.
            tokenizer.add_special_tokens([UNUSED])
            unused = tokenizer.token_to_id(UNUSED)
            if unused is None:
                raise ValueError("no token can be added to it")
            self._unused = unused
            size = max(vocab, tokenizer.get_vocab_size())
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._unused)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise EngineError(
                f"sampling.constraint needs a tokenizer, and {path} cannot be used: "
                f"{_in_one_line(str(error))}"
            ) from error

    def matcher(self, constraint: Constraint, *, ends: Iterable[int]) -> "Matcher":
        """Return a matcher of a text that begins now. `ends` are the tokens that end
        it. Raises ValueError for what cannot be constrained.
        """
        matcher = self._matchers.pop(constraint, None)
        if matcher is None:
            try:
                grammar = grammar_of(constraint)
            except ValueError as error:
                raise ValueError(f"{CANNOT}{error}") from error
            matcher = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=LIMITS)
            if matcher.is_error():
                raise ValueError(f"{CANNOT}{_in_one_line(matcher.get_error())}")
        self._matchers[constraint] = matcher  # the last one is that of the newest use
        if len(self._matchers) > CACHED_MATCHERS:
            del self._matchers[next(iter(self._matchers))]
        ends = [end for end in ends if end < self._vocab]
        return Matcher(matcher.deep_copy(), vocab=self._vocab, ends=ends, unused=self._unused)


class Matcher:
    """A text that grows token by token."""

    def __init__(self, matcher: LLMatcher, *, vocab: int, ends: list[int], unused: int) -> None:
        self._matcher, self._vocab, self._ends, self._unused = matcher, vocab, ends, unused
        self._tokens, self._spent_s = 0, 0.0

    def feed(self, token: int) -> None:
        """Append a token that does not end the text. Raises ValueError for one that is
        not allowed.
        """
        self._matcher.consume_token(token)
        self._tokens += 1
        self._check()

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and no token can end it or continue it."""
        return not self._ends and self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """Return which tokens may follow, one bit for each token of the vocabulary, the
        lowest bit of a byte first.

        Raises ValueError if none may, or if the masks of this text take too long.
        """
        started = time.process_time()
        bits = bytearray(self._matcher.compute_bitmask())
        self._spent_s += time.process_time() - started
        self._check()
        if self._unused < self._vocab:
            bits[self._unused // 8] &= ~(1 << self._unused % 8)
        if self._matcher.is_accepting():
            for end in self._ends:
                bits[end // 8] |= 1 << end % 8
        del bits[-(-self._vocab // 8) :]
        if self._vocab % 8:
            bits[-1] &= (1 << self._vocab % 8) - 1
        limit_s = FIRST_S + TOKEN_S * self._tokens
        if self._spent_s > limit_s:
            raise _unmet(f"its masks must take at most {limit_s:.1f} s of CPU time, and took more")
        if not any(bits):
            raise _unmet("no token can continue the text")
        return bytes(bits)

    def _check(self) -> None:
        """Raise ValueError if the text can no longer be what it must be."""
        if self._matcher.is_error():
            raise _unmet(_in_one_line(self._matcher.get_error()))


def _unmet(reason: str) -> ValueError:
    return ValueError(f"sampling.constraint cannot be met: {reason}")


def _check_multiples(schema: object) -> None:
    """Raise ValueError for a schema whose `multipleOf` would take too long."""
    common, pending = 1, [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        if not isinstance(part, dict):
            continue
        pending += part.values()
        step = part.get("multipleOf")
        if isinstance(step, bool) or not isinstance(step, int | Decimal) or not step:
            continue
        common = math.lcm(common, int("".join(map(str, Decimal(step).as_tuple().digits))))
        if common > MOST_MULTIPLE:
            raise ValueError(
                f"the least common multiple of all multipleOf, without decimal points, must be at "
                f"most {MOST_MULTIPLE}, got {common} with {step}"
            )


def _check_begins(grammar: str) -> None:
    """Raise ValueError for a schema with references by which no text can begin. What
    begins a text does not depend on the tokenizer.
    """
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=SILENT, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError("its references lead back to themselves, so that no text is of this form")


def _in_one_line(error: str) -> str:
    """Return llguidance's error without its picture of the grammar, and without its
    advice to raise limits.
    """
    lines = error.splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return reason.removeprefix("error: ").partition("; either increase limits")[0]


FED_S = 0.01
"""CPU seconds for each token with which a text begins."""


class Connection:
    """The client's end of a socket: frames, read one at a time, so that a worker takes
    no command that the next one should have.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> bytes | None:
        """Return the next payload; None at the end of the stream."""
        return read_frame(self._socket)

    def send(self, reply: MaskReply) -> None:
        """Send a reply, which is dropped if the client has closed the connection."""
        with contextlib.suppress(OSError):
            self._socket.sendall(b"".join(frame(encode(reply))))


class Worker:
    """The texts of one worker, by their ids. `begin_s` stands for `BEGIN_S`."""

    def __init__(self, grammars: Grammars, *, begin_s: float) -> None:
        self._grammars, self._begin_s = grammars, begin_s
        self._texts: dict[str, Matcher] = {}

    def reply(self, command: TextCommand) -> MaskReply:
        """Execute a command, within its CPU time."""
        limit_s = NEXT_S
        if isinstance(command, BeginText):
            limit_s = self._begin_s + FED_S * len(command.tokens)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            return self._reply(command)
        except (ValueError, MemoryError) as error:
            self._texts.pop(command.id, None)
            return MaskReply(error=str(error) or f"{CANNOT}it takes too much memory")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _reply(self, command: TextCommand) -> MaskReply:
        match command:
            case BeginText(id=id, constraint=constraint, ends=ends, tokens=tokens):
                text = self._texts[id] = self._grammars.matcher(constraint, ends=ends)
                for token in tokens:
                    text.feed(token)
            case ContinueText(id=id, token=token):
                text = self._texts[id]
                text.feed(token)
            case EndText(id=id):
                self._texts.pop(id, None)
                return MaskReply()
        if text.is_complete:
            return MaskReply(complete=True)
        return MaskReply(mask=text.allowed())


def main() -> None:
    """Serve until the client closes the connection."""
    gc.freeze()
    gc.enable()
    connection = Connection(int(sys.argv[1]))
    payload = connection.receive()
    if payload is None:
        return
    vocabulary: Vocabulary = decoder_of(Vocabulary)(payload)
    checkpoint = Path(vocabulary.checkpoint) if vocabulary.checkpoint else None
    try:
        grammars = Grammars(checkpoint, vocab=vocabulary.size)
    except EngineError as error:
        connection.send(MaskReply(error=str(error)))
        return
    connection.send(MaskReply())
    own = os.getpid()
    while True:
        child = os.fork()
        if not child:
            die_with(own)
            _work(connection, Worker(grammars, begin_s=vocabulary.begin_s))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return
        connection.send(MaskReply(lost=True, error=_why(os.WTERMSIG(status))))


def _work(connection: Connection, worker: Worker) -> NoReturn:
    """Execute commands until the client closes the connection."""
    _bound_memory()
    decode = decoder_of(TextCommand)
    while (payload := connection.receive()) is not None:
        connection.send(worker.reply(decode(payload)))
    os._exit(0)


def _bound_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # only Linux tells its size
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _why(number: int) -> str:
    if number == signal.SIGPROF:
        return f"{CANNOT}it takes too much CPU time"
    return f"{CANNOT}it takes too much memory (signal {signal.Signals(number).name})"


if __name__ == "__main__":
    main()
    os._exit(0)
