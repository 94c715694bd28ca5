"""The editor through a channel: each edit is compared with a simple reference, and
every rule that protects a file is tested.
"""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.sandbox.tests.action_server import served
from rollweave.sandbox.tools import Editor, Text
from rollweave.schema.errors import SandboxRefusedError
from rollweave_sandbox.inside import files as module
from tests.support.properties import examples

QUICKLY = settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


async def test_view_numbers_the_requested_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntwo\nthree\n\nfive")
    async with served() as channel:
        editor = Editor(channel)
        assert await editor.view(str(path), first=2, last=3) == Text(
            text="     2\ttwo\n     3\tthree\n", lines=5
        )
        assert (await editor.view(str(path))).text.splitlines()[-2:] == ["     4\t", "     5\tfive"]
        assert (await editor.view(str(path), first=5, last=99)).text == "     5\tfive\n"
        with pytest.raises(
            SandboxRefusedError, match="first must be at most the number of lines, 5, got 6"
        ):
            await editor.view(str(path), first=6)
        with pytest.raises(SandboxRefusedError, match="last must be an integer from 3"):
            await editor.view(str(path), first=3, last=2)


async def test_a_folder_is_shown_two_levels_deep_without_hidden_names(tmp_path: Path) -> None:
    for name in ("b/c/deep", "a", ".hidden/x", "b/.git/y", "b/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("/")
    async with served() as channel:
        assert (await Editor(channel).view(str(tmp_path))).text == "a\nb/\nb/c/\nb/z\nlink\n"


async def test_long_views_and_large_folders_are_truncated(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 1000 + "\n" + "y\n" * 1_000_000)
    for number in range(1100):
        (tmp_path / f"{number}").touch()
    async with served() as channel:
        view = await Editor(channel).view(str(tmp_path / "long"))
        assert len(view.text) < module.VIEW_CHARS + 100
        assert view.text.splitlines()[-1].endswith("more lines")
        assert (await Editor(channel).view(str(tmp_path))).text.endswith("more than 1000 entries\n")


async def test_create_makes_folders_and_keeps_existing_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    async with served() as channel:
        editor = Editor(channel)
        await editor.create(str(path), "text 🐴\n")
        with pytest.raises(
            SandboxRefusedError, match="path must not exist yet, unless overwrite is set"
        ):
            await editor.create(str(path), "other")
        assert path.read_text() == "text 🐴\n"
        await editor.create(str(path), "other", overwrite=True)
        assert path.read_text() == "other"
        await editor.undo(str(path))
        assert path.read_text() == "text 🐴\n"
        await editor.undo(str(path))
        assert not path.exists()


@QUICKLY
@given(st.text("ab\n", max_size=12), st.text("ab\n", max_size=3), st.text("xy\n", max_size=3))
def test_replaces_exactly_one_occurrence(tmp_path: Path, before: str, old: str, new: str) -> None:
    async def main() -> None:
        path = tmp_path / "file"
        path.write_text(before)
        async with served() as channel:
            editor = Editor(channel)
            places = [at for at in range(len(before)) if old and before.startswith(old, at)]
            if len(places) == 1:
                await editor.replace(str(path), old, new)
                assert (
                    path.read_text() == before[: places[0]] + new + before[places[0] + len(old) :]
                )
                await editor.undo(str(path))
            else:
                with pytest.raises(
                    SandboxRefusedError,
                    match=f"is there {len(places)} times" if old else "old must not be empty",
                ):
                    await editor.replace(str(path), old, new)
            assert path.read_text() == before

    asyncio.run(main())


@QUICKLY
@given(
    st.lists(st.text("ab", max_size=2), max_size=5),
    st.booleans(),
    st.integers(0, 6),
    st.lists(st.text("xy", max_size=2), max_size=3),
)
def test_insert_puts_lines_between_lines(
    tmp_path: Path, before: list[str], ended: bool, line: int, added: list[str]
) -> None:
    async def main() -> None:
        path = tmp_path / "file"
        text = "\n".join(before) + ("\n" if before and ended else "")
        path.write_text(text)
        lines = text.removesuffix("\n").split("\n") if text else []
        async with served() as channel:
            editor = Editor(channel)
            new = "".join(f"{one}\n" for one in added)
            if line > len(lines):
                with pytest.raises(
                    SandboxRefusedError, match="line must be at most the number of lines"
                ):
                    await editor.insert(str(path), line, new)
                assert path.read_text() == text
            else:
                await editor.insert(str(path), line, new)
                assert path.read_text().removesuffix("\n").split("\n") == (
                    [*lines[:line], *added, *lines[line:]] or [""]
                )
                await editor.undo(str(path))
                assert path.read_text() == text

    asyncio.run(main())


async def test_an_edit_shows_the_lines_around(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("".join(f"line {number}\n" for number in range(1, 21)))
    async with served() as channel:
        editor = Editor(channel)
        view = await editor.replace(str(path), "line 10\n", "new\nlines\n")
        expected = ["new", "lines", "line 11"]
        assert [row.split("\t")[1] for row in view.text.splitlines()][4:7] == expected
        assert view.lines == 21
        assert "added" in (await editor.insert(str(path), 21, "added")).text


async def test_replace_reports_the_lines_of_other_occurrences(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a\nb\na\n")
    async with served() as channel:
        with pytest.raises(SandboxRefusedError, match="is there 2 times, at lines 1, 3"):
            await Editor(channel).replace(str(path), "a", "c")


async def test_line_ends_modes_and_links_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"one\r\ntwo\r\n")
    path.chmod(0o750)
    link.symlink_to("file")
    async with served() as channel:
        editor = Editor(channel)
        await editor.insert(str(link), 1, "new")
        assert path.read_bytes() == b"one\r\nnew\r\ntwo\r\n"
        assert path.stat().st_mode & 0o777 == 0o750
        assert link.is_symlink()
        await editor.undo(str(path))
        assert path.read_bytes() == b"one\r\ntwo\r\n"


async def test_a_file_that_is_not_text_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\xff\n")
    async with served() as channel:
        editor = Editor(channel)
        for edit in (
            editor.view(str(path)),
            editor.replace(str(path), "a", "b"),
            editor.insert(str(path), 0, "x"),
        ):
            with pytest.raises(
                SandboxRefusedError, match="file must be UTF-8, got invalid start byte at byte 1"
            ):
                await edit
        assert path.read_bytes() == b"a\xff\n"
        path.write_bytes(b"x" * (module.FILE_BYTES + 1))
        with pytest.raises(SandboxRefusedError, match="path must have at most"):
            await editor.view(str(path))


async def test_undo_reverts_edits_but_not_changes_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with served() as channel:
        editor = Editor(channel)
        await editor.create(str(path), "a")
        for old, new in (("a", "b"), ("b", "a"), ("a", "b")):
            await editor.replace(str(path), old, new)
        for text in ("a", "b", "a"):
            await editor.undo(str(path))
            assert path.read_text() == text
        path.write_text("changed")
        with pytest.raises(SandboxRefusedError, match="was changed since"):
            await editor.undo(str(path))
        assert path.read_text() == "changed"
        with pytest.raises(SandboxRefusedError, match="must have an edit that can be undone"):
            await editor.undo(str(tmp_path / "other"))


async def test_the_undo_history_is_bounded(tmp_path: Path) -> None:
    async with served() as channel:
        editor = Editor(channel)
        for number in range(module.EDITS + 1):
            await editor.create(str(tmp_path / str(number)), "x")
        with pytest.raises(SandboxRefusedError, match="must have an edit"):
            await editor.undo(str(tmp_path / "0"))
        await editor.undo(str(tmp_path / "1"))


async def test_concurrent_edits_are_atomic(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("".join(f"<{number}>\n" for number in range(20)))
    async with served() as channel:
        editor = Editor(channel)
        await asyncio.gather(
            *(editor.replace(str(path), f"<{number}>", f"[{number}]") for number in range(20))
        )
    assert path.read_text() == "".join(f"[{number}]\n" for number in range(20))
    assert os.listdir(tmp_path) == ["file"]
