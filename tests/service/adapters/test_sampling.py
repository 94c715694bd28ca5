"""Rollouts use the sampling settings of the trainer, or the adapter refuses them."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.schema.work import Decoding
from rollweave.service.adapters.trl import decoding_of


def trainer(**more: Any) -> SimpleNamespace:
    """Return the attributes of TRL's GRPOTrainer with its default settings."""
    args = SimpleNamespace(generation_kwargs=more.pop("generation_kwargs", None))
    return SimpleNamespace(
        **{
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "args": args,
            **more,
        }
    )


def test_uses_the_trainers_sampling_unless_the_request_sets_its_own() -> None:
    assert decoding_of(trainer(), Decoding()) == Decoding(temperature=1.0, top_p=1.0, top_k=0)
    trainer_ = trainer(temperature=0.7, top_p=0.9, top_k=-1, generation_kwargs={})
    assert decoding_of(trainer_, Decoding(seed=3)) == Decoding(
        temperature=0.7, top_p=0.9, top_k=0, seed=3
    )
    named = Decoding(temperature=0.1, top_p=0.2, top_k=3)
    assert decoding_of(trainer_, named) == named


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 0.1), ("repetition_penalty", 1.1), ("generation_kwargs", {"typical_p": 0.9})],
)
def test_refuses_unsupported_sampling(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"GRPOConfig\.{field} must be .*, got "):
        decoding_of(trainer(**{field: value}), Decoding())
