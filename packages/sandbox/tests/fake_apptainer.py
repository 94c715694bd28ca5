"""Stands in for `apptainer`: takes only the flags that Apptainer 1.x documents for
`exec`, and runs an equivalent bwrap.

A flag that it does not know, a value that is missing, or an image that is no folder,
ends it with status 255, as cobra does.
"""

import os
import sys

PLAIN = (
    "--containall",
    "--cleanenv",
    "--writable-tmpfs",
    "--fakeroot",
    "--net",
    "--uts",
)
VALUED = ("--network", "--hostname", "--bind", "--pwd", "--home")

PREFIX = "APPTAINERENV_"


def main(argv: list[str]) -> None:
    if argv[:1] != ["exec"]:
        _refuse(f"unknown command {argv[:1]}")
    flags: set[str] = set()
    values: dict[str, list[str]] = {name: [] for name in VALUED}
    rest = argv[1:]
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag in PLAIN:
            flags.add(flag)
        elif flag in VALUED and rest:
            values[flag].append(rest.pop(0))
        else:
            _refuse(f"unknown flag: {flag}")
    os.close(os.open(".", os.O_RDONLY))  # as Apptainer does, which fails if it may not
    if len(rest) < 2 or not os.path.isdir(rest[0]):
        _refuse("needs an image and a command")
    source = (values["--home"] or [""])[0].partition(":")[0]
    if {"--containall", "--cleanenv"} - flags or not source or os.path.exists(source):
        _refuse("would see the host")
    os.execvpe("bwrap", _bwrap(rest[0], rest[1:], flags, values), {"PATH": os.environ["PATH"]})


def _bwrap(
    image: str, command: list[str], flags: set[str], values: dict[str, list[str]]
) -> list[str]:
    argv = [
        "bwrap",
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--die-with-parent",
        "--clearenv",
        "--tmpfs",
        "/",
    ]
    argv += (
        ["--uid", "0", "--gid", "0"]
        if "--fakeroot" in flags
        else ["--uid", "1000", "--gid", "1000"]
    )
    argv += ["--unshare-net"] if values["--network"] == ["none"] and "--net" in flags else []
    argv += ["--unshare-uts", "--hostname", values["--hostname"][0]] if "--uts" in flags else []
    for name in sorted(os.listdir(image)):
        if os.path.islink(f"{image}/{name}"):
            argv += ["--symlink", os.readlink(f"{image}/{name}"), f"/{name}"]
        elif name not in ("proc", "dev", "tmp", "home", "run"):
            argv += ["--ro-bind", f"{image}/{name}", f"/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for bind in values["--bind"]:
        source, target, mode = bind.split(":")
        argv += ["--ro-bind" if mode == "ro" else "--bind", source, target]
    home = values["--home"][0].partition(":")[2]
    argv += ["--tmpfs", home, "--setenv", "HOME", home]
    for name, value in os.environ.items():
        if name.startswith(PREFIX):
            argv += ["--setenv", name.removeprefix(PREFIX), value]
    return [*argv, "--chdir", values["--pwd"][0], *command]


def _refuse(why: str) -> None:
    print(f"Error: {why}", file=sys.stderr)
    sys.exit(255)


if __name__ == "__main__":
    main(sys.argv[1:])
