"""Fields that clients of OpenAI, vLLM and SGLang send and that no server here honors,
their neutral values, and the errors that such clients read. Pure.

A server reads the fields that it honors and passes all others to `refused_field`.
Invariant: no field that would change what is sampled or answered is ignored. A field
passes if it is null, has a neutral value, or can by its nature change neither; any
other value is refused, and so is a field that is in no table. Every error names field,
rule and value.
"""

import json
import re
from collections.abc import Collection, Mapping

import msgspec

from rollweave.schema.text import whole

SHOWN = 100
"""Maximum number of characters of a field's name in an error."""

UNKNOWN_FIELD = "must not be given: no field of that name is known"
"""The rule that a field breaks if it is in no table."""


def _each(names: str, *neutral: object) -> dict[str, tuple[object, ...]]:
    """Return a row for each of the names, which blanks separate."""
    return dict.fromkeys(names.split(), neutral)


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI.
    **_each("audio moderation reasoning_effort stream_options web_search_options"),
    **_each("best_of n", 1),
    **_each("echo stream", False),
    **_each("frequency_penalty presence_penalty", 0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": ("medium",),
    # How tokens are chosen.
    **_each("allowed_token_ids bad_words logits_processors stop_regex", []),
    **_each("custom_logit_processor repetition_detection thinking_token_budget"),
    **_each("custom_params vllm_xargs", {}),
    **_each("early_stopping ignore_eos use_beam_search watermarking", False),
    **_each("length_penalty repetition_penalty typical_p", 1),
    **_each("min_p min_tokens", 0),
    # Grammars.
    **_each(
        "ebnf guided_choice guided_decoding_backend guided_grammar guided_json "
        "guided_regex guided_whitespace_pattern json_schema regex structural_tag "
        "structured_outputs"
    ),
    # What the prompt is made of.
    "add_generation_prompt": (True,),
    **_each("add_special_tokens continue_final_message use_audio_in_video", False),
    **_each(
        "chat_template enable_thinking images_config input_ids lora_path "
        "max_dynamic_patch min_dynamic_patch ngram_corpus_id task thinking "
        "truncate_prompt_tokens truncation_side"
    ),
    **_each(
        "chat_template_kwargs media_io_kwargs mm_processor_kwargs reasoning session_params", {}
    ),
    "documents": ([],),
    # What the answer holds.
    **_each(
        "include_reasoning return_mm_kwargs spaces_between_special_tokens stream_reasoning", True
    ),
    **_each(
        "include_stop_str_in_output no_stop_trim return_cached_tokens_details "
        "return_hidden_states return_meta_info return_prompt_text return_prompt_token_ids "
        "return_routed_experts return_token_ids return_token_offsets "
        "return_tokens_as_token_ids separate_reasoning skip_special_tokens",
        False,
    ),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    **_each("routed_experts_prompt_start routed_experts_start_len", 0),
    # Which server of a cluster does the work.
    **_each(
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank "
        "disagg_prefill_dp_rank routed_dp_rank"
    ),
    **_each("ec_transfer_params kv_transfer_params", {}),
}
"""Field → its values besides null that have no effect."""

WITHOUT_EFFECT = frozenset(
    (
        "cache_salt",
        "custom_labels",
        "extra_key",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    )
)
"""Fields that name, account for, store or schedule a request: their values do not
change what is sampled or answered.
"""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_INDEX = re.compile(r"\[(\d+)\]")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<rule>.*?)(?:, got (?P<kind>.*))?$", re.DOTALL)

_TOO_LARGE = "Number out of range"
"""The error of a number beyond the range of a float."""


def refused_field(
    fields: Mapping[str, object],
    *,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    without_effect: Collection[str] = WITHOUT_EFFECT,
) -> tuple[str, str] | None:
    """Return the first field that asks for something unsupported, and the rule that it
    breaks; None if all may pass.
    """
    for name, value in fields.items():
        if value is None or name in without_effect:
            continue
        if name not in neutral:
            return name, UNKNOWN_FIELD
        if not any(_same(value, allowed) for allowed in neutral[name]):
            allowed = " or ".join(map(json.dumps, (*neutral[name], None)))
            return name, f"must be {allowed}: it is not supported"
    return None


def shown(name: str) -> str:
    """Return the name of a field as an error shows it, in one line."""
    return name if name.isprintable() and 0 < len(name) <= SHOWN else f"{name!r:.{SHOWN}}"


def openai_error(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Return the body of an error in the form of OpenAI's APIs."""
    kind = (
        "rate_limit_error"
        if status == 429
        else "invalid_request_error"
        if status < 500
        else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _same(value: object, neutral: object) -> bool:
    """Compare JSON values; unlike in Python, true is not 1."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def struct_error(error: msgspec.DecodeError, value: object) -> tuple[str | None, str]:
    """Return the field that is wrong, or None, and the error in one line. `value` is
    the JSON that does not fit, or None if it is not JSON.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return None, f"the body must be JSON: {text}"
    found = _PLACE.search(text)
    path = _INDEX.sub(r".\1", found["path"]) if found else ""
    text = text[: found.start()] if found else text
    if (missing := _MISSING.match(text)) is not None:
        name = _joined(path, missing["name"])
        return name, f"{shown(name)} must be given, got none"
    if (unknown := _UNKNOWN.match(text)) is not None:
        name = _joined(path, unknown["name"])
        rule = UNKNOWN_FIELD
        return name, f"{shown(name)} {rule}{_got(value, name)}"
    if (expected := _EXPECTED.match(text)) is not None:
        rule = expected["rule"].replace("`", "")
        kind = (expected["kind"] or "").replace("`", "")
        got = _got(value, path) or (f", got {kind}" if kind else "")
        return path or None, f"{shown(path) if path else 'the body'} must be {rule}{got}"
    if text == _TOO_LARGE:
        rule = "must be at most 1.8e308"
        known = path and "[...]" not in path
        return (path, f"{shown(path)} {rule}") if known else (None, f"numbers {rule}")
    return path or None, text  # a struct's own error names field, rule and value


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _got(value: object, path: str) -> str:
    """Return the value at a path as an error shows it; "" if the path names none."""
    for name in path.split(".") if path else ():
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and (place := whole(name)) is not None and place < len(value):
            value = value[place]
        else:
            return ""
    return f", got {value!r:.80}"
