"""`Forked`, a `subprocess.Popen` whose child is forked from a server that has imported
the child's modules: a start takes milliseconds of CPU in place of up to two seconds.

Each test process has one server, which imports the modules of a program when the
program is first started. Invariants: the child is a child of the test process, with its
arguments, environment, working directory and file descriptors, and the process id by
which `Popen` waits for it and signals it; it has neither the memory of the test process
nor its threads.

Invariant: the child starts in the state of a new interpreter. What the server has
derived from its own environment, its imports or its own start is reset at each fork
(`reset_inherited`), and what a child takes from the process that starts it (umask,
limits, blocked signals) is that of the test process, not that of the server.
`tests/test_forking.py` compares a forked child with one that `Popen` has started.

A program that is not an interpreter's, that runs with interpreter options, or whose
environment differs from the server's in a variable that an interpreter reads only at
its start (`READ_AT_START`), starts as `Popen` starts it. Tests of a start itself (what
it imports, its signals, its output before the imports) use `subprocess.Popen`.
"""

import ast
import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import inspect
import json
import locale
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
REQUEST_BYTES = 1 << 20
"""Maximum size of a request: arguments and environment."""

FIRST_SPARE_FD = 500
"""File descriptors from here on are none that a test process passes to a child."""

COMMAND_LINE = ("rollweave.cli.entry", "rollweave.cli.main")
"""Modules of the command line, which import the module of a command when it runs."""

ENGINE = ("rollweave.engine.coserving.executor", "rollweave.engine.thread")
TRAINER = ("rollweave.runtime.entrypoints.trainer", "torch._dynamo")

IMPORTED_LATER = {
    "rollweave.cli.engine": ENGINE,
    "rollweave.cli.entry": ("rollweave.cli.main",),
    "rollweave.cli.train": (*ENGINE, *TRAINER),
    "rollweave.runtime.entrypoints.engine": ENGINE,
    "rollweave.runtime.entrypoints.predictor": ("rollweave.train.regressors",),
    "rollweave.runtime.entrypoints.server_engine": ("rollweave_servers.provider",),
    "rollweave.runtime.entrypoints.trainer": TRAINER,
    "packages.servers.tests.vllm_server": ENGINE,
}
"""Modules that a module imports before it is ready, but not at its top."""

READ_AT_START = ("LANG", "LC_", "LD_", "MALLOC_", "PYTHON")
"""Beginnings of the names of variables that only the start of a process reads, with the
exception of PYTHONPATH.
"""

RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that an interpreter ignores by itself. `Popen` restores them in its children,
and an interpreter that it starts ignores them again.
"""

HANDLED = {signal.SIGINT: signal.default_int_handler}
"""Handlers that an interpreter installs at its start."""

LIMITS = tuple(
    getattr(resource, name) for name in sorted(vars(resource)) if name.startswith("RLIMIT_")
)

Request = dict[str, Any]


class Forked(subprocess.Popen[Any]):
    """A child process that the server forks if it is an interpreter's."""

    def _execute_child(self, *given: Any) -> None:
        names = list(inspect.signature(super()._execute_child).parameters)
        values = {
            name.removeprefix("unused_"): value for name, value in zip(names, given, strict=True)
        }
        args = list(values["args"])
        env = dict(values["env"] if values["env"] is not None else os.environ)
        if (
            sys.platform != "linux"
            or args[0] != sys.executable
            or args[1] not in ("-c", "-m")
            or values["preexec_fn"] is not None
            or read_at_start(env) != server().read_at_start
        ):
            super()._execute_child(*given)
            return
        streams = [
            own if fd == -1 else fd
            for own, fd in enumerate(
                (values["p2cread"], values["c2pwrite"], values["errwrite"]),
            )
        ]
        request = {
            "argv": args[1:],
            "cwd": str(values["cwd"] or Path.cwd()),
            "env": env,
            "umask": int(status_of(os.getpid())["Umask"], 8),
            "limits": [resource.getrlimit(limit) for limit in LIMITS],
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": [
                int(number)
                for number in signal.valid_signals()
                if signal.getsignal(number) is signal.SIG_IGN
                and not (values["restore_signals"] and number in RESTORED)
            ],
            "fds": [0, 1, 2, *values["pass_fds"]],
            "new_session": values["start_new_session"],
        }
        self.pid = server().fork(request, [*streams, *values["pass_fds"]])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(values[end] for end in ends))


