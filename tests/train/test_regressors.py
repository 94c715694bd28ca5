"""Every regressor learns, is deterministic, and accepts unusual input; the learned ones
beat the baselines.
"""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollweave.core.policy.predict import PLAN_TOKENS, ProgressivePredictor, Rows
from rollweave.schema.config.run import PREDICTORS
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import PROMPT_TOKENS
from rollweave.train.lengths import build_regressor
from rollweave.train.regressors import BATCH, backbone, texts_of
from tests.support.properties import examples
from tests.support.revealed_lengths import TURNS, Example, quality, teach, trajectories

BUILT = [name for name in PREDICTORS if name != "lm"]
LEARNED = ["ridge", "boosted", "policy"]


def predictor_of(name: str, checkpoint: str | None = None) -> ProgressivePredictor:
    return ProgressivePredictor(functools.partial(build_regressor, name, checkpoint=checkpoint))


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("baseline", ["prompt", "history"])
def test_learned_regressors_beat_baselines_on_informative_turns(name: str, baseline: str) -> None:
    taught, examples = trajectories(400, seed=1), trajectories(300, seed=2)
    learned, simple = predictor_of(name), predictor_of(baseline)
    teach(learned, taught)
    teach(simple, taught)
    before, after = quality(simple, examples, 0), quality(learned, examples, 2)
    assert after[0] > before[0] + 0.3
    assert after[1] > before[1] + 0.3
    assert learned.failed_fits == 0
    assert learned.failed_predictions == 0
    assert simple.failed_fits == 0
    assert simple.failed_predictions == 0


@pytest.mark.parametrize("name", LEARNED)
def test_predictions_improve_with_every_informative_turn(name: str) -> None:
    predictor = predictor_of(name)
    teach(predictor, trajectories(400, seed=1))
    examples = trajectories(300, seed=2)
    blind, first, last = (quality(predictor, examples, turn)[1] for turn in (0, 1, TURNS - 1))
    assert blind < first < last


@pytest.mark.parametrize("name", BUILT)
def test_the_same_pairs_give_the_same_numbers(name: str) -> None:
    """The order and the grouping of the questions do not matter."""
    given: dict[str, Any] = {"plans": True, "prompts": True, "states": True}
    examples = [
        one.contexts[index % 3] for index, one in enumerate(trajectories(20, seed=3, **given))
    ]
    estimates = []
    for _ in range(2):
        predictor = predictor_of(name)
        teach(predictor, trajectories(50, seed=1, **given))
        questions = [predictor.remember(number, context) for number, context in enumerate(examples)]
        estimates.append(predictor.estimate(questions))
        assert [predictor.estimate([question])[0] for question in questions] == estimates[-1]
        assert (predictor.failed_fits, predictor.failed_predictions) == (0, 0)
    assert estimates[0] == estimates[1]


@pytest.mark.parametrize("name", BUILT)
def test_predicts_for_an_unknown_domain(name: str) -> None:
    predictor = predictor_of(name)
    teach(predictor, trajectories(50, seed=1) + trajectories(50, seed=1, domain="b", scale=5.0))
    new = [one.contexts[1] for one in trajectories(20, seed=3, domain="new")]
    estimates = predictor.estimate(
        [predictor.remember(number, context) for number, context in enumerate(new)]
    )
    assert np.isfinite(estimates).all()
    assert predictor.failed_predictions == 0


@pytest.mark.parametrize("name", LEARNED)
def test_domains_may_differ_in_remaining_lengths(name: str) -> None:
    """After a first turn of 100 tokens, four more follow in one domain, and one in the
    other.
    """
    predictor = predictor_of(name)
    teach(
        predictor,
        trajectories(200, seed=1)
        + [_shortened(one) for one in trajectories(200, seed=4, domain="b")],
    )
    for domain, cut in (("a", False), ("b", True)):
        examples = trajectories(100, seed=5, domain=domain)
        examples = [_shortened(one) for one in examples] if cut else examples
        left = predictor.estimate(
            [predictor.remember("judged", one.contexts[1]) for one in examples]
        )
        truth = [one.tokens - one.contexts[1].output_tokens for one in examples]
        slope = float(np.polyfit(truth, left, 1)[0])
        assert 0.5 < slope < 1.5
        assert np.mean(left) == pytest.approx(np.mean(truth), rel=0.35)


def _shortened(one: Example) -> Example:
    """Return the same trajectory, ended after its second turn."""
    return one._replace(contexts=one.contexts[:3], tokens=one.contexts[2].output_tokens)


@pytest.mark.parametrize("name", BUILT)
def test_columns_that_never_vary_do_not_matter(name: str) -> None:
    """With one trajectory repeated, every column is constant but those of the turn."""
    (one,) = trajectories(1, seed=1)
    predictor = predictor_of(name)
    teach(predictor, [one] * 20)
    assert predictor.failed_fits == 0
    assert predictor.predict("k", one.contexts[2]) >= 1.0


def test_states_tell_what_nothing_else_does() -> None:
    """After a first turn that is only a plan without text, only the state reveals the
    level; where no context has a state, all numbers are those of `ridge`.
    """
    taught, judged = (
        trajectories(count, seed=seed, opening=True, states=True)
        for count, seed in ((300, 1), (200, 2))
    )
    reading, blind = predictor_of("policy"), predictor_of("ridge")
    teach(reading, taught)
    teach(blind, taught)
    told, untold = quality(reading, judged, 1), quality(blind, judged, 1)
    assert told[0] > untold[0] + 0.3
    assert told[1] > max(0.9, untold[1] + 0.5)
    without = trajectories(200, seed=1)
    contexts = [one.contexts[turn] for one in trajectories(20, seed=3) for turn in (0, 1, 2)]
    fresh = predictor_of("policy"), predictor_of("ridge")
    for predictor in fresh:
        teach(predictor, without)
    policy, ridge = (
        predictor.estimate([predictor.remember("judged", context) for context in contexts])
        for predictor in fresh
    )
    assert policy == pytest.approx(ridge)


