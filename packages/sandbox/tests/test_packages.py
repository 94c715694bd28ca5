"""The packages that a sandbox may see, and their files: those of a folder that the test
makes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.schema.errors import ConfigError
from rollweave_sandbox import packages, rootfs
from rollweave_sandbox.packages import distributions, files_of, installed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of packages, from which the tests' process imports, too."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    packages.installed.cache_clear()
    yield folder
    packages.installed.cache_clear()


def add(
    site: Path,
    name: str,
    files: dict[str, str],
    *,
    requires: tuple[str, ...] = (),
    record: bool = True,
    origin: object = None,
) -> None:
    """Install a distribution: `files` by their paths relative to the folder."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    lines = [f"Requires-Dist: {line}\n" for line in requires]
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{''.join(lines)}"
    }
    if origin is not None:
        files |= {f"{info}/direct_url.json": json.dumps(origin)}
    if record:
        files |= {f"{info}/RECORD": "".join(f'"{path}",,\n' for path in [*files, "gone.py"])}
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def seen(*names: str) -> set[str]:
    """Return the files of the packages, without their metadata."""
    return {
        path
        for distribution in distributions(names).values()
        for path in files_of(distribution)
        if ".dist-info" not in path
    }


def test_a_package_comes_with_what_it_requires_and_nothing_else(site: Path) -> None:
    add(
        site,
        "top-one",
        {"top/a.py": "", "top/__pycache__/a.cpython-311.pyc": "", "../../bin/top": "#!"},
        requires=("Below[fast]>=1", "absent", "never; python_version < '3'", "more; extra == 'x'"),
    )
    add(site, "below", {"below.py": ""}, requires=("quick; extra == 'fast'", "top.one"))
    for name in ("quick", "never", "more", "other"):
        add(site, name, {f"{name}.py": "", f"space/{name}/m.py": ""})
    (site / "top" / "not_recorded.py").write_text("")
    (site / "top" / "__pycache__" / "a.cpython-399.pyc").write_text("")
    common = {"top/a.py", "top/__pycache__/a.cpython-311.pyc", "../../bin/top", "gone.py"}
    common |= {"top/__pycache__/a.cpython-399.pyc", "below.py", "quick.py", "space/quick/m.py"}
    assert seen("Top_One") == common
    assert seen("top.one[x]") == common | {"more.py", "space/more/m.py"}
    assert installed("top-one", "nowhere", "other") == ("top-one", "other")


def test_packages_of_a_system_have_no_record(site: Path) -> None:
    add(
        site,
        "Old-Thing",
        {
            "old_thing/__init__.py": "",
            "old_thing/sub/data.txt": "",
            "_old.cpython-311-x86_64-linux-gnu.so": "",
            "old_thing_too/__init__.py": "",
            "Old_Thing-1.0.dist-info/top_level.txt": "old_thing\n_old\n",
        },
        record=False,
    )
    add(site, "single", {"single.py": "", "singles.py": ""}, record=False)
    assert seen("old-thing", "single") == {
        "old_thing/__init__.py",
        "old_thing/sub/data.txt",
        "_old.cpython-311-x86_64-linux-gnu.so",
        "single.py",
    }


def test_a_file_that_adds_folders_is_left_out(site: Path) -> None:
    add(site, "hooks", {"imports.pth": "# x\n\nimport os\n", "adds.pth": "import os\n/srv/x\n"})
    assert seen("hooks") == {"imports.pth", "gone.py"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere-at-all",), "packages must be installed on this host, got 'nowhere-at-all'"),
        (("rollweave",), "packages must not have rollweave, whose handlers contain"),
        (("Roll_weave",), "packages must be installed"),
        (("user",), r"rollweave, which user requires, whose handlers .*, got 'user'"),
        (("edited",), "packages must not be editable installs, .*: edited is one"),
        (("on-top",), "packages must not be editable installs, .*: edited, which on-top requires"),
        (("developed",), "packages must not be editable installs, .*: developed is one"),
    ],
)
def test_refuses_packages_that_no_sandbox_may_see(
    site: Path, names: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(site, "user", {"user.py": ""}, requires=("Rollweave[tools]",))
    origin = {"url": "file:///src", "dir_info": {"editable": True}}
    add(site, "edited", {"__editable__.edited.pth": "/src"}, origin=origin)
    add(site, "on-top", {"on_top.py": ""}, requires=("edited",))
    source = site.parent / "source"
    add(source, "developed", {"developed.py": ""}, record=False)
    monkeypatch.syspath_prepend(str(source))
    with pytest.raises(ConfigError, match=message):
        distributions(names)


def test_packages_from_elsewhere_are_where_the_interpreter_looks(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a user's own folder, or of PYTHONPATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    add(site, "elsewhere", {"elsewhere/a.py": "1", "../../bin/elsewhere": "#!", "../../../x": ""})
    view = rootfs.view_with(("elsewhere",))
    folders = {where: source for source, where in view.binds}
    place = rootfs._package_folders()[0]
    prefix = max((where for where in folders if f"{place}/".startswith(f"{where}/")), key=len)
    made = Path(folders[prefix], place.removeprefix(prefix).lstrip("/"))
    assert (made / "elsewhere/a.py").read_text() == "1"
    assert sorted(path.name for path in made.iterdir()) == ["elsewhere", "elsewhere-1.0.dist-info"]
    assert (Path(folders[sys.prefix]) / "bin/elsewhere").exists()
    assert view.names == {"elsewhere"}


def test_a_folder_of_packages_is_made_again_when_a_package_has_changed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    kept = tmp_path / "caches" / "rollweave" / "packages"

    def view() -> rootfs.View:
        rootfs._views.clear()
        return rootfs.view_with(("changing",))

    add(site, "changing", {"changing.py": "1"})
    first = view()
    assert view() == first
    assert rootfs.known_view(("changing",)) is rootfs.view_with(("changing",))
    assert len(list(kept.iterdir())) == 1
    add(site, "changing", {"changing.py": "1", "new.py": ""})
    second = view()
    assert second != first
    assert len(list(kept.iterdir())) == 2
    old = next(path for path in kept.iterdir() if str(path) not in str(second))
    rootfs.os.utime(old, (0, 0))
    add(site, "changing", {"changing.py": "1", "newer.py": ""})
    view()
    assert old not in kept.iterdir()
    for path in kept.iterdir():
        packages.os.rename(path, f"{path}.moved")
    assert rootfs.known_view(("changing",)) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr(rootfs.tempfile, "gettempdir", lambda: str(tmp_path))
    assert str(tmp_path / "rollweave-packages-") in str(view())
