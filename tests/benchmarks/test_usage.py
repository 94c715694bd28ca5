"""The processor time and the memory of a tree of processes."""

import subprocess
import sys

from benchmarks.usage import used

MIB = 1 << 20
CHILD = """
import subprocess, sys
held = bytearray(64 << 20)
until = "while time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", "import time\\n" + until], check=True)
print("done", flush=True)
sys.stdin.read()
"""


def test_a_tree_keeps_the_time_of_ended_processes_and_the_peak_of_memory() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        with used(child.pid) as usage:
            assert child.stdout.readline() == b"done\n"
            assert usage.cpu_s() >= 0.2
        child.communicate()
        assert 64 * MIB < usage.peak < 256 * MIB
