"""Bench `predictors`: all predictors of remaining lengths on the trajectories of a
pretrained chat model, which takes two or three turns at tasks of very uneven length.

Groups of equal prompts are sampled at temperature 1 on our engine, which gives states,
with the contexts that a run would have. Predictors learn from the first groups, and
predict the later ones before each turn. Beside the predictors of a run stands the small
language model of Heddle §4.1, all weights of which are tuned to the lengths.
"""

import asyncio
import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, load_average, rounded
from rollweave.core.policy.predict import NUMBERS, Lengths, ProgressivePredictor, Regressor, Rows
from rollweave.engine.clients.client import EngineClient, in_thread
from rollweave.engine.embedded import REPLY_S, START_S
from rollweave.engine.thread import EngineThread
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import Conversation
from rollweave.rollout.turns import PLAN_TOKENS
from rollweave.schema.base import EngineId, mix
from rollweave.schema.chat import Message
from rollweave.schema.config.run import PREDICTORS
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineSpec, FinishReason, GenerateRequest, Sampling
from rollweave.schema.training import PROMPT_TOKENS, LengthContext
from rollweave.train.lengths import build_regressor
from rollweave.train.regressors import texts_of
from rollweave_papers.measures import pearson, recall_of_longest

TASKS = (
    ("In one word, what color is {}?", "Why?"),
    ("Is {} useful? Answer yes or no.", "Thank you. Are you sure?"),
    ("Name three things that go with {}.", "Which of them is the cheapest?"),
    ("Explain {} to a child in one sentence.", "Now in simpler words."),
    ("Translate the word {} into French.", "Use it in a sentence."),
    ("Write a short poem about {}.", "Give it a title."),
    ("List ten facts about {}.", "Which fact is the most surprising?"),
    ("Write a story about {}.", "Tell me its moral in one sentence."),
)
"""The first message of a task, and the second one where the first answer was whole."""

TOPICS = (
    "bread", "rain", "a bicycle", "gold", "a violin", "chess", "the moon", "a volcano",
    "tea", "snow", "a bridge", "honey", "a whale", "paper", "a clock", "garlic",
)  # fmt: skip

CUT = "Go on."
"""The message after an answer that the limit cut; after the second, the only one."""

MEMBERS, TURNS, TURN_TOKENS = 4, 3, 160
GROUPS, GROUPS_QUICK = 48, 20
LEARNED = 0.6
"""Share of the groups from which predictors learn."""

TUNED_S, TUNED_S_QUICK = 100.0, 45.0
"""Maximum seconds of tuning."""

EPOCHS, BATCH, RATE = 3, 8, 3e-5


class Sampled(NamedTuple):
    """A trajectory: its group, the contexts before its turns, and its tokens."""

    group: int
    contexts: list[LengthContext]
    tokens: int


