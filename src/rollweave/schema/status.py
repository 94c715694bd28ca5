"""The present state of a run as its file `status.json` has it, which a living run
replaces every `STATUS_S` seconds: which parts work, which parts wait, for what, and for
how long.

Times are in seconds of the run's clock, except `written_at`.
"""

import msgspec

from rollweave.schema.base import Struct

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
    its turns and the number of turns that it can run at the same time. It is `lent` if
    it computes next to the model of a serving engine.
    """

    id: str
    status: str
    seconds: float
    host: int = 0
    pool: str = ""
    version: int = -1
    busy: int = 0
    slots: int = 0
    lent: bool = False


class TrainerState(Struct, frozen=True, kw_only=True):
    """The trainer: its status since `seconds`, the steps that it has trained, and the
    numbers of the hosts of its ranks.
    """

    status: str
    seconds: float
    step: int
    hosts: tuple[int, ...] = ()


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
