"""The filter of system calls, as classic BPF: it refuses calls that no program in a
sandbox needs and an attack would use.

Every call that is not named here is allowed, so that compilers, interpreters, package
managers and test suites work. Refused are calls that reach the kernel's least-tested
parts (io_uring, bpf, keys, perf), that look into other processes (ptrace), that change
namespaces or mounts, that hold memory which no process maps (memfd, System V and POSIX
message queues, semaphores and shared memory), that use up a count of the whole machine
(asynchronous I/O contexts), sockets of families other than UNIX and IP and of protocols
other than TCP, UDP and ping, pushing input to a terminal, its line disciplines, and
personalities that no program needs. A call that is newer than this table does not
exist. Calls of another architecture end the process.

The filter does not use libseccomp: it is one table and a page of code, and needs no
system library. Standard library alone.
"""

import errno
import functools
import os
import struct

_EPERM, _ENOSYS = errno.EPERM, errno.ENOSYS
_EAFNOSUPPORT, _EPROTONOSUPPORT = errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
X32_BIT = 0x40000000
"""Bit of system calls with x86-64's 32-bit pointers: a second set of numbers, which
would evade every rule.
"""

REFUSED: dict[str, tuple[int | None, int | None, int]] = {
    # name: number on x86_64, on aarch64 (None: it has none), error
    "io_uring_setup": (425, 425, _ENOSYS),
    "io_uring_enter": (426, 426, _ENOSYS),
    "io_uring_register": (427, 427, _ENOSYS),
    # Its flags are in memory, where a filter cannot look; the C library falls back to
    # clone.
    "clone3": (435, 435, _ENOSYS),
    "memfd_create": (319, 279, _ENOSYS),
    "memfd_secret": (447, 447, _ENOSYS),
    "shmget": (29, 194, _ENOSYS),
    "shmat": (30, 196, _ENOSYS),
    "shmctl": (31, 195, _ENOSYS),
    "shmdt": (67, 197, _ENOSYS),
    "semget": (64, 190, _ENOSYS),
    "semop": (65, 193, _ENOSYS),
    "semctl": (66, 191, _ENOSYS),
    "semtimedop": (220, 192, _ENOSYS),
    "msgget": (68, 186, _ENOSYS),
    "msgsnd": (69, 189, _ENOSYS),
    "msgrcv": (70, 188, _ENOSYS),
    "msgctl": (71, 187, _ENOSYS),
    "mq_open": (240, 180, _ENOSYS),
    "mq_unlink": (241, 181, _ENOSYS),
    "mq_timedsend": (242, 182, _ENOSYS),
    "mq_timedreceive": (243, 183, _ENOSYS),
    "mq_notify": (244, 184, _ENOSYS),
    "mq_getsetattr": (245, 185, _ENOSYS),
    "io_setup": (206, 0, _ENOSYS),
    "add_key": (248, 217, _EPERM),
    "request_key": (249, 218, _EPERM),
    "keyctl": (250, 219, _EPERM),
    "bpf": (321, 280, _EPERM),
    "perf_event_open": (298, 241, _EPERM),
    "userfaultfd": (323, 282, _EPERM),
    "fanotify_init": (300, 262, _EPERM),
    "fanotify_mark": (301, 263, _EPERM),
    "lookup_dcookie": (212, 18, _EPERM),
    "syslog": (103, 116, _EPERM),
    "ptrace": (101, 117, _EPERM),
    "process_vm_readv": (310, 270, _EPERM),
    "process_vm_writev": (311, 271, _EPERM),
    "process_madvise": (440, 440, _EPERM),
    "pidfd_getfd": (438, 438, _EPERM),
    "kcmp": (312, 272, _EPERM),
    "unshare": (272, 97, _EPERM),
    "setns": (308, 268, _EPERM),
    "mount": (165, 40, _EPERM),
    "umount2": (166, 39, _EPERM),
    "pivot_root": (155, 41, _EPERM),
    "chroot": (161, 51, _EPERM),
    "open_tree": (428, 428, _EPERM),
    "move_mount": (429, 429, _EPERM),
    "fsopen": (430, 430, _EPERM),
    "fsconfig": (431, 431, _EPERM),
    "fsmount": (432, 432, _EPERM),
    "fspick": (433, 433, _EPERM),
    "mount_setattr": (442, 442, _EPERM),
    "open_tree_attr": (467, 467, _EPERM),
    "open_by_handle_at": (304, 265, _EPERM),
    "name_to_handle_at": (303, 264, _EPERM),
    "init_module": (175, 105, _EPERM),
    "finit_module": (313, 273, _EPERM),
    "delete_module": (176, 106, _EPERM),
    "kexec_load": (246, 104, _EPERM),
    "kexec_file_load": (320, 294, _EPERM),
    "reboot": (169, 142, _EPERM),
    "swapon": (167, 224, _EPERM),
    "swapoff": (168, 225, _EPERM),
    "acct": (163, 89, _EPERM),
    "quotactl": (179, 60, _EPERM),
    "quotactl_fd": (443, 443, _EPERM),
    "modify_ldt": (154, None, _ENOSYS),
    "uselib": (134, None, _ENOSYS),
    "iopl": (172, None, _EPERM),
    "ioperm": (173, None, _EPERM),
    "migrate_pages": (256, 238, _EPERM),
    "move_pages": (279, 239, _EPERM),
    "vhangup": (153, 58, _EPERM),
}

