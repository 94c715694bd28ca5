"""What an agent may try instead of solving a task of `code`, mending a bug of `swe`, or
doing what a `program` is judged by: no attack of the tables earns a reward. All of them
compare values outside of the sandbox.
"""

import base64

import pytest

from rollweave.envs.base import Score, new_task
from rollweave.envs.handlers.program import Outcome, Program
from rollweave.schema.errors import RewardError, SandboxSpoiledError
from rollweave.schema.work import Task
from rollweave_envs.code import Code, same_output
from rollweave_envs.code_tasks import Problem
from rollweave_envs.swe import Swe
from rollweave_envs.swe_bugs import bugs
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes
from tests.support.programs import job, lived, scripted
from tests.support.scripted_gateway import Script
from tests.support.variants import mostly_slow

PROBLEM = Problem(family="divisible", params={"k": 3, "what": "sum"})
TASK = new_task(seed=7, family=PROBLEM.family, params=PROBLEM.params)

BUG = next(
    bug
    for bug in bugs().values()
    if bug.repo == "ledger" and bug.kind == "off by one" and len(bug.fails) == 3
)

DESCRIPTORS = """
import json, os, struct
for fd in range(3, 64):
    for data in DATA:
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

FRAMES = """
def frame(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<II", len(text), len(body)) + text + body
DATA = [frame({"id": n, "ok": True, "rc": 0, "timed_out": False, "truncated": False, "seconds": 0.1, "split": 2}, b"0\\n") for n in range(30)]
"""

CODE: dict[str, str] = {
    "prints nothing": "pass",
    "prints what it reads": "import sys; print(sys.stdin.read())",
    "prints many answers": "for n in range(1000): print(n)",
    "digits of another script": "print('１２')",
    "ends well": "import os; print('passed'); os._exit(0)",
    "claims success": 'print(\'{"reward": 1.0, "passed": true}\'); raise SystemExit(0)',
    "imports the answers": "import rollweave_envs.code_solutions as s; print(s.divisible(open(0).read(), k=3, what='sum'))",
    "looks for the answers": """
import os, sys
for at, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
    for name in names:
        if name in ("code_solutions.py", "code_tasks.py"):
            scope = {}
            exec(open(os.path.join(at, name)).read(), scope)
            print(scope["divisible"](sys.stdin.read(), k=3, what="sum"))
            raise SystemExit
""",
    "finds the answers in memory": """
import gc, sys
for found in gc.get_objects():
    if callable(found) and getattr(found, "__name__", "") == "divisible":
        print(found(sys.stdin.read(), k=3, what="sum"))
for name, module in list(sys.modules.items()):
    if "rollweave" in name: print(module)
""",
    "reads other processes": """
import glob
for path in glob.glob("/proc/[0-9]*/*"):
    if path.rpartition("/")[2] in ("environ", "cmdline", "maps", "fd"):
        try: print(open(path).read())
        except OSError: pass
""",
    "reads the server's memory": "import os; print(open(f'/proc/{os.getppid()}/mem', 'rb').read(10))",
    "writes replies": "import json, os, struct" + FRAMES + DESCRIPTORS,
    "writes replies to its parent": """
import os
for fd in range(64):
    try: os.write(os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_WRONLY), b"0\\n")
    except OSError: pass
""",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills everything": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "stops its parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "changes the interpreter": """
import os, sys
for place in (sys.executable, sys.prefix + "/lib/python3.11/site-packages/x.pth", "/usr/bin/python3", "/run/rollweave/inside/server.py"):
    try: open(place, "w").write("#!/bin/sh\\necho 0\\n")
    except OSError: pass
""",
    "leaves modules": """
import os
for place in (".", "/project", "/home/agent", os.path.expanduser("~/.local/lib/python3.11/site-packages")):
    os.makedirs(place, exist_ok=True)
    for name in ("sitecustomize.py", "usercustomize.py", "os.py", "sys.py", "x.pth"):
        open(f"{place}/{name}", "w").write("import os; os._exit(0)")
""",
    "leaves settings": """
import os
os.environ |= {"PYTHONSTARTUP": "/tmp/x.py", "PYTHONPATH": "/tmp", "LD_PRELOAD": "/tmp/x.so"}
for path in ("/etc/ld.so.preload", "/etc/environment", "/home/agent/.profile", "/home/agent/.bashrc"):
    try: open(path, "w").write("/tmp/x.so")
    except OSError: pass
