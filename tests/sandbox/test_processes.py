"""The processes of this machine: who descends from whom."""

import os
import subprocess
import threading

from rollweave.sandbox.processes import Table, family, started


def test_a_child_of_a_thread_is_seen_while_other_threads_end() -> None:
    """The kernel lists children by thread, and hands those of one that ends to another."""
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