NEWEST = 469
"""Highest number of a call that this table considers (file_setattr, Linux 6.17). Calls
with higher numbers fail with ENOSYS.
"""

CLONE, SOCKET, SOCKETPAIR, IOCTL, PERSONALITY = (56, 220), (41, 198), (53, 199), (16, 29), (135, 92)
"""Numbers of the calls that are refused by an argument."""

NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW* flag that clone takes."""

TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX, which push input, and TIOCSETD, which loads a line
discipline.
"""

FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""

PROTOCOLS = (0, 1, 6, 17, 58)
"""Allowed protocols: the default, ICMP (whose number is also PF_UNIX), TCP, UDP,
ICMPv6. Others load little-tested modules.
"""

PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Allowed personalities: Linux and PER_LINUX32, both also with UNAME26, and the query
for the current personality.
"""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARGS = 0, 4, 16
"""Offsets into struct seccomp_data. Both architectures are little-endian, so an
argument's low half comes first.
"""


@functools.cache
def bpf_filter(machine: str | None = None) -> bytes:
    """Return the program for `machine` (as printed by `uname -m`; by default this
    machine). Raises ValueError for an unknown machine.
    """
    machine = machine or os.uname().machine
    if machine not in AUDIT_ARCH:
        raise ValueError(
            f"machine must be one of {', '.join(AUDIT_ARCH)} for a seccomp filter, got {machine!r}"
        )
    column = _COLUMN[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD, _NR),
    ]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, X32_BIT, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    code += [_op(_AT_LEAST, NEWEST + 1, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in REFUSED.values():
        number, error = numbers[column], numbers[2]
        if number is not None:
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | error)]
    code += _when(
        CLONE[column],
        [*_argument(0), _op(_ANY_BIT, NEW_NAMESPACES, 0, 1), _op(_RETURN, _ERRNO | _EPERM)],
    )
    refused_ioctls = [
        op
        for number in TERMINAL_REQUESTS
        for op in (_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | _EPERM))
    ]
    code += _when(IOCTL[column], [*_argument(1), *refused_ioctls])
    for call in (SOCKET, SOCKETPAIR):
        code += _when(
            call[column],
            [*_one_of(0, FAMILIES, _EAFNOSUPPORT), *_one_of(2, PROTOCOLS, _EPROTONOSUPPORT)],
        )
    code += _when(PERSONALITY[column], _one_of(0, PERSONALITIES, _EPERM))
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _when(number: int, code: list[bytes]) -> list[bytes]:
    """Run `code` for the call `number`, then allow the call. Other calls skip both
    steps, and their number stays loaded.
    """
    inner = [*code, _op(_RETURN, _ALLOW)]
    return [_op(_EQUAL, number, 0, len(inner)), *inner]


def _one_of(place: int, values: tuple[int, ...], error: int) -> list[bytes]:
    """Refuse with `error` unless an argument is one of `values`."""
    accept = [_op(_EQUAL, value, len(values) - number, 0) for number, value in enumerate(values)]
    return [*_argument(place), *accept, _op(_RETURN, _ERRNO | error)]


def _argument(place: int) -> list[bytes]:
    """Load the low half of an argument, the only half that the calls above use."""
    return [_op(_LOAD, _ARGS + 8 * place)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction, a struct sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
