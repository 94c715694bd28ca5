"""Heddle Fig. 13: the quality of predicted remaining lengths, before a trajectory's
first turn and after one and two.

Batches of groups are drawn from the simulator's families; regressors that learned from
the earlier batches predict each. Nothing is fitted to the paper. Limits: simulated
trajectories have no text, so the plan of the first turn, which the paper's regressor
reads, is empty, and a prompt is known by its length alone, which in the families is
independent of its task's difficulty: from that alone, the longest are predicted by
chance.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rollweave.core.policy.predict import ProgressivePredictor
from rollweave.schema.base import Struct
from rollweave.schema.training import LengthContext
from rollweave.train.lengths import build_regressor, check_installed
from rollweave_papers.measures import pearson, recall_of_longest
from rollweave_papers.results import Experiment, Row
from rollweave_sim.workload import Plan, workload

NAME = "heddle-fig13"

TASKS = ("coding", "search", "math")

MEMBERS = 16
"""Samples of a prompt (Heddle §7)."""

SHARE = 0.1
"""Share of the longest trajectories. The paper's shares are missing from our copy."""

TOKEN_S = 0.02
"""Seconds of a token, the same for all: it decides which siblings have ended at a
prediction. Assumption.
"""

MIN_TURNS = 3
"""Minimum turns of the judged trajectories: all continue after the second turn, so that
every row judges the same ones.
"""


class Batches(Struct, frozen=True, kw_only=True):
    """`count` batches of `groups` groups. Every batch but the first is predicted."""

    count: int
    groups: int


FULL, QUICK = Batches(count=5, groups=100), Batches(count=3, groups=25)


class Trajectory(NamedTuple):
    """The inputs of predictions for one trajectory: contexts before each turn and after
    the last, and its total length.

    `recalled` is the context before the first turn for a predictor that remembers the
    same prompt's members of an earlier epoch.
    """

    contexts: Sequence[LengthContext]
    recalled: LengthContext
    tokens: int


class Quality(Struct, frozen=True, kw_only=True):
    """Quality of predicted total lengths, mean over batches."""

    recall: float
    pearson: float


def quality(task: str, batches: Batches) -> dict[str, Quality]:
    """Return the quality of `history`, `prompt`, and of the regressor `ridge` by turns:
    `after 0`, `after 1`, `after 2`.
    """
    check_installed()
    ways: dict[str, tuple[str, Callable[[Trajectory], Sequence[LengthContext]]]] = {
        "history": ("history", lambda one: [one.recalled]),
        "prompt": ("prompt", lambda one: one.contexts[:1]),
        "after": ("ridge", lambda one: one.contexts),
    }
    measured: dict[str, list[tuple[float, float]]] = {}
    drawn = [
        list(trajectories_of(task, batches.groups * number, batches.groups))
        for number in range(batches.count)
    ]
    for way, (name, contexts_of) in ways.items():
        predictor = ProgressivePredictor(functools.partial(build_regressor, name))
        for number, batch in enumerate(drawn):
            if number > 0:
                for turns, answers in _answers(predictor, batch, contexts_of).items():
                    measured.setdefault(f"{way} {turns}" if way == "after" else way, []).append(
                        answers
                    )
            _learn(predictor, batch, contexts_of)
    return {
        name: Quality(
            recall=statistics.fmean(r for r, _ in measured),
            pearson=statistics.fmean(p for _, p in measured),
        )
        for name, measured in measured.items()
    }


def _answers(
    predictor: ProgressivePredictor,
    batch: Sequence[Trajectory],
    contexts_of: Callable[[Trajectory], Sequence[LengthContext]],
) -> dict[int, tuple[float, float]]:
    """Return recall and correlation after 0, 1 and 2 turns, as far as predicted."""
    measured_trajectories = [one for one in batch if len(one.contexts) > MIN_TURNS]
    totals = [one.tokens for one in measured_trajectories]
    measured = {}
    for turns in range(min(MIN_TURNS, *(len(contexts_of(one)) for one in measured_trajectories))):
        contexts = [contexts_of(one)[turns] for one in measured_trajectories]
        left = predictor.estimate([predictor.remember("judged", context) for context in contexts])
        guess = [
            context.output_tokens + tokens for context, tokens in zip(contexts, left, strict=True)
        ]
        measured[turns] = (recall_of_longest(guess, totals, SHARE), pearson(guess, totals))
    predictor.observe("judged", None)
    return measured


