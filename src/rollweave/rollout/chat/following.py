"""The text that a chat template puts after the agent's message, and the end of the
agent's turn.

The text is taken from renderings in which a placeholder represents the agent's message.
If the new messages begin with results of tools, that message has their calls, since
some templates look there. Invariant: the text is the same after any number of earlier
turns.

A turn ends at a token if the template closes it with a marker (perhaps after a space),
or begins every other message with a marker; an ordinary token of the vocabulary never
ends a turn. Otherwise the turn ends at a text: the template's closing, or, if the
closing is a space, the beginning of the next message.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer

from rollweave.rollout.chat.template import HOLE, ChatError, ChatTemplate
from rollweave.rollout.chat.text import encode_after
from rollweave.schema.chat import Message, ToolCall

PLACEHOLDER: Final = f"{HOLE}mark{HOLE}"
"""Represents the agent's message in a rendering.

No template contains it, and it has no white space that a template could trim.
"""

ARGUMENT: Final = f"{HOLE}call{HOLE}"
"""The argument of the agent's tool calls in a rendering."""

CONTEXT: Final = (Message(role="user", content="a"), Message(role="assistant", content=PLACEHOLDER))
"""The shortest conversation that every template accepts before a new message."""

EARLIER: Final = (Message(role="user", content="c"), Message(role="assistant", content="d"))
"""A turn before that."""

QUESTION: Final = Message(role="user", content=f"{HOLE}new{HOLE}")
"""A message that is recognizable in a rendering."""

ANSWER: Final = Message(role="tool", content="r", tool_call_id="call_000000009", name="f")
"""The result of a tool."""