def bench_predictors(*, quick: bool, model: Path | None, progress: Progress) -> Result:
    """Return the quality and the cost of each predictor. Raises ConfigError without a
    `model`, and EngineError where the engine fails.
    """
    if model is None:
        raise ConfigError("--model must be given for bench predictors, which samples from it")
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # as in the engine's and the predictor's processes
    groups, started = (GROUPS_QUICK if quick else GROUPS), time.perf_counter()
    sampled = sorted(asyncio.run(_sample(model, groups)), key=lambda one: one.group)
    sampling_s = time.perf_counter() - started
    progress(f"{len(sampled)} trajectories sampled in {sampling_s:.0f} s")
    first = [one for one in sampled if one.group < LEARNED * groups]
    later = [one for one in sampled if one.group >= LEARNED * groups]
    p50, p90 = np.percentile([one.tokens for one in sampled], [50, 90]).tolist()
    figures: dict[str, Figure] = {"trajectories": len(sampled), "sampling_s": sampling_s}
    figures |= {"tokens_p50": p50, "tokens_p90": p90}
    for name in PREDICTORS:
        checkpoint = str(model) if name == "lm" else None
        make = functools.partial(build_regressor, name, checkpoint=checkpoint)
        make()  # reads the model's weights, once
        figures |= _judged(name, make, first, later)
        progress(f"{name} is measured")
    tuned = Tuned(str(model), TUNED_S_QUICK if quick else TUNED_S)
    figures |= _judged("tuned_lm", lambda: tuned, first, later)
    figures["tuned_lm_epochs"] = tuned.epochs
    return Result(
        bench="predictors",
        figures={name: rounded(value) for name, value in figures.items()},
        conditions={
            "model": model.name,
            "trajectories": f"{groups} groups of {MEMBERS}, of which the first {LEARNED:.0%} "
            f"are learned from, 2 or {TURNS} turns of at most {TURN_TOKENS} tokens, temperature 1",
            "rho": "Spearman's correlation of predicted and true remaining tokens, before the "
            "first turn (prompt), after it (first), and after later ones (later)",
            "recall": "share of the longest tenth that is also predicted to be it",
            "predict_ms": "one prediction alone; all fits and predictions by one thread",
            "tuned_lm": f"all weights, at most {EPOCHS} epochs or {tuned.limit_s:g} s; below an "
            "epoch, it says nothing about Heddle's",
            "load": load_average(),
        },
    )


# Trajectories.


async def _sample(model: Path, groups: int) -> list[Sampled]:
    """Sample all trajectories at once, as a run does."""
    own: dict[str, Any] = {"dtype": "bfloat16", "kv_tokens": 49152, "states": True}
    spec = EngineSpec(id=EngineId("e"), model=str(model), **own)
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    link = in_thread(spec, EngineThread, model_ready=present)
    engine = EngineClient("engine", link, start_s=START_S, reply_s=REPLY_S)
    codec = ChatCodec.from_directory(model)
    tasks = list(itertools.product(TASKS, TOPICS))
    random.Random(0).shuffle(tasks)
    try:
        await engine.ready()
        taken = []
        for group, ((first, then), topic) in enumerate(tasks[:groups]):
            ended: list[int] = []
            asked = first.format(topic), then
            places = [(group, member) for member in range(MEMBERS)]
            taken += [_trajectory(engine, codec, asked, place, ended) for place in places]
        return await asyncio.gather(*taken)
    finally:
        await engine.close()


async def _trajectory(
    engine: EngineClient, codec: ChatCodec, asked: tuple[str, str], place: tuple[int, int],
    ended: list[int],
) -> Sampled:  # fmt: skip
    """Take the turns of the member of the group at `place`. `ended` has the lengths of
    the group's members that have ended.
    """
    talk = Conversation(codec, [Message(role="user", content=asked[0])])
    prompt, contexts, said = talk.tokens, list[LengthContext](), list[int]()
    plan: tuple[int, ...] = ()
    state: tuple[float, ...] = ()
    while True:
        contexts.append(
            LengthContext(
                domain="chat",
                prompt_tokens=len(prompt),
                turn=len(said),
                output_tokens=sum(said),
                last_output_tokens=said[-1] if said else 0,
                observation_tokens=len(talk) - len(prompt) - sum(said),
                tool_s=0.0,
                siblings=len(ended),
                sibling_mean=sum(ended) / max(1, len(ended)),
                sibling_longest=max(ended, default=0),
                plan=plan,
                prompt=prompt[-PROMPT_TOKENS:],
                state=state,
            )
        )
        stop, seed = codec.stop_token_ids, mix(*place, len(said))
        sampling = Sampling(max_tokens=TURN_TOKENS, stop_token_ids=stop, seed=seed)
        request = GenerateRequest(id=str(seed), tokens=talk.tokens, sampling=sampling)
        result = await engine.generate(request)
        talk.add_turn(result)
        plan, state = plan or result.tokens[:PLAN_TOKENS], result.state
        said.append(len(result.tokens))
        cut = result.finish is FinishReason.LENGTH
        if len(said) == TURNS or (len(said) > 1 and not cut):
            ended.append(sum(said))
            return Sampled(place[0], contexts, sum(said))
        talk.observe([Message(role="user", content=CUT if cut else asked[1])])


