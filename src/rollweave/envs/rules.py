"""Functions of the user's that a configuration names to decide what is trained on
(`core/policy/experience.Rule`).
"""

import inspect
from typing import cast

from rollweave.core.policy.experience import Rule
from rollweave.envs.registry import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError


def named(config: RunConfig) -> list[tuple[str, str]]:
    """The knobs that name a function, with its `package.module:function`."""
    knobs = (("buffer.sample", config.buffer.sample), ("buffer.evict", config.buffer.evict))
    return [(knob, name) for knob, name in knobs if ":" in name]


def rule(name: str) -> Rule:
    """The function itself.

    Raises ConfigError for what cannot be imported, or called with the buffer and a
    version.
    """
    what = f"function {name!r}"
    found = load(name, what=what)
    if not callable(found) or inspect.iscoroutinefunction(found):
        kind = "a coroutine function" if callable(found) else type(found).__name__
        raise ConfigError(f"{what} must be a function, got {kind}")
    try:
        inspect.signature(found).bind((), 0)
    except TypeError as error:
        raise ConfigError(f"{what} must take the experiences and the version: {error}") from error
    except ValueError:  # a function in C says nothing
        pass
    return cast(Rule, found)


def rules_of(config: RunConfig) -> dict[str, Rule]:
    """By name. Raises ConfigError with a line for each knob whose function is none."""
    found: dict[str, Rule] = {}
    wrong = []
    for knob, name in named(config):
        try:
            found[name] = rule(name)
        except ConfigError as error:
            wrong.append(f"{knob}: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found
