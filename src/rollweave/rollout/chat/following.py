"""The text that a chat template puts after the agent's message.

It is taken from renderings in which a placeholder represents the agent's message. If
the new messages begin with results of tools, that message has their calls, since some
templates look there. Invariant: the text is the same after any number of earlier turns.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Final

from rollweave.rollout.chat.template import HOLE, ChatError, ChatTemplate
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
