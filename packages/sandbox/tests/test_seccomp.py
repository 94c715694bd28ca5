"""The filter is compared with its specification by a simple interpreter of classic
BPF.
"""

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave_sandbox import seccomp

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = ("x86_64", "aarch64")

GOLDEN = """
io_uring_setup 425 425 ENOSYS; io_uring_enter 426 426 ENOSYS; io_uring_register 427 427 ENOSYS;
clone3 435 435 ENOSYS; memfd_create 319 279 ENOSYS; memfd_secret 447 447 ENOSYS; shmget 29 194 ENOSYS;
shmat 30 196 ENOSYS; shmctl 31 195 ENOSYS; shmdt 67 197 ENOSYS; semget 64 190 ENOSYS; semop 65 193 ENOSYS;
semctl 66 191 ENOSYS; semtimedop 220 192 ENOSYS; msgget 68 186 ENOSYS; msgsnd 69 189 ENOSYS; msgrcv 70 188 ENOSYS;
msgctl 71 187 ENOSYS; mq_open 240 180 ENOSYS; mq_unlink 241 181 ENOSYS; mq_timedsend 242 182 ENOSYS;
mq_timedreceive 243 183 ENOSYS; mq_notify 244 184 ENOSYS; mq_getsetattr 245 185 ENOSYS; io_setup 206 0 ENOSYS;
add_key 248 217 EPERM; request_key 249 218 EPERM; keyctl 250 219 EPERM; bpf 321 280 EPERM;
perf_event_open 298 241 EPERM; userfaultfd 323 282 EPERM; fanotify_init 300 262 EPERM; fanotify_mark 301 263 EPERM;
lookup_dcookie 212 18 EPERM; syslog 103 116 EPERM; ptrace 101 117 EPERM; process_vm_readv 310 270 EPERM;
process_vm_writev 311 271 EPERM; process_madvise 440 440 EPERM; pidfd_getfd 438 438 EPERM; kcmp 312 272 EPERM;
unshare 272 97 EPERM; setns 308 268 EPERM; mount 165 40 EPERM; umount2 166 39 EPERM; pivot_root 155 41 EPERM;
chroot 161 51 EPERM; open_tree 428 428 EPERM; move_mount 429 429 EPERM; fsopen 430 430 EPERM; fsconfig 431 431 EPERM;
fsmount 432 432 EPERM; fspick 433 433 EPERM; mount_setattr 442 442 EPERM; open_tree_attr 467 467 EPERM;
open_by_handle_at 304 265 EPERM; name_to_handle_at 303 264 EPERM; init_module 175 105 EPERM;
finit_module 313 273 EPERM; delete_module 176 106 EPERM; kexec_load 246 104 EPERM; kexec_file_load 320 294 EPERM;
reboot 169 142 EPERM; swapon 167 224 EPERM; swapoff 168 225 EPERM; acct 163 89 EPERM; quotactl 179 60 EPERM;
quotactl_fd 443 443 EPERM; modify_ldt 154 - ENOSYS; uselib 134 - ENOSYS; iopl 172 - EPERM; ioperm 173 - EPERM;
migrate_pages 256 238 EPERM; move_pages 279 239 EPERM; vhangup 153 58 EPERM
"""
"""Calls that the filter refuses whatever their arguments are: name, number on x86_64
and on aarch64, error.
"""

HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


def run(program: bytes, *, arch: int, number: int, args: tuple[int, ...] = (0,) * 6) -> int:
    """Interpret the filter as the kernel does for a call."""
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
    if machine == "x86_64" and number >= seccomp.X32_BIT:
        return ERRNO | errno.ENOSYS
    if number > seccomp.NEWEST:
        return ERRNO | errno.ENOSYS
    for row in seccomp.REFUSED.values():
        if row[column] == number:
            return ERRNO | row[2]
    low = [value & 0xFFFFFFFF for value in args]
    if number == seccomp.CLONE[column] and low[0] & seccomp.NEW_NAMESPACES:
        return ERRNO | errno.EPERM
    if number == seccomp.IOCTL[column] and low[1] in seccomp.TERMINAL_REQUESTS:
        return ERRNO | errno.EPERM
    if (
        number in (seccomp.SOCKET[column], seccomp.SOCKETPAIR[column])
        and low[0] not in seccomp.FAMILIES
    ):
        return ERRNO | errno.EAFNOSUPPORT
    if (
        number in (seccomp.SOCKET[column], seccomp.SOCKETPAIR[column])
        and low[2] not in seccomp.PROTOCOLS
    ):
        return ERRNO | errno.EPROTONOSUPPORT
    if number == seccomp.PERSONALITY[column] and low[0] not in seccomp.PERSONALITIES:
        return ERRNO | errno.EPERM
    return ALLOW


