"""Requests to a live run over its control socket, and replies: one line of JSON each
(`runtime/control`).
"""

from typing import Annotated

import msgspec

from rollweave.schema.base import EngineId, Struct, TaggedStruct

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


class ControlReply(Struct, frozen=True, kw_only=True):
    """The engines `added` are starting.

    `error` says why the request failed, or why no more engines than `added` were
    started; it is "" on success.
    """

    engines: tuple[EngineLine, ...] = ()
    added: tuple[EngineId, ...] = ()
    error: str = ""
