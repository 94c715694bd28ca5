"""From the name of an environment to its class: built in, `package.module:Class`, or an entry point `rollweave.envs`."""

import difflib
import functools
import importlib
import inspect
from importlib.metadata import entry_points
from typing import Any

from rollweave.envs.base import Options
from rollweave.schema.errors import ConfigError

ENTRY_POINTS = "rollweave.envs"

BUILT_IN = {
    "calculator": "rollweave.envs.calculator:Calculator",
    "frozenlake": "rollweave.envs.frozenlake:FrozenLake",
    "gym_text": "rollweave.envs.gym_text:GymText",
    "jsonl": "rollweave.envs.jsonl:Jsonl",
    "nim": "rollweave.envs.nim:Nim",
    "reasoning": "rollweave.envs.reasoning:Reasoning",
}


@functools.lru_cache(64)
def resolve(name: str) -> type[Any]:
    """The environment class called `name`. Raises ConfigError that says what is wrong with it, and what there is."""
    found = load(_reference(name), what=f"environment {name!r}")
    if not inspect.isclass(found):
        raise ConfigError(f"environment {name!r} must be a class, got {type(found).__name__}")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"environment {name!r} must have reset and step, {found.__name__} has no {' and no '.join(missing)}")
    return found


def check_options(name: str, options: Options) -> None:
    """Raise ConfigError where the environment's constructor does not take these options."""
    kind = resolve(name)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a constructor in C says nothing
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"options of environment {name!r} must suit {kind.__name__}({takes}): {error}") from error


def load(reference: str, *, what: str) -> Any:
    """The object at `package.module:name`. Raises ConfigError, naming `what` it was to be."""
    module, colon, attribute = reference.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{what} must be package.module:name, got {reference!r}")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the user's module runs here: whatever it raises is why it cannot be used
        raise ConfigError(f"{what}: cannot import {module}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: {module} has no {attribute}{_nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def names() -> list[str]:
    """The names that need no module: built in, or announced by an installed package."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _reference(name: str) -> str:
    if name in BUILT_IN or ":" in name:
        return BUILT_IN.get(name, name)
    announced = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    if name not in announced:
        known = names()
        raise ConfigError(
            f"environment must be one of {', '.join(known)}, or package.module:Class, got {name!r}{_nearest(name, known)}"
        )
    return announced[name]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
