"""An agent's changes: validated, bounded, and rendered as a patch that git applies."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollweave_envs import changes as changes_module
from rollweave_envs.changes import CHANGED_BYTES, FILES, changes, patch
from tests.support.properties import examples

BEFORE = {"a.py": "one\ntwo\nthree\n", "b/c.py": "four\n", "d.py": ""}


def listing(**files: str | bytes) -> bytes:
    coded = {
        path: base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
        for path, text in files.items()
    }
    return json.dumps(coded).encode()


def everything(path: str) -> bool:
    return True


def test_collects_differences() -> None:
    after = {"a.py": "one\n2\nthree\n", "b/c.py": "four\n", "new.py": "x"}
    collected, refused = changes(listing(**after), BEFORE, keep=everything)
    assert (collected, refused) == ({"a.py": "one\n2\nthree\n", "d.py": None, "new.py": "x"}, "")
    assert changes(listing(**BEFORE), BEFORE, keep=everything) == ({}, "")


def test_ignores_excluded_paths() -> None:
    collected, _ = changes(
        listing(**{"a.py": "1", "b/x": "2"}), BEFORE, keep=lambda path: not path.startswith("b/")
    )
    assert collected == {"a.py": "1", "d.py": None}


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a\nb", "x" * 300, "..", "a/"]
)
def test_paths_stay_below(path: str) -> None:
    assert changes(listing(**{**BEFORE, path: "x"}), BEFORE, keep=everything) == ({}, "")


def test_leaves_out_binary_files() -> None:
    assert changes(listing(**BEFORE, x=b"\xff", y="a\0b"), BEFORE, keep=everything) == ({}, "")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff", listing(**BEFORE)[:-5]])
def test_refuses_an_invalid_listing(data: bytes) -> None:
    assert changes(data, BEFORE, keep=everything) == ({}, changes(b"", {}, keep=everything)[1])
    assert changes(data, BEFORE, keep=everything)[1].startswith(
        "the files of the project could not be listed"
    )


def test_too_much_is_refused() -> None:
    for after in (
        {"x": "x" * (CHANGED_BYTES + 1)},
        {str(number): "x" for number in range(FILES + 1)},
    ):
        collected, refused = changes(listing(**BEFORE, **after), BEFORE, keep=everything)
        assert not collected
        assert refused.startswith(f"at most {FILES} files")


LINES = st.lists(st.sampled_from(["a", "b", "", "\x0c", "c\r", "é"]), max_size=6)
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end, LINES, st.sampled_from(["", "\n"]))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["a", "b/c", "d"]), TEXTS),
    st.dictionaries(st.sampled_from(["a", "b/c", "d"]), TEXTS),
    st.booleans(),
)
def test_git_applies_the_patch(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, str],
    after: dict[str, str],
    costly: bool,
) -> None:
    folder = tmp_path_factory.mktemp("project")
    for path, text in before.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(text.encode())
    empty = [path for path in {*before, *after} if not before.get(path) and not after.get(path)]
    # an empty patch has no content
    collected, _ = changes(listing(**after), before, keep=lambda path: path not in empty)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes_module, "STEPS", -1 if costly else changes_module.STEPS)
        text = patch(before, collected)
    if text:
        subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            input=text.encode(),
            cwd=folder,
            check=True,
            capture_output=True,
        )
    there = {
        str(path.relative_to(folder)): path.read_bytes().decode()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }
    expected = {path: text for path, text in after.items() if path not in empty}
    assert {path: text for path, text in there.items() if path not in empty} == expected
