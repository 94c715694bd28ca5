"""The test files of vLLM that are run, and why some of the tests do not apply."""

from typing import Final

FILES: Final = (
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "anthropic/test_messages.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
"""Paths below `tests/entrypoints`."""

OPTIONS: Final = (
    "--enable-force-include-usage",
    "--enable-prompt-embeds",
    "--max-logprobs",
    "--return-tokens-as-token-ids",
    "--root-path",
    "--skip-tokenizer-init",
    "--speculative-config",
    "--watermark-config",
)

LORA: Final = "asks for an adapter"
REASONS: Final = "needs a model that thinks before it answers"
TOKENIZER: Final = "expects the number of tokens of another model's tokenizer"
QUALITY: Final = "expects the right answer, or a call, of a model of billions of parameters"
VERSION: Final = "expects vLLM's version"
TRANSFER: Final = "sends the prompt's tokens between vLLM's prefill and decode servers"

RULES: Final[tuple[tuple[str, str], ...]] = (
    (r"zephyr-lora|test_check_models", LORA),
    (r"test_include_reasoning|test_thinking_token|test_function_tool_use.*True-", REASONS),
    (r"responses/.*(reasoning|raw_message|test_simple_input|test_function_tool_use)", REASONS),
    (r"test_completion.py::test_single_completion|test_single_chat_session", TOKENIZER),
    (r"more_than_one_prompt_logprobs|test_comparison_with_prompt", QUALITY),
    (r"test_completion_streaming|test_response_format_json_|complex_message_content", QUALITY),
    (r"structured_outputs_choice_chat$|test_chat_completion_with_tool_use|-auto-|\[auto-", QUALITY),
    (r"test_anthropic_tool_call\b|responses/test_structured_output", QUALITY),
    (
        r"streaming_expected_arguments|previous_response|same_prev_id|test_basic.py::(test_instructions|test_chat)$",
        QUALITY,
    ),
    (r"test_kv_transfer", TRANSFER),
    (r"test_show_version", VERSION),
)
"""A regular expression of the test's id → why it does not apply."""
