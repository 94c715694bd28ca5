"""One attempt at one task: drives the environment and the agent's turns, and keeps what
training must know.

Invariants: every call of the environment has a limit; time counts against the budget
only while the agent generates or the environment works, never while a turn queues;
whatever goes wrong becomes one `EpisodeStopError` with a typed reason; tokens are those
that the engine sampled. The episode owns its environment until `close` or `kill`.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from rollweave.envs.base import Episode as Seen
from rollweave.envs.base import Observation, Score, Step, mix
from rollweave.rollout.budget import Budget, EpisodeStopError
from rollweave.rollout.chat.codec import ChatError
from rollweave.rollout.chat.conversation import Conversation
from rollweave.rollout.driver import Speech, TurnPort
from rollweave.schema.commands import StartInit
from rollweave.schema.serving import Finish, Sampling, finish_word
from rollweave.schema.work import (
    BLAME_OF,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
)

T = TypeVar("T")


class LiveEnv(Protocol):
    """An opened environment, as `envs/process.py` has it, whatever its isolation.

    Limits are the episode's.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task. Raises `EnvError`."""

    async def step(self, action: str, *, finish_reason: str) -> Step:
        """Take the agent's words, and how they ended: "stop", or "length" where they
        were cut. Raises `EnvError`.
        """

    async def close(self) -> None:
        """Free what it holds."""

    def kill(self) -> None:
        """Free it at once, without waiting; harmless after `close`."""


class Worlds(Protocol):
    """Opens environments and scores episodes of one task domain."""

    async def open(self, task: Task, *, seed: int) -> LiveEnv:
        """A fresh environment. `seed` decides injected faults. Raises `EnvError`."""

    async def score(self, episode: Seen, *, seed: int) -> Score:
        """The reward of a whole episode. Raises `RewardError`."""