class Following:
    """The text that one template puts after the agent's message, with these `tools`. It
    can be appended: it begins with the same end of the message, whatever comes next.
    """

    def __init__(
        self,
        template: ChatTemplate,
        markers: re.Pattern[str],
        *,
        name: str,
        tools: Sequence[str] = (),
    ) -> None:
        """`markers` match the template's tokens that mark something. Raises ChatError
        for a template whose conversations cannot grow by appending.
        """
        self._template, self._markers, self._name, self._tools = template, markers, name, tools
        after = self._after(CONTEXT, (QUESTION,), prompt=True)
        later = self._after((*EARLIER, *CONTEXT), (QUESTION,), prompt=True)
        closing = self._after(CONTEXT, (), prompt=False)
        problem = ""
        if after.count(QUESTION.content) != 1:
            problem = "a new message must appear once, after the turn before it"
        elif after != later:
            problem = "what follows a turn must not depend on earlier turns"
        elif not after.startswith(closing):
            # a template may write more at the end of a conversation, such as an end
            end, whole = markers.search(closing), closing
            closing = _common(closing, after)
            more = end and markers.search(whole, end.end())
            closing = closing[: more.start()] if more else closing
            if end is None or len(closing) < end.end():
                text = after.replace(HOLE, "")
                problem = f"a turn must end with {whole!r} also where another follows, got {text!r}"
        if problem:
            raise ChatError(problem)
        self.closing = closing
        """The text that ends the agent's message."""
        self.ends = self._find_ends()
        """The markers that end the message: first the marker in `closing`, if there is
        one; then the marker after calls, if it is a different marker.
        """
        self.header = after.partition(QUESTION.content)[0].removeprefix(self.closing)
        """The text between the agent's message and a user's."""
        opening = template.render(CONTEXT[:1], prompt=True, tools=tools)
        whole = template.render((*CONTEXT, QUESTION), prompt=True, tools=tools)
        begun = whole.partition(PLACEHOLDER)[0]
        self.opening = opening
        """The first message, and the opening of the agent's."""
        self.lead = begun[len(opening) :] if begun.startswith(opening) else ""
        """The text of the agent's message before its content."""

    def after(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Return the text after the agent's message, from its end on. Raises ChatError,
        also if the text depends on earlier turns.
        """
        if results := _results(messages):
            try:
                return self._settled((CONTEXT[0], calling(results)), messages, prompt=prompt)
            except _NoEndError:
                pass  # the template does not show calls, or the agent's turn ends otherwise
        return self._settled(CONTEXT, messages, prompt=prompt)

    def headers(self) -> tuple[str, ...]:
        """Return the markers with which the next message begins, a user's or a result
        of a tool, in templates that begin messages with markers.
        """
        found = [self._markers.match(self.header)]
        with contextlib.suppress(ChatError):
            after = self.after((ANSWER,), prompt=True)
            found.append(self._markers.match(after, len(self.closing)))
        return tuple(dict.fromkeys(match.group() for match in found if match)) if found[0] else ()

    def rewrites(self, first: Sequence[Message], said: str) -> bool:
        """Return whether the template changes or moves the first messages, or the text
        that the agent `said`, once other messages follow. False if it refuses the
        conversation.
        """
        answer = Message(role="assistant", content=said)
        try:
            opening = self._template.render(first, prompt=True, tools=self._tools)
            after = self.after((QUESTION,), prompt=True)
            whole = self._template.render(
                (*first, answer, QUESTION), prompt=True, tools=self._tools
            )
        except ChatError:
            return False
        return f"{opening}{self.lead}{said}{after}" != whole

    def _find_ends(self) -> tuple[str, ...]:
        end = self._markers.search(self.closing)
        if end is None:
            return ()
        try:
            rest = self._after_calls((CONTEXT[0], calling((ANSWER,))), ())
        except ChatError:
            return (end.group(),)
        of_calls = self._markers.findall(rest)
        return tuple(dict.fromkeys((end.group(), *of_calls[-1:])))

    def _settled(
        self, context: Sequence[Message], messages: Sequence[Message], *, prompt: bool
    ) -> str:
        """Return the text after this context. Raises ChatError if the text differs
        after earlier turns.
        """
        text = self._after(context, messages, prompt=prompt)
        earlier: tuple[Message, ...] = EARLIER
        if _results(messages):
            earlier = (EARLIER[0], calling((ANSWER,)), ANSWER, EARLIER[1])
        try:
            later = self._after((*earlier, *context), messages, prompt=prompt)
        except ChatError:
            return text  # the template refuses a conversation of this kind, which may not come
        if text != later:
            roles = ", ".join(dict.fromkeys(message.role for message in messages))
            raise ChatError(
                f"{self._name}: what the chat template puts after a turn must not depend on "
                f"earlier turns, and does before a message of role {roles}"
            )
        return text

    def _after(
        self, context: Sequence[Message], messages: Sequence[Message], *, prompt: bool
    ) -> str:
        if context[-1].tool_calls:
            return self._after_called(context, messages, prompt=prompt)
        rendering = self._template.render((*context, *messages), prompt=prompt, tools=self._tools)
        pieces = rendering.split(PLACEHOLDER)
        if len(pieces) != 2:
            raise ChatError(
                f"{self._name}: chat template must show an assistant message once, "
                f"got {len(pieces) - 1} times"
            )
        return pieces[1]

    def _after_called(
        self, context: Sequence[Message], messages: Sequence[Message], *, prompt: bool
    ) -> str:
        """Return the text from the end of the agent's calls on."""
        rest = self._after_calls(context, ())
        end = next((end for end in self.ends if end in rest), self.closing)
        lead = self.closing.partition(self.ends[0])[0] if self.ends else ""
        before = rest.rpartition(end)[0] if end else rest
        following = self._after_calls(context, messages, prompt=prompt)
        if end not in rest or not following.startswith(f"{before}{end}"):
            raise _NoEndError
        return lead + following[len(before) :]

    def _after_calls(
        self, context: Sequence[Message], messages: Sequence[Message], *, prompt: bool = False
    ) -> str:
        """Return the text after the last argument of the agent's calls."""
        rendering = self._template.render((*context, *messages), prompt=prompt, tools=self._tools)
        _, found, rest = rendering.rpartition(ARGUMENT)
        if not found:
            raise _NoEndError
        return rest


class _NoEndError(ChatError):
    """The end of the agent's message cannot be found in a rendering with calls."""


def _common(left: str, right: str) -> str:
    """Return the longest common beginning of two texts."""
    count = min(len(left), len(right))
    while not right.startswith(left[:count]):
        count -= 1
    return left[:count]


def _results(messages: Sequence[Message]) -> list[Message]:
    """Return the results of tools with which messages begin, if they name the calls."""
    results = list[Message]()
    for message in messages:
        if message.role != "tool" or not message.tool_call_id:
            break
        results.append(message)
    return results


def calling(results: Sequence[Message]) -> Message:
    """Return a message of the agent with the calls of these results."""
    calls = tuple(
        ToolCall(
            id=result.tool_call_id,
            name=result.name or "f",
            arguments=json.dumps({"x": ARGUMENT}),
        )
        for result in results
    )
    return Message(role="assistant", content="", tool_calls=calls)


TAIL: Final = 8
"""Number of tokens that the agent may sample after the token that ends its turn."""

LETTER: Final = "a"
"""Stands for the end of the agent's text."""


class Ending:
    """The end of a turn. `markers` match the spellings of the tokens `ids`."""

    def __init__(
        self,
        following: Following,
        tokenizer: Tokenizer,
        markers: re.Pattern[str],
        ids: Mapping[str, int],
    ) -> None:
        self._tokenizer, self._markers, self._ids = tokenizer, markers, ids
        closing, header = following.closing, following.header
        self._closing = closing
        ends = following.ends or (() if closing.strip() else following.headers())
        self.tokens = tuple(ids[text] for text in ends)
        """The tokens that end the turn, the usual token first."""
        self.stop = ""
        """The text that ends the turn if no token does."""
        if following.ends:
            self._lead = closing.partition(ends[0])[0]
        elif ends:
            self._lead = closing
        else:
            is_text = closing.strip() or "\n" in closing
            self._lead = closing if is_text else f"{closing}{header}"
            self.stop = closing if is_text else self._lead.rstrip()
        self.text = f"{self._lead}{ends[0]}" if ends else closing
        """The text of the end that belongs to the agent's turn."""
        before = encode_after(tokenizer, LETTER, self._lead)
        self._start = len(before) if ends else 0
        rest = closing[len(self.text) :] if following.ends else ""
        after = list(self.tokens[:1])
        after += encode_after(tokenizer, self.text, rest) if rest else []
        self._sequence = (*before, *after)

    def overlap(self, sampled: Sequence[int]) -> int:
        """Return how many of the last sampled tokens belong to the end of the turn:
        they begin it, perhaps only from the token that ends the turn on.
        """
        for end in (self._sequence, self._sequence[self._start :], self.tokens[1:]):
            for count in range(min(len(end), len(sampled)), 0, -1):
                if tuple(sampled[len(sampled) - count :]) == end[:count]:
                    return count
        return 0

    def without(self, text: str) -> str:
        """Return the agent's text without the text that ends its turn."""
        for count in range(len(self._lead), len(self.stop) - 1, -1) if self.stop else ():
            if text.endswith(self._lead[:count]):
                return text[: len(text) - count]
        return text

    def written(
        self, sampled: Sequence[int], after: str, decode: Callable[[Sequence[int]], str]
    ) -> int:
        """Return how many of the first characters of `after`, the template's text after
        the agent's message, the agent has written at the end of its turn.
        """
        found = self._markers.match(after, len(self._lead))
        if found is not None and after.startswith(self._lead):
            token = self._ids[found.group()]
            tokens = self.tokens if token in self.tokens else (token,)
            for count in range(min(TAIL, len(sampled))):
                if sampled[len(sampled) - 1 - count] not in tokens:
                    continue
                more = decode(sampled[len(sampled) - count :]) if count else ""
                if not more or self._closing.startswith(more, found.end()):
                    return found.end() + len(more)
        tail = decode(sampled[-(len(self._lead) + TAIL) :]) if self._lead else ""
        for count in range(len(self._lead), 0, -1):
            if tail.endswith(self._lead[:count]) and after.startswith(self._lead[:count]):
                return count
        return 0
