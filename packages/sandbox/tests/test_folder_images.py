"""Sandboxes on an image that is a folder: copy-on-write where overlayfs works,
otherwise a copy; and Apptainer's contract.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollweave.sandbox.base import Backend, SandboxSpec
from rollweave.schema.errors import ConfigError, SandboxError
from rollweave_sandbox import running
from rollweave_sandbox.registry import backend
from tests.support.sandboxes import image, needs, opened, sh

FAKE = Path(__file__).with_name("fake_apptainer.py")


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """Return a folder that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def folder(open_folder: Path) -> str:
    needs("bubblewrap")
    return image(open_folder)


@pytest_asyncio.fixture
async def bubblewrap() -> AsyncIterator[Backend]:
    async with opened("bubblewrap") as opened_backend:
        yield opened_backend


async def test_writes_stay_in_the_sandbox_and_its_branches(
    bubblewrap: Backend, folder: str
) -> None:
    spec = SandboxSpec(image=folder, workdir="/project")
    first = await bubblewrap.start(spec)
    change = "cat kept; echo changed > kept; rm gone; echo new > made; ls"
    assert await sh(first, change) == "from the imagekept\nmade\n"
    snapshot = await first.snapshot()
    branch = await bubblewrap.branch(snapshot)
    assert await sh(branch, "cat kept; ls") == "changed\nkept\nmade\n"
    await sh(branch, "rm made; cat /project/kept > /project/gone")
    last = await bubblewrap.branch(await branch.snapshot())
    assert await sh(last, "ls; cat gone") == "gone\nkept\nchanged\n"
    other = await bubblewrap.start(spec)
    assert await sh(other, "cat kept; ls") == "from the imagegone\nkept\n"
    assert _project(folder) == {"gone": "from the image", "kept": "from the image"}


def _project(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder, "project").iterdir()}


async def test_a_replaced_folder_hides_the_layers_below(bubblewrap: Backend, folder: str) -> None:
    first = await bubblewrap.start(SandboxSpec(image=folder, workdir="/project"))
    await sh(first, "cd /; rm -r project", cwd="/")
    await first.exec(
        ["python3", "-c", "import os; os.mkdir('/project'); open('/project/only','w').write('x')"],
        cwd="/",
    )
    branch = await bubblewrap.branch(await first.snapshot())
    assert (await branch.exec(["ls", "/project"], cwd="/")).stdout == b"only\n"


async def test_selected_paths_are_copied_as_the_union_shows_them(
    bubblewrap: Backend, folder: str
) -> None:
    first = await bubblewrap.start(SandboxSpec(image=folder, workdir="/project"))
    await sh(first, "echo changed > made; echo x > /usr/lib/left")
    second = await bubblewrap.branch(await first.snapshot())
    await sh(second, "rm gone; echo more >> kept")
    branch = await bubblewrap.branch(await second.snapshot(only=["."], at="/taken"))
    listed = await sh(branch, "ls /project /taken /usr/lib/left; cat /taken/kept /taken/made")
    assert listed.split("\n")[:-1] == [
        *("/project:", "gone", "kept", "", "/taken:", "kept", "made"),
        *("from the imagemore", "changed"),
    ]
    source = (
        "import os, shutil; shutil.rmtree('/project'); os.mkdir('/project'); "
        "open('/project/only', 'w').close()"
    )
    await second.exec(["python3", "-c", source], cwd="/")
    replaced = await bubblewrap.branch(await second.snapshot(only=["."], at="/taken"))
    assert (await replaced.exec(["ls", "/taken"], cwd="/")).stdout == b"only\n"


