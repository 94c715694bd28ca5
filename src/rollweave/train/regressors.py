"""Regressors of the remaining length: linear and boosted trees on the whole row, a
small language model that reads the plan, and the baselines of Heddle §7.2.

Invariants: they use one thread and no randomness, and the same row gives the same
number, alone or among many. A baseline predicts a trajectory's total length from the
facts known before its first turn, and subtracts the tokens sampled since. torch and
transformers are imported by the language model alone, because that takes seconds.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollweave.core.policy.predict import (
    DOMAINS,
    LOG_PROMPT,
    NUMBERS,
    OUTPUT,
    PLAN_TOKENS,
    SIBLING_MEAN,
    TURN,
    Lengths,
    Regressor,
    Rows,
    Table,
)
from rollweave.io.extras import from_extra

with from_extra("predict"):
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge as SklearnRidge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import ThreadpoolController

Matrix = NDArray[np.float64]

ALPHA = 1.0
"""Ridge's penalty on standardized columns: a thousand pairs outweigh it, and columns
that never vary stay at 0.
"""

TREES = 30
"""Boosting rounds: on simulated trajectories 15 to 60 rounds did equally well, and more
rounds worse.
"""

BATCH = 16
"""Number of plans read in one batch: a batch of plans of 256 tokens fits into memory
next to everything else.
"""

CACHED_PLANS = 16_384
"""Number of plans whose states are cached: a plan per attempt that the predictor
remembers, read once instead of at every turn.
"""

COMPONENTS = 32
"""Number of components kept of a hidden state.

