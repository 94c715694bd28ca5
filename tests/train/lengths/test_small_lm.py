"""The language model's head on a tiny random model: it reads plans with any ids, and
reads each once.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollweave.core.policy.predict import ProgressivePredictor
from rollweave.train.lengths import build_regressor
from tests.support.revealed_lengths import quality, teach, trajectories

VOCABULARY = 97


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lm")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def predictor_of(name: str, checkpoint: str) -> ProgressivePredictor:
    return ProgressivePredictor(functools.partial(build_regressor, name, checkpoint=checkpoint))


@pytest.mark.parametrize("name", ["lm", "ridge", "boosted"])
def test_reads_an_informative_plan(checkpoint: str, name: str) -> None:
    """After a first turn that is only a plan, nothing else is informative."""
    reading, blind = predictor_of(name, checkpoint), predictor_of(name, checkpoint)
    teach(reading, trajectories(300, seed=1, opening=True, plans=True))
    teach(blind, trajectories(300, seed=1, opening=True))
    examples = quality(reading, trajectories(200, seed=2, opening=True, plans=True), 1)
    untold = quality(blind, trajectories(200, seed=2, opening=True), 1)
    assert (reading.failed_fits, blind.failed_fits) == (0, 0)
    assert examples[0] > untold[0] + 0.2
    assert examples[1] > untold[1] + 0.3


def test_states_do_not_depend_on_the_batch_or_on_earlier_plans(checkpoint: str) -> None:
    from rollweave.train.regressors import BATCH, backbone  # scikit-learn takes a second

    backbone.cache_clear()
    states = backbone(checkpoint)
    plans = [tuple(range(1, 2 + number % 7 * 5)) for number in range(2 * BATCH + 3)]
    together = states([*plans, ()])
    backbone.cache_clear()
    separately = np.vstack([backbone(checkpoint)([plan]) for plan in [*plans, ()]])
    assert together == pytest.approx(separately, abs=1e-5)
    assert (together[-1] == 0).all()
    assert (states(plans) == together[:-1]).all()


def test_folds_ids_unknown_to_the_checkpoint(checkpoint: str) -> None:
    from rollweave.train.regressors import backbone

    states = backbone(checkpoint)
    assert states([(3 + VOCABULARY, 2**31)]) == pytest.approx(states([(3, 2**31 % VOCABULARY)]))


def test_an_invalid_checkpoint_fails_when_built(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        build_regressor("lm", checkpoint=str(tmp_path / "none"))
