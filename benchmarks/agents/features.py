"""The features that a request may ask for, in the terms of each API, and how to see
whether they were given.

Each case is a request to a gateway whose agent says what is written down. It works if
what was asked for can be seen in the answer, in how the turn was sampled, or in the
prompt. It is recorded if it was ignored and the answer names it. It is refused if the
answer is an error of one line that names the field. Otherwise it was ignored in
silence, which must never be.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.agents.scripted import scripted
from benchmarks.agents.wire import BODIES, Answer, Json, post
from rollweave.schema.base import Struct
from rollweave.schema.serving import Sampling


class Outcome(enum.StrEnum):
    """The outcome of a request."""

    WORKS = "works"
    REFUSED = "refused"
    RECORDED = "recorded"  # ignored, which the trace and the answer's header say
    IGNORED = "silently ignored"
    FAILED = "failed"  # neither honored nor refused by the name of a field


class Cell(Struct, frozen=True, kw_only=True):
    """One client and one feature. `detail` is the error of what was refused."""

    outcome: Outcome
    detail: str = ""


class Seen(Struct, frozen=True, kw_only=True):
    """The visible effects of a request that was answered."""

    answer: Answer
    prompt: str
    sampling: Sampling
    gateway: Any


Check = Callable[[Seen], bool]


def never(_: Seen) -> bool:
    """Return false: no answer of a model of text can honor it."""
    return False


class Feature(Struct, frozen=True):
    """A feature: the fields that ask for it in each API that has it, the check of what
    was answered, and what the agent says. The name of the field that a refusal must
    have is the first one, unless it is in `named`.
    """

    name: str
    asks: Mapping[str, Json]
    check: Check = never
    says: Sequence[str] = ("It is 5.",)
    named: str = ""


async def try_feature(feature: Feature, api: str) -> Cell:
    """Request the feature through one API."""
    named = feature.named or _first_field(feature.asks[api])
    async with scripted(*feature.says) as gateway:
        answer = await post(gateway, api, {**BODIES[api], **feature.asks[api]})
        if answer.status == 200:
            seen = Seen(
                answer=answer,
                prompt=gateway.prompt(),
                sampling=gateway.script.samplings[-1],
                gateway=gateway,
            )
            if feature.check(seen):
                return Cell(outcome=Outcome.WORKS)
            recorded = names(named, answer.ignored)
            return Cell(
                outcome=Outcome.RECORDED if recorded else Outcome.IGNORED, detail=answer.ignored
            )
    error = answer.error
    is_named = answer.status == 400 and "\n" not in error and names(named, error)
    return Cell(outcome=Outcome.REFUSED if is_named else Outcome.FAILED, detail=error)


def names(field: str, error: str) -> bool:
    """Return whether an error has a field's name as a word."""
    return re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", error) is not None


def _first_field(asked: Json) -> str:
    """Return the name of the first field that is asked for."""
    return next(iter(asked), "")
