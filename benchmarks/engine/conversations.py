"""Conversations of random tokens that share no prefix: the work of a profile."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.engine.harness import Harness
from rollweave.schema.serving import Add, GenerateRequest, Sampling

TURNS = 3
"""Turns of each conversation."""

PARTS = 3
"""Parts in which turns arrive while others decode."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The measured work: concurrent conversations, tokens of their prompts, of a turn,
    and of an environment's answer to it.
    """

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prompts: tuple[int, ...] = (16, 128, 448)
    output: int = 8
    observation: int = 12
    repeats: int = 3


class Conversations:
    """Conversations of random tokens that share no prefix."""

    def __init__(self, engine: Harness, vocabulary: int, grid: Grid) -> None:
        self._engine, self._vocabulary, self._grid = engine, vocabulary, grid
        self._random = torch.Generator().manual_seed(0)
        self._numbers = itertools.count()

    def random_tokens(self, count: int) -> tuple[int, ...]:
        """Return that many unused random tokens."""
        return tuple(torch.randint(self._vocabulary, (count,), generator=self._random).tolist())

    def turn(self, contexts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Run one turn of each conversation together; the contexts then grow by the
        agent's output and an answer to it.
        """
        results = self._engine.generate(self._requests(contexts, self._grid.output))
        return [
            (*context, *result.tokens, *self.random_tokens(self._grid.observation))
            for context, result in zip(contexts, results, strict=True)
        ]

    def overlapping(
        self, first_half: Sequence[tuple[int, ...]], second_half: Sequence[tuple[int, ...]]
    ) -> None:
        """Decode `these` while the turns of `those` arrive and end, in three parts."""
        first = self._requests(first_half, PARTS * self._grid.output)
        self._engine.post(*(Add(request=request) for request in first))
        for part in range(PARTS):
            self._engine.generate(self._requests(second_half[part::PARTS], self._grid.output))
        self._engine.results(first)

    def _requests(self, contexts: Sequence[tuple[int, ...]], output: int) -> list[GenerateRequest]:
        sampling = Sampling(max_tokens=output)
        return [
            GenerateRequest(id=str(next(self._numbers)), tokens=context, sampling=sampling)
            for context in contexts
        ]


def together(conversations: Conversations, count: int, prompt: int) -> None:
    """Run `count` conversations that begin with `prompt` tokens each and generate at
    the same time.
    """
    contexts = [conversations.random_tokens(prompt) for _ in range(count)]
    for _ in range(TURNS):
        contexts = conversations.turn(contexts)


def staggered(conversations: Conversations, count: int, prompt: int) -> None:
    """Run half of the conversations, while the turns of the others arrive in
    between.
    """
    contexts = conversations.turn([conversations.random_tokens(prompt) for _ in range(count)])
    conversations.overlapping(contexts[: count // 2], contexts[count // 2 :])
