"""Golden command lines, so that every change of a sandbox's isolation is visible in
review.
"""

import sys
from pathlib import Path

import pytest

from rollweave.sandbox.base import Limits, SandboxSpec
from rollweave_sandbox import kernel
from rollweave_sandbox.registry import apptainer_command, apptainer_environment, bubblewrap_command

LIMITS = (
    '{"CPU": 3600, "DATA": 4294967296, "FSIZE": 1073741824, "MSGQUEUE": 0, "NICE": 0, "NOFILE": '
    '1024, "NPROC": 128, '
    '"RTPRIO": 0, "SIGPENDING": 4096}'
)
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


def words(*lines: str, processes: int = 128) -> list[str]:
    """Parse a golden command line: `_` is a blank in a word, LIMITS the argument of
    boot.py.
    """
    limits = LIMITS.replace("128,", f"{processes},")
    return [
        limits if word == "LIMITS" else word.replace("_", " ")
        for line in lines
        for word in line.split()
    ]


def test_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MASKED", ("cmdline", "none"))
    spec = SandboxSpec(env={"A": "b c"}, hostname="box", workdir="/project")
    got = bubblewrap_command(
        spec, bwrap="/usr/bin/bwrap", root="/run/r/root", python="/usr/bin/python3"
    )
    assert got == words(
        "/usr/bin/bwrap --unshare-user --uid 1000 --gid 1000 --unshare-ipc --unshare-pid "
        "--unshare-net --unshare-uts",
        "--unshare-cgroup --disable-userns --assert-userns-disabled --die-with-parent "
        "--new-session --cap-drop ALL",
        "--hostname box --seccomp 4 --bind /run/r/root / --dev-bind /run/r/root/dev /dev",
        "--proc /proc --ro-bind /proc/sys /proc/sys --ro-bind /dev/null /proc/cmdline",
        f"--remount-ro /proc --clearenv --setenv PATH {Path(sys.executable).parent}:{PATH}",
        "--setenv HOME /home/agent --setenv LANG C.UTF-8 --setenv A b_c",
        "--chdir /project -- /usr/bin/python3 -I -S /run/rollweave/boot.py {}",
        "/project /run/rollweave/inside --fd 3",
    )


def test_bubblewrap_with_the_hosts_network_as_root() -> None:
    spec = SandboxSpec(network=True, fakeroot=True)
    got = bubblewrap_command(spec, bwrap="bwrap", root="/r", python="python3")
    assert "--unshare-net" not in got
    assert got[got.index("--uid") + 1] == "0"


def test_apptainer() -> None:
    spec = SandboxSpec(
        image="/images/a.sif",
        env={"A": "b c"},
        hostname="box",
        fakeroot=True,
        limits=Limits(processes=16),
    )
    got = apptainer_command(spec, runtime="/usr/bin/apptainer", support="/opt/rollweave")
    assert got == words(
        "/usr/bin/apptainer exec --containall --cleanenv --home "
        "/opt/rollweave/nothing:/home/agent --writable-tmpfs --fakeroot --net --network none",
        "--uts --hostname box --bind /opt/rollweave:/run/rollweave:ro --pwd /",
        "/images/a.sif python3 -I -S /run/rollweave/boot.py LIMITS",
        "/home/agent /run/rollweave/inside --fd 3",
        processes=16,
    )


def test_variables_reach_apptainers_sandbox_by_its_own() -> None:
    spec = SandboxSpec(image="/images/a.sif", env={"A": "b,c"})
    got = apptainer_environment(spec, runtime="/opt/bin/singularity")
    assert got == {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "SINGULARITYENV_PATH": PATH,
        "SINGULARITYENV_LANG": "C.UTF-8",
        "SINGULARITYENV_A": "b,c",
    }


def test_apptainer_has_no_image_of_the_host() -> None:
    with pytest.raises(ValueError, match=r"image must be a \.sif file or a folder for apptainer"):
        apptainer_command(SandboxSpec(), runtime="apptainer", support="/opt")
