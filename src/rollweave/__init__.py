"""Rollweave trains LLM agents with reinforcement learning, each trajectory at its own
pace.

The public interface is the names of `__all__`, and what the pages in docs/ and the
examples import from the modules of the package; every other name may change between
versions. The names of `__all__` are imported on first
use, so that `import rollweave` is fast and loads neither torch nor numpy.
"""

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollweave.package import VERSION

if TYPE_CHECKING:
    from rollweave.envs.base import (
        Env,
        Episode,
        Observation,
        Options,
        Score,
        Split,
        Step,
        new_task,
        payload_of,
    )
    from rollweave.envs.handlers.base import Agent, AgentHandler, Job, Tool
    from rollweave.envs.handlers.toolbox import toolbox
    from rollweave.envs.handlers.tools import converse
    from rollweave.envs.roles import role
    from rollweave.record.summary import Summary
    from rollweave.runtime.roles.cluster import Cluster
    from rollweave.runtime.roles.worker import Worker, register
    from rollweave.sandbox.base import SandboxSpec
    from rollweave.sandbox.tools import Bash, IPython
    from rollweave.schema.base import mix
    from rollweave.schema.chat import Message
    from rollweave.schema.config.root import RunConfig
    from rollweave.schema.errors import ConfigError, RollweaveError
    from rollweave.schema.roles import WorkerError
    from rollweave.schema.work import (
        Decoding,
        SegmentKind,
        StopReason,
        Task,
        TokenSequence,
        Trajectory,
    )

__version__ = VERSION

__all__ = [
    "Agent",
    "AgentHandler",
    "Bash",
    "Cluster",
    "ConfigError",
    "Decoding",
    "Env",
    "Episode",
    "IPython",
    "Job",
    "Message",
    "Observation",
    "Options",
    "RollweaveError",
    "RunConfig",
    "SandboxSpec",
    "Score",
    "SegmentKind",
    "Split",
    "Step",
    "StopReason",
    "Task",
    "TokenSequence",
    "Tool",
    "Trajectory",
    "Worker",
    "WorkerError",
    "converse",
    "mix",
    "new_task",
    "payload_of",
    "register",
    "role",
    "toolbox",
    "train",
]

_NAMES_OF = {
    "envs.base": (
        "Env",
        "Episode",
        "Observation",
        "Options",
        "Score",
        "Split",
        "Step",
        "new_task",
        "payload_of",
    ),
    "envs.handlers.base": ("Agent", "AgentHandler", "Job", "Tool"),
    "envs.handlers.toolbox": ("toolbox",),
    "envs.handlers.tools": ("converse",),
    "envs.roles": ("role",),
    "runtime.roles.cluster": ("Cluster",),
    "runtime.roles.worker": ("Worker", "register"),
    "sandbox.base": ("SandboxSpec",),
    "sandbox.tools": ("Bash", "IPython"),
    "schema.base": ("mix",),
    "schema.chat": ("Message",),
    "schema.config.root": ("RunConfig",),
    "schema.errors": ("ConfigError", "RollweaveError"),
    "schema.roles": ("WorkerError",),
    "schema.work": ("Decoding", "SegmentKind", "StopReason", "Task", "TokenSequence", "Trajectory"),
}
"""The public names of each module, which `__getattr__` imports."""

_MODULE_OF = {name: f"rollweave.{module}" for module, names in _NAMES_OF.items() for name in names}

# `train` is also a subpackage. Importing it here, before the function is defined, lets
# the function keep the name: the import system binds a subpackage to its parent only
# when it first loads it.
importlib.import_module("rollweave.train")


def train(
    config: "str | os.PathLike[str] | RunConfig",
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    inproc: bool = False,
) -> "Summary":
    """Train as `rollweave train` does, without its output, and return the run's
    summary.

    `config` is a TOML file, a run directory to resume, or a configuration; `overrides`
    are "key=value" as for `--set`. Settings without effect are reported by `warnings`.
    Raises ConfigError before anything is computed for input that is wrong,
    RollweaveError for a run that failed, and KeyboardInterrupt after the orderly end of
    a run that the user stopped.
    """
    from rollweave.cli.train import train_quietly

    return train_quietly(config, overrides, resume=resume, fresh=fresh, inproc=inproc)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'rollweave' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
