"""Programs that attack the kernel, the host's files and other processes from inside a
sandbox (`benchmarks/sandbox/attack_programs`).
"""

KERNEL_PROGRAMS: dict[str, str] = {
    "memory of the server": """
for pid in {1, os.getppid()}:
    for name, flags in (("mem", os.O_RDWR), ("mem", os.O_RDONLY), ("environ", os.O_RDONLY), ("maps", os.O_RDONLY)):
        try: os.close(os.open(f"/proc/{pid}/{name}", flags))
        except OSError: continue
        if pid != 1 or flags == os.O_RDWR: escaped(f"/proc/{pid}/{name}, {flags}")
    for fd in range(10):
        try: os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError: continue
        if pid != 1: escaped(f"/proc/{pid}/fd/{fd}")
held()
""",
    "settings of the kernel": """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
             "/proc/sysrq-trigger", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces",
             "/sys/kernel/uevent_helper", "/proc/kcore", "/sys/fs/cgroup/cgroup.procs"):
    try: os.close(os.open(path, os.O_WRONLY))
    except OSError: continue
    escaped(path)
held()
""",
    "environment of the host": """
seen = repr(dict(os.environ))
for name in os.listdir("/proc"):
    if name.isdecimal():
        try: seen += open(f"/proc/{name}/environ").read()
        except OSError: pass
escaped("the bait") if BAIT in seen else held()
""",
    "input to a terminal": """
main, side = os.openpty()
if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.setsid()
fcntl.ioctl(side, 0x540E, 0)
for request, argument in ((0x5412, b"x"), (0x541C, b"\\x02"), (0x5423, struct.pack("i", 0))):
    try: fcntl.ioctl(side, request, argument)
    except PermissionError: continue
    except OSError as error: escaped(f"reached the terminal: {error}")
    escaped("pushed")
held()
""",
    "descriptors of others": """
allowed = ("pipe:", "socket:", "anon_inode:", "/dev/null", "/dev/pts/", "/dev/ptmx", "/proc/")
for name in os.listdir("/proc"):
    if name.isdecimal():
        try: fds = os.listdir(f"/proc/{name}/fd")
        except OSError: continue
        for fd in fds:
            try: path = os.readlink(f"/proc/{name}/fd/{fd}")
            except OSError: continue
            if not path.startswith(allowed): escaped(f"{name}: {fd} is {path}")
held()
""",
    "looking into processes": """
parent = os.getppid()
for pid in (1, parent):
    refused("ptrace", 101, 117, 16, pid, 0, 0)
    refused("ptrace seize", 101, 117, 0x4206, pid, 0, 0)
    refused("process_vm_readv", 310, 270, pid, 0, 0, 0, 0, 0)
    refused("process_vm_writev", 311, 271, pid, 0, 0, 0, 0, 0)
refused("kcmp", 312, 272, parent, 1, 0, 0, 0)
refused("pidfd_getfd", 438, 438, 0, 0, 0)
held()
""",
    "rare system calls": """
refused("io_uring_setup", 425, 425, 8, bytes(120))
refused("io_uring_enter", 426, 426, -1, 0, 0, 0, 0, 0)
refused("io_uring_register", 427, 427, -1, 0, 0, 0)
refused("fanotify_init", 300, 262, 0, 0)
refused("modify_ldt", 154, 425, 0, 0, 0)
refused("personality", 135, 92, ctypes.c_ulong(0x0040000))
refused("a call of the future", 500, 500)
refused("add_key", 248, 217, b"user", b"x", b"y", 1, -3)
refused("keyctl", 250, 219, 0, -3, 1)
refused("request_key", 249, 218, b"user", b"x", 0, -3)
refused("bpf", 321, 280, 0, bytes(48), 48)
refused("perf_event_open", 298, 241, bytes(112), 0, -1, -1, 0)
refused("userfaultfd", 323, 282, 0)
refused("open_by_handle_at", 304, 265, 0, 0, 0)
held()
""",
    "sockets of the kernel": """
for family in (16, 17, 31, 38, 40, 44):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try: socket.socket(family, kind)
        except OSError: continue
        escaped(f"family {family}, type {kind}")
for protocol in (33, 115, 132, 136, 262):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try: socket.socket(socket.AF_INET, kind, protocol)
        except OSError as error:
            if error.errno == errno.EPROTONOSUPPORT: continue
            escaped(f"protocol {protocol}, type {kind}: {error}")
        escaped(f"protocol {protocol}, type {kind}")
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
except OSError: held()
escaped("a raw socket")
""",
    "network": """
for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, ABSTRACT), (socket.AF_INET, ("1.1.1.1", 53)),
                        (socket.AF_INET, ("169.254.169.254", 80))):
    try:
        with socket.socket(family) as sock: sock.settimeout(3); sock.connect(address)
    except OSError: continue
    escaped(address)
names = [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]]
escaped(names) if names != ["lo"] else held()
""",
    "mounts": """
refused("mount", 165, 40, b"none", b"/tmp", b"tmpfs", 0, 0)
refused("umount2", 166, 39, b"/proc/sys", 2)
refused("pivot_root", 155, 41, b"/tmp", b"/tmp")
refused("fsopen", 430, 430, b"tmpfs", 0)
refused("open_tree", 428, 428, -100, b"/", 1)
refused("mount_setattr", 442, 442, -100, b"/usr", 0, bytes(32), 32)
for path in ("/usr", "/dev", "/proc/sys"):
    try: os.mkdir(f"{path}/made")
    except OSError: continue
    escaped(path)
held()
""",
    "devices": """
for kind, major, minor in ((0o060000, 254, 0), (0o060000, 8, 0), (0o020000, 1, 1), (0o020000, 10, 232)):
    try: os.mknod(f"/tmp/d{major}-{minor}", kind | 0o600, os.makedev(major, minor))
    except OSError: continue
    escaped(f"made {major}:{minor}")
usual = "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
extra = set(os.listdir("/dev")) - set(usual.split())
escaped(extra) if extra else held()
""",
    "namespaces": """
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x10020000):
    refused("unshare", 272, 97, flag)
    refused("clone", 56, 220, ctypes.c_ulong(flag | 17), 0, 0, 0, 0)
refused("clone3", 435, 435, struct.pack("=8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
refused("setns", 308, 268, os.open("/proc/1/ns/user", os.O_RDONLY) if os.access("/proc/1/ns/user", os.R_OK) else 0, 0)
held()
""",
    "privileges": """
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(status[name], 16): escaped(f"{name} {status[name]}")
if status["NoNewPrivs"] != "1" or status["Seccomp"] != "2": escaped(status["NoNewPrivs"] + status["Seccomp"])
for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chroot("/tmp")):
    try: call()
    except OSError: continue
    escaped("became another")
held()
""",
    "files of the host": """
ways = ("", "/proc/1/root", "/proc/self/root", "/proc/self/cwd/../../..", "/proc/1/cwd/../../../..")
for path in (*(way + SECRET_PATH for way in ways), "/etc/shadow", "/etc/ssh", "/root/.ssh"):
    try: os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError: continue
    escaped(path)
held()
""",
    "packages and answers of the host": """
# The interpreter that runs Rollweave is here; the packages that it imports are not.
for at, folders, names in os.walk("/"):
    if at == "/": folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
    for name in folders + names:
        if name.endswith((".dist-info", ".egg-info", ".egg-link")) or name == "swe_repos":
            escaped(f"{at}/{name}")
    if "code_solutions.py" in names or "bugs.toml" in names: escaped(at)
for path in [path for path in sys.path if path.endswith("-packages")] + ["/opt", "/srv", "/usr/src", "/usr/share/doc", "/var/lib"]:
    if os.path.isdir(path) and os.listdir(path): escaped(path)
held()
""",
    "other architectures": """
# x32 numbers on x86-64: keyctl and ptrace by their second names
for number in (250, 521, 425, 272):
    ctypes.set_errno(0)
    if X86 and (libc.syscall(ctypes.c_long(0x40000000 | number), 0, 0, 0, 0) >= 0 or ctypes.get_errno() != errno.ENOSYS):
        escaped(f"{number}: {ctypes.get_errno()}")
held()
""",
}
"""Programs by name of the attack."""