The turns of a trajectory share its plan, so hundreds of trajectories do not support
more.
"""

Plan = tuple[int, ...]


@functools.cache
def _threads() -> ThreadpoolController:
    """Control the threads of BLAS and OpenMP: cores belong to engines, and with one
    thread sums keep their order.
    """
    return ThreadpoolController()


class Affine:
    """A ridge on standardized columns, folded into one product with the raw columns."""

    def __init__(self, columns: Matrix, target: Lengths) -> None:
        """Fit `columns` of shape (n, m) to `target` (n,)."""
        with _threads().limit(limits=1):
            scaler, ridge = make_pipeline(StandardScaler(), SklearnRidge(alpha=ALPHA)).fit(
                columns, target
            )
        self._weights: Lengths = ridge.coef_ / scaler.scale_
        self._intercept = float(ridge.intercept_ - self._weights @ scaler.mean_)

    def __call__(self, columns: Matrix) -> Lengths:
        # Not BLAS: it uses threads, and rounds a row differently among many rows than
        # alone.
        predicted: Lengths = np.einsum("nm,m->n", columns, self._weights) + self._intercept
        return predicted


class ByDomain:
    """The row, with its numbers repeated for each domain in the training data: slopes
    differ between domains, and new domains share a slope.
    """

    def __init__(self, table: Table) -> None:
        used = np.flatnonzero(domains_of(table).any(axis=0))
        self._used = used if len(used) > 1 else used[:0]

    def __call__(self, table: Table) -> Matrix:
        """Return columns for an `Affine`, shape (n, m)."""
        numbers, domains = table[:, :NUMBERS], domains_of(table)
        return np.hstack([table, *(numbers * domains[:, [slot]] for slot in self._used)]).astype(
            np.float64
        )


def domains_of(table: Table) -> Table:
    """Return the one-hot columns of the domain, shape (n, DOMAINS)."""
    return table[:, NUMBERS : NUMBERS + DOMAINS]


def first_rows(rows: Rows, remaining: Lengths) -> tuple[Table, Lengths]:
    """Return the earliest known row of each trajectory, and its total length: the rows
    of the lowest turn.
    """
    table = rows.table
    first = table[:, TURN] == table[:, TURN].min()
    return table[first], remaining[first] + table[first, OUTPUT]


class Ridge:
    """Linear in the numbers, separately per domain, and in the plan."""

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        self._columns = ByDomain(rows.table)
        self._affine = Affine(self._columns(rows.table), remaining)

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._columns(rows.table))


class Boosted:
    """Gradient-boosted trees on the whole row."""

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        self._trees = HistGradientBoostingRegressor(
            max_iter=TREES, early_stopping=False, random_state=0
        )
        with _threads().limit(limits=1):
            self._trees.fit(rows.table, remaining)

    def predict(self, rows: Rows) -> Lengths:
        with _threads().limit(limits=1):
            predicted: Lengths = self._trees.predict(rows.table)
        return predicted


class Prompt:
    """Prompt-only prediction (Heddle §7.2, model-based): linear in the prompt's length,
    separately per domain.

    Contexts do not contain the prompt's text, which the paper's baseline reads.
    """

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        table, total = first_rows(rows, remaining)
        self._affine = Affine(self._columns(table), total)

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._columns(rows.table)) - rows.table[:, OUTPUT]

    def _columns(self, table: Table) -> Matrix:
        prompt, domains = table[:, [LOG_PROMPT]].astype(np.float64), domains_of(table)
        return np.hstack([prompt, domains, prompt * domains])


class History:
    """Statistics of the same prompt (Heddle §7.2, history-based): the mean length of
    its siblings, else of its domain.
    """

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        table, total = first_rows(rows, remaining)
        domains = domains_of(table).astype(np.float64)
        counts = domains.sum(axis=0)
        self._mean = total.mean()
        self._by_domain = np.where(
            counts > 0, (total @ domains) / np.maximum(counts, 1.0), self._mean
        )

    def predict(self, rows: Rows) -> Lengths:
        table, domains = rows.table, domains_of(rows.table)
        usual = np.where(domains.any(axis=1), domains @ self._by_domain, self._mean)
        siblings = table[:, SIBLING_MEAN]
        predicted: Lengths = np.where(siblings > 0, siblings, usual) - table[:, OUTPUT]
        return predicted


class Backbone:
    """The checkpoint without its language-model head."""

    def __init__(self, checkpoint: str) -> None:
        with from_extra("predict"):
            from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        self._model = model.base_model
        self._vocabulary: int = model.config.vocab_size
        self._hidden: int = model.config.hidden_size
        self._cache: OrderedDict[Plan, Lengths] = OrderedDict()

    def __call__(self, plans: Sequence[Plan]) -> Matrix:
        """Return the mean last hidden state of each plan, shape (n, hidden); zeros for
        an empty plan.
        """
        cut = [plan[:PLAN_TOKENS] for plan in plans]
        states: dict[Plan, Lengths] = {(): np.zeros(self._hidden)}
        unread = []
        for plan in dict.fromkeys(cut):
            if plan in self._cache:
                states[plan] = self._cache[plan]
            elif plan:
                unread.append(plan)
        unread.sort(key=len)  # reduces padding
        for start in range(0, len(unread), BATCH):
            batch = unread[start : start + BATCH]
            for plan, state in zip(batch, self._read(batch), strict=True):
                states[plan] = self._cache[plan] = state
        while len(self._cache) > CACHED_PLANS:
            self._cache.popitem(last=False)
        return np.stack([states[plan] for plan in cut])

    def _read(self, plans: Sequence[Plan]) -> Matrix:
        import torch

        width = max(map(len, plans))
        ids = torch.tensor(
            [
                [token % self._vocabulary for token in plan] + [0] * (width - len(plan))
                for plan in plans
            ]
        )
        mask = torch.tensor([[1] * len(plan) + [0] * (width - len(plan)) for plan in plans])
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            mean: Matrix = ((states * weights).sum(1) / weights.sum(1)).double().numpy()
        return mean


@functools.lru_cache(1)
def backbone(checkpoint: str) -> Backbone:
    """Load the backbone once per process: every fit makes a new head."""
    return Backbone(checkpoint)


class SmallLm:
    """A ridge on the row, and on the main components of the states that a small
    language model has for the plan (Heddle §4.1).

    The paper fine-tunes a Qwen of 0.6B for minutes. Here the model stays fixed and only
    its regression head is fitted, in closed form, so that a fit ends before the next
    training step does. Plans are token ids of the agent's vocabulary: the checkpoint's
    tokenizer should be the agent's. Ids unknown to the checkpoint are folded into known
    ones, and never fail.
    """

    def __init__(self, checkpoint: str) -> None:
        self._backbone = backbone(checkpoint)

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        states = self._backbone(rows.plans)
        # in order of their variance
        _, components = np.linalg.eigh(np.cov(states, rowvar=False))
        self._components: Matrix = components[:, -COMPONENTS:]
        self._columns = ByDomain(rows.table)
        self._affine = Affine(self._all(rows.table, states), remaining)

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._all(rows.table, self._backbone(rows.plans)))

    def _all(self, table: Table, states: Matrix) -> Matrix:
        return np.hstack([self._columns(table), states @ self._components])


BY_NAME: dict[str, type[Regressor]] = {
    "ridge": Ridge,
    "boosted": Boosted,
    "prompt": Prompt,
    "history": History,
}
