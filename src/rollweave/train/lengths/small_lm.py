"""A small language model that reads the plan (Heddle §4.1): its averaged last hidden
states are used in addition to the row of numbers.

The paper fine-tunes a Qwen of 0.6B for minutes. Here the model stays fixed and only its
regression head is fitted, in closed form, so that a fit ends before the next training
step does. Plans are token ids of the agent's vocabulary: the checkpoint's tokenizer
should be the agent's. Invariant: ids unknown to the checkpoint are folded into known
ones, and never fail.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollweave.core.policy.predict import PLAN_TOKENS, Lengths, Rows, Table
from rollweave.io.extras import from_extra
from rollweave.train.lengths.regressors import Affine, ByDomain, Matrix

with from_extra("predict"):
    from transformers import AutoModelForCausalLM

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


class Backbone:
    """The checkpoint without its language-model head."""

    def __init__(self, checkpoint: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
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

    @torch.inference_mode()
    def _read(self, plans: Sequence[Plan]) -> Matrix:
        width = max(map(len, plans))
        ids = torch.tensor(
            [
                [token % self._vocabulary for token in plan] + [0] * (width - len(plan))
                for plan in plans
            ]
        )
        mask = torch.tensor([[1] * len(plan) + [0] * (width - len(plan)) for plan in plans])
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean: Matrix = ((states * weights).sum(1) / weights.sum(1)).double().numpy()
        return mean


@functools.lru_cache(1)
def backbone(checkpoint: str) -> Backbone:
    """Load the backbone once per process: every fit makes a new head."""
    return Backbone(checkpoint)


class SmallLm:
    """A ridge on the row, and on the main components of a language model's states for
    its plan.
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