async def forked(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a child as `asyncio.create_subprocess_exec` does, by `Forked`."""
    with mock.patch("subprocess.Popen", Forked):
        return await asyncio.create_subprocess_exec(*command, **options)


class Server:
    """The server of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        env = dict(os.environ)
        self.read_at_start = read_at_start(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def fork(self, request: Request, fds: list[int]) -> int:
        """Start a child, and return its process id.

        The server's grandchild becomes our child because its parent ends while we adopt
        orphans.
        """
        with self._lock:
            adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
                answer = self._socket.recv(REQUEST_BYTES)
            finally:
                adopt_orphans(False)
        if not answer:
            raise ChildProcessError("the server that forks children ended")
        return int(answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def server() -> Server:
    made = Server()
    atexit.register(made.close)
    return made


def read_at_start(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that only the start of a process reads."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of `/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def serve(control: socket.socket, parent_pid: int) -> Request:
    """Fork a child for each request; return the request in the child."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, 64)
        if not data:
            os._exit(0)  # the test process has ended
        request: Request = json.loads(data)
        preload(request["argv"])
        gc.freeze()
        between = os.fork()
        if between:
            for fd in fds:
                os.close(fd)
            os.waitpid(between, 0)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != parent_pid:
            time.sleep(0.0002)  # until the process between has ended
        if request["new_session"]:
            os.setsid()
        answer = str(os.getpid()).encode()
        control.send(answer)
        control.close()
        take_descriptors(fds, request["fds"])
        return request


def preload(argv: list[str]) -> None:
    """Import what a program imports first, without executing the program.

    An error is left to the program.
    """
    with contextlib.suppress(Exception):
        if "-m" in argv:
            module = argv[argv.index("-m") + 1]
            source = Path(importlib.util.find_spec(module).origin).read_text()
            modules, arguments = [module], argv[argv.index("-m") + 2 :]
        else:
            source, modules, arguments = argv[1], list[str](), argv[2:]
        modules += imported(source)
        if arguments and any(module in COMMAND_LINE for module in modules):
            modules.append(f"rollweave.cli.{arguments[0]}")
        for module in modules[1 if "-m" in argv else 0 :]:
            importlib.import_module(module)
        for module in modules:
            for later in IMPORTED_LATER.get(module, ()):
                importlib.import_module(later)
    forget_results()


def forget_results() -> None:
    """Empty the caches that our modules have filled while they were imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("rollweave", "packages.", "tests.")):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def imported(source: str) -> list[str]:
    """Return the modules that a program imports at its top."""
    names = list[str]()
    for node in ast.parse(source).body:
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(name), level=0):
                names.append(name)
    return names


def take_descriptors(received: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that they have in the test process."""
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE_FD) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(spare, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def reset_inherited(request: Request) -> None:
    """Give the child the state that the test process passes on, and reset what the
    server's interpreter and its imports have derived from the state of the server.
    """
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    for limit, bounds in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, bounds)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in request["ignored"] or number in RESTORED:
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, HANDLED.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    tempfile.tempdir = None
    time.tzset()
    locale.setlocale(locale.LC_ALL, "C")
    locale.setlocale(locale.LC_CTYPE, "")
    importlib.invalidate_caches()
    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        threads = request["env"].get("OMP_NUM_THREADS", "")
        sys.modules["torch"].set_num_threads(
            int(threads) if threads.isdecimal() else len(request["cpus"])
        )


def run(request: Request, paths: list[str], output: dict[str, str]) -> NoReturn:
    """Run a program as the interpreter does, and end the process. `output` is the
    encoding of an interpreter's standard output, and how it handles errors.
    """
    option, program, *arguments = request["argv"]
    reset_inherited(request)
    added = os.environ.get("PYTHONPATH", "")
    here = request["cwd"] if option == "-m" else ""
    sys.path[:] = [here, *filter(None, added.split(os.pathsep)), *paths]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, **output)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", closefd=False, encoding=output["encoding"], errors="backslashreplace", buffering=1
    )
    status = 0
    if "-m" in request["argv"]:  # it is executed anew, as the interpreter does
        sys.modules.pop(request["argv"][request["argv"].index("-m") + 1], None)
    try:
        if option == "-m":
            sys.argv[:] = ["-m", *arguments]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = ["-c", *arguments]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent_pid = int(sys.argv[2])
    numbered = fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE_FD)
    control.close()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in sys.path[1:] if path not in added]
    output = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    run(serve(socket.socket(fileno=numbered), parent_pid), paths, output)


if __name__ == "__main__":
    main()
