"""Make a request readable for one model: wishes become arguments of its chat template.
Fields that neither the model nor the template can read are left out or refused, as the
session says. Pure.

Invariant: nothing is left out in silence: each `Unread` is recorded or refused.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from rollweave.rollout.chat.template import ChatError
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.chat.thoughts import Thinking
from rollweave.rollout.gateway.fields import Unread, resolve
from rollweave.rollout.gateway.refusals import bad
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.chat import Message
from rollweave.schema.work import Ignored, Unreadable

MOST: Final = 100
"""Maximum number of different fields that a session records; further fields are counted
together.
"""

MAX_ARGUMENTS: Final = 4096
"""Maximum characters of the arguments of a chat template, which is tried with them."""

OTHERS: Final = "(other fields)"


def readable(
    chat: ChatRequest, codec: TextCodec, *, unreadable: Unreadable
) -> tuple[ChatRequest, list[Unread]]:
    """Return the request in the form that the model can be shown, and the fields that
    were left out. Raises RequestError for a field that must be refused.
    """
    if chat.prompt is not None:
        unread = list(chat.unread)
        _check(unread, unreadable)
        return chat, unread
    thinks = codec.thinking is not None
    arguments, left = resolve(chat.asks, codec.template_variables, thinks=thinks)
    if len(arguments) > MAX_ARGUMENTS:
        rule = f"must have at most {MAX_ARGUMENTS} characters of JSON"
        raise bad("chat_template_kwargs", rule, arguments)
    unread = [*(field for field in chat.unread if not (field.of_thoughts and thinks)), *left]
    if chat.tools and chat.call is None and not _shows_tools(codec, arguments):
        rule = "must be none: this model's chat template shows none"
        unread.append(Unread(field="tools", value=len(chat.tools), rule=rule, action="left out"))
        chat = msgspec.structs.replace(chat, tools=(), reads_calls=False)
    _check(unread, unreadable)
    return (
        msgspec.structs.replace(
            chat,
            messages=tuple(_shown(message, codec.thinking) for message in chat.messages),
            template_arguments=arguments or chat.template_arguments,
            asks=(),
            unread=(),
        ),
        unread,
    )


def _shows_tools(codec: TextCodec, arguments: str) -> bool:
    try:
        return codec.with_arguments(arguments).shows_tools
    except ChatError:  # the session reports what is wrong with the arguments
        return True


def _check(unread: Iterable[Unread], unreadable: Unreadable) -> None:
    if unreadable == "refuse":
        for field in unread:
            raise bad(field.field, field.rule, field.value)


def _shown(message: Message, thinking: Thinking | None) -> Message:
    """Return the message with its thoughts apart, if the model has any."""
    if message.role != "assistant":
        return message
    if thinking is None:
        return msgspec.structs.replace(message, thoughts="") if message.thoughts else message
    if not message.thoughts:
        thoughts, content = thinking.split_sent(message.content)
        if thoughts:
            return msgspec.structs.replace(message, thoughts=thoughts, content=content)
    return message


class IgnoredFields:
    """The fields of a session's requests that had no effect, and the number of requests
    that had each field.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Ignored] = {}

    def add(self, unread: Iterable[Unread]) -> None:
        """Record the unread fields of one request."""
        of_request = {
            (ignored.field, ignored.action): ignored for ignored in (u.recorded() for u in unread)
        }
        for key, one in of_request.items():
            if key not in self._found and len(self._found) >= MOST:
                key = (OTHERS, "ignored")
                one = Ignored(field=OTHERS, value="")
            known = self._found.get(key)
            count = 1 if known is None else known.requests + 1
            self._found[key] = msgspec.structs.replace(known or one, requests=count)

    def entries(self) -> tuple[Ignored, ...]:
        """Return the recorded fields, in the order of the first request that had each
        field.
        """
        return tuple(self._found.values())
