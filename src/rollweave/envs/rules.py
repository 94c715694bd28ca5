"""User functions, named by the configuration, that decide what is trained on
(`core/policy/experience.Rule`).
"""

import inspect
from typing import cast

from rollweave.core.policy.experience import Rule
from rollweave.envs.registry import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError


def named(config: RunConfig) -> list[tuple[str, str]]:
    """Return the settings that name a function, with its `package.module:function`."""
    name = config.buffer.sample
    return [("buffer.sample", name)] if ":" in name else []


def rule(name: str) -> Rule:
    """Return the function.

    Raises ConfigError if it cannot be imported, or cannot be called with the buffer and
    a version.
    """
    what = f"function {name!r}"
    function = load(name, what=what)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else type(function).__name__
        raise ConfigError(f"{what} must be a function, got {kind}")
    try:
        inspect.signature(function).bind((), 0)
    except TypeError as error:
        raise ConfigError(f"{what} must take the experiences and the version: {error}") from error
    except ValueError:  # a function written in C has no signature
        pass
    return cast(Rule, function)


def rules_of(config: RunConfig) -> dict[str, Rule]:
    """Return the functions by name. Raises ConfigError with a line for each setting
    whose function is invalid.
    """
    rules: dict[str, Rule] = {}
    errors = []
    for setting, name in named(config):
        try:
            rules[name] = rule(name)
        except ConfigError as error:
            errors.append(f"{setting}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))
    return rules
