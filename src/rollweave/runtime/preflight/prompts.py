"""Check that a model's chat template shows prompts and transcripts within the limits of
their task domain, and that the model has all of their tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.rollout.chat.following import ANSWER
from rollweave.runtime.preflight.checks import Check, fail, ok, warn
from rollweave.runtime.preflight.environments import Domain
from rollweave.weights.checkpoint import ModelShape

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
    for domain in domains:
        if domain.first:
            yield _first(codec, domain)
        yield from overlong_prompts(codec, [domain])
        yield from _unshown(codec, domain)
        yield from _transcripts(codec, domain)


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


def _first(codec: ChatCodec, domain: Domain) -> Check:
    """Check that the first messages of an episode leave room for the agent."""
    if domain.tools and not codec.shows_tools:
        return fail(
            domain.name,
            f"the model's chat template must show the handler's tools ({len(domain.tools)}), got "
            'one that shows none; with options.calls = "text", if the handler has it, none is '
            "needed",
        )
    what = "first messages"
    try:
        count = len(codec.start(domain.first, domain.tools))
        what = "results of tools"
        if domain.tools:
            codec.extend((), (ANSWER,), tools=domain.tools)
    except ChatError as error:
        return fail(domain.name, f"{what}: {error}")
    limit = domain.limits.max_tokens
    if count < limit:
        return ok(f"{domain.name} prompt", f"{count} of {limit} tokens")
    text = f"must be more than the first prompt ({count} tokens), got {limit}"
    return fail(f"{domain.name}.max_tokens", text)


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


def _transcripts(codec: ChatCodec, domain: Domain) -> Iterator[Check]:
    """Check that a rollout's limits admit the transcripts of the warm-up.

    Name the first transcript that breaks each limit.
    """
    broken: dict[str, str] = {}
    for number, messages in enumerate(domain.transcripts):
        try:
            sequence = tokenize_transcript(codec, messages)
        except (ChatError, ValueError) as error:
            yield fail(f"{domain.name} warm-up", f"transcript {number}: {error}")
            break
        replies = [message.content for message in messages if message.role == "assistant"]
        for place, (turn, reply) in enumerate(zip(sequence.turns, replies, strict=True)):
            length = turn.end - turn.start
            if length > domain.limits.max_turn_tokens:
                text = f"turn {place}, {reply!r:.60}, has {length} tokens with its end token"
                broken.setdefault(
                    "max_turn_tokens", f"every turn of transcript(): in transcript {number} {text}"
                )
        if len(sequence.tokens) > domain.limits.max_tokens:
            text = f"every transcript(): number {number} has {len(sequence.tokens)} tokens"
            broken.setdefault("max_tokens", text)
    for limit, text in broken.items():
        got = getattr(domain.limits, limit)
        yield fail(f"{domain.name}.{limit}", f"must hold {text}, got {got}")


def check_tokens(codec: ChatCodec, shape: ModelShape) -> Iterator[Check]:
    """Check that the model has an embedding of every token that a prompt can have."""
    vocabulary, unwritten = codec.tokenizer.get_vocab(), codec.unwritten
    beyond = {text: id for text, id in vocabulary.items() if id >= shape.vocab}
    possible = {text: id for text, id in beyond.items() if id not in unwritten}
    if not beyond:
        return
    text, id = min((possible or beyond).items(), key=lambda item: item[1])
    if possible:
        yield fail(
            "tokenizer",
            "must have no tokens in prompts that the model has no embedding of: the embedding has "
            f"{shape.vocab:,} rows, got {len(possible):,} beyond them, such as {text!r:.80} "
            f"({id})",
        )
    else:
        yield warn(
            "tokenizer",
            f"{len(beyond):,} special tokens, such as {text!r:.80} ({id}), have no row in the "
            "model's embedding; the chat template writes none of them, and messages that spell "
            "them have text",
        )


def describe_template(codec: ChatCodec) -> Check:
    """Say how turns end, and how a growing conversation differs from a rendering."""
    ends = [f"token {', '.join(map(str, codec.stop_token_ids))}"] if codec.stop_token_ids else []
    ends += [f"text {stop!r:.80}" for stop in codec.stop]
    text = f"grows turn by turn; a turn ends at {' or '.join(ends) or 'its token limit alone'}"
    if rewritten := codec.rewritten:
        text += (
            f"; {', '.join(rewritten)} stay as they were, though the template renders them "
            "otherwise once more messages follow"
        )
    return ok("chat template", text)