@settings(max_examples=examples(20))
@given(values=st.lists(st.floats(width=16), max_size=9))
def test_any_states_give_finite_numbers_alone_and_among_many(values: list[float]) -> None:
    predictor, taught = predictor_of("policy"), []
    for number, one in enumerate(trajectories(20, seed=1)):
        spread = (values[(number * at) % len(values)] for at in range(STATE_WIDTH if values else 0))
        state = tuple(spread) if number % 3 else ()
        contexts = [msgspec.structs.replace(context, state=state) for context in one.contexts]
        taught.append(one._replace(contexts=contexts))
    teach(predictor, taught)
    questions = [predictor.remember(n, one.contexts[1]) for n, one in enumerate(taught)]
    together = predictor.estimate(questions)
    assert np.isfinite(together).all()
    assert [predictor.estimate([question])[0] for question in questions] == together
    assert (predictor.fits, predictor.failed_predictions) == (1, 0)


def test_history_predicts_the_mean_of_siblings_or_of_the_domain() -> None:
    taught = trajectories(40, seed=1) + trajectories(40, seed=1, domain="b", scale=3.0)
    predictor = predictor_of("history")
    teach(predictor, taught)
    context = taught[0].contexts[2]
    mean = np.mean([one.tokens for one in taught[:40]])
    assert predictor.predict("k", context) == pytest.approx(max(1.0, mean - context.output_tokens))
    with_siblings = msgspec.structs.replace(
        context, siblings=2, sibling_mean=5000.0, sibling_longest=6000
    )
    assert predictor.predict("k", with_siblings) == pytest.approx(5000.0 - context.output_tokens)
    strange = msgspec.structs.replace(context, domain="new")
    assert predictor.predict("k", strange) == pytest.approx(
        max(1.0, np.mean([one.tokens for one in taught]) - context.output_tokens)
    )


def test_baselines_weight_trajectories_equally() -> None:
    """This also holds if no prediction was requested before the first turn."""
    taught = [
        *trajectories(40, seed=1, scale=4.0),
        *(_shortened(one) for one in trajectories(40, seed=6)),
    ]
    taught = [one._replace(contexts=one.contexts[1:]) for one in taught]
    mean = np.mean([one.tokens for one in taught])
    contexts = [one.contexts[0] for one in taught]
    for name in ("history", "prompt"):
        predictor = predictor_of(name)
        teach(predictor, taught)
        left = predictor.estimate([predictor.remember("judged", context) for context in contexts])
        totals = [
            tokens + context.output_tokens
            for tokens, context in zip(left, contexts, strict=True)
            if tokens > 1.0
        ]
        assert np.mean(totals) == pytest.approx(mean, rel=0.05)


def test_the_prompt_baseline_only_subtracts_sampled_tokens() -> None:
    predictor = predictor_of("prompt")
    teach(predictor, trajectories(60, seed=1))
    one = min(trajectories(20, seed=2), key=lambda one: one.tokens)
    first, second = predictor.predict("k", one.contexts[0]), predictor.predict("k", one.contexts[1])
    assert second == pytest.approx(first - one.contexts[1].output_tokens)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a predictor must be one of ridge, .*, got 'rigde'"):
        build_regressor("rigde")
    with pytest.raises(ConfigError, match="without a checkpoint"):
        build_regressor("lm")


@pytest.mark.variants
@pytest.mark.parametrize(
    "module",
    [
        "rollweave.cli.entry",
        "rollweave.runtime.launch",
        "rollweave.runtime.supervisors.predictor",
        "rollweave_sim.effects",
    ],
)
def test_imports_nothing_before_a_regressor_is_built(module: str) -> None:
    code = (
        f"import sys, {module}; sys.exit(', '.join(name for name in ('sklearn', 'torch') if name "
        "in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# The language model, on a tiny random model.

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


@pytest.mark.parametrize("name", ["lm", "prompt", "ridge", "boosted", "policy"])
def test_reads_an_informative_prompt(checkpoint: str, name: str) -> None:
    """Before the first turn, the prompt's length tells nothing and its text all."""
    reading, blind = predictor_of(name, checkpoint), predictor_of(name, checkpoint)
    teach(reading, trajectories(300, seed=1, prompts=True))
    teach(blind, trajectories(300, seed=1))
    told = quality(reading, trajectories(200, seed=2, prompts=True), 0)
    untold = quality(blind, trajectories(200, seed=2), 0)
    assert (reading.failed_fits, blind.failed_fits) == (0, 0)
    assert told[1] > untold[1] + 0.5


def test_reads_the_end_of_the_prompt_and_then_the_plan() -> None:
    table = np.zeros((3, 1), dtype=np.float32)
    prompts = [(), (1, 2), tuple(range(PROMPT_TOKENS + 3))]
    plans = [(7,), (), tuple(range(PLAN_TOKENS + 1))]
    assert texts_of(Rows(table, prompts, plans, [])) == [
        (7,),
        (1, 2),
        (*range(3, PROMPT_TOKENS + 3), *range(PLAN_TOKENS)),
    ]


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
    states = backbone(checkpoint)
    assert states([(3 + VOCABULARY, 2**31)]) == pytest.approx(states([(3, 2**31 % VOCABULARY)]))


def test_an_invalid_checkpoint_fails_when_built(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        build_regressor("lm", checkpoint=str(tmp_path / "none"))
