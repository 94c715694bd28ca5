"""Resolves the name of an environment or handler to its class: a built-in name,
`package.module:Class`, or an entry point.

Packages register environments as `rollweave.envs` and handlers as
`rollweave.envs.handlers`.
"""

import functools
import importlib
import inspect
import typing
from importlib.metadata import entry_points
from typing import Any, NoReturn

import msgspec

from rollweave.envs.base import Options
from rollweave.io.extras import (
    USER_CODE_RULE,
    MissingExtraError,
    user_code_is_allowed,
    without_distribution,
)
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import did_you_mean

ENTRY_POINTS = ("rollweave.envs", "rollweave.envs.handlers")

REWARDS = "rollweave.rewards"
"""The entry points by which packages announce reward functions of data sets."""

METHODS = {"environment": ("reset", "step"), "handler": ("init", "run", "eval")}
"""The methods that make a class an environment or a handler."""

NAMES_SHOWN = 8
"""Maximum number of a module's functions and classes that an error names."""

BUILT_IN = {
    "calculator": "rollweave.envs.games:Calculator",
    "frozenlake": "rollweave.envs.frozenlake:FrozenLake",
    "jsonl": "rollweave.envs.jsonl:Jsonl",
    "nim": "rollweave.envs.games:Nim",
    "program": "rollweave.envs.handlers.program:Program",
}

DISTRIBUTION = "rollweave-envs"
"""The distribution in this repository that announces `DISTRIBUTED`."""

DISTRIBUTED = (
    "code",
    "dataset",
    "gem",
    "gym",
    "math_tool",
    "openenv",
    "prorl",
    "stem",
    "swe",
    "swe_bench",
    "textworld",
    "verifiers",
)
"""The names that an error explains where their distribution is not installed."""


@functools.lru_cache(64)
def resolve(name: str) -> type[Any]:
    """Return the class called `name`, an `Env` or a handler.

    Raises ConfigError that says what is wrong with the name and lists the known names.
    """
    kind = load(reference_of(name), what=f"environment {name!r}")
    if not inspect.isclass(kind):
        raise ConfigError(f"environment {name!r} must be a class, got {type(kind).__name__}")
    lacks = min((_lacks(kind, methods) for methods in METHODS.values()), key=len)
    if lacks:
        rule = "must have reset and step, or init, run and eval as a handler has"
        raise ConfigError(
            f"environment {name!r} {rule}; {kind.__name__} has no {' and no '.join(lacks)}"
        )
    return kind


def is_handler(name: str) -> bool:
    """Return whether the class drives the attempt itself (`envs/handlers/base.py`),
    instead of answering as an `Env`. Raises ConfigError.
    """
    return not _lacks(resolve(name), METHODS["handler"])


def _lacks(kind: type[Any], methods: tuple[str, ...]) -> list[str]:
    return [method for method in methods if not callable(getattr(kind, method, None))]


def check_options(name: str, options: Options) -> None:
    """Raise ConfigError if the environment's constructor does not accept these options,
    or annotates them with other types.
    """
    kind = resolve(name)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a constructor written in C has no signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ConfigError(
            f"options of environment {name!r} must suit {kind.__name__}({takes}): {error}"
        ) from error
    _check_types(name, kind, options)


def _check_types(name: str, kind: type[Any], options: Options) -> None:
    """Check the types as far as the constructor annotates types that a configuration
    can express.
    """
    try:
        hints = typing.get_type_hints(kind.__init__)
    except Exception:  # names that exist only for type checkers
        return
    for option, value in options.items():
        hint = hints.get(option, Any)
        # The constructor's own error is better: it lists the values.
        if typing.get_origin(hint) is typing.Literal:
            hint = type(typing.get_args(hint)[0])
        try:
            msgspec.convert(value, hint, dec_hook=_unknown)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"options.{option} of environment {name!r}: {error}: {value!r:.100}"
            ) from error
        except (TypeError, NotImplementedError):  # the constructor converts the value itself
            continue


def _unknown(kind: type[Any], value: object) -> NoReturn:
    raise NotImplementedError(kind)


def load(reference: str, *, what: str) -> Any:
    """Return the object at `package.module:name`.

    Raises ConfigError that names `what` it should be.
    """
    module, colon, attribute = reference.partition(":")
    if not (module and colon and attribute) or "/" in module or module.endswith(".py"):
        name = module.removesuffix(".py").rpartition("/")[2]
        near = (
            f" (did you mean {name}:{attribute}, run in the directory of {name}.py?)"
            if name and attribute
            else ""
        )
        raise ConfigError(f"{what} must be package.module:name, got {reference!r}{near}")
    if not (user_code_is_allowed() or _is_ours(reference)):
        raise ConfigError(f"{what} {USER_CODE_RULE}, got {reference!r}")
    try:
        target: Any = importlib.import_module(module)
    except MissingExtraError as error:
        raise ConfigError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:  # importing runs user code, which may raise anything
        raise ConfigError(
            f"{what}: cannot import {module}: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            hint = did_you_mean(part, dir(target)) or _contents(target)
            raise ConfigError(f"{what}: {module} has no {attribute}{hint}")
        target = getattr(target, part)
    return target


def names() -> list[str]:
    """Return the names that are built in or registered by an installed package, and so
    need no module.
    """
    return sorted({*BUILT_IN, *announced_in(*ENTRY_POINTS)})


def reference_of(name: str) -> str:
    """Return the `package.module:Class` that is called `name`. Raises ConfigError."""
    if name in BUILT_IN or ":" in name:
        return BUILT_IN.get(name, name)
    announced = announced_in(*ENTRY_POINTS)
    if name in DISTRIBUTED and name not in announced:
        raise without_distribution(f"environment {name!r}", DISTRIBUTION)
    if name not in announced:
        known = names()
        raise ConfigError(
            f"environment must be one of {', '.join(known)}, or package.module:Class, got "
            f"{name!r}{did_you_mean(name, known)}"
        )
    return announced[name]


def announced_in(*groups: str) -> dict[str, str]:
    """Return the references that packages announce in these groups, by name."""
    return {entry.name: entry.value for group in groups for entry in entry_points(group=group)}


def _is_ours(reference: str) -> bool:
    """Return whether this repository's distributions announce the reference."""
    return reference in BUILT_IN.values() or any(
        entry.value == reference and entry.dist is not None and entry.dist.name == DISTRIBUTION
        for group in (*ENTRY_POINTS, REWARDS)
        for entry in entry_points(group=group)
    )


def _contents(target: Any) -> str:
    """Return the end of an error that names the functions and classes that a module, or
    a class, defines itself.
    """
    module = getattr(target, "__module__", None) or getattr(target, "__name__", None)
    names = [
        name
        for name, value in vars(target).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module
    ]
    more = ", …" if len(names) > NAMES_SHOWN else ""
    return f" (it has {', '.join(names[:NAMES_SHOWN])}{more})" if names else ""