# Predictors.


class Tuned:
    """A small language model with a regression head, all weights of which are tuned
    (Heddle §4.1): it reads the prompt and the plan, and its head also has the numbers
    of the row. Lengths are predicted in units of their deviation.
    """

    def __init__(self, checkpoint: str, limit_s: float) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model, self.limit_s, self.epochs = model.base_model, limit_s, 0.0
        torch.manual_seed(0)
        self._head = torch.nn.Linear(model.config.hidden_size + NUMBERS, 1)

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        numbers = rows.table[:, :NUMBERS]
        self._mean, self._scale = numbers.mean(0), numbers.std(0) + 1e-3
        self._level, self._spread = float(remaining.mean()), float(remaining.std()) + 1e-3
        target = torch.tensor((remaining - self._level) / self._spread, dtype=torch.float32)
        body, head = [*self._model.parameters()], [*self._head.parameters()]
        rates = [{"params": body, "lr": RATE}, {"params": head, "lr": 30 * RATE}]
        optimizer = torch.optim.AdamW(rates, weight_decay=0.01)
        order, shuffle = list(range(len(target))), random.Random(0)
        started, seen = time.perf_counter(), 0
        for _ in range(EPOCHS):
            shuffle.shuffle(order)
            for start in range(0, len(order), BATCH):
                if time.perf_counter() - started > self.limit_s:
                    break
                batch = order[start : start + BATCH]
                loss = (self._read(rows, batch) - target[batch]).square().mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(body, 1.0)
                optimizer.step()
                seen += len(batch)
        self.epochs = seen / len(order)

    def predict(self, rows: Rows) -> Lengths:
        with torch.inference_mode():
            predicted = self._read(rows, range(len(rows.table))).double().numpy()
        return self._level + self._spread * np.asarray(predicted)

    def _read(self, rows: Rows, chosen: Sequence[int]) -> torch.Tensor:
        every = texts_of(rows)
        texts = [every[row] or (0,) for row in chosen]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        last = states[torch.arange(len(texts)), mask.sum(1) - 1]
        numbers = (rows.table[list(chosen), :NUMBERS] - self._mean) / self._scale
        predicted: torch.Tensor = self._head(torch.cat([last, torch.tensor(numbers)], 1))
        return predicted.squeeze(1)


def _judged(
    name: str, make: Callable[[], Regressor], first: Sequence[Sampled], later: Sequence[Sampled]
) -> dict[str, Figure]:
    """Teach a predictor the first trajectories; return its figures on later ones."""
    predictor = ProgressivePredictor(make)
    for number, one in enumerate(first):
        for context in one.contexts:
            predictor.remember(number, context)
        predictor.observe(number, one.tokens)
    started = time.perf_counter()
    predictor.fit()
    figures: dict[str, Figure] = {f"{name}_fit_ms": 1e3 * (time.perf_counter() - started)}
    asked = [(context, one.tokens) for one in later for context in one.contexts]
    questions = [predictor.remember("asked", context) for context, _ in asked]
    started = time.perf_counter()
    predicted = [predictor.estimate([question])[0] for question in questions]
    figures[f"{name}_predict_ms"] = 1e3 * (time.perf_counter() - started) / len(asked)
    for turn, stage in enumerate(("prompt", "first", "later")):
        rows = [row for row, (context, _) in enumerate(asked) if min(2, context.turn) == turn]
        guess = [predicted[row] for row in rows]
        truth = [asked[row][1] - asked[row][0].output_tokens for row in rows]
        figures[f"{name}_rho_{stage}"] = pearson(rankdata(guess), rankdata(truth))
        figures[f"{name}_recall_{stage}"] = recall_of_longest(guess, truth)
    if predictor.failed_fits or predictor.failed_predictions:
        raise RuntimeError(f"the predictor {name} fails")
    return figures
