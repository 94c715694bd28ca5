"""Programs that attack the sandbox they run in (`benchmarks/sandbox/attacks`).

Each prints as its verdict whether it got out: `held` or `escaped`.
"""

from benchmarks.sandbox.kernel_attacks import KERNEL_PROGRAMS

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, platform, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def escaped(what): print("escaped", what, flush=True); os._exit(0)
def held(what=""): print("held", what, flush=True); os._exit(0)
def refused(name, x86, arm, *args):
    # The call must not succeed, nor come as far as looking at its arguments.
    ctypes.set_errno(0)
    got = libc.syscall(ctypes.c_long(x86 if X86 else arm), *args)
    if got >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        escaped(f"{name} gave {got}, errno {ctypes.get_errno()}")
"""
"""Common beginning of all programs, after the names that `attacks.Scene` defines."""

PROGRAMS: dict[str, str] = {
    "fork bomb": """
pids = []
try:
    while len(pids) <= 4 * PROCESSES:
        pid = os.fork()
        if pid == 0: time.sleep(20); os._exit(0)
        pids.append(pid)
except BlockingIOError: pass
for pid in pids: os.kill(pid, signal.SIGKILL)
escaped(len(pids)) if len(pids) >= PROCESSES else held(len(pids))
""",
    "thread bomb": """
started = 0
try:
    for _ in range(4 * PROCESSES):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); started += 1
except RuntimeError: pass
escaped(started) if started >= PROCESSES else held(started)
""",
    "memory of one process": """
try: block = bytearray(2 * MEMORY)
except MemoryError: held()
escaped(len(block))
""",
    "memory of many processes": """
read, write = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        area = mmap.mmap(-1, MEMORY // 3, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(area), 4096): area[at] = 1
        os.write(write, b"x"); time.sleep(20); os._exit(0)
got = 0
while got < 6: got += len(os.read(read, 6))
time.sleep(3)
escaped("twice the limit was held for 3 s")
""",
    "memory that processes share": """
area = mmap.mmap(-1, 2 * MEMORY)
for at in range(0, len(area), 4096): area[at] = 1
time.sleep(3)
escaped("twice the limit was held for 3 s")
""",
    "memory that no process maps": """
refused("memfd_create", 319, 279, b"x", 0)
refused("shmget", 29, 194, 0, ctypes.c_size_t(2 * MEMORY), 0o1600)
refused("memfd_secret", 447, 447, 0)
refused("semget", 64, 190, 0, 32_000, 0o1600)
refused("semop", 65, 193, 0, bytes(6), 1)
refused("semctl", 66, 191, 0, 0, 12)
refused("semtimedop", 220, 192, 0, bytes(6), 1, 0)
refused("msgget", 68, 186, 0, 0o1600)
refused("msgsnd", 69, 189, 0, bytes(16), ctypes.c_size_t(8), 0)
refused("mq_open", 240, 180, b"queue", os.O_CREAT | os.O_RDWR, 0o600, 0)
refused("io_setup", 206, 0, 64, ctypes.byref(ctypes.c_ulong(0)))
held()
""",
    "memory of page tables": """
# Reading maps the shared page of zeros, which no resident memory counts, but takes 4 kB of page tables for each 2 MiB.
areas = []
while len(areas) * (1 << 36) < 2 * MEMORY * 512:
    areas.append(mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ))
    areas[-1].madvise(15)
    for at in range(0, 1 << 36, 1 << 21): areas[-1][at]
time.sleep(3)
escaped("twice the limit was held for 3 s")
""",
    "shared memory that no process maps any longer": """
# It stays in memory until the last process that could map it again has ended.
area = mmap.mmap(-1, 2 * MEMORY)
for start in range(0, len(area), 1 << 24):
    for at in range(start, start + (1 << 24), 4096): area[at] = 1
    area.madvise(4, start, 1 << 24)
time.sleep(3)
escaped("twice the limit was held for 3 s")
""",
    "buffers of sockets": """
read, write = os.pipe()
chunk = bytes(1 << 16)
for _ in range(6):
    if os.fork() == 0:
        pairs, kept = [], 0
        while kept < MEMORY // 3:
            pairs.append(socket.socketpair())
            for end in pairs[-1]:
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                try:
                    while True: kept += end.send(chunk)
                except BlockingIOError: pass
        os.write(write, b"x"); time.sleep(20); os._exit(0)
got = 0
while got < 6: got += len(os.read(read, 6))
time.sleep(3)
escaped("twice the limit was held for 3 s")
""",
    "disk": """
wrote = 0
for folder in ("/tmp", "/home/agent", "/", "/var", "/dev/shm", "/run", "/run/rollweave", "/dev", "/proc", "/usr", "/etc"):
    for number in range(4):
        try:
            with open(f"{folder}/fill{number}", "wb", buffering=0) as out:
                while wrote <= 8 * DISK: wrote += out.write(bytes(1 << 20))
        except OSError: pass
allowed = DISK + (64 << 20)
escaped(wrote) if wrote > allowed else held(wrote)
""",
    "many empty files": """
# Empty files take no space, so the size of a file system does not limit their number.
made = 0
for folder in ("/tmp", "/home/agent", "/dev/shm", "/dev", "/run", "/var", "/", "/proc", "/usr"):
    try:
        os.mkdir(f"{folder}/many")
        for number in range(4 * FILES): os.close(os.open(f"{folder}/many/{number}", os.O_CREAT | os.O_WRONLY)); made += 1
    except OSError: pass
escaped(made) if made > 2 * FILES else held(made)
""",
    "all terminals": """
opened = 0
try:
    for _ in range(300): os.openpty(); opened += 1
except OSError as error: held(f"{opened}: {error}") if 8 <= opened <= 64 else escaped(f"{opened}: {error}")
escaped(opened)
""",
    "the choice of the OOM killer": """
# The OOM killer ends a sandbox first, its server included, and no process inside can change that.
for name in os.listdir("/proc"):
    if name.isdecimal() or name == "self":
        for file, word in (("oom_score_adj", b"0"), ("oom_score_adj", b"-1000"), ("oom_adj", b"0")):
            try: os.write(os.open(f"/proc/{name}/{file}", os.O_WRONLY), word)
            except OSError: pass
        score = open(f"/proc/{name}/oom_score_adj").read().strip()
        if score != "1000": escaped(f"{name}: {score}")
held()
""",
    **KERNEL_PROGRAMS,
}
"""Programs by name of the attack."""

COUNTED_BY_GROUPS = frozenset(
    ("shared memory that no process maps any longer", "buffers of sockets")
)
"""Attacks that only a control group stops; they are not tried where there is none,
which `rollweave doctor` reports.
"""
