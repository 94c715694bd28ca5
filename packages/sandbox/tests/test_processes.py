"""The processes of this machine and their parents."""

import mmap
import os
import subprocess
import threading

import pytest

from rollweave.io.processes import family
from rollweave_sandbox import processes
from rollweave_sandbox.processes import Table, process, started


def test_a_threads_child_is_listed_while_other_threads_end() -> None:
    """The kernel lists children by thread, and reassigns those of a thread that
    ends.
    """
    done, here = threading.Event(), threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        children.append(subprocess.Popen(["sleep", "60"]))
        here.set()
        done.wait()

    def come_and_go() -> None:
        while not done.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=work) for work in (come_and_go, start)]
    for thread in threads:
        thread.start()
    try:
        here.wait()
        assert all(children[0].pid in family(os.getpid()) for _ in range(1000))
        assert children[0].pid in {each.pid for each in Table.now().below(started([os.getpid()]))}
    finally:
        done.set()
        for thread in threads:
            thread.join()
        for child in children:
            child.kill()
            child.wait()


def test_page_tables_count_as_memory() -> None:
    """Reading what is not there maps one page of zeros, which resident memory does not
    count, by tables, which it does not either.
    """

    def now() -> tuple[int, int, int]:
        line = process(os.getpid())
        assert line is not None
        return line.proportional_bytes(), line.most_bytes, line.resident_bytes

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    before, _, resident_before = now()
    with mmap.mmap(-1, 1 << 34, flags=flags, prot=mmap.PROT_READ) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        assert {area[at] for at in range(0, len(area), 1 << 21)} == {0}
        used, most, resident = now()
        own = process(os.getpid())
        assert own is not None
        assert 1 << 25 <= own.table_bytes() < 1 << 26
    assert used - before >= (1 << 25) - (resident - resident_before) - (1 << 20)
    assert most >= used


def test_hidden_memory_counts_unless_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    line = process(os.getpid())
    assert line is not None
    monkeypatch.setattr(processes, "_kilobytes", refused)
    assert line.proportional_bytes() == line.resident_bytes
    assert line.proportional_bytes(line.resident_bytes - 5) == 5
    assert line.proportional_bytes(line.resident_bytes + 5) == 0
