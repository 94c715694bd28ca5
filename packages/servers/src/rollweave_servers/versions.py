"""The versions of the weights of a server that this process has started.

Invariant: every version that an answer names is one that the server has had since the
request was sent, in that order.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.clients.streams import StreamingDialect
from rollweave.schema.base import as_json
from rollweave.schema.serving import GenerateRequest, GenerateResult, VersionSpan

PER_RANK = 1000
"""Number of a server's priorities between two ranks that differ by 1: ranks may be
seconds, and priorities are integers.
"""

MAX_SENT = 1 << 14
"""Maximum number of requests that are remembered: many times those in flight."""


def salt_of(publication_id: int) -> str:
    """Return the salt of prefixes that these published weights have computed; "" of
    those that the model has (-1).
    """
    return str(publication_id) if publication_id >= 0 else ""


class OwnDialect(StreamingDialect, Protocol):
    """The dialect of a server that this process has started with its own settings."""

    def changed(self, version: int, publication_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""


class KnownVersions:
    """The versions that a server has had, the first of which is `version`.

    `key` names the weights that it has now, "" the first ones: prefixes of other
    weights must not be continued.
    """

    def __init__(self, version: int) -> None:
        self.key = ""
        self._versions = [max(0, version)]
        self._sent: dict[str, int] = {}

    def changed(self, version: int, publication_id: int) -> None:
        """Record that the server gets these weights."""
        self.key = salt_of(publication_id)
        self._versions.append(version)

    def encode(self, request: GenerateRequest, fields: dict[str, Any]) -> bytes:
        """Return the body with these fields, and record that the request is sent."""
        body = as_json(fields)
        self._sent[request.id] = len(self._versions) - 1
        if len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]
        return body

    def checked(self, request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        """Return the answer to a request. Raises `ResponseError` if the server cannot
        have had its versions.
        """
        self._check(self._sent.pop(request.id, 0), result.versions)
        return result

    def so_far(
        self, request: GenerateRequest, count: int, spans: Sequence[VersionSpan] | None
    ) -> tuple[VersionSpan, ...] | None:
        """Return the versions of the first `count` tokens of an answer; None if they
        are not certain: without the server's `spans`, the weights must not have changed
        since the request was sent. Raises `ResponseError` as `checked` does.
        """
        first = self._sent.get(request.id, 0)
        if spans is not None:
            self._check(first, spans)
            return tuple(spans)
        if len(self._versions) - 1 > first:
            return None
        return (VersionSpan(start=0, end=count, version=self._versions[-1]),)

    def _check(self, first: int, spans: Sequence[VersionSpan]) -> None:
        left = self._versions[first:]
        for span in spans:
            while left and left[0] != span.version:
                left = left[1:]
            if not left:
                raise ResponseError(
                    f"its tokens {span.start} to {span.end} are of version {span.version}, which "
                    "it has not had since the request was sent"
                )
