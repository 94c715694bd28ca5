"""Episodes in lockstep: every running episode takes a turn in each generation, as a
rollout function of TRL has to.

Invariants: the tokens are those of our own episodes (`rollout/env_episode.py`), from
the same codec and within the same limits; only sampled tokens have a 1 in the mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollweave.envs.base import Options
from rollweave.envs.registry import resolve
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.work import Task

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Samples one turn, with its end, for each context."""


@dataclass
class Played:
    """One episode: its prompt, all later tokens, and which of these were sampled."""

    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    running: bool = True

    @property
    def context(self) -> list[int]:
        """Return all tokens so far."""
        return [*self.prompt, *self.completion]

    def append(self, tokens: Sequence[int], *, sampled: bool) -> None:
        """Append tokens of the agent, or of the environment."""
        self.completion += tokens
        self.mask += [int(sampled)] * len(tokens)


def play(
    tasks: Sequence[Task], *, options: Options, codec: ChatCodec, generate: Generate
) -> list[Played]:
    """Play one episode of each task to its end, and return them in order."""
    envs = [resolve(task.env)(**options) for task in tasks]
    episodes = [
        Played(prompt=list(codec.start(env.reset(task).messages)))
        for env, task in zip(envs, tasks, strict=True)
    ]
    while running := [place for place, one in enumerate(episodes) if one.running]:
        turns = generate([episodes[place].context for place in running])
        for place, turn in zip(running, turns, strict=True):
            _take(episodes[place], envs[place], tasks[place], turn, codec)
    return episodes


def _take(episode: Played, env: Any, task: Task, turn: list[int], codec: ChatCodec) -> None:
    """Apply one turn to the environment, and append its answer."""
    room = task.limits.max_tokens - len(episode.context)
    ended = bool(turn) and turn[-1] in codec.stop_token_ids and len(turn) <= room
    turn = turn[:room]
    episode.append(turn, sampled=True)
    episode.turns += 1
    if len(turn) == room and not ended:
        episode.running = False
        return
    step = env.step(codec.text(turn))
    episode.reward += step.reward
    if step.done:
        episode.running = False
        return
    episode.append(codec.extend(turn, step.messages), sampled=False)
    if episode.turns == task.limits.max_turns or len(episode.context) >= task.limits.max_tokens:
        episode.running = False