INTERESTING = [
    *(0, 1, 2, 8, 10, 16, 17, 40, 132, 0x5412, 0x541C, 0x5423, 0x20008, 0x40000, 0x10000000),
    2**32 - 1,
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    seccomp.bpf_filter.cache_clear()


@given(
    machine=st.sampled_from(MACHINES),
    number=st.integers(0, 500) | st.integers(0, 2**32 - 1),
    args=st.tuples(
        *[st.sampled_from([*INTERESTING, *(2**32 + value for value in INTERESTING)])] * 6
    ),
)
def test_every_call_is_handled_as_the_tables_say(
    machine: str, number: int, args: tuple[int, ...]
) -> None:
    program = seccomp.bpf_filter(machine)
    assert run(program, arch=seccomp.AUDIT_ARCH[machine], number=number, args=args) == expected(
        machine, number, args
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_below_500_and_other_architectures(machine: str) -> None:
    program = seccomp.bpf_filter(machine)
    for number in range(500):
        assert run(program, arch=seccomp.AUDIT_ARCH[machine], number=number) == expected(
            machine, number, (0,) * 6
        )
        assert run(program, arch=0x40000003, number=number) == KILL  # i386


def test_the_table_is_the_one_that_was_reviewed() -> None:
    numbers = [("-" if n is None else str(n) for n in row[:2]) for row in seccomp.REFUSED.values()]
    lines = [
        " ".join((name, *row_numbers, errno.errorcode[row[2]]))
        for (name, row), row_numbers in zip(seccomp.REFUSED.items(), numbers, strict=True)
    ]
    assert lines == [line.strip() for line in GOLDEN.replace("\n", " ").split(";")]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"this machine has no {header} (apt-get install linux-libc-dev)")
    pairs = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in pairs}
    column = MACHINES.index(machine)
    table = {name: row[column] for name, row in seccomp.REFUSED.items() if row[column] is not None}
    assert {
        name: number for name, number in table.items() if numbers.get(name, number) != number
    } == {}
    assert max(table.values(), key=int) <= seccomp.NEWEST


@pytest.mark.parametrize("machine", MACHINES)
def test_values_that_the_filter_must_refuse(machine: str) -> None:
    """The values are listed here, not taken from the filter's own tables."""
    column = MACHINES.index(machine)

    def verdict(call: tuple[int, int], *args: int) -> int:
        return run(
            seccomp.bpf_filter(machine),
            arch=seccomp.AUDIT_ARCH[machine],
            number=call[column],
            args=(*args, *(6 - len(args)) * (0,)),
        )

    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict((56, 220), namespace | 17) == ERRNO | errno.EPERM, hex(namespace)
    for request in (0x5412, 0x541C, 0x5423):
        assert verdict((16, 29), 0, request) == ERRNO | errno.EPERM, hex(request)
    for family in set(range(46)) - {1, 2, 10}:
        assert verdict((41, 198), family, 1, 0) == ERRNO | errno.EAFNOSUPPORT, family
    for protocol in (33, 115, 132, 136, 262):  # DCCP, L2TP, SCTP, UDP-Lite, MPTCP
        assert verdict((41, 198), 2, 1, protocol) == ERRNO | errno.EPROTONOSUPPORT, protocol
    # no randomization, executable reads, a mapped page zero, SVR4
    for personality in (0x40000, 0x400000, 0x0100000, 1):
        assert verdict((135, 92), personality) == ERRNO | errno.EPERM, hex(personality)
    for number in (470, 480, 511, 0x40000000, 2**32 - 1):
        assert verdict((number, number)) == ERRNO | errno.ENOSYS


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="machine must be one of x86_64, aarch64"):
        seccomp.bpf_filter("riscv64")


def test_allows_calls_that_programs_need() -> None:
    calls = {"read": 0, "openat": 257, "execve": 59, "futex": 202, "socket(AF_INET)": 41}
    program, arch = seccomp.bpf_filter("x86_64"), seccomp.AUDIT_ARCH["x86_64"]
    for name, number in {**calls, "clone(SIGCHLD)": 56}.items():
        args = (17 if "clone" in name else 2, 0, 0, 0, 0, 0)
        assert run(program, arch=arch, number=number, args=args) == ALLOW, name