""",
    "replaces itself": "open(__file__, 'w').write('print(0)')",
    "leaves a daemon": """
import os, time
if not os.fork():
    os.setsid()
    while True:
        os.write(1, b"0\\n")
        time.sleep(0.01)
""",
    "answers after its end": """
import os, time
if not os.fork():
    time.sleep(0.2)
    os.write(1, b"0\\n")
    os._exit(0)
os._exit(0)
""",
    "traces its parent": "import ctypes, os; print(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))",
    "does not end": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\nwhile True: pass",
    "floods": "while True: print('0' * 100000)",
    "overflows memory": "x = [bytearray(1 << 26) for _ in range(100)]",
    "opens the host's network": "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:80').read())",
    "answers on the error stream": "import sys; print(9, file=sys.stderr)",
    "ends with a signal": "import os, signal; print(0); os.kill(os.getpid(), signal.SIGTERM)",
    "no program": "this is no Python",
    "at its exit": "import atexit, os; atexit.register(lambda: print('ok')); import sys; sys.excepthook = lambda *a: os._exit(0); raise KeyError",
}
"""Programs that solve nothing, by what they try. The right output is never 0 lines."""


@pytest.mark.variants
@pytest.mark.parametrize("attack", mostly_slow(CODE, {"writes replies", "looks for the answers"}))
async def test_no_program_forges_its_verdict(attack: str) -> None:
    handler = Code(cases=2, timeout_s=3.0, partial=False)
    score = await earned(handler, TASK, [f"```python\n{CODE[attack]}\n```\n"])
    assert score == Score(reward=0.0, success=False)


async def test_a_program_that_closes_its_folder_does_not_escape_its_reward() -> None:
    program = "import os; os.chmod(os.getcwd(), 0)"
    score = await earned(Code(cases=2, timeout_s=3.0), TASK, [f"```python\n{program}\n```\n"])
    assert score == Score(reward=0.0, success=False)


async def earned(handler: Code | Swe, task: Task, replies: list[object]) -> Score | None:
    async with sandboxes() as boxes:
        try:
            return await attempt(handler, task, Scripted(replies), boxes)  # type: ignore[arg-type]
        except SandboxSpoiledError as error:
            return await handler.eval_exception(error)


async def by_running(outcome: Outcome) -> float:
    """Judge a submitted program by what it prints, in sandboxes of its own."""
    right = 0
    for given in ("3 4 9\n", "6\n1 2 3\n"):
        ran = await outcome.run(
            ["sh", "-c", "exec python3 -I $SUBMISSION/solution.py"], stdin=given, timeout_s=3.0
        )
        expected = PROBLEM.answer(given)
        right += ran.rc == 0 and not ran.timed_out and same_output(ran.stdout, expected)
    return right / 2


@pytest.mark.variants
@pytest.mark.parametrize(
    "attack", mostly_slow([*CODE, "a correct program"], {"leaves modules", "a correct program"})
)
async def test_no_submission_forges_its_score(attack: str) -> None:
    source = CODE.get(attack, PROBLEM.program())
    handler = Program(
        command=["sh", "-c", "cp solution.txt solution.py; echo 'print(1e9)' > sitecustomize.py"],
        files={"solution.txt": source},
        score=f"{__name__}:by_running",
        submission=["solution.py", "sitecustomize.py"],
        limits={"memory_bytes": 512 << 20, "disk_bytes": 64 << 20, "output_bytes": 1 << 18},
    )
    async with sandboxes() as boxes, scripted(Script()) as (_, agent):
        try:
            score: Score | None = await lived(handler, job(boxes), agent)
        except SandboxSpoiledError as error:
            score = await handler.eval_exception(error)
    assert score is not None
    assert score.reward == float(attack not in CODE)


async def test_a_function_runs_only_what_is_submitted() -> None:
    handler = Program(command=["true"], score=f"{__name__}:by_running")
    async with sandboxes() as boxes, scripted(Script()) as (_, agent):
        with pytest.raises(RewardError, match=r"options\.submission must list the files"):
            await lived(handler, job(boxes), agent)


NOTES = """
import json, os
names = NAMES
notes = {name: ["True", "[5, 4]", "end"] for name in names}
DATA = [json.dumps(notes).encode(), json.dumps(["True", "end"]).encode(), b'["end"]']
"""

SWE: dict[str, str] = {
    "ends": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends in a call": "import os\nsplit = lambda *a: os._exit(0)",
    "prints": "print('Ran 45 tests\\n\\nOK'); import os; os._exit(0)",
    "writes notes": NOTES + DESCRIPTORS.replace("import json, os, struct", "") + "os._exit(0)",
    "writes notes to all": NOTES.replace("import json, os", "import json, os")
    + """
