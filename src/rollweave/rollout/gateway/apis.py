"""The APIs that clients may use, by their paths."""

from collections.abc import Mapping

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.anthropic_messages import MessagesApi
from rollweave.rollout.gateway.completions import CompletionsApi
from rollweave.rollout.gateway.openai_responses import ResponsesApi
from rollweave.rollout.gateway.responses import Api, BatchApi, ChatApi


def apis(codec: TextCodec, *, served: bool = False) -> Mapping[str, Api]:
    """Return the path of each API below the base URL, and the API. With `served`,
    requests may have the fields of those outside of a run.
    """
    return {
        **({"/chat/completions/batch": BatchApi(codec)} if served else {}),
        "/chat/completions": ChatApi(codec, served=served),
        "/completions": CompletionsApi(codec.plain, served=served),
        "/messages": MessagesApi(codec),
        "/responses": ResponsesApi(),
    }
