"""The APIs that clients may use, by their paths."""

from collections.abc import Mapping

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.anthropic_messages import MessagesApi
from rollweave.rollout.gateway.completions import CompletionsApi
from rollweave.rollout.gateway.openai_responses import ResponsesApi
from rollweave.rollout.gateway.responses import Api, ChatApi


def apis(codec: TextCodec, *, scores_prompts: bool = False) -> Mapping[str, Api]:
    """Return the path of each API below the base URL, and the API.

    `scores_prompts` is true if completions may have `prompt_logprobs`.
    """
    return {
        "/chat/completions": ChatApi(),
        "/completions": CompletionsApi(codec.plain, scores_prompts=scores_prompts),
        "/messages": MessagesApi(codec),
        "/responses": ResponsesApi(),
    }