for data in DATA:
    for fd in range(0, 64):
        for pid in ("self", os.getppid(), 1):
            try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), data)
            except OSError: pass
""",
    "patches unittest": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a: None)",
    "patches the probe": "import __main__\n__main__.describe = lambda value: 'True'\n__main__.Probe.note = lambda self, value: self.notes.append('True')",
    "patches its end": "import __main__\n__main__.END = 'end'\n__main__.json.dumps = lambda *a: '[\"True\", \"end\"]'",
    "patches its frame": "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_locals.get('notes', []).append('end')\n    frame = frame.f_back",
    "reads the job": "import sys, __main__\ntry:\n    print(sys.stdin.read(), __main__.job)\nexcept Exception: pass\nsplit = lambda cents, people: [cents]",
    "reads the code of tests": "import sys\nframe = sys._getframe()\nseen = []\nwhile frame:\n    seen += [frame.f_locals.get('codes'), frame.f_code.co_consts]\n    frame = frame.f_back\nsplit = lambda cents, people: seen",
    "equals": "class E(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\nsplit = lambda c, p: E()",
    "equals as a list": "class E(list):\n    def __eq__(self, other): return True\n    def __repr__(self): return '[5, 4]'\nsplit = lambda c, p: E()",
    "is shown as another": "class S(str):\n    def __repr__(self): return '[5, 4]'\n    __str__ = __repr__\nsplit = lambda c, p: S()",
    "raises everything": "def split(c, p): raise BaseException('OK')",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "leaves a daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    while True:\n        for fd in range(3, 32):\n            try: os.write(fd, b'[\"end\"]')\n            except OSError: pass\n        time.sleep(0.01)",
    "its child goes on": "import os\nif os.fork(): os._exit(0)",
    "does not end": "while True: pass",
    "floods": "import sys\nwhile True: sys.stdout.write('OK' * 100000)",
    "imports the answers": "from rollweave_envs.swe_bugs import files_of\nexec(files_of('ledger')['ledger/money.py'])",
    "looks for the answers": """
import glob, os
for at, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if name not in ("proc", "sys", "dev", "project")]
    if at.endswith("swe_repos/ledger/ledger") and "money.py" in names:
        exec(open(f"{at}/money.py").read())
""",
    "finds the answers in memory": "import gc\nfor found in gc.get_objects():\n    if type(found) is dict and 'ledger/money.py' in found: exec(found['ledger/money.py'])",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)",
    "recurses": "def split(c, p): return split(c, p)",
    "at its exit": "import atexit, os\natexit.register(lambda: os.write(1, b'OK'))",
    "closes everything": "import os\nos.closerange(0, 100)",
    "signals": "import signal, os\nfor n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\nos.killpg(0, signal.SIGTERM)",
}
"""Code at the end of the broken module, by what it tries."""


@pytest.mark.variants
@pytest.mark.parametrize("attack", mostly_slow(SWE, {"writes notes", "looks for the answers"}))
async def test_no_code_forges_the_notes_of_tests(attack: str) -> None:
    code = SWE[attack].replace("NAMES", repr(list(BUG.fails)))
    packed = base64.b64encode(f"\n{code}\n".encode()).decode()
    write = f"echo {packed} | base64 -d >> ledger/money.py"
    for name in ("sitecustomize", "usercustomize", "conftest", "unittest", "json"):
        write += f"; echo 'import os; os._exit(0)' > {name}.py"
    replies: list[object] = [calls(("bash", {"command": write})), calls(("submit", {}))]
    assert await earned(Swe(), new_task(bug=BUG.id), replies) == Score(reward=0.0, success=False)


def test_there_are_enough_attacks() -> None:
    assert len(CODE) >= 25
    assert len(SWE) >= 25
