"""One attempt at one task in an environment: drives the environment and the agent's
turns, and records what training needs.

Invariants: every call of the environment has a limit; time counts against the budget
only while the agent generates or the environment works, never while a turn queues;
every failure becomes one `EpisodeStopError` with a typed reason; tokens are those that
the engine sampled. The episode owns its environment until `close` or `kill`.
"""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from rollweave.envs.base import Episode, Observation, Score, Step
from rollweave.envs.tasks import DomainEnvProvider, OpenedEnv
from rollweave.rollout.chat.codec import AgentConfig, ChatError
from rollweave.rollout.chat.conversation import Conversation
from rollweave.rollout.driver import Budget, EpisodeStopError, TurnPort, record_of
from rollweave.schema.base import as_json, mix
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.serving import FinishReason
from rollweave.schema.work import (
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
)

T = TypeVar("T")


class EnvEpisode:
    """The `Driver` of an attempt in an environment. `provider` and `agent` belong to
    the task's domain; `seed` is the run's.
    """

    def __init__(
        self,
        command: StartInit,
        *,
        provider: DomainEnvProvider,
        agent: AgentConfig,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._command, self._task, self._limits = command, command.task, command.task.limits
        self.on_delay: Callable[[], None] = lambda: None
        self._provider, self._clock = provider, clock
        self._codec = agent.codec
        self._sampling = agent.sampling
        self._seed = mix(seed, command.trajectory_id, command.attempt)
        self._env: OpenedEnv | None = None
        self._conversation: Conversation | None = None
        self._rewards: list[float] = []
        self._success: bool | None = None
        self._engine = self._reason = ""
        self._budget = Budget(command.task.limits, clock)
        self.stop_reason = StopReason.FINISHED

    @property
    def conversation(self) -> tuple[Message, ...]:
        return self._conversation.messages if self._conversation is not None else ()

    @property
    def turns(self) -> int:
        return self._conversation.turns if self._conversation is not None else 0

    @property
    def prompt_tokens(self) -> int:
        return self._conversation.prompt_tokens if self._conversation is not None else 0

    @property
    def reward(self) -> float:
        """Return the sum of the rewards of the steps so far."""
        return sum(self._rewards)

    @property
    def budget_s(self) -> float:
        return self._budget.remaining_s

    @property
    def eval_s(self) -> float:
        return self._budget.eval_s

    @property
    def result(self) -> str:
        """Return the reason of the reward as JSON, "" if the score names none."""
        return as_json({"reason": self._reason}).decode() if self._reason else ""

    # The three stages.

    async def init(self) -> None:
        """Open and reset the environment. Raises `EpisodeStopError`."""
        started = self._clock()
        try:
            observation = await self._limited(self._open(), "starting")
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
        """Take turns until the episode ends.

        The returned reason permits training; otherwise `EpisodeStopError` is raised.
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
        """Return the reward of the ended episode. Raises `EpisodeStopError`."""
        assert self._conversation is not None, "score follows run"
        episode = Episode(
            task=self._task,
            messages=self._conversation.messages,
            rewards=tuple(self._rewards),
            success=self._success,
            stop_reason=self.stop_reason,
        )
        started = self._clock()
        try:
            call = self._provider.score(episode)
            score = await self._budget.run_limited(
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
        self._reason = score.reason
        return score

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            await self._env.close()
            self._env = None

    def kill(self) -> None:
        """Kill the environment."""
        if self._env is not None:
            self._env.kill()
            self._env = None

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """Return the attempt's record without a reward, which is stored later."""
        self.stop_reason = reason
        sequences: tuple[TokenSequence, ...] = ()
        if self._conversation is not None:
            sequences = (_within(self._conversation.sequence(), self._limits.max_tokens),)
        return msgspec.structs.replace(
            record_of(self._command, reason, error),
            sequences=sequences,
            engine=self._engine,
            success=self._success,
            timing=self._budget.timing(),
        )

    # Parts of a turn.

    async def _open(self) -> Observation:
        # Assigned before the next await, so that a timeout in `reset` still closes the
        # environment.
        self._env = await self._provider.open(self._task)
        return await self._env.reset(self._task)

    async def _agent_turn(
        self, port: TurnPort, conversation: Conversation, room: int
    ) -> tuple[str, bool]:
        """Take one turn.

        Return the agent's message, and whether the trajectory ran out of tokens in it.
        """
        number, requested_at = conversation.turns, self._clock()
        sampling = msgspec.structs.replace(
            self._sampling,
            max_tokens=min(room, self._limits.max_turn_tokens),
            seed=mix(self._seed, number),
        )
        answer = await port.turn(number, conversation.tokens, sampling)
        result = answer.result
        self._engine = answer.engine_id
        self._budget.charge_turn(requested_at, result.generate_s)
        text = conversation.add_turn(result)
        return text, result.finish is FinishReason.LENGTH and room <= self._limits.max_turn_tokens

    async def _env_step(self, port: TurnPort, conversation: Conversation, text: str) -> Step:
        env, started = self._env, self._clock()
        assert env is not None, "the environment is open while the episode runs"
        number = conversation.turns - 1
        try:
            step = await self._limited(
                env.step(text, finish_reason=conversation.finish_reason), f"step {number}"
            )
        finally:
            finished = self._clock()
            self._budget.env_s += finished - started
        port.record_span(f"step {number}", started, finished)
        if not isinstance(step, Step) or not _finite(step.reward):
            raise EpisodeStopError(
                StopReason.ENV_ERROR, f"step {number} must return a Step, got {step!r:.200}"
            )
        self._rewards.append(float(step.reward))
        conversation.reward(float(step.reward))
        return step

    def _limited(self, call: Awaitable[T], what: str) -> Awaitable[T]:
        return self._budget.run_limited(
            call, hang=StopReason.ENV_HANG, failure=StopReason.ENV_ERROR, what=what
        )


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _within(sequence: TokenSequence, max_tokens: int) -> TokenSequence:
    """Cut off the end of a last observation that exceeds the limit: nothing was sampled
    after it.
    """
    if len(sequence.tokens) <= max_tokens:
        return sequence
    segments = [segment for segment in sequence.segments if segment.start < max_tokens]
    last = segments[-1]
    assert last.kind is not SegmentKind.OUTPUT or last.end <= max_tokens, (
        "a turn never samples beyond the limit"
    )
    segments[-1] = msgspec.structs.replace(last, end=min(last.end, max_tokens))
    end = segments[-1].end
    return msgspec.structs.replace(
        sequence,
        tokens=sequence.tokens[:end],
        segments=tuple(segments),
        logprobs=sequence.logprobs[:end],
    )
