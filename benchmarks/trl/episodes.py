"""Episodes in lockstep: every running episode takes a turn in each generation, as a
rollout function of TRL has to.

Invariants: the tokens are those of our own episodes (`rollout/env_episode.py`), from
the same codec and within the same limits; only sampled tokens have a 1 in the mask.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollweave.envs.base import Episode, Options
from rollweave.envs.boundary import score_episode
from rollweave.envs.registry import resolve
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.chat import Message
from rollweave.schema.work import Task

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Samples one turn, with its end, for each context."""


@dataclass
class Played:
    """One episode: its prompt, all later tokens, and which of these were sampled; its
    messages, and the rewards of its steps.
    """

    prompt: list[int]
    messages: list[Message]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
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
    episodes = []
    for env, task in zip(envs, tasks, strict=True):
        messages = env.reset(task).messages
        episodes.append(Played(prompt=list(codec.start(messages)), messages=list(messages)))
    while running := [place for place, one in enumerate(episodes) if one.running]:
        turns = generate([episodes[place].context for place in running])
        for place, turn in zip(running, turns, strict=True):
            _take(episodes[place], envs[place], tasks[place], turn, codec)
    asyncio.run(_score(tasks, episodes, options))
    return episodes


async def _score(tasks: Sequence[Task], episodes: Sequence[Played], options: Options) -> None:
    """Set the rewards as a run does."""
    for task, one in zip(tasks, episodes, strict=True):
        episode = Episode(task=task, messages=tuple(one.messages), rewards=tuple(one.rewards))
        one.reward = (await score_episode(task.env, options, episode)).reward


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
    text = codec.text(turn)
    step = env.step(text)
    episode.messages += [Message(role="assistant", content=text), *step.messages]
    episode.rewards.append(step.reward)
    if step.done:
        episode.running = False
        return
    episode.append(codec.extend(turn, step.messages), sampled=False)
    if episode.turns == task.limits.max_turns or len(episode.context) >= task.limits.max_tokens:
        episode.running = False
