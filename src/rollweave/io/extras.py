"""Optional dependencies: import them, and say how to install a missing dependency. The
permission to run the user's code in this process.

The user's code consists of modules that a configuration names, interpreters, and
options of servers that may name files of code. An agent whose operator has not allowed
it (`rollweave host --user-code`) withdraws the permission from its processes. A
controller cannot give it to them.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from rollweave.schema.errors import ConfigError

EXTRAS = {
    "envs": ("gymnasium",),
    "math": ("math_verify",),
    "parquet": ("pyarrow",),
    "predict": ("sklearn", "threadpoolctl", "transformers"),
    "tools": ("jsonschema", "IPython"),
    "transformers": ("transformers",),
}
"""The modules that a run imports from each extra of `pyproject.toml`.

Sinks and transports have extras of their names.
"""

DISTRIBUTIONS = {
    "rollweave-collective": "packages/collective",
    "rollweave-envs": "packages/envs",
    "rollweave-papers": "packages/papers",
    "rollweave-ray": "packages/ray",
    "rollweave-sandbox": "packages/sandbox",
    "rollweave-servers": "packages/servers",
    "rollweave-service": "packages/service",
    "rollweave-sim": "packages/sim",
    "rollweave-ui": "packages/ui",
}
"""The folder of each further distribution of this repository."""

COMMANDS = {
    "advise": "rollweave-sim",
    "beside": "rollweave-servers",
    "check_beside": "rollweave-servers",
    "reproduce": "rollweave-papers",
    "serve": "rollweave-service",
    "simulate": "rollweave-sim",
    "ui": "rollweave-ui",
    "workload": "rollweave-sim",
}
"""The distribution of each command, or format of an export, outside of this package."""

USER_CODE_VARIABLE = "ROLLWEAVE_USER_CODE"
"""Environment variable of an agent's processes."""

USER_CODE_REFUSED = "no"

USER_CODE_RULE = "must be built in on a host whose agent runs without --user-code"


class MissingExtraError(ConfigError):
    """A package of an extra is not installed.

    The message names the package and how to install its extra.
    """


@contextlib.contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of `extra` in this context.

    Raises MissingExtraError for a package that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed ({how_to_install(extra)})"
        ) from error


def missing_from(extra: str) -> list[str]:
    """Return the modules of `extra` that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def how_to_install(extra: str) -> str:
    """Return the pip command for optional dependency group `extra`: by path for a
    checkout, else by name from an index.
    """
    checkout = _checkout()
    return (
        f"pip install 'rollweave[{extra}]'"
        if checkout is None
        else f"pip install -e '{checkout}[{extra}]'"
    )


def how_to_install_distribution(name: str) -> str:
    """Return the pip command for a further distribution of this repository: by path for
    a checkout, else by name from an index.
    """
    checkout = _checkout()
    if checkout is None:
        return f"pip install {name}"
    return f"pip install -e '{checkout / DISTRIBUTIONS[name]}'"


def without_distribution(what: str, name: str) -> ConfigError:
    """Return the error for `what`, which needs a further distribution that is not
    installed.
    """
    return ConfigError(
        f"{what} needs the package {name}, which is not installed "
        f"({how_to_install_distribution(name)})"
    )


def announced(group: str, *names: str, field: str, distribution: str, needing: str = "") -> Any:
    """Return what a distribution announces by an entry point of `group`, for the first
    of `names` that any announces. Errors name it after `field`. `needing` is what needs
    `distribution`, that of this repository, if not the field.

    Raises ConfigError if no distribution announces one of the names, if two announce
    the same, or if this host does not run the user's code and another distribution than
    this repository's announces it.
    """
    for name in names:
        if found := [*importlib.metadata.entry_points(group=group, name=name)]:
            break
    else:
        raise without_distribution(needing or f"{field} {names[0]}", distribution)
    origins = sorted("" if entry.dist is None else entry.dist.name for entry in found)
    if len(found) > 1:
        raise ConfigError(
            f"{field} {name} must be announced by one package, got {' and '.join(origins)}"
        )
    if origins != [distribution] and not user_code_is_allowed():
        raise ConfigError(f"{field} {USER_CODE_RULE}, got {name!r}")
    return found[0].load()


def command(name: str, shown: str = "") -> Any:
    """Return the function of a command that a further distribution announces; `shown`
    is what the user has typed, if not the name. Raises ConfigError if the distribution
    is not installed.
    """
    for entry in importlib.metadata.entry_points(group="rollweave.commands"):
        if entry.name == name:
            return entry.load()
    raise without_distribution(f"`rollweave {shown or name}`", COMMANDS[name])


def _checkout() -> Path | None:
    """Return the checkout of an editable installation; None for any other
    installation.
    """
    try:
        record = importlib.metadata.distribution("rollweave").read_text("direct_url.json")
        origin = json.loads(record) if record else {}
        path = (
            Path(unquote(urlparse(origin["url"]).path))
            if origin.get("dir_info", {}).get("editable")
            else None
        )
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return None
    if path is not None and path == Path.cwd():
        return Path(".")
    return path


def user_code_is_allowed() -> bool:
    """Return whether this process may run the user's code."""
    return os.environ.get(USER_CODE_VARIABLE) != USER_CODE_REFUSED
