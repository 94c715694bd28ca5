"""What a run that goes on is asked for through its control socket, and its answer: a
line of JSON each (`runtime/control`).
"""

from typing import Annotated

import msgspec

from rollweave.schema.base import EngineId, Struct, TaggedStruct

MOST_ENGINES = 64
"""Engines that one request may ask for."""


class ListEngines(TaggedStruct, frozen=True, kw_only=True):
    """Which engines are there?"""


class AddEngines(TaggedStruct, frozen=True, kw_only=True):
    """Start so many more, each as the configuration's group of engines number `group`,
    from 0, has them.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_ENGINES)] = 1
    group: Annotated[int, msgspec.Meta(ge=0)] = 0


class WithdrawEngine(TaggedStruct, frozen=True, kw_only=True):
    """Do without this one: when what it began is over (`drain`), or now, and it goes on
    elsewhere.
    """

    engine_id: EngineId
    drain: bool = True


ControlRequest = ListEngines | AddEngines | WithdrawEngine


class EngineLine(Struct, frozen=True, kw_only=True):
    """An engine as the core knows it.

    `version` is -1 before it has weights; `machine` is that of its relay, None without.
    """

    id: EngineId
    status: str
    version: int
    machine: int | None
    group: int
    degree: int
    slots: int
    busy: int
    joined: bool


class ControlReply(Struct, frozen=True, kw_only=True):
    """`added` are starting.

    `error` says why what was asked for was not done, or no more of it than `added`; ""
    if it was.
    """

    engines: tuple[EngineLine, ...] = ()
    added: tuple[EngineId, ...] = ()
    error: str = ""
