"""`rollweave config`: shows sections and settings, and writes their reference and the
JSON schema of a configuration file.
"""

import json
from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import out
from rollweave.schema.config.conflicts import CONFLICTS, WITHOUT_EFFECT
from rollweave.schema.config.reference import Part, Setting, json_schema, part_or_setting, parts

INTRODUCTION = """\
# Settings

<!-- written by `rollweave config --markdown` -->

Every setting of a configuration file, in the order of the sections. In a terminal,
`rollweave config` lists the sections, `rollweave config rollout` the settings of a
section, and `rollweave config rollout.alpha` shows one setting. A setting on the
command line replaces the file's: `rollweave train CONFIG --set rollout.alpha=2`.

Editors that know JSON schemas check a file and complete its keys: write the schema
with `rollweave config --json-schema > rollweave.schema.json`, and begin the file with
`#:schema rollweave.schema.json` (Taplo, Even Better TOML).

A setting that others exclude is refused unless it has its default. A setting that only
has no effect together with others is accepted, and named when a run starts. The
[last two tables](#settings-that-exclude-each-other) say when.
"""


def config(key: str | None, *, schema: bool, markdown: bool) -> None:
    """Show all sections, one section or one setting, or write the JSON schema or the
    reference. Raises ConfigError for an unknown key.
    """
    if schema:
        print(json.dumps(json_schema(), indent=2))
    elif markdown:
        print("\n".join(page()), end="")
    elif key is None:
        _show_sections()
    else:
        shown = part_or_setting(key)
        if isinstance(shown, Setting):
            _show_setting(shown)
        else:
            _show_parts(shown)


def page() -> Iterator[str]:
    """Return the lines of the reference as Markdown."""
    yield INTRODUCTION
    for part in parts():
        yield f"## `{part.header}`\n"
        if part.description:
            yield f"{part.description}\n"
        yield "| setting | type | default | meaning |"
        yield "|---|---|---|---|"
        for setting in part.settings:
            cells = (
                f"`{setting.key.rpartition('.')[2]}`",
                _cell(setting.type),
                "**must be set**" if setting.required else _code(setting.default),
                _cell(" ".join([setting.description, *setting.conflicts])),
            )
            yield f"| {' | '.join(cells)} |"
        yield ""
    for title, verb, table in (
        ("Settings that exclude each other", "must be left out", CONFLICTS),
        ("Settings without effect", "have no effect", WITHOUT_EFFECT),
    ):
        yield f"## {title}\n"
        yield f"| settings | {verb} | because |"
        yield "|---|---|---|"
        for row in table:
            named = ", ".join(
                f"`{key}`" + (f" ({', '.join(values)})" if values else "")
                for key, values in row.choices.items()
            )
            yield f"| {named} | {row.clause.text} | {row.clause.why} |"
        yield ""


def _code(value: str | None) -> str:
    return "unset" if value is None else f"`{_cell(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _show_sections() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("section", no_wrap=True)
    table.add_column("settings", justify="right")
    table.add_column("")
    for part in parts():
        table.add_row(escape(part.header), str(len(part.settings)), escape(part.description))
    out.print(table)
    out.print("\n`rollweave config SECTION` lists its settings, `rollweave config KEY` shows one.")


def _show_parts(shown: Sequence[Part]) -> None:
    for number, part in enumerate(shown):
        if number:
            out.print()
        out.print(f"[bold]{escape(part.header)}[/]  {escape(part.description)}")
        table = Table(box=None, pad_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("type", ratio=2)
        table.add_column("default", ratio=1)
        table.add_column("meaning", ratio=4)
        for setting in part.settings:
            table.add_row(
                setting.key.rpartition(".")[2],
                escape(setting.type),
                escape(setting.shown_default),
                escape(" ".join([setting.description, *setting.conflicts])),
            )
        out.print(table)


def _show_setting(setting: Setting) -> None:
    (part,) = (part for part in parts() if setting in part.settings)
    name = setting.key.rpartition(".")[2]
    out.print(f"[bold]{escape(setting.key)}[/]  {escape(setting.description)}")
    for line in setting.conflicts:
        out.print(escape(line))
    out.print(f"type     {escape(setting.type)}")
    out.print(f"default  {escape(setting.shown_default)}")
    example = setting.default if setting.default is not None else "…"
    out.print(f"in a file           {escape(part.header)} {name} = {escape(example)}")
    section = part.header.strip("[]")
    first, dot, rest = section.partition(".")
    # `[engines]` may be a single table
    section = f"{first}.0{dot}{rest}" if first in ("tasks", "rewards") else section
    place = f"{section}.{name}"
    out.print(f"on a command line   --set {escape(place)}={escape(example)}")
