"""The reference of all settings, read from the sections themselves: type, default,
sentence, and when a setting must be left out or has no effect.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollweave.schema.config.conflicts import CONFLICTS, WITHOUT_EFFECT
from rollweave.schema.config.loading import model_in
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

LARGEST = 2**63
"""Bounds from here on say no more than that a number fits into 64 bits."""

TYPES = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "object": "table",
    "string": "text",
}
"""The words for types of JSON schema."""

BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting. `default` is TOML, or None if it is unset or must be set."""

    key: str
    type: str
    required: bool
    default: str | None
    description: str
    conflicts: tuple[str, ...]
    """Sentences that say when it must be left out, or has no effect."""

    @property
    def shown_default(self) -> str:
        """The default in words."""
        return "must be set" if self.required else "unset" if self.default is None else self.default


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section, or a table in one."""

    key: str
    """Its key, as in `tasks.algorithm`."""
    header: str
    """Its header in a file, as `[[tasks]]`."""
    description: str
    settings: tuple[Setting, ...]


def parts() -> tuple[Part, ...]:
    """Return all sections in the order of a file."""
    return tuple(_parts(RunConfig))


def part_or_setting(key: str) -> tuple[Part, ...] | Setting:
    """Return the setting of this key, or the section with all tables in it.

    Raises ConfigError for an unknown key.
    """
    everything = parts()
    chosen = tuple(part for part in everything if part.key == key or part.key.startswith(f"{key}."))
    if chosen:
        return chosen
    settings = {setting.key: setting for part in everything for setting in part.settings}
    if key in settings:
        return settings[key]
    named = [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]
    known = [*settings, *(part.key for part in everything)]
    near = named or difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "`rollweave config` lists them"
    raise ConfigError(f"KEY must be a section or a setting ({hint}), got {key!r}")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, for editors."""
    schema = RunConfig.model_json_schema()
    properties = schema["properties"]
    group = properties["engines"]["items"]
    properties["engines"] = {
        "anyOf": [group, properties["engines"]],  # one group may be a table
        "description": properties["engines"].get("description", ""),
    }
    schema["required"] = [name for name in schema["required"] if name != "model"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _parts(
    model: type[BaseModel], key: str = "", header: str = "", description: str = ""
) -> Iterator[Part]:
    schema = model.model_json_schema()
    plain, inner = list[Setting](), list[tuple[str, type[BaseModel], FieldInfo]]()
    for name, field in model.model_fields.items():
        place = f"{key}.{name}" if key else name
        nested = model_in(field.annotation)
        if nested is not None:
            inner.append((place, nested, field))
        else:
            plain.append(_setting(place, field, schema["properties"][name], schema))
    if plain:
        yield Part(key=key, header=header, description=description, settings=tuple(plain))
    for place, nested, field in inner:
        about = " ".join((field.description or "").split()) or _sentence(nested)
        yield from _parts(nested, place, _header(place, field), about)


def _header(place: str, field: FieldInfo) -> str:
    kind = get_origin(field.annotation)
    if kind is dict:
        return f"[{place}.NAME]"
    return f"[[{place}]]" if kind is tuple else f"[{place}]"


def _sentence(model: type[BaseModel]) -> str:
    """Return the first paragraph of a section's docstring, in one line."""
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


def _setting(
    key: str, field: FieldInfo, schema: Mapping[str, Any], whole: Mapping[str, Any]
) -> Setting:
    required = field.is_required()
    default = None if required else field.get_default(call_default_factory=True)
    return Setting(
        key=key,
        type=_type(schema, whole),
        required=required,
        default=None if default is None else _toml(default),
        description=" ".join((field.description or "").split()),
        conflicts=tuple(_left_out(key)),
    )


def _left_out(key: str) -> Iterator[str]:
    """Yield when a setting, or a value of it, must be left out or has no effect."""
    for row in CONFLICTS:
        if (values := row.choices.get(key)) is not None:
            yield f"Leave {', '.join(values) or 'it'} out {row.clause.text}."
    for row in WITHOUT_EFFECT:
        if (values := row.choices.get(key)) is not None:
            verb = "have" if len(values) > 1 else "has"
            yield f"{', '.join(values) or 'It'} {verb} no effect {row.clause.text}."


def _toml(value: Any) -> str:
    plain = value.value if isinstance(value, ModeName) else value
    if isinstance(plain, tuple):
        return f"[{', '.join(map(_toml, plain))}]"
    if isinstance(plain, dict):
        return "{}" if not plain else json.dumps(plain)
    return json.dumps(plain, ensure_ascii=False)


def _type(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the type and the bounds in words."""
    if "$ref" in schema:
        return _type(whole["$defs"][str(schema["$ref"]).rpartition("/")[2]], whole)
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [_type(one, whole) for one in forms if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(_toml, schema.get("enum") or [schema["const"]]))
    kind = schema.get("type")
    if keys := schema.get("properties"):
        return f"table of {', '.join(keys)}"
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), whole)}"
    words = TYPES.get(str(kind), "any value")
    bounds = [
        text.format(_toml(schema[bound]))
        for bound, text in BOUNDS.items()
        if bound in schema and abs(schema[bound]) < LARGEST
    ]
    return ", ".join([words, *bounds])
