"""The phases of engines that a configuration may have."""

from typing import Any

import pytest

from rollweave.schema.config.root import RunConfig


def config(*phases: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "tasks": [{"env": "frozenlake"}],
            "engines": [{"max_slots": 8, **phase} for phase in phases],
            **sections,
        }
    )


PREFILL, DECODE = {"phase": "prefill"}, {"phase": "decode"}


def test_prefill_engines_need_engines_that_decode() -> None:
    assert [group.phase for group in config(PREFILL, DECODE, {}).engines] == [
        "prefill",
        "decode",
        "both",
    ]


@pytest.mark.parametrize(
    ("groups", "sections", "message"),
    [
        (
            [PREFILL],
            {},
            "engines.0.phase must be both unless other engines have phase decode, got prefill",
        ),
        (
            [{}, PREFILL],
            {},
            "engines.1.phase must be both unless other engines have phase decode, got prefill",
        ),
        (
            [{}, DECODE],
            {},
            "engines.1.phase must be both unless other engines have phase prefill, got decode",
        ),
        (
            [{**PREFILL, "kind": "vllm"}, DECODE],
            {},
            "engines.kind must be the same for all prefill and decode engines, which exchange KV, "
            r"got \['vllm', 'embedded'\]",
        ),
        (
            [
                {**PREFILL, "kind": "vllm"},
                {**DECODE, "kind": "vllm", "address": "http://h:1", "token_env": "T"},
            ],
            {"model": {"path": "/m"}},
            "engines.1.phase must be both with address, whose engines cannot move KV, got decode",
        ),
        (
            [PREFILL, {**DECODE, "kind": "sglang"}],
            {},
            "engines.1.phase must be both with kind sglang, whose engines cannot move KV, "
            "got decode",
        ),
        (
            [PREFILL, DECODE],
            {"ablation": {"without": ["prefix_cache"]}},
            "engines.0.phase must be both without prefix_cache, from which KV moves, got prefill",
        ),
        (
            [PREFILL, {**DECODE, "deterministic": True}],
            {},
            r"engines.deterministic must be the same for all prefill and decode engines, which "
            r"exchange KV, got \[False, True\]",
        ),
    ],
)
def test_phases_that_cannot_be_apart_are_refused(
    groups: list[dict[str, Any]], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(*groups, **sections)
