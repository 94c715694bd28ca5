"""A child that the tests' server forks starts as one that `Popen` starts."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking
from tests.support.forking import Forked, Server

STATE = """
import json, locale, os, resource, signal, sys, tempfile, time
import rollweave.io.wire  # the server imports it, and what it needs, before the fork
import numpy.random

names = ("Umask", "SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "Cpus_allowed")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
state = {
    "status": {name: status[name].strip() for name in names},
    "handled": [n for n in signal.valid_signals() if callable(signal.getsignal(n))],
    "temporary": tempfile.gettempdir(),
    "locale": [locale.setlocale(category) for category in (locale.LC_CTYPE, locale.LC_NUMERIC)],
    "timezone": [time.tzname, time.localtime(0).tm_hour],
    "limits": [resource.getrlimit(limit) for limit in range(16)],
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "cwd": os.getcwd(),
    "env": {name: value for name, value in sorted(os.environ.items()) if name != "_"},
    "flags": list(sys.flags),
    "warnings": sys.warnoptions,
    "group": os.getpgid(0) == os.getpid(),
    "encodings": [sys.getfilesystemencoding(), sys.stdout.encoding, sys.stdout.errors],
    "recursion": sys.getrecursionlimit(),
    "names": [__name__, sys.argv],
}
drawn = [numpy.random.random(), __import__("random").random()]
print(json.dumps([state, drawn]))
"""


@pytest.fixture
def unlike_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process a state that the server, which is older, does not have."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    umask, files = os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    cpus = os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, files[1]))
    os.sched_setaffinity(0, {min(cpus)})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    former = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR2, former)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    os.sched_setaffinity(0, cpus)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.umask(umask)


def started(by: type[subprocess.Popen[Any]], **env: str) -> Any:
    with by([sys.executable, "-c", STATE, "x"], stdout=-1, env={**os.environ, **env}) as child:
        return json.loads(child.communicate(timeout=60)[0])


@pytest.mark.usefixtures("unlike_the_server")
@pytest.mark.parametrize("env", [{}, {"PYTHONWARNINGS": "error", "LC_ALL": "C"}])
def test_a_forked_child_has_the_state_of_a_new_interpreter(env: dict[str, str]) -> None:
    forked, drawn = started(Forked, **env)
    again, drawn_again = started(Forked, **env)
    new, _ = started(subprocess.Popen, **env)
    assert forked == again == new
    assert not {*drawn} & {*drawn_again}, "each child draws its own random numbers"


def test_the_server_imports_what_the_path_at_its_start_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree with a changed file is found by what the server imports before a fork."""
    (tmp_path / "changed.py").write_text("import os\nOWN = os.getpid()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(Server()) as own:
        monkeypatch.setattr(forking, "server", lambda: own)
        program = "import changed, os, sys; print(changed.OWN == os.getpid(), sys.path)"
        with Forked([sys.executable, "-c", program], stdout=-1, text=True) as child:
            known, _, path = child.communicate()[0].partition(" ")
    assert (known, eval(path).count(str(tmp_path))) == ("False", 1), "the server imported it"