async def test_links_in_a_snapshot_are_not_followed_outside(
    bubblewrap: Backend, folder: str, tmp_path: Path
) -> None:
    """The next start makes folders and files in what the last one left: /run, /tmp,
    /dev may be links to the host by then.
    """
    first = await bubblewrap.start(SandboxSpec(image=folder, workdir="/project"))
    script = (
        f"cd /; rm -r tmp home; ln -s {tmp_path} tmp; ln -s {tmp_path} home; ln -s {tmp_path} "
        "etc/passwd; ln -s / root"
    )
    await sh(first, script, cwd="/")
    branch = await bubblewrap.branch(await first.snapshot())
    assert (await branch.exec(["ls", "/tmp"], cwd="/")).rc == 0
    assert os.listdir(tmp_path) == []


async def test_refuses_invalid_images(bubblewrap: Backend, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image must exist"):
        await bubblewrap.start(SandboxSpec(image=str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxError, match="python3"):
        await bubblewrap.start(SandboxSpec(image=str(tmp_path / "empty")))


@pytest_asyncio.fixture
async def apptainer(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    program, fake = open_folder / "apptainer", open_folder / "fake.py"
    program.write_text(f'#!/bin/sh\nexec python3 -I {fake} "$@"\n')
    program.chmod(0o755)
    fake.write_text(FAKE.read_text())
    monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
    async with opened("apptainer", faked=True) as opened_backend:
        yield opened_backend


async def test_apptainers_contract(
    apptainer: Backend, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "secret")
    sandbox = await apptainer.start(SandboxSpec(image=folder, env={"A": "b c"}, hostname="box"))
    source = (
        "import os, socket; print(os.environ['A'], socket.gethostname(), 'A_SECRET' in "
        "os.environ, os.getcwd(), os.getuid())"
    )
    assert (
        await sandbox.exec(["python3", "-c", source])
    ).stdout == b"b c box False /home/agent 1000\n"
    await sandbox.write("/tmp/x", b"data")
    assert await sandbox.read("/tmp/x") == b"data"
    with pytest.raises(SandboxError, match="no separate layer"):
        await sandbox.snapshot()
    await sandbox.stop()
    assert sandbox.ended == "stopped"


async def test_apptainer_gets_a_folder_file_by_file(
    apptainer: Backend, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PART_BYTES", 1000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "sub" / "tool").chmod(0o755)
    (tmp_path / "big").write_bytes(bytes(2500))
    (tmp_path / "link").symlink_to("sub/tool")
    sandbox = await apptainer.start(SandboxSpec(image=folder, folder=str(tmp_path)))
    seen = await sandbox.exec(["sh", "-c", "./link; ls; cat big"])
    assert seen.stdout == b"tool\nbig\nlink\nsub\n" + bytes(2500)


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandboxes have other uids")
async def test_apptainer_by_root_starts_from_a_closed_folder(
    apptainer: Backend, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apptainer opens the folder in which it starts, as a user who may not enter it."""
    os.chmod(tmp_path, 0o700)
    monkeypatch.chdir(tmp_path)
    async with opened("apptainer", faked=True) as backend_:
        sandbox = await backend_.start(SandboxSpec(image=folder))
        assert (await sandbox.exec(["sh", "-c", "echo hi"])).stdout == b"hi\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandboxes have other uids")
async def test_apptainer_as_root_needs_an_accessible_image(
    apptainer: Backend, open_folder: Path, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o700)
    inside = open_folder / "inside.sif"
    (tmp_path / "image").mkdir()
    inside.symlink_to(tmp_path / "image")
    (own := open_folder / "own.sif").touch(0o600)
    for image_, closed in ((inside, tmp_path), (own, own)):
        with pytest.raises(ValueError, match=f"readable by every user .*: {closed} is closed"):
            await apptainer.start(SandboxSpec(image=str(image_)))


def test_a_missing_back_end_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        backend("bubblewrap")
    with pytest.raises(
        SandboxError, match=r"no sandbox: .*apt-get install bubblewrap.*name the back end: plain"
    ):
        backend()
    with pytest.raises(SandboxError, match=r"apptainer\.org"):
        backend("apptainer")
    with pytest.raises(
        ConfigError, match="must be one of bubblewrap, zygote, apptainer, plain, got 'docker'"
    ):
        backend("docker")
