"""The filter against its specification, run by a slow and obvious interpreter of classic BPF."""

import errno
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.sandbox.seccomp import (
    AUDIT_ARCH,
    CLONE,
    FAMILIES,
    IOCTL,
    NEW_NAMESPACES,
    REFUSED,
    SOCKET,
    SOCKETPAIR,
    TERMINAL_INPUT,
    X32_BIT,
    bpf_filter,
)

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = ("x86_64", "aarch64")


def run(program: bytes, *, arch: int, number: int, args: tuple[int, ...] = (0,) * 6) -> int:
    """What the kernel would do with a call."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args)
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            jumps = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if jumps else if_false


def expected(machine: str, number: int, args: tuple[int, ...]) -> int:
    column = MACHINES.index(machine)
    if machine == "x86_64" and number >= X32_BIT:
        return ERRNO | errno.ENOSYS
    for row in REFUSED.values():
        if row[column] == number:
            return ERRNO | row[2]
    low = [value & 0xFFFFFFFF for value in args]
    if number == CLONE[column] and low[0] & NEW_NAMESPACES:
        return ERRNO | errno.EPERM
    if number == IOCTL[column] and low[1] in TERMINAL_INPUT:
        return ERRNO | errno.EPERM
    if number in (SOCKET[column], SOCKETPAIR[column]) and low[0] not in FAMILIES:
        return ERRNO | errno.EAFNOSUPPORT
    return ALLOW


@settings(deadline=None)
@given(
    machine=st.sampled_from(MACHINES),
    number=st.integers(0, 500) | st.integers(0, 2**32 - 1),
    args=st.tuples(*[st.sampled_from([0, 1, 2, 10, 16, 40, 0x5412, 0x541C, 0x10000000, 17, 2**32 + 0x5412, 2**32 + 1])] * 6),
)
def test_every_call_meets_the_fate_that_the_tables_name(machine: str, number: int, args: tuple[int, ...]) -> None:
    program = bpf_filter(machine)
    assert run(program, arch=AUDIT_ARCH[machine], number=number, args=args) == expected(machine, number, args)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_below_500_and_other_architectures(machine: str) -> None:
    program = bpf_filter(machine)
    for number in range(500):
        assert run(program, arch=AUDIT_ARCH[machine], number=number) == expected(machine, number, (0,) * 6)
        assert run(program, arch=0x40000003, number=number) == KILL  # i386


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="machine must be one of x86_64, aarch64"):
        bpf_filter("riscv64")


def test_what_programs_need_is_allowed() -> None:
    for name in ("read", "openat", "execve", "futex", "socket(AF_INET)", "clone(SIGCHLD)"):
        number = {"read": 0, "openat": 257, "execve": 59, "futex": 202, "socket(AF_INET)": 41, "clone(SIGCHLD)": 56}[name]
        args = (17 if "clone" in name else 2, 0, 0, 0, 0, 0)
        assert run(bpf_filter("x86_64"), arch=AUDIT_ARCH["x86_64"], number=number, args=args) == ALLOW, name