def _learn(
    predictor: ProgressivePredictor,
    batch: Sequence[Trajectory],
    contexts_of: Callable[[Trajectory], Sequence[LengthContext]],
) -> None:
    for number, one in enumerate(batch):
        for context in contexts_of(one):
            predictor.remember(number, context)
        predictor.observe(number, one.tokens)
    predictor.fit()


def trajectories_of(task: str, first: int, groups: int) -> Iterator[Trajectory]:
    """Return the trajectories of `groups` groups, each as if it never waited for an
    engine.
    """
    work = workload(task)
    for index in range(first, first + groups):
        earlier, now = (
            [
                work.plan(index=index, member=member, attempt=epoch, seed=0)
                for member in range(MEMBERS)
            ]
            for epoch in (0, 1)
        )
        known = [sum(turn.output_tokens for turn in plan.turns) for plan in earlier]
        ends = [
            (
                sum(turn.output_tokens * TOKEN_S + turn.env_s for turn in plan.turns),
                sum(t.output_tokens for t in plan.turns),
            )
            for plan in now
        ]
        for member, plan in enumerate(now):
            others = ends[:member] + ends[member + 1 :]
            contexts = list(_contexts(task, plan, others))
            recalled = msgspec.structs.replace(
                contexts[0],
                siblings=MEMBERS,
                sibling_mean=statistics.fmean(known),
                sibling_longest=max(known),
            )
            yield Trajectory(contexts, recalled, ends[member][1])


def _contexts(
    task: str, plan: Plan, others: Sequence[tuple[float, int]]
) -> Iterator[LengthContext]:
    """Return the contexts of the core's predictions: before the first turn, and at the
    end of each.

    `others` are the siblings' ends and lengths.
    """
    at = tool_s = 0.0
    output = last = observation = 0
    for number in range(len(plan.turns) + 1):
        if number:
            last = plan.turns[number - 1].output_tokens
            output, at = output + last, at + last * TOKEN_S
        ended_tokens = [tokens for end, tokens in others if end <= at]
        yield LengthContext(
            domain=task,
            prompt_tokens=plan.prompt_tokens,
            turn=number,
            output_tokens=output,
            last_output_tokens=last,
            observation_tokens=observation,
            tool_s=tool_s,
            siblings=len(ended_tokens),
            sibling_mean=statistics.fmean(ended_tokens) if ended_tokens else 0.0,
            sibling_longest=max(ended_tokens, default=0),
        )
        if number:
            env_s = plan.turns[number - 1].env_s
            at, tool_s, observation = (
                at + env_s,
                tool_s + env_s,
                observation + plan.turns[number - 1].observation_tokens,
            )


LABELS = {
    "history": ("history-based", "mean length of the same prompt's 16 members in an earlier epoch"),
    "prompt": (
        "prompt-only",
        "by the prompt's length, which is drawn independently of its task's difficulty: chance; "
        "there is no text to read",
    ),
    "after 0": ("ours before the first turn", "nothing but the prompt's length is known: chance"),
    "after 1": ("ours after one turn", "plans hold no text"),
    "after 2": ("ours after two turns", "plans hold no text"),
}


def fig13(quick: bool) -> list[Row]:
    """Return the precision of predicted total lengths: recall of the longest tenth,
    correlation.

    No values are in the text.
    """
    batches = QUICK if quick else FULL
    size = (
        f"mean of {batches.count - 1} batches of {batches.groups * MEMBERS:,}, of which those of "
        f"{MIN_TURNS} turns or more"
    )
    rows = []
    for task in TASKS:
        for way, measured in quality(task, batches).items():
            label, note = LABELS[way]
            for measure, value in (("recall", measured.recall), ("Pearson", measured.pearson)):
                row = f"{task}, {measure}: {label}"
                rows.append(Row(row=row, ours=value, unit="", note=f"{note}; {size}", own=True))
    needs = "missing: text in simulated trajectories, for its regressor of 0.6B to read"
    return [*rows, Row(row="Heddle's predictor", ours=None, unit="", note=needs)]


EXPERIMENT = Experiment(
    NAME,
    "Length prediction, recall of the longest tenth and correlation",
    "Heddle Fig. 13, §7.2",
    fig13,
)