class Episode:
    """`worlds` and `speech` belong to the task's domain; `seed` is the run's."""

    def __init__(
        self,
        command: StartInit,
        *,
        worlds: Worlds,
        speech: Speech,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._command, self._task, self._limits = command, command.task, command.task.limits
        self._worlds, self._clock = worlds, clock
        self._codec = speech.codec
        self._sampling = speech.sampling
        self._seed = mix(seed, command.trajectory_id, command.attempt)
        self._env: LiveEnv | None = None
        self._conversation: Conversation | None = None
        self._rewards: list[float] = []
        self._success: bool | None = None
        self._engine = ""
        self._budget = Budget(command.task.limits, clock)
        self.stop_reason = StopReason.FINISHED

    @property
    def turns(self) -> int:
        """Turns that the agent has taken."""
        return self._conversation.turns if self._conversation is not None else 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the first turn's prompt."""
        return self._conversation.prompt_tokens if self._conversation is not None else 0

    @property
    def reward(self) -> float:
        """Of the steps so far."""
        return sum(self._rewards)

    @property
    def plan(self) -> tuple[int, ...]:
        """The first tokens of the agent's first turn."""
        return self._conversation.plan if self._conversation is not None else ()

    @property
    def budget_s(self) -> float:
        """Active seconds that are left."""
        return self._budget.left_s

    @property
    def eval_s(self) -> float:
        """Seconds that the reward took."""
        return self._budget.eval_s

    @property
    def result(self) -> str:
        """An environment keeps nothing else."""
        return ""

    # The three stages.

    async def init(self) -> None:
        """Open and reset the environment. Raises `EpisodeStopError`."""
        started = self._clock()
        try:
            observation = await self._worked(self._open(), "starting")
        finally:
            self._budget.init_s += self._clock() - started
        if not isinstance(observation, Observation):
            raise EpisodeStopError(
                StopReason.ENV_ERROR, f"reset must return an Observation, got {observation!r:.200}"
            )
        try:
            self._conversation = Conversation(
                self._codec, observation.messages, state_key=observation.state_key
            )
        except (ChatError, ValueError, TypeError) as error:
            raise EpisodeStopError(StopReason.ENV_ERROR, f"first messages: {error}") from error
        if len(self._conversation) >= self._limits.max_tokens:
            text = (
                f"the prompt has {len(self._conversation)} tokens, max_tokens is "
                f"{self._limits.max_tokens}"
            )
            raise EpisodeStopError(StopReason.ENV_ERROR, text)

    async def run(self, port: TurnPort) -> StopReason:
        """Take turns until the episode is over; the reason is one that may be trained
        on, or `EpisodeStopError` is raised.
        """
        conversation = self._conversation
        assert conversation is not None, "run follows init"
        while True:
            if conversation.turns >= self._limits.max_turns:
                return StopReason.MAX_TURNS
            room = self._limits.max_tokens - len(conversation)
            if room <= 0:
                return StopReason.MAX_TOKENS
            text, cut = await self._agent_turn(port, conversation, room)
            if cut:
                return StopReason.MAX_TOKENS
            step = await self._env_step(port, conversation, text)
            if step.done:
                self._success = step.success
                return StopReason.FINISHED
            try:
                conversation.observe(step.messages, state_key=step.state_key)
            except (ChatError, ValueError, TypeError) as error:
                raise EpisodeStopError(
                    StopReason.ENV_ERROR, f"answer to turn {conversation.turns - 1}: {error}"
                ) from error

    async def score(self) -> Score:
        """The reward of the ended episode. Raises `EpisodeStopError`."""
        assert self._conversation is not None, "score follows run"
        seen = Seen(
            task=self._task,
            messages=self._conversation.messages,
            rewards=tuple(self._rewards),
            success=self._success,
            stop_reason=self.stop_reason,
        )
        started = self._clock()
        try:
            call = self._worlds.score(seen, seed=self._seed)
            score = await self._budget.limited(
                call,
                hang=StopReason.REWARD_HANG,
                failure=StopReason.REWARD_ERROR,
                what="the reward",
            )
        finally:
            self._budget.eval_s += self._clock() - started
        if not isinstance(score, Score) or not _finite(score.reward):
            raise EpisodeStopError(
                StopReason.REWARD_ERROR, f"the reward must be a finite number, got {score!r:.200}"
            )
        return score

    async def close(self) -> None:
        """Free the environment."""
        if self._env is not None:
            await self._env.close()
            self._env = None

    def kill(self) -> None:
        """Free the environment now."""
        if self._env is not None:
            self._env.kill()
            self._env = None

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """What came of the attempt, as it is stored. The reward comes later."""
        self.stop_reason = reason
        command = self._command
        sequences: tuple[TokenSequence, ...] = ()
        if self._conversation is not None:
            sequences = (_within(self._conversation.sequence(), self._limits.max_tokens),)
        return Trajectory(
            id=command.trajectory_id,
            group_id=command.group_id,
            task=self._task,
            attempt=command.attempt,
            initiated_version=command.initiated_version,
            sequences=sequences,
            reward=None,
            stop_reason=reason,
            blame=BLAME_OF[reason],
            engine=self._engine,
            success=self._success,
            timing=self._budget.timing(),
            error=error,
        )

    # Parts of a turn.

    async def _open(self) -> Observation:
        # Kept before anything is awaited further, so that a time-out in `reset` still
        # finds what to close.
        self._env = await self._worlds.open(self._task, seed=self._seed)
        return await self._env.reset(self._task)

    async def _agent_turn(
        self, port: TurnPort, conversation: Conversation, room: int
    ) -> tuple[str, bool]:
        """The agent's words, and whether the trajectory's tokens ran out while it
        spoke.
        """
        number, asked = conversation.turns, self._clock()
        sampling = _sampling(
            self._sampling,
            max_tokens=min(room, self._limits.max_turn_tokens),
            seed=mix(self._seed, number),
        )
        answer = await port.turn(number, conversation.tokens, sampling)
        result = answer.result
        self._engine = answer.engine_id
        self._budget.took_turn(asked, result.generate_s)
        text = conversation.sampled(
            result.tokens,
            result.logprobs,
            result.versions,
            exact=not result.text_only,
            finish_reason=finish_word(result.finish),
        )
        return text, result.finish is Finish.LENGTH and room <= self._limits.max_turn_tokens

    async def _env_step(self, port: TurnPort, conversation: Conversation, text: str) -> Step:
        env, started = self._env, self._clock()
        assert env is not None, "the environment is open while the episode runs"
        number = conversation.turns - 1
        try:
            step = await self._worked(
                env.step(text, finish_reason=conversation.finish_reason), f"step {number}"
            )
        finally:
            ended = self._clock()
            self._budget.env_s += ended - started
        port.stepped(f"step {number}", started, ended)
        if not isinstance(step, Step) or not _finite(step.reward):
            raise EpisodeStopError(
                StopReason.ENV_ERROR, f"step {number} must return a Step, got {step!r:.200}"
            )
        self._rewards.append(float(step.reward))
        conversation.reward(float(step.reward))
        return step

    def _worked(self, call: Awaitable[T], what: str) -> Awaitable[T]:
        return self._budget.limited(
            call, hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR, what=what
        )


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _sampling(base: Sampling, *, max_tokens: int, seed: int) -> Sampling:
    return Sampling(
        temperature=base.temperature,
        top_p=base.top_p,
        top_k=base.top_k,
        max_tokens=max_tokens,
        stop_token_ids=base.stop_token_ids,
        stop=base.stop,
        allowed=base.allowed,
        seed=seed,
    )


def _within(sequence: TokenSequence, max_tokens: int) -> TokenSequence:
    """Without the end of a last observation that went over the limit: nothing was
    sampled after it.
    """
    if len(sequence.tokens) <= max_tokens:
        return sequence
    segments = [segment for segment in sequence.segments if segment.start < max_tokens]
    last = segments[-1]
    assert last.kind is not SegmentKind.OUTPUT or last.end <= max_tokens, (
        "a turn never samples beyond the limit"
    )
    segments[-1] = Segment(
        start=last.start, end=min(last.end, max_tokens), kind=last.kind, version=last.version
    )
    end = segments[-1].end
    return TokenSequence(
        tokens=sequence.tokens[:end],
        segments=tuple(segments),
        logprobs=sequence.logprobs[:end],
        turns=sequence.turns,
    )
