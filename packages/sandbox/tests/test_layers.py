"""Copies of untrusted trees, compared with a reader's view of both trees."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollweave_sandbox.layers import DEPTH, Copy, LayerError, leads_out, remove
from tests.support.properties import examples

NAMES = st.sampled_from(["a", "b", "c", "\udcff", "x y"])
TREES = st.recursive(
    st.one_of(st.binary(max_size=20), st.sampled_from(["/etc/passwd", "a", "../.."])),
    lambda children: st.dictionaries(NAMES, children, max_size=4),
    max_leaves=12,
)


def build(tree: object, path: Path) -> None:
    """Build a tree: bytes are files, strings links, dicts folders."""
    if isinstance(tree, dict):
        path.mkdir(exist_ok=True)
        for name, below in tree.items():
            build(below, path / name)
    elif isinstance(tree, bytes):
        path.write_bytes(tree)
    else:
        path.symlink_to(str(tree))


def seen(path: Path) -> object:
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return {below.name: seen(below) for below in path.iterdir()}
    return path.read_bytes()


def copied(
    source: Path, target: Path, *, limit_bytes: int = 1 << 20, skip: frozenset[str] = frozenset()
) -> int:
    ends = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (source, target)]
    copy = Copy(limit_bytes=limit_bytes, skip=skip)
    try:
        copy.run(*ends)
    finally:
        for end in ends:
            os.close(end)
    return copy.bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(tree=st.dictionaries(NAMES, TREES, max_size=4))
def test_a_copy_is_equal_and_follows_no_link(
    tree: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("copy")
    build(tree, place / "from")
    (place / "to").mkdir()
    copied(place / "from", place / "to")
    assert seen(place / "to") == seen(place / "from") == tree
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    remove("to", folder)
    os.close(folder)
    assert not (place / "to").exists()


def test_nothing_of_a_copy_raises_privileges_or_blocks(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    (source / "program").write_bytes(b"x")
    (source / "program").chmod(0o6755)
    os.mkfifo(source / "fifo")
    (source / "skipped").mkdir()
    (source / "skipped" / "file").write_bytes(b"x")
    (source / "skipped").chmod(0o1055)
    os.utime(source / "program", ns=(3, 7 * 10**9))
    copied(source, target, skip=frozenset({"skipped/file"}))
    seen = [(target / name).stat() for name in ("program", "skipped")]
    assert [stat.S_IMODE(status.st_mode) for status in seen] == [0o755, 0o1755]
    assert (seen[0].st_atime_ns, seen[0].st_mtime_ns) == (3, 7 * 10**9)
    assert sorted(os.listdir(target)) == ["program", "skipped"]
    assert os.listdir(target / "skipped") == []


def test_holes_are_free_and_bytes_are_bounded(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    with open(source / "sparse", "wb") as out:
        out.truncate(1 << 40)
        out.seek(1 << 30)
        out.write(b"middle")
    copied(source, target)
    assert (target / "sparse").stat().st_size == 1 << 40
    with open(target / "sparse", "rb") as file:
        file.seek(1 << 30)
        assert file.read(6) == b"middle"
    (source / "large").write_bytes(bytes(2 << 20))
    with pytest.raises(LayerError, match="at most 1048576 bytes"):
        copied(source, tmp_path, limit_bytes=1 << 20)


def test_depth_is_bounded(tmp_path: Path) -> None:
    deep = tmp_path / "from"
    for _ in range(DEPTH + 2):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (tmp_path / "to").mkdir()
    with pytest.raises(LayerError, match="at most 100 deep"):
        copied(tmp_path / "from", tmp_path / "to")


@pytest.mark.parametrize("link", ["a", "./a//b", "..", "../a", "../../a", "a/..", "../a/..", "/a"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_link_may_lead_as_far_up_as_its_folder_is_deep(link: str, depth: int) -> None:
    ups = link.count("..") if link.startswith("..") and not link.endswith("a/..") else 0
    assert leads_out(link, depth) is (link in ("a/..", "../a/..", "/a") or ups > depth)
