"""Regressors of the remaining length: linear and boosted trees on the whole row, one
that also has the policy's own states, a small language model that reads the prompt and
the plan, and the baselines of Heddle §7.2.

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
    PROMPT,
    PROMPT_BUCKETS,
    SIBLING_MEAN,
    TURN,
    WIDTH,
    Lengths,
    Regressor,
    Rows,
    Table,
)
from rollweave.io.extras import from_extra
from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import PROMPT_TOKENS

with from_extra("predict"):
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge as SklearnRidge
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import ThreadpoolController

Matrix = NDArray[np.float64]

ALPHA = 1.0
"""Ridge's penalty on standardized columns: a thousand pairs outweigh it, and columns
that never vary stay at 0.
"""

ALPHA_OF_TEXT = 100.0
"""The same for columns of hashed texts and of states, of which there are many: in a few
hundred pairs of few different prompts, they fit the prompts instead of the lengths.
"""

TREES = 30
"""Boosting rounds: on simulated trajectories 15 to 60 rounds did equally well, and more
rounds worse.
"""

BATCH = 16
"""Number of texts read in one batch: a batch of texts of 512 tokens fits into memory
next to everything else.
"""

CACHED_TEXTS = 16_384
"""Number of texts whose states are cached: one per attempt that the predictor
remembers, read once instead of at every turn.
"""

COMPONENTS = 32
"""Number of components kept of a hidden state.

The turns of a trajectory share its text, so hundreds of trajectories do not support
more.
"""

TEXTS = slice(NUMBERS + DOMAINS, WIDTH)
"""The columns of a row that hold hashed texts."""

Text = tuple[int, ...]


@functools.cache
def _threads() -> ThreadpoolController:
    """Control the threads of BLAS and OpenMP: cores belong to engines, and with one
    thread sums keep their order.
    """
    return ThreadpoolController()


class Affine:
    """A ridge on standardized columns, folded into one product with the raw columns."""

    def __init__(self, columns: Matrix, target: Lengths, *texts: slice) -> None:
        """Fit `columns` of shape (n, m) to `target` (n,). `texts` are the columns with
        the penalty of texts.
        """
        share = np.ones(columns.shape[1])
        for text in texts:
            share[text] = (ALPHA / ALPHA_OF_TEXT) ** 0.5
        with _threads().limit(limits=1):
            scaler = StandardScaler().fit(columns)
            ridge = SklearnRidge(alpha=ALPHA).fit(scaler.transform(columns) * share, target)
        self._weights: Lengths = ridge.coef_ * share / scaler.scale_
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
    """Linear in the numbers, separately per domain, and in the texts."""

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        self._columns = ByDomain(rows.table)
        self._affine = Affine(self._columns(rows.table), remaining, TEXTS)

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


class Policy:
    """`Ridge` with the policy's own state, which is zero where a context has none; a
    column tells whether it has one. Where no context has one, it is `Ridge`.
    """

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        self._columns = ByDomain(rows.table)
        self._affine = Affine(self._all(rows), remaining, TEXTS, slice(-STATE_WIDTH, None))

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._all(rows))

    def _all(self, rows: Rows) -> Matrix:
        states = np.zeros((len(rows.states), 1 + STATE_WIDTH))
        known = [row for row, state in enumerate(rows.states) if len(state)]
        if known:
            states[known] = np.stack([[1.0, *rows.states[row]] for row in known])
        return np.hstack([self._columns(rows.table), states])


class Prompt:
    """Prompt-only prediction (Heddle §7.2, model-based): linear in the prompt's length,
    separately per domain, and in its text.
    """

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        table, total = first_rows(rows, remaining)
        self._affine = Affine(self._columns(table), total, slice(-PROMPT_BUCKETS, None))

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._columns(rows.table)) - rows.table[:, OUTPUT]

    def _columns(self, table: Table) -> Matrix:
        prompt, domains = table[:, [LOG_PROMPT]].astype(np.float64), domains_of(table)
        return np.hstack([prompt, domains, prompt * domains, table[:, PROMPT:]])


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
        self._cache: OrderedDict[Text, Lengths] = OrderedDict()

    def __call__(self, texts: Sequence[Text]) -> Matrix:
        """Return the mean last hidden state of each text, shape (n, hidden); zeros for
        an empty text.
        """
        states: dict[Text, Lengths] = {(): np.zeros(self._hidden)}
        unread = []
        for text in dict.fromkeys(texts):
            if text in self._cache:
                states[text] = self._cache[text]
            elif text:
                unread.append(text)
        unread.sort(key=len)  # reduces padding
        for start in range(0, len(unread), BATCH):
            batch = unread[start : start + BATCH]
            for text, state in zip(batch, self._read(batch), strict=True):
                states[text] = self._cache[text] = state
        while len(self._cache) > CACHED_TEXTS:
            self._cache.popitem(last=False)
        return np.stack([states[text] for text in texts])

    def _read(self, texts: Sequence[Text]) -> Matrix:
        import torch

        width = max(map(len, texts))
        ids = torch.tensor(
            [
                [token % self._vocabulary for token in text] + [0] * (width - len(text))
                for text in texts
            ]
        )
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
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
    language model has for the prompt followed by the plan (Heddle §4.1).

    The paper fine-tunes a Qwen of 0.6B for minutes. Here the model stays fixed and only
    its regression head is fitted, in closed form, so that a fit ends before the next
    training step does. Texts are token ids of the agent's vocabulary: the checkpoint's
    tokenizer should be the agent's. Ids unknown to the checkpoint are folded into known
    ones, and never fail.
    """

    def __init__(self, checkpoint: str) -> None:
        self._backbone = backbone(checkpoint)

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        states = self._backbone(texts_of(rows))
        # in order of their variance
        _, components = np.linalg.eigh(np.cov(states, rowvar=False))
        self._components: Matrix = components[:, -COMPONENTS:]
        self._columns = ByDomain(rows.table)
        self._affine = Affine(self._all(rows.table, states), remaining, TEXTS)

    def predict(self, rows: Rows) -> Lengths:
        return self._affine(self._all(rows.table, self._backbone(texts_of(rows))))

    def _all(self, table: Table, states: Matrix) -> Matrix:
        return np.hstack([self._columns(table), states @ self._components])


def texts_of(rows: Rows) -> list[Text]:
    """Return the text of each row: its prompt, followed by its plan."""
    pairs = zip(rows.prompts, rows.plans, strict=True)
    return [prompt[-PROMPT_TOKENS:] + plan[:PLAN_TOKENS] for prompt, plan in pairs]


BY_NAME: dict[str, type[Regressor]] = {
    "ridge": Ridge,
    "boosted": Boosted,
    "policy": Policy,
    "prompt": Prompt,
    "history": History,
}
