"""A sandbox on the host's image sees an allow-list of the host, however Rollweave is
installed; and programs load no file at their start that an agent could write.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

import rollweave
import rollweave_envs
import rollweave_sandbox
from rollweave.sandbox.base import Backend, SandboxSpec
from rollweave_sandbox import rootfs
from rollweave_sandbox.sources import DIRECTORIES
from tests.support.sandboxes import ISOLATING, SPEC, needs, opened
from tests.support.variants import mostly_extended

SOURCES = [str(directory.parent) for directory in DIRECTORIES]


@pytest_asyncio.fixture(params=ISOLATING)
async def isolating(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with opened(request.param) as opened_backend:
        yield opened_backend


WALK = """
import json, os, sys
found = {"ours": [], "infos": [], "packages": [], "answers": [], "files": 0}
for at, folders, names in os.walk("/"):
    if at == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
    ours = at == "/run/rollweave" or "/rollweave-sandboxes-" in at  # the server's own files
    if "rollweave" in os.path.basename(at) and not ours:
        found["ours"].append(at)
    found["infos"] += [name for name in folders + names if name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link"))]
    if os.path.basename(at) in ("site-packages", "dist-packages", "node_modules"):
        found["packages"] += folders + names
    for name in names:
        path = os.path.join(at, name)
        if not os.path.isfile(path):
            continue
        found["files"] += 1
        if name.endswith((".py", ".pyc", ".toml", ".json", ".jsonl", ".md", ".zip", ".whl")):
            try:
                data = open(path, "rb").read(1 << 22)
            except OSError:
                continue
            if any(mark.encode() in data for mark in sys.argv[1:]):
                found["answers"].append(path)
found["top"] = sorted(os.listdir("/")), sorted(os.listdir("/etc")), sorted(os.listdir("/usr"))
print(json.dumps(found))
"""
"""Walks the whole file system: what is there of Rollweave, of packages, and of the
marks in the arguments, which the answers of tasks have.
"""

MARKS = ("def divisible(text", "ledger-0168b0", "without_tests(", 'kind = "off by one"')


def check(found: dict[str, object], packages: set[str]) -> None:
    """Check what a walk has found: exactly the named packages."""
    assert found["ours"] == []
    assert found["answers"] == []
    assert found["files"] > 1000  # type: ignore[operator]
    names = {name.partition("-")[0].lower() for name in found["infos"]}  # type: ignore[attr-defined]
    assert names == packages
    tops = {name.partition(".")[0] for name in found["packages"] if "-info" not in name}  # type: ignore[attr-defined]
    assert tops <= {*packages, "_pytest", "py", "pygments", "__pycache__"}
    root, etc, usr = found["top"]  # type: ignore[misc]
    assert not {"opt", "srv", "mnt", "media", "boot", "data", "lost+found"} & {*root}
    known = "alternatives ca-certificates crypto-policies group hosts ld.so.cache ld.so.preload "
    assert {*etc} <= {*known.split(), "nsswitch.conf", "passwd", "pki", "python3.11", "ssl"}
    parts = "bin include lib lib32 lib64 libexec libx32 local sbin share"
    assert {*usr} <= {*parts.split()}


PYTEST = {"pytest", "iniconfig", "packaging", "pluggy", "pygments"}
"""What pytest requires."""


@pytest.mark.variants
async def test_an_editable_install_shows_the_named_packages_alone(isolating: Backend) -> None:
    """The tests run on one. The interpreter works, and imports what is named."""
    sandbox = await isolating.start(SPEC)
    other = await isolating.start(SandboxSpec(packages=("pytest",)))
    walk = await other.exec([sys.executable, "-c", WALK, *MARKS])
    check(json.loads(walk.stdout), PYTEST)
    program = "import ctypes, sqlite3, ssl, pytest, sys; print(pytest.__version__, sys.prefix)"
    tried = await other.exec(["python", "-c", program])
    assert tried.stdout.decode().split() == [pytest.__version__, sys.prefix], tried.stderr
    assert (await other.exec(["pytest", "--version"])).rc == 0
    for name in ("rollweave", "msgspec", "numpy"):
        assert (await other.exec(["python", "-c", f"import {name}"])).rc == 1
        assert (await sandbox.exec(["python", "-c", f"import {name}"])).rc == 1


@pytest.mark.extended
def test_the_named_packages_are_seen_as_another_user(tmp_path: Path) -> None:
    """Without root, roots are mounted in user namespaces."""
    needs("bubblewrap")
    os.chmod(tmp_path, 0o777)
    command = ["unshare", "--user", "--map-user=12345", "--map-group=12345", sys.executable, "-c"]
    seen = _run([*command, INSIDE, *ISOLATING], caches=tmp_path)
    for name in ISOLATING:
        check(seen[name], PYTEST)


INSIDE = f"""
import asyncio, json, sys
from rollweave.sandbox.base import SandboxSpec
from rollweave_sandbox.registry import backend

async def main():
    seen = {{}}
    for name in sys.argv[1:]:
        boxes = backend(name)
        try:
            box = await boxes.start(SandboxSpec(packages=("pytest",)))
            walk = await box.exec(["python3", "-c", {WALK!r}, *{MARKS!r}])
            seen[name] = json.loads(walk.stdout or repr(walk.stderr))
        finally:
            await boxes.close()
    import rollweave
    seen["installed"] = rollweave.__file__
    print(json.dumps(seen))

asyncio.run(main())
"""


def _run(command: list[str], *, caches: Path, path: str = "") -> dict[str, dict[str, object]]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(caches)},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, dict[str, object]] = json.loads(done.stdout)
    return seen


@functools.cache
def _dependencies() -> str:
    """Return the folder of packages that a throwaway installation also imports from."""
    return str(Path(msgspec.__file__).parents[1])


def _install(packages: Path) -> None:
    """Install Rollweave, its tasks and its sandboxes as their wheels do: packages,
    answers and metadata.
    """
    packages.mkdir(parents=True, exist_ok=True)
    for package in (rollweave, rollweave_envs, rollweave_sandbox):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, packages / source.name)
    info = packages / "rollweave-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollweave\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("rollweave/__init__.py,,\n")
    (packages / "others.pth").write_text(_dependencies())


def _environment(folder: Path, *, shared: bool = False) -> tuple[str, Path]:
    """Make a virtual environment; return its interpreter and its folder of packages."""
    venv.create(folder, symlinks=True, system_site_packages=shared)
    return f"{folder}/bin/python", next(Path(folder, "lib").glob("python3.*")) / "site-packages"


def _installation(folder: Path) -> tuple[str, Path]:
    """Make an interpreter that is no virtual environment: files of ours, by hard links
    where that is possible.
    """
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    ignored = shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*")
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(base)}))
    shutil.copytree(
        library, folder / "lib" / version, ignore=ignored, copy_function=rootfs._link_or_copy
    )
    for shared in base.glob("lib/libpython*.so*"):
        rootfs._link_or_copy(os.path.realpath(shared), str(folder / "lib" / shared.name))
    (folder / "bin").mkdir()
    rootfs._link_or_copy(os.path.realpath(sys.executable), str(folder / "bin" / version))
    (folder / "bin" / "python3").symlink_to(version)
    return str(folder / "bin" / "python3"), folder / "lib" / version / "site-packages"


INSTALLS = ("wheel", "system", "shared")


@pytest.mark.extended
@pytest.mark.parametrize("install", mostly_extended(INSTALLS, {"wheel"}))
def test_an_installed_package_shows_the_named_packages_alone(install: str, tmp_path: Path) -> None:
    """Installed into a virtual environment, into the interpreter's own folder, or there
    and used by a virtual environment that shares it.
    """
    for name in ISOLATING:
        needs(name)
    os.chmod(tmp_path, 0o755)
    if install == "wheel":
        python, packages = _environment(tmp_path / "env")
    else:
        python, packages = _installation(tmp_path / "system")
    _install(packages)
    if install == "shared":
        subprocess.run(
            [python, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "env"],
            check=True,
        )
        python = str(tmp_path / "env" / "bin" / "python")
    seen = _run([python, "-c", INSIDE, *ISOLATING], caches=tmp_path / "caches")
    assert str(seen.pop("installed")).startswith(str(packages))
    for found in seen.values():
        check(found, PYTEST)


@pytest.mark.extended
def test_the_systems_python_shows_the_named_packages_alone(tmp_path: Path) -> None:
    """Its packages, and those of PYTHONPATH, are in folders that it imports from."""
    needs("bubblewrap")
    version = "import sys; print(*sys.version_info[:2])"
    python = ["/usr/bin/python3", "-c"]
    if not Path(python[0]).exists() or subprocess.run(
        [*python, version], capture_output=True, text=True, check=False
    ).stdout.split() != [*map(str, sys.version_info[:2])]:
        pytest.skip("the system has no Python of this version")
    path = ":".join([*SOURCES, _dependencies()])
    seen = _run([*python, INSIDE, *ISOLATING], caches=tmp_path, path=path)
    for name in ISOLATING:
        check(seen[name], PYTEST)


def test_supervisors_import_the_standard_library_alone() -> None:
    """Every sandbox is a fork of one, and has its modules in memory."""
    program = f"import sys; sys.path[:0] = {SOURCES!r}; import rollweave_sandbox.zygote_process"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


@pytest.mark.extended
def test_a_wheel_that_is_built_here_shows_the_named_packages_alone(tmp_path: Path) -> None:
    needs("bubblewrap")
    os.chmod(tmp_path, 0o755)
    checkout, pip = Path(rollweave.__file__).parents[2], [sys.executable, "-m", "pip"]
    beside = [checkout / "packages" / name for name in ("envs", "sandbox")]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", tmp_path, checkout, *beside],
        capture_output=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"a wheel cannot be built here: {built.stderr.decode()[-300:]}")
    python, packages = _environment(tmp_path / "env")
    target = ["--no-deps", "--no-index", "--target", packages, *tmp_path.glob("*.whl")]
    subprocess.run([*pip, "install", "-q", *target], check=True)
    assert (packages / "rollweave_envs" / "swe_repos").is_dir()
    (packages / "others.pth").write_text(_dependencies())
    seen = _run([python, "-c", INSIDE, *ISOLATING], caches=tmp_path / "caches")
    assert str(seen.pop("installed")).startswith(str(packages))
    for found in seen.values():
        check(found, PYTEST)


PLANT = """
import os
places = {places!r}
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py", "encodings/__init__.py", "a.pth"):
        try:
            os.makedirs(os.path.dirname(f"{{place}}/{{name}}"), exist_ok=True)
            with open(f"{{place}}/{{name}}", "w") as out:
                out.write("import sys; open('/tmp/loaded', 'a').write('{{}} '.format(__name__))")
        except OSError:
            pass
for path in ("/etc/ld.so.preload", "/etc/ld.so.cache"):
    with open(f"{{path}}.new", "w") as out:
        out.write("/tmp/evil.so")
    os.rename(f"{{path}}.new", path)
for place in places:  # what cannot be written in may be moved out of the way
    top = "/".join(place.split("/")[:2])
    try:
        os.rename(top, top + ".moved")
        os.makedirs(place)
        with open(f"{{place}}/sitecustomize.py", "w") as out:
            out.write("open('/tmp/loaded', 'a').write('{{}} '.format(__name__))")
    except OSError:
        pass
"""


async def test_a_branch_loads_nothing_that_an_agent_wrote(isolating: Backend) -> None:
    """Neither our interpreter nor the system's, whose library has a link into /etc."""
    sandbox = await isolating.start(SPEC)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [
        *(*SOURCES, *sys.path[1:], sys.prefix),
        *("/home/agent", "/etc/python3", f"/etc/{version}", "/usr/lib/python3/dist-packages"),
        *(f"/usr/local/lib/{version}/{name}-packages" for name in ("dist", "site")),
        *(f"{sys.base_prefix}/lib", "/run/rollweave/inside"),
    ]
    planted = await sandbox.exec([sys.executable, "-I", "-c", PLANT.format(places=places)])
    assert planted.rc == 0, planted.stderr
    await sandbox.exec(["rm", "-f", "/tmp/loaded"])
    branch = await isolating.branch(await sandbox.snapshot())
    for python in filter(shutil.which, (sys.executable, "/usr/bin/python3")):
        assert (await branch.exec([python, "-I", "-c", ""], cwd="/")).stderr == b""
    assert (
        await branch.exec(["cat", "/tmp/loaded", "/etc/ld.so.preload", "/etc/ld.so.cache"])
    ).stdout == b""


async def test_nothing_of_the_host_can_be_made_or_changed(isolating: Backend) -> None:
    sandbox = await isolating.start(SandboxSpec(packages=("pytest",)))
    site = rootfs._package_folders()[0]
    for place in (site, f"{site}/pytest", f"{sys.prefix}/bin", "/usr", "/usr/lib", "/usr/bin"):
        made = await sandbox.exec(["mkdir", f"{place}/made"])
        assert b"Read-only file system" in made.stderr, place
        taken = await sandbox.exec(["mv", place, f"{place}.moved"])
        assert taken.rc != 0, place


def test_a_system_without_folders_of_libraries_hides_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of /usr/lib or /usr/lib64 has to be seen, as on Fedora and Arch."""
    library = tmp_path / "lib64"
    for path in ("python3.13/site-packages/x", "python3.12/site-packages", "node_modules/y"):
        (library / path).mkdir(parents=True)
    ours = [library / name for name in ("rollweave", "rollweave_sandbox")]
    for folder in ours:
        folder.mkdir()
    monkeypatch.setattr(rootfs, "DIRECTORIES", ours)
    binds = [(str(library), "/usr/lib64"), (str(tmp_path / "none"), "/none")]
    hidden = rootfs._hidden(binds, ["/usr/lib64/python3.13/site-packages"])
    assert sorted(hidden) == [
        "/usr/lib64/node_modules",
        "/usr/lib64/python3.12/site-packages",
        "/usr/lib64/rollweave",
        "/usr/lib64/rollweave_sandbox",
    ]


async def test_an_image_sees_nothing_of_the_host() -> None:
    view = await rootfs.view_of(SandboxSpec(image="/image"))
    root = rootfs.root_of(SandboxSpec(image="/image"), view, support="/support", layers=("/image",))
    assert root["binds"] == [("/support", "/run/rollweave")]
    assert root["hidden"] == root["links"] == []
    with pytest.raises(ValueError, match="packages must be empty for an image"):
        SandboxSpec(image="/image", packages=("numpy",))
