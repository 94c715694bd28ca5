"""What functions return, which values are refused, and what follows from values and
from the settings of a configuration (`calls.toml`).
"""

import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.schema.address import Hosts
from rollweave.schema.config import conflicts
from rollweave.schema.config.conflicts import Place
from rollweave.schema.config.loading import loads
from rollweave.schema.config.reference import Setting, part_or_setting
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Device, JoinHost, Resources, wrong_offer
from tests.support.calls import check_rows, table

TABLE = table(Path(__file__).with_name("calls.toml"))
BASE = (
    "[run]\nname = 'lake'\n[model.scratch]\n[[tasks]]\nenv = 'a'\n[[tasks]]\nenv = 'b'\ntag = 'c'\n"
)


def allowed(entry: str) -> Hosts:
    return Hosts.parse(["GPU.a", "10.0.0.0/8", "::1", "168.63.0.0/16", entry], field="h")


def admits(host: str) -> bool:
    hosts = allowed("100.100.100.200")
    return hosts.admits_name(host) or hosts.admits_ip(host)


def offer(name: str = "b", many: int = 0, **changes: Any) -> str:
    """Return why a host is refused that offers `changes`, and beside them `many`
    variables, resources and GPUs.
    """
    names = [f"V{number}" for number in range(many)]
    given: dict[str, Any] = {"address": "a", "package": "1", "cpus": 1, "memory_bytes": 1}
    given |= {"labels": dict.fromkeys(names, 1.0), "variables": names} | changes
    rows = given.get("devices", [[number, "a", 1] for number in range(many)])
    given["devices"] = [dict(zip(Device.__struct_fields__, row, strict=True)) for row in rows]
    resources = {field: given.pop(field) for field in Resources.__struct_fields__}
    joined = msgspec.convert({"name": name, "resources": resources, **given}, JoinHost)
    return (wrong := wrong_offer(joined)) and f"! {wrong}"


def configured(overrides: list[str]) -> RunConfig:
    return loads(BASE, overrides)


def without_effects(overrides: list[str]) -> str:
    return "; ".join(conflicts.without_effect(loads(BASE, overrides)).values())


def strays(overrides: str) -> str:
    return "\n".join(loads(BASE, overrides.split("; ")).strays_from(loads(BASE)))


def clause(name: str, values: list[str], why: str = "", task: int = -1) -> str:
    """Return the words of a clause, in general and for the configuration, or for one
    task of it.
    """
    config = loads(BASE, ["rollout.mode=partial", "tasks.1.algorithm.advantage=rloo"])
    key, item = ("rollout.alpha", config) if task < 0 else ("tasks.weight", config.tasks[task])
    place = Place(config=config, key=key, field=key, item=item)
    made = getattr(conflicts, name)(*values, **({"why": why} if why else {}))
    return f"{made.text} / {made.rule(place)}" if made.applies(place) else "no"


def setting(key: str) -> str:
    """Return the reference of a setting, or the headers of a section, in short."""
    found = part_or_setting(key)
    if not isinstance(found, Setting):
        return ", ".join(part.header for part in found)
    return "; ".join([f"{found.type}, {found.shown_default}", *found.conflicts])


CALLED = {
    (module, name): globals().get(name) or pkgutil.resolve_name(f"rollweave.schema.{module}:{name}")
    for module, names in TABLE.items()
    for name in names
}


@pytest.mark.parametrize("place", CALLED, ids=".".join)
def test_results_and_refusals(place: tuple[str, str]) -> None:
    check_rows(CALLED[place], TABLE[place[0]][place[1]])
