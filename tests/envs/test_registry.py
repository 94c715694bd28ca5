"""Names of environments: built in, by module, by entry point; and the errors of invalid
ones.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollweave.envs import registry
from rollweave.envs.base import Env
from rollweave.envs.frozenlake import FrozenLake
from rollweave.envs.registry import (
    BUILT_IN,
    DISTRIBUTED,
    check_options,
    is_handler,
    load,
    names,
    reference_of,
    resolve,
)
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_RULE, USER_CODE_VARIABLE
from rollweave.schema.errors import ConfigError

from .worlds import HERE, Echo


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_name_resolves(name: str) -> None:
    assert callable(resolve(name).run if is_handler(name) else resolve(name).step)


def test_resolves_by_name_and_by_module() -> None:
    kind: type[Env] = resolve("frozenlake")
    assert kind is FrozenLake
    assert resolve(f"{HERE}Echo") is Echo
    assert set(names()) >= set(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "frozenlak",
            r"must be one of calculator, .*frozenlake.*got 'frozenlak' \(did you "
            r"mean frozenlake\?\)",
        ),
        ("zzz", "got 'zzz'$"),
        ("nowhere.at.all:X", "cannot import nowhere.at.all: ModuleNotFoundError"),
        (f"{HERE}Ech", r"has no Ech \(did you mean Echo\?\)"),
        ("tests.envs.nothing_else:qqq", r"nothing_else has no qqq \(it has first, Second\)$"),
        (f"{HERE}NoStep", "must have reset and step, .*; NoStep has no step"),
        (f"{HERE}config", "must be a class, got function"),
        (":X", "must be package.module:name, got ':X'$"),
        ("a.b:", "must be package.module:name, got 'a.b:'$"),
        (
            "a/b.py:X",
            r"name, got 'a/b\.py:X' \(did you mean b:X, run in the directory of b\.py\?\)",
        ),
        ("b.py:X", r"did you mean b:X, run in the directory of b\.py\?\)"),
    ],
)
def test_a_name_that_does_not_resolve(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(name)


def test_a_name_of_a_distribution_that_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.envs.registry.entry_points", lambda group: ())
    for name in DISTRIBUTED:
        with pytest.raises(
            ConfigError,
            match=rf"'{name}' needs the package rollweave-envs, .* \(pip install .*envs",
        ):
            reference_of(name)


def test_options_are_checked_against_the_constructor() -> None:
    check_options("frozenlake", {"maps": "fixed"})
    with pytest.raises(
        ConfigError,
        match=r"must suit FrozenLake\(.*maps.*\): got an unexpected keyword argument 'map'",
    ):
        check_options("frozenlake", {"map": "fixed"})
    with pytest.raises(ConfigError, match="missing a required argument: 'reward'"):
        check_options("jsonl", {"path": "x"})


def test_load_resolves_nested_attributes() -> None:
    assert load(f"{HERE}Echo.reset", what="it") is Echo.reset
    with pytest.raises(ConfigError, match="the reward: "):
        load(f"{HERE}Echo.rest", what="the reward")


class Entry:
    def __init__(self, value: str, distribution: str | None) -> None:
        self.name, self.value = value, value
        self.dist = None if distribution is None else SimpleNamespace(name=distribution)


def test_without_the_permission_only_our_own_code_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [("Echo", "rollweave-envs"), ("Odd", None), ("Slow", "another")]
    entries = [Entry(f"{HERE}{name}", distribution) for name, distribution in found]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    assert load(BUILT_IN["frozenlake"], what="it") is FrozenLake
    assert load(f"{HERE}Echo", what="it") is Echo
    for name in ("Odd", "Slow", "config"):
        with pytest.raises(ConfigError, match=f"^it {USER_CODE_RULE}, got '{HERE}{name}'$"):
            load(f"{HERE}{name}", what="it")


def test_a_package_registers_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is as pip installs it: a module on the path, and its entry point in
    the metadata of its distribution.
    """
    (tmp_path / "clerk.py").write_text(
        "class Clerk:\n    async def init(self, job): ...\n    run = eval = init\n"
    )
    metadata = tmp_path / "clerk-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: clerk\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rollweave.envs.handlers]\nclerk = clerk:Clerk\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    resolve.cache_clear()
    try:
        assert "clerk" in names()
        assert is_handler("clerk")
        assert not is_handler("frozenlake")
    finally:
        resolve.cache_clear()
        sys.modules.pop("clerk", None)


@pytest.mark.parametrize(
    ("env", "option", "value", "rule"),
    [
        ("program", "folder", 0, "Expected `str`, got `int`"),
        ("frozenlake", "maps", 1, "Expected `str`, got `int`"),
    ],
)
def test_an_option_of_another_type_is_named_with_its_value(
    env: str, option: str, value: object, rule: str
) -> None:
    needed = {"command": ["true"], "score": ["true"]} if env == "program" else {}
    with pytest.raises(
        ConfigError, match=re.escape(f"options.{option} of environment {env!r}: {rule}")
    ) as raised:
        check_options(env, {**needed, option: value})
    assert str(raised.value).endswith(f": {value!r}")


class Odd:
    """Annotated with types that no configuration can express, and with one that exists
    only for type checkers.
    """

    def __init__(self, *, match: Path | None = None) -> None: ...

    def reset(self) -> None: ...

    def step(self) -> None: ...


class Checked(Odd):
    def __init__(self, *, match: "NotHere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("kind", [Odd, Checked])
def test_ignores_annotations_that_a_configuration_cannot_express(kind: type) -> None:
    check_options(f"{__name__}:{kind.__name__}", {"match": "x"})
