"""From the name of an environment or handler to its class: built in,
`package.module:Class`, or an entry point.

Packages announce environments as `rollweave.envs` and handlers as
`rollweave.envs.handlers`.
"""

import difflib
import functools
import importlib
import inspect
import typing
from importlib.metadata import entry_points
from typing import Any, NoReturn

import msgspec

from rollweave.envs.base import Options
from rollweave.io.extras import MissingExtraError
from rollweave.schema.errors import ConfigError

ENTRY_POINTS = ("rollweave.envs", "rollweave.envs.handlers")

METHODS = {"environment": ("reset", "step"), "handler": ("init", "run", "eval")}
"""What makes a class the one or the other."""

BUILT_IN = {
    "calculator": "rollweave.envs.calculator:Calculator",
    "code": "rollweave.envs.handlers.code:Code",
    "frozenlake": "rollweave.envs.frozenlake:FrozenLake",
    "gym": "rollweave.envs.gym:Gym",
    "jsonl": "rollweave.envs.jsonl:Jsonl",
    "math_tool": "rollweave.envs.handlers.math_tool:MathTool",
    "nim": "rollweave.envs.nim:Nim",
    "openenv": "rollweave.envs.openenv:OpenEnv",
    "program": "rollweave.envs.handlers.program:Program",
    "stem": "rollweave.envs.handlers.stem:Stem",
    "swe": "rollweave.envs.handlers.swe:Swe",
}


@functools.lru_cache(64)
def resolve(name: str) -> type[Any]:
    """The class called `name`, of an `Env` or a handler.

    Raises ConfigError that says what is wrong with it, what there is.
    """
    found = load(_reference(name), what=f"environment {name!r}")
    if not inspect.isclass(found):
        raise ConfigError(f"environment {name!r} must be a class, got {type(found).__name__}")
    lacks = min((_lacks(found, methods) for methods in METHODS.values()), key=len)
    if lacks:
        rule = "must have reset and step, or init, run and eval as a handler has"
        raise ConfigError(
            f"environment {name!r} {rule}; {found.__name__} has no {' and no '.join(lacks)}"
        )
    return found


def is_handler(name: str) -> bool:
    """Whether it drives the attempt itself (`envs/handlers/base.py`), instead of
    answering as an `Env`. Raises ConfigError.
    """
    return not _lacks(resolve(name), METHODS["handler"])


def _lacks(kind: type[Any], methods: tuple[str, ...]) -> list[str]:
    return [method for method in methods if not callable(getattr(kind, method, None))]


def check_options(name: str, options: Options) -> None:
    """Raise ConfigError where the environment's constructor does not take these
    options, or is annotated with another type.
    """
    kind = resolve(name)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a constructor in C says nothing
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
    """As far as the constructor is annotated, with types that a configuration can have."""
    try:
        hints = typing.get_type_hints(kind.__init__)
    except Exception:  # names that are there for a type checker alone
        return
    for option, value in options.items():
        hint = hints.get(option, Any)
        # the constructor says it better: which values there are
        if typing.get_origin(hint) is typing.Literal:
            hint = type(typing.get_args(hint)[0])
        try:
            msgspec.convert(value, hint, dec_hook=_unknown)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"options.{option} of environment {name!r}: {error}, got {value!r:.100}"
            ) from error
        except (TypeError, NotImplementedError):  # the constructor makes of it what it says
            continue


def _unknown(kind: type[Any], value: object) -> NoReturn:
    raise NotImplementedError(kind)


def load(reference: str, *, what: str) -> Any:
    """The object at `package.module:name`.

    Raises ConfigError, naming `what` it was to be.
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
    try:
        found: Any = importlib.import_module(module)
    except MissingExtraError as error:
        raise ConfigError(f"{what}: {error}") from error
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's module runs here: whatever it raises is why it cannot be used
        raise ConfigError(
            f"{what}: cannot import {module}: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: {module} has no {attribute}{_nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def names() -> list[str]:
    """The names that need no module: built in, or announced by an installed package."""
    return sorted({*BUILT_IN, *_announced()})


def _reference(name: str) -> str:
    if name in BUILT_IN or ":" in name:
        return BUILT_IN.get(name, name)
    announced = _announced()
    if name not in announced:
        known = names()
        raise ConfigError(
            f"environment must be one of {', '.join(known)}, or package.module:Class, got "
            f"{name!r}{_nearest(name, known)}"
        )
    return announced[name]


def _announced() -> dict[str, str]:
    return {
        entry.name: entry.value for group in ENTRY_POINTS for entry in entry_points(group=group)
    }


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
