"""What Linux says of a machine is what the package takes it to be."""

import os
import socket
from pathlib import Path

import pytest
import torch

from rollweave.io import machine
from rollweave.io.machine import computed_dtype, describe_computation, has_bfloat16

REAL = has_bfloat16
MEMORY = "MemTotal:  1000 kB\nMemAvailable:  400 kB\nHugePages_Total:  3\n"
CGROUP = "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("", False),
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16x amx_bf\nbugs : amx_bf16\n", False),
        ("processor : 0\nflags\t\t: fpu avx512_bf16 avx2\n", True),
        ("flags\t\t: amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
    ],
)
def test_the_abilities_of_a_cpu_are_those_that_linux_names(
    monkeypatch: pytest.MonkeyPatch, text: str, native: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert REAL.__wrapped__() is native
    monkeypatch.setattr("rollweave.io.machine.has_bfloat16", lambda: native)
    assert computed_dtype("bfloat16", "cpu") == ("bfloat16" if native else "float32")
    assert computed_dtype("float32", "cpu") == "float32"
    assert computed_dtype("bfloat16", "cuda") == "bfloat16"
    sentence = "models of bfloat16 are computed in bfloat16"
    assert describe_computation("bfloat16", "cuda") == sentence
    slow = "float32, with twice the memory, since this CPU has no instructions for bfloat16"
    other = sentence if native else f"models of bfloat16 are computed in {slow}"
    assert describe_computation("bfloat16", "cpu") == other


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        *(("", "", (1000 << 10, 400 << 10)), ("max\n", "1", (1000 << 10, 400 << 10))),
        *(("1024000\n", "1000000", (1000 << 10, 400 << 10)), ("900000", "", (900000, 400 << 10))),
        ("900000", "600001", (900000, 299999)),
    ],
)
def test_memory_is_bounded_by_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch, limit: str, used: str, expected: tuple[int, int]
) -> None:
    texts = {"/proc/meminfo": MEMORY, f"{CGROUP}max": limit, f"{CGROUP}current": used}
    monkeypatch.setattr(machine, "_lines", lambda path: texts[path].splitlines())
    assert machine.memory_bytes() == expected
    texts["/proc/meminfo"] = ""
    assert machine.memory_bytes() == (0, 0)


def test_a_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 3407872 kB",
        "/proc/cpuinfo": "x: 1\nmodel name\t: A: B \n",
    }
    monkeypatch.setattr(machine, "_lines", lambda path: texts.get(path, "").splitlines())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {1, 4, 7}}.__getitem__)
    described = machine.describe()
    assert (described["cpu"], described["cores"], described["memory_gib"]) == ("A: B", 3, 3.2)
    assert [machine.device_named(name).type for name in ("auto", "meta")] == ["cpu", "meta"]
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
        machine.gpu_memory("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {torch.device("cuda:1"): (3, 8)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", {0: "a GPU"}.__getitem__)
    assert machine.describe()["gpu"] == "a GPU"
    assert machine.gpu_memory("cuda:1") == (8, 3)
    found = [str(machine.device_named(name)) for name in ("auto", "cuda", "cuda:1")]
    assert found == ["cuda:0", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"][: 1 + socket.has_dualstack_ipv6()])
def test_a_port_of_a_former_process_is_free_at_once(address: str) -> None:
    with machine.bound_socket(address, 0) as first:
        port = first.getsockname()[1]
        first.listen()
        with socket.create_connection((address, port)):
            with pytest.raises(OSError, match="in use"):
                machine.bound_socket(address, port)
            first.accept()[0].close()  # this end closes first, and the port lingers
    machine.bound_socket(address, port).close()
