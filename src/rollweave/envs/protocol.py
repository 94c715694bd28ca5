"""Messages between the run and a process that holds one environment at a time.

Each command has one reply.
"""

from typing import Any

from rollweave.envs.base import Episode, Observation, Score, Step
from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.work import Task


class EnvSpec(Struct, frozen=True, kw_only=True):
    env: str
    options: dict[str, Any]


class Open(TaggedStruct, frozen=True, kw_only=True):
    """→ Done | Failed"""

    spec: EnvSpec


class Reset(TaggedStruct, frozen=True, kw_only=True):
    """→ Observed | Failed"""

    task: Task


class Act(TaggedStruct, frozen=True, kw_only=True):
    """→ Stepped | Failed"""

    action: str
    finish_reason: str = "stop"


class Close(TaggedStruct, frozen=True, kw_only=True):
    """→ Done | Failed. The process may then open another environment."""


class Evaluate(TaggedStruct, frozen=True, kw_only=True):
    """→ Scored | Failed"""

    spec: EnvSpec
    episode: Episode


EnvCommand = Open | Reset | Act | Close | Evaluate


class Done(TaggedStruct, frozen=True, kw_only=True):
    pass


class Observed(TaggedStruct, frozen=True, kw_only=True):
    observation: Observation


class Stepped(TaggedStruct, frozen=True, kw_only=True):
    step: Step


class Scored(TaggedStruct, frozen=True, kw_only=True):
    score: Score


class Failed(TaggedStruct, frozen=True, kw_only=True):
    """The environment or the reward failed; the process is healthy."""

    error: str


EnvReply = Done | Observed | Stepped | Scored | Failed
