"""Small templates: `{{name}}`, `{{name|filter:argument}}`, `{{#list}}...{{/list}}`."""

import re

_TAG = re.compile(r"\{\{\s*([#/]?)([\w.]+)((?:\|\w+(?::[^|}]*)?)*)\s*\}\}")


class TemplateError(ValueError):
    """The template, or what it asks for, is wrong. `line` is where."""

    def __init__(self, message, line):
        super().__init__(f"line {line}: {message}")
        self.line = line


FILTERS = {
    "upper": lambda value, _: str(value).upper(),
    "lower": lambda value, _: str(value).lower(),
    "default": lambda value, argument: argument if value is None else value,
    "join": lambda value, argument: (argument or ", ").join(str(part) for part in value),
    "first": lambda value, argument: value[: int(argument or 1)],
}


def render(template, values):
    """The text. Raises TemplateError for unknown names without a default, unknown filters, sections that do not match."""
    text, rest = _render(template, 0, None, [values])
    assert rest == len(template)
    return text


def _render(template, start, section, scopes):
    parts = []
    place = start
    while True:
        match = _TAG.search(template, place)
        if match is None:
            if section is not None:
                raise TemplateError(f"section {section} is not closed", _line(template, start))
            parts.append(template[place:])
            return "".join(parts), len(template)
        parts.append(template[place : match.start()])
        kind, name, filters = match.groups()
        place = match.end()
        if kind == "/":
            if name != section:
                raise TemplateError(f"section {name} is closed but not open", _line(template, match.start()))
            return "".join(parts), place
        value = _apply(_find(name, scopes), filters, name, _line(template, match.start()))
        if kind == "#":
            items = value if isinstance(value, (list, tuple)) else [value] if value else []
            end = _render(template, place, name, [*scopes, _Anything()])[1]
            for item in items:
                parts.append(_render(template, place, name, [*scopes, item])[0])
            place = end
        else:
            parts.append(str(value))


def _apply(value, filters, name, line):
    for part in filters.split("|")[1:]:
        which, _, argument = part.partition(":")
        if which not in FILTERS:
            raise TemplateError(f"there is no filter {which}", line)
        value = FILTERS[which](value, argument)
    if value is None:
        raise TemplateError(f"{name} has no value", line)
    return value


def _find(name, scopes):
    """The innermost scope that has the first part of the name; `.` alone and `item` are the scope itself."""
    first, *more = name.split(".")
    for scope in reversed(scopes):
        if isinstance(scope, _Anything):
            return scope
        if isinstance(scope, dict) and first in scope:
            value = scope[first]
            for part in more:
                value = value.get(part) if isinstance(value, dict) else None
            return value
        if first == "item" and not isinstance(scope, dict):
            return scope
    return None


class _Anything(str):
    """Stands for whatever a section that is skipped would ask for."""


def _line(template, place):
    return template.count("\n", 0, place) + 1
