"""Names of environments: built in, by module, by entry point; and what is wrong with the others."""

import pytest

from rollweave.envs.base import Env
from rollweave.envs.frozenlake import FrozenLake
from rollweave.envs.registry import BUILT_IN, check_options, load, names, resolve
from rollweave.schema.errors import ConfigError

from .worlds import HERE, Echo


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_name_resolves(name: str) -> None:
    assert callable(resolve(name).step)


def test_resolves_by_name_and_by_module() -> None:
    kind: type[Env] = resolve("frozenlake")
    assert kind is FrozenLake
    assert resolve(f"{HERE}Echo") is Echo
    assert set(names()) >= set(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("frozenlak", r"must be one of calculator, frozenlake.*got 'frozenlak' \(did you mean frozenlake\?\)"),
        ("zzz", "got 'zzz'$"),
        ("nowhere.at.all:X", "cannot import nowhere.at.all: ModuleNotFoundError"),
        (f"{HERE}Ech", r"has no Ech \(did you mean Echo\?\)"),
        (f"{HERE}NoStep", "must have reset and step, .*; NoStep has no step"),
        (f"{HERE}config", "must be a class, got function"),
        (":X", "must be package.module:name"),
    ],
)
def test_a_name_that_does_not_resolve(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(name)


def test_options_are_checked_against_the_constructor() -> None:
    check_options("frozenlake", {"maps": "fixed"})
    with pytest.raises(ConfigError, match=r"must suit FrozenLake\(.*maps.*\): got an unexpected keyword argument 'map'"):
        check_options("frozenlake", {"map": "fixed"})
    with pytest.raises(ConfigError, match="missing a required argument: 'reward'"):
        check_options("jsonl", {"path": "x"})


def test_load_finds_what_is_inside_a_class() -> None:
    assert load(f"{HERE}Echo.reset", what="it") is Echo.reset
    with pytest.raises(ConfigError, match="the reward: "):
        load(f"{HERE}Echo.rest", what="the reward")
