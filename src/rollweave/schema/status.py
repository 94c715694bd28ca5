"""The present state of a run as its file `status.json` has it, and the requests to a
live run over its control socket, with their replies: one line of JSON each
(`runtime/control`).

A living run replaces the file every `STATUS_S` seconds. It says which parts work, which
parts wait, for what, and for how long. Times are in seconds of the run's clock, except
`written_at`.
"""

from typing import Annotated

import msgspec

from rollweave.schema.base import EngineId, Struct, TaggedStruct

STATUS_S = 2.0
"""Seconds between two writes of the file."""


class WaitStatus(Struct, frozen=True, kw_only=True):
    """The wait of `waiter` for `target`, since `seconds`.

    `what` describes what `target` does, or what it lacks. `count` is the number of
    waiters, `seconds` is the length of the longest wait, and `oldest` names its waiter.
    A wait is ended, or acted on, after `limit_s`, and usually takes `usual_s`; 0 means
    that there is no such number.
    """

    waiter: str
    target: str
    what: str = ""
    count: int = 1
    seconds: float = 0.0
    limit_s: float = 0.0
    usual_s: float = 0.0
    oldest: str = ""


class EngineState(Struct, frozen=True, kw_only=True):
    """An engine: its status since `seconds`, the version of its weights (-1 for none),
    its turns and the number of turns that it can run at the same time. `phase` is
    prefill, decode or both. It is `lent` if it computes next to the model of a serving
    engine.
    """

    id: str
    status: str
    seconds: float
    host: int = 0
    pool: str = ""
    version: int = -1
    busy: int = 0
    slots: int = 0
    phase: str = "both"
    lent: bool = False


class TrainerState(Struct, frozen=True, kw_only=True):
    """The trainer: its status since `seconds`, the steps that it has trained, the
    numbers of the hosts of its ranks, and the number of these ranks.
    """

    status: str
    seconds: float
    step: int
    hosts: tuple[int, ...] = ()
    ranks: int = 1


class RunStatus(Struct, frozen=True, kw_only=True):
    """The state of a run at run time `at`.

    `written_at` is Unix time; `machine` and `pid` are the controller's. `ended` is true
    in the last status that a life of a run writes; `error` is the run's error, if it
    ended with an error. `attempts` counts attempts by stage, and `buffered` counts
    complete groups; a step takes `wanted` groups. `hosts` has the names of hosts by
    number, "" for a single host.
    """

    at: float
    written_at: float = 0.0
    machine: str = ""
    pid: int = 0
    ended: bool = False
    error: str = ""
    phase: str
    step: int
    steps: int
    attempts: dict[str, int] = msgspec.field(default_factory=dict)
    queued_turns: int = 0
    buffered: int = 0
    wanted: int = 0
    version: int = -1
    engines: tuple[EngineState, ...] = ()
    trainer: TrainerState | None = None
    workers: dict[str, int] = msgspec.field(default_factory=dict)
    hosts: dict[int, str] = msgspec.field(default_factory=dict)
    waits: tuple[WaitStatus, ...] = ()


MOST_ENGINES = 64
"""Maximum number of engines that one request may add."""


class ListEngines(TaggedStruct, frozen=True, kw_only=True):
    """List the engines."""


class AddEngines(TaggedStruct, frozen=True, kw_only=True):
    """Start `count` more engines with the settings of the group number `group` of the
    configuration, from 0.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_ENGINES)] = 1
    group: Annotated[int, msgspec.Meta(ge=0)] = 0


class WithdrawEngine(TaggedStruct, frozen=True, kw_only=True):
    """Remove this engine: once its trajectories are over (`drain`), or now, so that
    they continue elsewhere.
    """

    engine_id: EngineId
    drain: bool = True


ControlRequest = ListEngines | AddEngines | WithdrawEngine


class EngineLine(Struct, frozen=True, kw_only=True):
    """The state of an engine.

    `version` is -1 before it has weights. `host` is the number of its host, or None
    without relays.
    """

    id: EngineId
    status: str
    version: int
    host: int | None
    group: int
    degree: int
    slots: int
    busy: int
    joined: bool
    phase: str = "both"


class ControlReply(Struct, frozen=True, kw_only=True):
    """The engines `added` are starting.

    `error` says why the request failed, or why no more engines than `added` were
    started; it is "" on success.
    """

    engines: tuple[EngineLine, ...] = ()
    added: tuple[EngineId, ...] = ()
    error: str = ""
