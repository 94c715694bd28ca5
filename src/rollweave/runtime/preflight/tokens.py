"""Check the tokens of a model's prompts, and say what its chat template does."""

from collections.abc import Iterator

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.runtime.preflight.checks import Check, fail, ok, warn
from rollweave.weights.checkpoint import ModelShape


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
