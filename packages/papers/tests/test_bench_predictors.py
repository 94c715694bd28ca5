"""Bench `predictors` without a pretrained model: its trajectories, the tuned language
model, and the figures of a predictor.
"""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from packages.papers.benchmarks import predictors
from packages.papers.benchmarks.predictors import Sampled, Tuned, _judged, _trajectory
from rollweave.core.policy.predict import ProgressivePredictor
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import FinishReason, GenerateRequest, GenerateResult
from rollweave.train.lengths import build_regressor
from tests.support.pipelines import CODEC, engine_result
from tests.support.revealed_lengths import teach, trajectories
from tests.support.tiny_models import build, save

torch.set_num_threads(1)


def sampled(count: int, **given: Any) -> list[Sampled]:
    examples = trajectories(count, seed=count, **given)
    return [Sampled(number, one.contexts[:3], one.tokens) for number, one in enumerate(examples)]


async def test_a_trajectory_has_the_contexts_of_a_run() -> None:
    asked = list[GenerateRequest]()
    cut = engine_result("x" * 70, finish=FinishReason.LENGTH)
    answers = iter([msgspec.structs.replace(cut, state=(1.0, 2.0)), engine_result("hi")])

    class Engine:
        def generate(self, request: GenerateRequest) -> asyncio.Future[GenerateResult]:
            asked.append(request)
            future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
            future.set_result(next(answers))
            return future

    ended = [50, 70]
    engine: Any = Engine()
    one = await _trajectory(engine, CODEC, ("go", "why"), (4, 1), ended)
    assert (one.group, one.tokens) == (4, 73)
    assert ended == [50, 70, 73]
    assert CODEC.decode(asked[1].tokens).endswith("Go on.<|im_end|>\n<|im_start|>assistant\n")
    first, second = one.contexts
    prompt = asked[0].tokens
    assert (first.turn, first.prompt, first.plan, first.state) == (0, prompt, (), ())
    assert (first.siblings, first.sibling_mean, first.sibling_longest) == (2, 60.0, 70)
    assert (second.turn, second.output_tokens, second.prompt) == (1, 70, prompt)
    assert (second.plan, second.state) == (cut.tokens[:64], (1.0, 2.0))
    assert second.observation_tokens == len(asked[1].tokens) - len(prompt) - 70


def test_figures_are_those_of_a_predictor_that_knows() -> None:
    figures = _judged("ridge", lambda: build_regressor("ridge"), sampled(300), sampled(200))
    stages = ("prompt", "first", "later")
    names = {"ridge_fit_ms", "ridge_predict_ms"}
    names |= {f"ridge_{kind}_{stage}" for kind in ("rho", "recall") for stage in stages}
    assert figures.keys() == names
    blind, first, later = (figures[f"ridge_rho_{at}"] for at in ("prompt", "first", "later"))
    assert isinstance(blind, float)
    assert isinstance(first, float)
    assert isinstance(later, float)
    assert blind < 0.3 < 0.8 < first <= later


def test_a_language_model_is_tuned_to_what_prompts_reveal(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors, "RATE", 1e-3)
    model = save(build("qwen3", vocab_size=200), tmp_path_factory.mktemp("model"))
    tuned = Tuned(model, 600.0)
    predictor = ProgressivePredictor(lambda: tuned)
    examples = trajectories(150, seed=1, prompts=True)
    teach(predictor, [one._replace(contexts=one.contexts[:1]) for one in examples])
    assert (predictor.fits, tuned.epochs) == (1, predictors.EPOCHS)
    judged = trajectories(100, seed=2, prompts=True)
    questions = [predictor.remember("judged", one.contexts[0]) for one in judged]
    guess = predictor.estimate(questions)
    assert np.corrcoef(guess, [one.tokens for one in judged])[0, 1] > 0.7
    assert guess[0] == pytest.approx(predictor.estimate(questions[:1])[0], rel=1e-3)


def test_a_model_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--model must be given"):
        predictors.bench_predictors(quick=True, model=None, progress=print)
