"""Files that programs load automatically at their start cannot be written by an agent,
in its sandbox or in a branch of it.
"""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollweave.sandbox import rootfs
from rollweave.sandbox.base import Backend, SandboxSpec
from rollweave.sandbox.rootfs import import_folders, root_of
from tests.support.sandboxes import ISOLATING, SPEC, opened


@pytest_asyncio.fixture(params=ISOLATING)
async def isolating(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with opened(request.param) as opened_backend:
        yield opened_backend


def test_finds_import_folders_whether_they_exist_or_not(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, info in (("one", {"editable": True}), ("two", {}), ("three", {"editable": True})):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        url = "https://example.org/x" if name == "three" else f"file:///work/{name}%20x"
        (packages / f"{name}.dist-info" / "direct_url.json").write_text(
            json.dumps({"url": url, "dir_info": info})
        )
    (packages / "torn.dist-info").mkdir()
    (packages / "torn.dist-info" / "direct_url.json").write_text("[")
    (packages / "a.pth").write_text("# none\nimport os; os\n\n/nowhere/src/\n../vendor\n")
    assert import_folders((str(tmp_path),)) == (
        "/nowhere/src",
        str(packages.parent / "vendor"),
        "/work/one x",
    )


def test_seals_folders_that_are_neither_present_nor_the_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = f"{sys.prefix}/lib/src"
    folders = (
        "/nowhere/src",
        "/nowhere/src/below",
        "/nowhere",
        "/usr/x",
        "/lib/x",
        inside,
        "/home",
        "/project",
        "/project/src",
        "/tmp",
        "/",
    )
    monkeypatch.setattr(rootfs, "import_folders", lambda: folders)

    def sealed(spec: SandboxSpec) -> set[str]:
        return set(root_of(spec, support="/support", layers=())["hidden"]) & set(folders)

    assert sealed(SPEC) == {"/nowhere", "/project"}
    assert sealed(SandboxSpec(workdir="/project")) == {"/nowhere"}
    assert sealed(SandboxSpec(image="/image")) == set()


PLANT = """
import os
places = {places!r}
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py", "encodings/__init__.py"):
        try:
            os.makedirs(os.path.dirname(f"{{place}}/{{name}}"), exist_ok=True)
            with open(f"{{place}}/{{name}}", "w") as out:
                out.write("open('/tmp/loaded', 'a').write('{{}} '.format(__name__))")
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
    """Where rollweave is installed for development, as it is for its tests, there is a
    folder to import from.
    """
    sandbox = await isolating.start(SPEC)
    places = [
        *import_folders(),
        "/home/agent",
        "/etc/python3",
        f"{sys.base_prefix}/lib",
        "/run/rollweave/inside",
    ]
    planted = await sandbox.exec([sys.executable, "-I", "-c", PLANT.format(places=places)])
    assert planted.rc == 0, planted.stderr
    await sandbox.exec(["rm", "-f", "/tmp/loaded"])
    branch = await isolating.branch(await sandbox.snapshot())
    assert (await branch.exec([sys.executable, "-I", "-c", ""], cwd="/")).stderr == b""
    assert (
        await branch.exec(["cat", "/tmp/loaded", "/etc/ld.so.preload", "/etc/ld.so.cache"])
    ).stdout == b""


async def test_a_folder_is_sealed_around_mounts_in_it(
    isolating: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install of a flat layout: the folder of the virtual environment is
    itself imported from.
    """
    around = str(Path(sys.prefix).parent)
    monkeypatch.setattr(rootfs, "import_folders", lambda: (around, "/opt/editable/src"))
    sandbox = await isolating.start(SPEC)
    tried = await sandbox.exec(
        [sys.executable, "-I", "-c", f"import os; os.mkdir({around + '/x'!r})"]
    )
    assert b"Read-only file system" in tried.stderr
    tried = await sandbox.exec(
        ["sh", "-c", "ls -A /opt/editable/src; echo x > /opt/editable/src/x"]
    )
    assert (tried.stdout, b"Read-only file system" in tried.stderr) == (b"", True)
