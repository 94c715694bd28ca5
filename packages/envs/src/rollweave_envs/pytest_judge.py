"""Judges tests that pytest runs in a sandbox beside code that an agent wrote
(`pytest_runner.py`): what the runner gets, and what of its report is
believed.

Invariants: settings that an agent wrote have no effect; a test passes only if a
complete report says so, every line of which is authentic, and the controls beside it
failed. What a program prints, its exit status and its files decide nothing.
"""

import functools
import hashlib
import hmac
import json
import posixpath
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rollweave.schema.errors import SandboxError

CONFIGS = (
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml"),
    *("tox.ini", "setup.cfg"),
)
"""The files in which pytest finds its settings, in its order."""

SHARED = ("pyproject.toml", "setup.cfg")
"""Files with pytest's settings among others: an agent may change the others."""

STARTED = frozenset({"conftest", "sitecustomize", "usercustomize"})
"""Modules that an interpreter or pytest runs if it finds them."""

METADATA = (".pth", ".egg-info", ".egg-link", ".dist-info")
"""Endings of files and folders by which packages announce plugins and folders."""

TESTS = frozenset({"test", "tests", "testing"})
"""Names of folders of tests."""

LOCATE = """
import os, re, shutil, sys
root, name, *files = sys.argv[1:]
sections = {".ini": r"\\[pytest\\]", ".cfg": r"\\[tool:pytest\\]"}
sections[".toml"] = r"\\[tool\\.pytest[\\].]"
own = ("pytest.ini", "pytest.toml")
folder = os.path.commonpath([os.path.dirname(os.path.join(root, file)) for file in files])
found = ""
while not found and (folder + "/").startswith(root + "/"):
    for config in CONFIGS:
        path = os.path.join(folder, config)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        section = sections[os.path.splitext(config)[1]]
        if config.lstrip(".") in own or re.search("(?m)^ *" + section, text):
            found = path
            break
    folder = os.path.dirname(folder)
if os.path.basename(found) in SHARED:
    copy = os.path.join(os.path.dirname(found), name + os.path.splitext(found)[1])
    shutil.copyfile(found, copy)
    found = copy
elif not found:
    found = os.path.join(root, name + ".ini")
    with open(found, "w") as file:
        file.write("[pytest]\\n")
print(found, end="")
""".replace("CONFIGS", repr(CONFIGS)).replace("SHARED", repr(SHARED))
"""A program that prints the path of the settings of pytest at the base, `LOCATE ROOT
NAME FILE…`: a copy if an agent may change the file, an empty one if there are none.
"""

PASSED = frozenset({"PASSED", "XFAIL"})
"""The outcomes that count as passed, as in SWE-bench."""

UNPASSED = frozenset({"FAILED", "ERROR", "SKIPPED"})
"""The outcomes that controls must have for the other outcomes to be believed."""

FINISHED = (("end", "o", "0"), ("end", "o", "1"))
"""The last record of tests that ran: all passed, or some did not."""

Outcomes = list[tuple[str, str]]
"""Pairs of outcome and name."""


@dataclass(frozen=True)
class Run:
    """One run of tests. `config` is the path of the settings in the sandbox, `changed`
    are the files that the agent wrote, relative to `root`.
    """

    root: str
    config: str
    files: Sequence[str]
    changed: Iterable[str] = ()
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    tag: str = field(default_factory=lambda: secrets.token_hex(6))

    def command(self, python: Sequence[str]) -> list[str]:
        return [*python, "-I", "-S", "-c", _runner()]

    def stdin(self) -> bytes:
        job: dict[str, object] = {"key": self.key.hex(), "tag": self.tag, "root": self.root}
        job |= {"config": self.config, "files": [*self.files], "changed": [*self.changed]}
        job["folders"] = sorted(folders_of(self.files))
        return json.dumps(job).encode()

    def outcomes(self, channel: bytes) -> Outcomes | None:
        """Return the outcomes of the report; None if it is not to be believed."""
        records = self._records(channel)
        finished = [record for record in records if record[0] == "end"]
        if len(finished) != 1 or records.pop() not in FINISHED:
            return None
        controls = {_file(name) for _, kind, name in records if kind == "c"}
        for status, kind, name in records:
            unchecked = kind == "f" and _file(name) not in controls
            if (kind == "c" and status not in UNPASSED) or (status == "PASSED" and unchecked):
                return None
        return [(status, name) for status, kind, name in records if kind != "c"]

    def _records(self, channel: bytes) -> list[tuple[str, str, str]]:
        """Return each line's status, kind and name; none if a line is not authentic."""
        records: list[tuple[str, str, str]] = []
        for number, line in enumerate(channel.splitlines()):
            said, _, mac = line.rpartition(b" ")
            expected = hashlib.blake2b(said, key=self.key, digest_size=16).hexdigest().encode()
            if not hmac.compare_digest(mac, expected):
                return []
            counted, status, kind, name = said.decode().split(" ")
            if int(counted) != number:
                return []
            records.append((status, kind, bytes.fromhex(name).decode(errors="replace")))
        return records


def is_control(path: str) -> bool:
    """Return whether a file decides how tests run: settings of pytest, modules that run
    at a start, and metadata of packages, which announces plugins.
    """
    pure = PurePosixPath(path)
    starts = any(part.partition(".")[0] in STARTED for part in pure.parts)
    announces = any(part.endswith(METADATA) for part in pure.parts)
    return starts or announces or (pure.name in CONFIGS and pure.name not in SHARED)


def folders_of(tests: Iterable[str]) -> frozenset[str]:
    """Return the folders of tests that these files are in, each the outermost one that
    has such a name.
    """
    folders = set()
    for test in tests:
        parts = PurePosixPath(test).parts
        depth = next((place for place, part in enumerate(parts[:-1]) if part in TESTS), None)
        if depth is not None:
            folders.add(posixpath.join(*parts[: depth + 1]))
    return frozenset(folders)


def matched(pairs: Outcomes, names: Sequence[str]) -> dict[str, bool]:
    """Return which tests passed. A name that is cut off at a space stands for all names
    that begin with it, because SWE-bench cuts names there.
    """
    seen: dict[str, list[bool]] = {}
    known = frozenset(names)
    longest = max(map(len, known), default=0)
    for status, said in pairs:
        for end in range(min(len(said), longest) + 1):
            if said[end : end + 1] in ("", " ") and said[:end] in known:
                seen.setdefault(said[:end], []).append(status in PASSED)
    return {name: all(seen.get(name, [False])) for name in names}


def check_config(path: bytes, root: str) -> str:
    """Return the path that LOCATE printed. Raises SandboxError."""
    config = path.decode(errors="replace")
    if not config.startswith(f"{root}/"):
        raise SandboxError(f"the settings of pytest in {root} could not be found, got {config!r}")
    return config


def _file(name: str) -> str:
    return name.partition("::")[0]


@functools.lru_cache(1)
def _runner() -> str:
    return Path(__file__).with_name("pytest_runner.py").read_text()
