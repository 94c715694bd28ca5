"""Constrained decoding: the tokens that may continue a text which must be JSON of a
schema, or match a regular expression. llguidance computes them.

Invariant: log-probs are not affected. A token's log-prob is that of the model's full
distribution, as the trainer computes it, and not that of the distribution from which
the constraint lets the engine sample (docs/ENGINES.md#constrained-turns).
"""

import functools
import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rollweave.io.tokenizer import read_tokenizer
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.serving import Constraint

CACHED = 256
"""Number of cached grammars: the requests of an agent program repeat few of them."""

MOST_MULTIPLE = 10_000
"""Maximum of the least common multiple of all numbers of whose multiples a schema
speaks, without their decimal points. llguidance builds an automaton of that many states
before the first token: 10,000 take 0.2 s, 99,991 take 1.7 s, and no limit of its own
ends that.
"""

LIMITS = LLParserLimits(max_grammar_size=30_000)
"""Limits of one grammar: llguidance reads 30,000 symbols, those of a schema of some
thousand properties, in 0.3 s.
"""

CACHED_MATCHERS = 32
"""Number of cached matchers, which are copied for each turn: a large one takes
milliseconds to build, and some megabytes.
"""

UNUSED = "<|end of a constrained text|>"
"""A special token that no tokenizer has."""

SILENT = 0
"""llguidance's level of messages to the standard error."""


@functools.lru_cache(CACHED)
def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint in llguidance's form.

    Raises ValueError, in one line, for what cannot be constrained.
    """
    is_json, text = constraint.kind == "json", constraint.text
    if not text:
        raise ValueError("it is empty")
    if is_json:
        _check_multiples(json.loads(text, parse_float=Decimal))
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


def lark_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint that can be constrained as llguidance's Lark,
    which servers take.
    """
    return constraint.text if constraint.kind == "lark" else f"start: {rule_of(constraint)}"


def rule_of(constraint: Constraint) -> str:
    """Return the right-hand side of a rule of llguidance's Lark: for JSON of a schema,
    or a match of a regular expression.
    """
    text = constraint.text
    return f"%json {json.dumps(json.loads(text))}" if constraint.kind == "json" else _lark(text)


class Grammars:
    """The constraints of one model's texts. `vocab` is the size of the model's
    vocabulary.

    Raises EngineError for a checkpoint whose tokenizer cannot be read.
    """

    def __init__(self, checkpoint: Path, *, vocab: int) -> None:
        path, self._vocab = checkpoint / "tokenizer.json", vocab
        self._matchers: dict[Constraint, LLMatcher] = {}
        """A matcher of an empty text for each of the last constraints."""
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
        try:
            grammar = grammar_of(constraint)
        except ValueError as error:
            raise ValueError(f"sampling.constraint cannot be constrained: {error}") from error
        matcher = self._matchers.pop(constraint, None) or LLMatcher(
            self._tokenizer, grammar, log_level=SILENT, limits=LIMITS
        )
        self._matchers[constraint] = matcher  # the last one is that of the newest use
        if len(self._matchers) > CACHED_MATCHERS:
            del self._matchers[next(iter(self._matchers))]
        ends = [end for end in ends if end < self._vocab]
        return Matcher(matcher.deep_copy(), vocab=self._vocab, ends=ends, unused=self._unused)


class Matcher:
    """A text that grows token by token."""

    def __init__(self, matcher: LLMatcher, *, vocab: int, ends: list[int], unused: int) -> None:
        self._matcher, self._vocab, self._ends, self._unused = matcher, vocab, ends, unused
        self._error = ""
        self.check()

    def feed(self, token: int) -> None:
        """Append a token that does not end the text. Raises ValueError for one that is
        not allowed.
        """
        self._matcher.consume_token(token)
        self.check()

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and no token can end it or continue it."""
        return not self._ends and self._matcher.is_stopped()

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """Return which tokens cannot follow; [vocab]. If no token can, `check` raises
        from now on.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        allowed[self._unused :][:1] = False
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        if self._matcher.is_error():
            self._error = _in_one_line(self._matcher.get_error())
        elif not allowed.any():
            self._error = "no token can continue the text"
        return np.zeros(self._vocab, dtype=np.bool_) if self._error else ~allowed

    def check(self) -> None:
        """Raise ValueError if the text can no longer be what it must be."""
        if not self._error and self._matcher.is_error():
            self._error = _in_one_line(self._matcher.get_error())
        if self._error:
            raise ValueError(f"sampling.constraint cannot be met: {self._error}")


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


def _lark(regex: str) -> str:
    """Return a regular expression in Lark's form, in which a slash ends it."""
    return "/" + _ENDS_REGEX.sub(lambda found: _ESCAPED.get(found[0], found[0]), regex) + "/"


_ENDS_REGEX = re.compile(r"\\.|[/\n]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def _in_one_line(error: str) -> str:
    """Return llguidance's error without its picture of the grammar."""
    lines = error.splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return reason.removeprefix("error: ")
