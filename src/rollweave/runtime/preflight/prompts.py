"""Check that a model's chat template shows prompts and transcripts within the limits of
their task domain.
"""

from collections.abc import Iterator, Sequence

import msgspec

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.rollout.chat.following import ANSWER
from rollweave.runtime.preflight.checks import Check, fail, ok, warn
from rollweave.runtime.preflight.environments import Domain
from rollweave.schema.chat import Message

NAMED = 5
"""Maximum number of prompts that are named as too long; the others are counted."""

SLACK = 8
"""Maximum number of tokens that a template may add to a message because it is not
empty.
"""


UNSHOWN = 64
"""Maximum number of prompts with thoughts that are rendered to see whether the template
shows them.
"""


def examine_prompts(codec: ChatCodec, domains: Sequence[Domain]) -> Iterator[Check]:
    """Check the first messages of an episode, every prompt that can be listed, and the
    transcripts of the warm-up.
    """
    yield from _first(codec, domains)
    yield from overlong_prompts(codec, domains)
    for domain in domains:
        yield from _unshown(codec, domain)
    yield from _transcripts(codec, domains)


def _unshown(codec: ChatCodec, domain: Domain) -> Iterator[Check]:
    """Warn of prompts that hold an answer already, and of thoughts that the agent is
    not shown.
    """
    answered = [place for place, messages in domain.prompts if messages[-1].role == "assistant"]
    if answered:
        yield warn(
            f"{domain.name} prompts",
            f"{len(answered):,} of {len(domain.prompts):,} end with an assistant's message, which "
            f"the agent is shown: {named(answered)}",
        )
    thoughtful = [
        (place, messages)
        for place, messages in domain.prompts
        if any(message.thoughts for message in messages)
    ]
    hidden = list[str]()
    for place, messages in thoughtful[:UNSHOWN]:
        without = tuple(msgspec.structs.replace(message, thoughts="") for message in messages)
        try:
            if codec.start(messages) == codec.start(without):
                hidden.append(place)
        except ChatError:
            continue  # it is refused as a prompt
    if hidden:
        yield warn(
            f"{domain.name} prompts",
            f"{len(thoughtful):,} have thoughts (reasoning_content), and the chat template shows "
            f"none of those of {named(hidden)}",
        )


def _first(codec: ChatCodec, domains: Sequence[Domain]) -> Iterator[Check]:
    """Check that the first messages of an episode leave room for the agent."""
    for domain in domains:
        if not domain.first:
            continue
        try:
            if domain.tools and not codec.shows_tools:
                yield fail(
                    domain.name,
                    f"the model's chat template must show the {len(domain.tools)} tools that the "
                    "handler offers its agent, got "
                    'one that shows none; with options.calls = "text", if the handler has it, '
                    "none is needed",
                )
                continue
            count = len(codec.start(domain.first, domain.tools))
        except ChatError as error:
            yield fail(domain.name, f"first messages: {error}")
            continue
        try:
            if domain.tools:
                codec.extend((), (ANSWER,), tools=domain.tools)
        except ChatError as error:
            yield fail(domain.name, f"results of tools: {error}")
            continue
        limit = domain.limits.max_tokens
        if count >= limit:
            yield fail(
                f"{domain.name}.max_tokens",
                f"must be more than the first prompt ({count} tokens), got {limit}",
            )
        else:
            yield ok(f"{domain.name} prompt", f"{count} of {limit} tokens")


def overlong_prompts(codec: ChatCodec, domains: Sequence[Domain]) -> Iterator[Check]:
    """Check that every prompt that can be listed leaves room for the agent.

    Name the first ones that do not; count all.
    """
    for domain in domains:
        overlong = list[str]()
        try:
            for place, count in too_long(codec, domain):
                overlong.append(f"{place} ({count} tokens)")
        except ChatError as error:
            yield fail(domain.name, str(error))
        if overlong:
            text = (
                f"{len(overlong):,} of {len(domain.prompts):,} are not shorter: {named(overlong)}"
            )
            yield fail(
                f"{domain.name}.max_tokens",
                f"must be more than every prompt, got {domain.limits.max_tokens}; {text}",
            )


def too_long(codec: ChatCodec, domain: Domain) -> Iterator[tuple[str, int]]:
    """Yield the place and the length of each listed prompt that leaves the agent no
    room. Raises ChatError that names the place.
    """
    limit = domain.limits.max_tokens
    for place, messages in domain.prompts:
        bare = tuple(msgspec.structs.replace(message, content="") for message in messages)
        # a token has at least one byte of its text, so that most prompts need not be
        # tokenized
        try:
            least = len(codec.start(bare)) + sum(
                len(message.content.encode()) + SLACK for message in messages
            )
            count = len(codec.start(messages)) if least >= limit else least
        except ChatError as error:
            raise ChatError(f"prompt of {place}: {error}") from error
        if count >= limit:
            yield place, count


def named(places: Sequence[str]) -> str:
    """Return the first of these, as a text."""
    return ", ".join(places[:NAMED]) + (", …" if len(places) > NAMED else "")


def _transcripts(codec: ChatCodec, domains: Sequence[Domain]) -> Iterator[Check]:
    """Check that a rollout's limits admit the transcripts of the warm-up.

    Name the first transcript that breaks each limit.
    """
    for domain in domains:
        broken: dict[str, str] = {}
        for number, messages in enumerate(domain.transcripts):
            try:
                sequence = tokenize_transcript(codec, messages)
            except (ChatError, ValueError) as error:
                yield fail(f"{domain.name} warm-up", f"transcript {number}: {error}")
                break
            for place, (turn, reply) in enumerate(
                zip(sequence.turns, _replies(messages), strict=True)
            ):
                length = turn.end - turn.start
                if length > domain.limits.max_turn_tokens:
                    text = f"turn {place}, {reply!r:.60}, has {length} tokens with its end token"
                    broken.setdefault(
                        "max_turn_tokens",
                        f"every turn of transcript(): in transcript {number} {text}",
                    )
            if len(sequence.tokens) > domain.limits.max_tokens:
                text = f"every transcript(): number {number} has {len(sequence.tokens)} tokens"
                broken.setdefault("max_tokens", text)
        for limit, text in broken.items():
            yield fail(
                f"{domain.name}.{limit}", f"must hold {text}, got {getattr(domain.limits, limit)}"
            )


def _replies(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role == "assistant"]
