"""The interface of an environment: the messages that it exchanges with an agent, and
its optional hooks.

An `Env` is single use: constructed from the options of its `[[tasks]]` entry, `reset`
once with a task, then `step` until done. Its methods may be `async`; then they run on
the event loop that all trajectories share and must not block it. Plain methods may
block: an environment that has any gets a thread for its lifetime, on which they run one
after another (`threads.py`). A class whose plain methods return immediately may set
`blocking = False`; they then run on the event loop. A call that does not return within
`tasks.step_s` is abandoned, but only `isolation = "process"` can end it.

Beyond `reset` and `step` everything is optional. The hooks are class methods, which
receive the options of the `[[tasks]]` entry:

- `make_task(*, index, seed, split, options) -> Task`: task number `index`, equal for
  equal arguments. Without it every task is only a random seed.
- `prepare(options) -> Options`: called before each start and each dry run, perhaps
  twice and with its own result, to download what its tasks need, for example; may take
  long; returns the options with which the run goes on and which it records, so that
  what may change, such as a revision, is determined.
- `words(options) -> Sequence[str]`: the vocabulary that a word-level tokenizer needs,
  so that observations and actions are sequences of whole words.
- `transcript(rng, options) -> Sequence[Message]`: one scripted conversation for the
  supervised warm-up. Its docstring says what it contains, and whether that reveals
  answers.
- `prompts(options) -> Iterable[tuple[str, Sequence[Message]]]`: the first messages of
  every task, each with its location (file and line, for example), so that a dry run can
  name prompts that are too long.
- `drops_overlong(options) -> bool`: whether overlong prompts are left out instead of
  refused. The run's options then list their locations in `left_out`, and `make_task`
  must not return these tasks.
- `allowed_words(options) -> Sequence[str]`: an action grammar: the only words that the
  agent may sample (empty: all).
- `score(episode, options) -> float | Score` (may be async): the reward of a complete
  episode, computed in the EVAL stage, after the environment is closed. Without it the
  reward is the sum of the steps' rewards.

An instance may also have `close()`, which releases what `reset` acquired.
"""

import enum
import json
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, Self

from rollweave.schema.base import Struct, TaskId, mix
from rollweave.schema.chat import Message, Role
from rollweave.schema.work import StopReason, Task

Options = Mapping[str, Any]


class Split(enum.StrEnum):
    """The use of a task.

    Tasks of different splits differ if an environment has enough of them.
    """

    TRAIN = "train"
    VALIDATION = "validation"  # held out: chooses the best checkpoint
    TEST = "test"  # held out: the final result


HELD_OUT = 1 / 8
"""Share of all possible tasks in each of the two held-out splits."""


class Observation(Struct, frozen=True, kw_only=True):
    """The first messages of an episode.

    `state_key` is equal for equal states of one task ("" means none): see `TurnSpan`.
    """

    messages: tuple[Message, ...]
    state_key: str = ""

    @classmethod
    def of(cls, content: str, *, role: Role = "user", state_key: str = "") -> Self:
        """Return an observation of one message."""
        return cls(messages=(Message(role=role, content=content),), state_key=state_key)


class Step(Struct, frozen=True, kw_only=True):
    """The result of one action: the answer, its reward, and whether the episode is over
    (`messages` may then be empty).

    `success` of the last step says whether the task was solved. If neither steps nor
    scores of an environment ever set it, results are mean rewards: success is not
    derived from them.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    success: bool | None = None
    state_key: str = ""

    @classmethod
    def of(
        cls,
        content: str,
        *,
        reward: float = 0.0,
        done: bool = False,
        success: bool | None = None,
        role: Role = "user",
        state_key: str = "",
    ) -> Self:
        """Return a step with an answer of one message."""
        message = Message(role=role, content=content)
        return cls(
            messages=(message,), reward=reward, done=done, success=success, state_key=state_key
        )


class Episode(Struct, frozen=True, kw_only=True):
    """An ended trajectory from the environment's point of view.

    `rewards` has one entry for each step taken.
    """

    task: Task
    messages: tuple[Message, ...]
    rewards: tuple[float, ...] = ()
    success: bool | None = None
    stop_reason: StopReason = StopReason.FINISHED

    def actions(self) -> tuple[str, ...]:
        """Return the agent's messages, turn by turn."""
        return tuple(message.content for message in self.messages if message.role == "assistant")


class Score(Struct, frozen=True, kw_only=True):
    """The reward of a trajectory, and whether the task was solved.

    `success` is None if it is unknown or undefined. `reason`, if given, says why the
    reward is what it is; it is stored with the trajectory.
    """

    reward: float
    success: bool | None = None
    reason: str = ""


class Env(Protocol):
    """A single-use environment.

    A `step` with a parameter `finish_reason` receives how the agent's turn ended:
    "stop", or "length" if it was cut at `max_turn_tokens`, so that `"righ"` need not be
    taken for an answer. A scorer finds it in each message of the episode.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin `task`."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply the agent's message.

        It must not raise for a message that makes no sense; the answer should say so.
        """


def new_task(*, seed: int = 0, **payload: Any) -> Task:
    """Return a task for `make_task` to return.

    The task source fills in id, domain and limits.
    """
    return Task(id=TaskId(""), env="", seed=seed, payload=json.dumps(payload, sort_keys=True))


def payload_of(task: Task) -> dict[str, Any]:
    """Return the payload with which `new_task` was called."""
    payload = json.loads(task.payload)
    if not isinstance(payload, dict):
        raise ValueError(f"task.payload must be a JSON object, got {task.payload[:80]}")
    return payload


def split_of(content: str) -> Split:
    """Return the split to which a task belongs by its content, so that no training task
    is ever in a held-out set, whatever is drawn.
    """
    place = mix("split", content) / 2**63
    if place < HELD_OUT:
        return Split.VALIDATION
    return Split.TEST if place < 2 * HELD_OUT else Split.TRAIN
