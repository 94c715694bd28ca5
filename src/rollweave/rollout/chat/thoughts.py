"""The thoughts of a model that thinks before it answers: where they stand in its text.

Invariants: dividing a text loses nothing that a reader sees: the result is thoughts,
then the answer, without the marks and the line ends around them; a text without the
opening mark consists of the answer alone.
"""

import base64
import binascii
import zlib
from typing import Final

from rollweave.schema.base import Struct

MARKS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""The marks of thoughts in chat templates of several families of models."""

SEAL: Final = "rw1."
"""Beginning of a sealed text: thoughts in a form that a program sends back unread."""

SEALED_CHARS: Final = 1 << 22
"""Maximum number of characters of thoughts that are unsealed."""


class Division(Struct, frozen=True, kw_only=True):
    """The places in a turn's text: thoughts are `[start, end)`, and the answer begins
    at `answer`. The places before `certain` stay, whatever follows the text.
    """

    start: int = 0
    end: int = 0
    answer: int = 0
    certain: int


class Thinking(Struct, frozen=True, kw_only=True):
    """The marks of thoughts. `opened` is true if the chat template writes the first
    mark itself, at the opening of the agent's turn.
    """

    first: str
    last: str
    opened: bool = False

    def divide(self, text: str) -> Division:
        """Return where thoughts and answer stand in the sampled text so far."""
        blank = len(text) - len(text.lstrip())
        if text.startswith(self.first, blank):
            body = blank + len(self.first)
        elif self.first.startswith(text[blank:]):  # the mark may still be completed
            return Division(certain=0)
        elif self.opened:
            body = 0
        else:
            return Division(certain=len(text))
        close = text.find(self.last, body)
        stop = before(self.last, text, since=body) if close < 0 else close
        start = body + len(text[body:stop]) - len(text[body:stop].lstrip("\n"))
        end = max(start, len(text[:stop].rstrip("\n")))
        if close < 0:
            return Division(start=start, end=end, answer=len(text), certain=end)
        after = close + len(self.last)
        answer = len(text) - len(text[after:].lstrip("\n"))
        return Division(start=start, end=end, answer=answer, certain=len(text))

    def split(self, text: str) -> tuple[str, str]:
        """Return thoughts and answer of a complete turn's text."""
        place = self.divide(text)
        return text[place.start : place.end], text[place.answer :]

    def split_sent(self, text: str) -> tuple[str, str]:
        """Return thoughts and answer of a message that a program sends back as one
        text.
        """
        if self.last not in text:
            return "", text
        begins = text.lstrip().startswith(self.first)
        if not begins and (not self.opened or self.first in text):
            return "", text
        return self.split(text)

    def joined(self, thoughts: str, answer: str) -> str:
        """Return thoughts and answer as one text, in the form that models write."""
        return f"{self.first}\n{thoughts}\n{self.last}\n\n{answer}"


def thinking_of(template: str, opening: str) -> Thinking | None:
    """Return the marks that a chat template's source names; None without marks.
    `opening` is the template's text at the opening of a turn.
    """
    for first, last in MARKS:
        if last in template:
            return Thinking(first=first, last=last, opened=opening.rstrip().endswith(first))
    return None


def seal(thoughts: str) -> str:
    """Return thoughts as the opaque text that APIs call a signature or encrypted
    content. It is not secret: it lets a program send thoughts back unread.
    """
    packed = zlib.compress(thoughts.encode(errors="surrogatepass"))
    return SEAL + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the thoughts of a sealed text; None for any other text."""
    if not text.startswith(SEAL):
        return None
    reader = zlib.decompressobj()
    try:
        packed = base64.b64decode(text[len(SEAL) :], altchars=b"-_", validate=True)
        data = reader.decompress(packed, SEALED_CHARS)
        return data.decode(errors="surrogatepass") if reader.eof else None
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return None


def before(mark: str, text: str, *, since: int) -> int:
    """Return the length of the text before `mark`, or before a possible beginning of
    `mark` at the end of the text.
    """
    place = text.find(mark, since)
    if place >= 0:
        return place
    for count in range(min(len(mark) - 1, len(text) - since), 0, -1):
        if text.endswith(mark[:count]):
            return len(text) - count
    return len(text)
