"""Reads of the kernel's table of processes, in which any of them may end at any
time.
"""

from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = _fields(pid)
    return fields is not None and fields[0] != "Z"


def process_state(pid: int) -> tuple[str, int]:
    """Return the state and the start in ticks of the kernel; "gone" if there is no such
    process.
    """
    fields = _fields(pid)
    return ("gone", -1) if fields is None else (fields[0], int(fields[19]))


def parent(pid: int) -> int:
    """Return the id of the parent of a process; 0 for one that is gone."""
    fields = _fields(pid)
    return 0 if fields is None else int(fields[1])


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process; each follows its parent."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        other = int(path.name)
        if parent(other) == pid and alive(other):
            processes += [other, *descendants(other)]
    return processes


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name; None if the process is
    gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
