"""Third-party agent programs, each a complete attempt: sandbox, gateway, relay,
score.
"""

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollweave.envs.base import Score, Split, payload_of
from rollweave.envs.handlers.base import AgentHandler
from rollweave.envs.handlers.program import Program
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.sandbox.base import Sandbox, SandboxSpec, Snapshot
from rollweave.schema import errors
from rollweave_sandbox import folders
from tests.support.programs import CLIENT, HERE, agent_program, job, lived, scripted
from tests.support.sandboxes import ISOLATING, NAMES, needs
from tests.support.scripted_gateway import CALL, Script
from tests.support.variants import mostly_extended

pytestmark = pytest.mark.variants

BY_ANSWER = HERE + "by_answer"


@pytest_asyncio.fixture(params=ISOLATING)
async def sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    needs(request.param)
    started = Sandboxes(request.param)
    yield started
    await started.close()


def kept_folders(sandboxes: Sandboxes) -> list[Path]:
    """Return the folders of snapshots that exist."""
    return list(Path(sandboxes._backend._launcher._snapshots).iterdir())  # type: ignore[union-attr]


async def test_scores_a_programs_output_and_hides_fields(sandboxes: Sandboxes) -> None:
    handler: AgentHandler = Program(
        packages=CLIENT,
        command=agent_program("print(say(task['question']) if 'answer' not in task else 'seen')"),
        score=BY_ANSWER,
        hidden=["answer"],
        unreadable="refuse",
    )
    async with scripted(Script(["42"])) as (gateway_, agent):
        assert await lived(handler, job(sandboxes, question="6 * 7?", answer="42"), agent) == Score(
            reward=1.0
        )
        (sequence,) = gateway_.close("s").sequences
    assert len(sequence.turns) == 1
    assert agent.unreadable == "refuse"
    assert isinstance(handler, Program)
    assert handler.final_result()["rc"] == 0
    assert kept_folders(sandboxes) == []


async def test_files_folder_environment_and_outputs(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tool.sh").write_text(
        "#!/bin/sh\necho $GREETING from $PWD > /tmp/said\necho made > made.txt\n"
    )
    (tmp_path / "sub" / "tool.sh").chmod(0o755)
    handler = Program(
        command=["sh", "main.sh"],
        score=HERE + "by_files",
        files={
            "main.sh": "sub/tool.sh; cat other/x.txt; echo $OPENAI_API_BASE; exit 3",
            "other/x.txt": "x\n",
        },
        folder=str(tmp_path),
        env={"GREETING": "hello"},
        outputs=["made.txt", "/tmp/said", "missing", "/dev/zero"],
    )
    async with scripted(Script()) as (_, agent):
        assert await lived(handler, job(sandboxes), agent) == Score(reward=2.0, success=True)
    result = handler.final_result()
    assert (result["rc"], result["outputs"]["/tmp/said"]) == (3, "hello from /home/agent\n")
    assert result["stdout"].startswith("x\nhttp://127.0.0.1:")


@pytest.mark.parametrize("name", mostly_extended(NAMES, {"bubblewrap"}))
async def test_a_folder_of_any_size_is_in_the_home_with_modes_and_links(
    name: str, tmp_path: Path
) -> None:
    """A native binary of hundreds of megabytes, for example, which takes nothing of the
    sandbox's disk.
    """
    needs(name)
    folder = tmp_path / "agent"
    (folder / "bin").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "bin/tool").write_text("#!/bin/sh\necho tool; tail -c 4 native\n")
    (folder / "bin/tool").chmod(0o750)
    (folder / "run").symlink_to("bin/tool")
    (folder / "programs").symlink_to("bin")
    with (folder / "native").open("wb") as native:
        native.truncate(600 << 20)
        native.seek(0, os.SEEK_END)
        native.write(b"end\n")
    script = "./run; programs/tool; ls; stat -c %a bin/tool; echo more >> bin/tool; echo x > new"
    judge = (
        "ls; ls $SUBMISSION; tail -1 $SUBMISSION/bin/tool; stat -c %s $SUBMISSION/native; echo 1"
    )
    handler = Program(
        command=["sh", "-c", script],
        folder=str(folder),
        score=["sh", "-c", judge],
        score_files={"judge": ""},
        limits={"disk_bytes": 64 << 20},
    )
    boxes = Sandboxes(name)
    try:
        for _ in range(2):  # the second attempt has the folder as it was
            async with scripted(Script()) as (_, agent):
                assert await lived(handler, job(boxes), agent) == Score(reward=1.0)
            result = handler.final_result()
            assert result["stdout"].split() == [
                *("tool", "end", "tool", "end"),
                *("bin", "empty", "native", "programs", "run", "task.json", "750"),
            ]
            assert result["score"].split() == [
                *("judge", "bin", "empty", "native", "new", "programs", "run", "task.json"),
                *("more", str((600 << 20) + 4), "1"),
            ]
    finally:
        await boxes.close()
    assert (folder / "bin/tool").read_text().count("\n") == 2


TESTS = """
import json, os, sys
told = json.load(sys.stdin)
processes = [open(f"/proc/{pid}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()]
print("status", told["rc"], "living", sum("forever" in each for each in processes))
print("home", *sorted(os.listdir(os.environ["HOME"])), "submission", *sorted(os.listdir(os.environ["SUBMISSION"])))
print(len(open(os.environ["SUBMISSION"] + "/work.txt").read()) / 10)
"""


async def test_a_command_scores_the_submission_in_a_clean_sandbox(sandboxes: Sandboxes) -> None:
    source = """
open("work.txt", "w").write(say("write"))
open("tests.py", "w").write("print(1e9)")
import subprocess
subprocess.Popen(["sh", "-c", ": forever; while :; do sleep 1; done"], start_new_session=True)
"""
    handler = Program(
        packages=CLIENT,
        command=agent_program(source),
        score=["python", "-I", "tests.py"],
        score_files={"tests.py": TESTS},
    )
    async with scripted(Script(["hello"])) as (_, agent):
        assert await lived(handler, job(sandboxes), agent) == Score(reward=0.5)
    seen = handler.final_result()["score"].splitlines()
    expected = ["status 0 living 0", "home tests.py submission task.json tests.py work.txt", "0.5"]
    assert seen == expected
    assert kept_folders(sandboxes) == []


LEFT = """
import os, pathlib, subprocess, sys
TRICK = "import os\\nprint('loaded')\\nopen('/tmp/loaded', 'a').close()\\n"
NAMES = ("sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "os.py", "json/__init__.py", "x.pth")
version = "python%d.%d" % sys.version_info[:2]
places = [".", "sub", "/tmp", "/score", "/home/submission", ".local/lib/" + version + "/site-packages", *sys.path]
places += [line.strip() for path in sys.path if os.path.isdir(path)
           for file in pathlib.Path(path).glob("*.pth") for line in open(file) if line.startswith("/")]
for place in places:
    for name in NAMES:
        try:
            path = pathlib.Path(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(TRICK)
        except OSError:
            pass
for place in ("/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/python3/sitecustomize.py", ".profile", ".bashrc", "bin/python"):
    try:
        pathlib.Path(place).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(place).write_text("/home/agent/evil.so" if "ld.so" in place else "echo loaded")
    except OSError:
        pass
os.makedirs("out/deep")
open("out/deep/work.txt", "w").write(say("write"))
os.symlink("deep/work.txt", "out/within")
os.symlink("/home/agent/check.py", "out/absolute")
os.symlink("../../agent/check.py", "out/relative")
os.symlink("deep/../../../agent/check.py", "out/through")
os.symlink("../../agent", "alone")
"""

CHECK = """
import json, os, sys
submission = os.environ["SUBMISSION"]
found = sorted(os.path.relpath(os.path.join(folder, name), submission)
               for folder, folders, files in os.walk(submission) for name in [*folders, *files])
print(*found)
print("home", *sorted(os.listdir("/home/agent")), "tmp", *os.listdir("/tmp"), os.path.getsize("/etc/ld.so.preload"))
print(len(open(submission + "/out/within").read()) / 10)
"""


async def test_scoring_finds_only_the_submission_and_runs_none_of_its_code(
    sandboxes: Sandboxes,
) -> None:
    handler = Program(
        packages=CLIENT,
        command=agent_program(LEFT),
        submission=["out", "alone", "missing", "not/there"],
        score=["sh", "-c", "python check.py && python -I check.py"],
        score_files={"check.py": CHECK},
    )
    async with scripted(Script(["hello"])) as (_, agent):
        assert await lived(handler, job(sandboxes), agent) == Score(reward=0.5)
    assert handler.final_result()["rc"] == 0, handler.final_result()["stderr"]
    # An interpreter below /tmp is mounted at its path.
    below = {Path(path).parts[2] for path in (sys.prefix, sys.base_prefix) if path[:5] == "/tmp/"}
    left = " ".join(["home check.py tmp", *sorted(below), "0"])
    seen = ["out out/deep out/deep/work.txt out/within", left, "0.5"]
    assert handler.final_result()["score"].splitlines() == [*seen, *seen]


@pytest.mark.extended
async def test_a_command_scores_without_isolation_too() -> None:
    sandboxes = Sandboxes("plain")
    check = (
        "import os; print(*os.listdir(), *sorted(os.listdir(os.environ['SUBMISSION'])));"
        "print(len(open(os.environ['SUBMISSION'] + '/work.txt').read()) / 10)"
    )
    handler = Program(
        packages=CLIENT,
        command=agent_program('open("work.txt", "w").write(say("write"))'),
        score=["python", "-I", "tests.py"],
        score_files={"tests.py": check},
    )
    async with scripted(Script(["hello"])) as (_, agent):
        assert await lived(handler, job(sandboxes), agent) == Score(reward=0.5)
    assert handler.final_result()["score"].splitlines()[0] == "tests.py task.json work.txt"
    await sandboxes.close()


async def test_an_abandoned_attempt_keeps_no_snapshot(sandboxes: Sandboxes) -> None:
    handler = Program(command=["true"], score=["echo", "0"])
    async with scripted(Script()) as (_, agent):
        await handler.init(job(sandboxes))
        await handler.run(agent)
        await handler.close()
    assert len(kept_folders(sandboxes)) == 1
    del handler
    gc.collect()
    assert kept_folders(sandboxes) == []


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            ["sh", "-c", "echo no number"],
            "last line must be a number in ASCII digits, got 'no number'",
        ),
        pytest.param(
            ["sh", "-c", "echo １"],
            "last line must be a number in ASCII digits, got '１'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["sh", "-c", "echo 1_000"],
            "last line must be a number in ASCII digits, got '1_000'",
            marks=pytest.mark.slow,
        ),
        (["true"], "last line must be a number in ASCII digits, got ''"),
        (["sh", "-c", "echo 1; echo oh >&2; exit 4"], "ended with status 4: 1\noh"),
    ],
)
async def test_a_failed_scoring_command_gives_no_reward(
    sandboxes: Sandboxes, score: list[str], message: str
) -> None:
    async with scripted(Script()) as (_, agent):
        with pytest.raises(errors.RewardError, match=message):
            await lived(Program(command=["true"], score=score), job(sandboxes), agent)
    assert kept_folders(sandboxes) == []


@pytest.mark.extended
async def test_a_program_over_its_limits_gets_errors_and_its_turns_count(
    sandboxes: Sandboxes,
) -> None:
    source = """
said = []
try:
    while True:
        said.append(say("more"))
except openai.RateLimitError as error:
    print(error.code, len(said))
"""
    handler = Program(packages=CLIENT, command=agent_program(source), score=BY_ANSWER)
    async with scripted(Script(), limits=SessionLimits(calls=3)) as (gateway_, agent):
        assert (
            await lived(handler, job(sandboxes, answer="insufficient_quota 3"), agent)
        ).reward == 1.0
        assert len(gateway_.close("s").sequences) == 3


RAW = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
request.add_header("Content-Type", "application/json")
message = {"role": "user", "content": "?"}
urllib.request.urlopen(request, json.dumps({"model": "tiny", "messages": [message]}).encode())
"""
ASKING = ["python", "-I", "-S", "-c", RAW]
"""Sends the client's request without the client, whose import takes seconds on a busy
machine.
"""


async def test_a_program_that_does_not_end_fails_and_its_turn_is_cancelled(
    sandboxes: Sandboxes,
) -> None:
    script = Script(hold=True)
    handler = Program(command=ASKING, score=BY_ANSWER, timeout_s=3.0)
    async with scripted(script) as (gateway_, agent):
        with pytest.raises(errors.SandboxError, match="did not end within timeout_s, 3 s"):
            await lived(handler, job(sandboxes, question="?"), agent)
        await asyncio.wait_for(script.cancelled.get(), 60)
        assert gateway_.close("s").sequences == ()
    assert handler.final_result()["rc"] < 0


async def test_an_attempt_that_is_cancelled_leaves_no_sandbox(sandboxes: Sandboxes) -> None:
    script = Script(hold=True)
    handler = Program(command=ASKING, score=BY_ANSWER)
    async with scripted(script) as (_, agent):
        life = asyncio.create_task(lived(handler, job(sandboxes, question="?"), agent))
        await script.started.get()
        life.cancel()
        await asyncio.wait([life])
        assert script.cancelled.get_nowait() is None
    assert life.cancelled()
    handler.kill()
    assert handler._sandbox is not None
    assert handler._sandbox.ended == "stopped"


async def test_attributes_the_end_of_the_sandbox(sandboxes: Sandboxes) -> None:
    async def ended(limits: dict[str, Any], source: str) -> Score | None:
        handler = Program(
            command=["python", "-I", "-S", "-c", source], score=BY_ANSWER, limits=limits
        )
        async with scripted(Script()) as (_, agent):
            with pytest.raises(errors.SandboxLostError) as lost:
                await lived(handler, job(sandboxes), agent)
        return await handler.run_exception(lost.value)

    assert await ended(
        {"cpu_s": 1.5}, "import os; os.fork(); os.fork()\nwhile True: pass"
    ) == Score(reward=0.0, success=False)
    assert await ended({"wall_s": 1.5}, "import time; time.sleep(100)") is None
    assert (
        await Program(command=["x"], score=BY_ANSWER).run_exception(ValueError("limits.cpu_s"))
        is None
    )


NO_TEXT = r"""
import os
say("hello")
os.symlink(b"/dev/null/\xff/x", "check.py")
os.mkdir(b"\xfe")
open(b"\xfe/\xfd", "w").close()
open("said.txt", "wb").write(b"\xff")
os.write(1, b"\xff out\n")
"""


@pytest.mark.extended
async def test_scores_names_and_text_that_are_not_utf_8(sandboxes: Sandboxes) -> None:
    files = {
        "check.py": "import os\nprint(len(os.listdir(os.environ['SUBMISSION'])) > 1)\nprint(0.5)"
    }
    handler = Program(
        packages=CLIENT,
        command=agent_program(NO_TEXT),
        score=["python", "-I", "check.py"],
        score_files=files,
        outputs=["said.txt", "check.py"],
    )
    async with scripted(Script()) as (_, agent):
        assert await lived(handler, job(sandboxes), agent) == Score(reward=0.5)
    result = handler.final_result()
    expected = ("\ufffd out\n", {"said.txt": "\ufffd"}, "True\n0.5\n")
    assert (result["stdout"], result["outputs"], result["score"]) == expected


KILLS_ALL = """
import contextlib, os, signal, time
for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
    if pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.HOW)
time.sleep(100)
"""

DEEP = """
import os
for _ in range(10_000):
    os.mkdir("d")
    os.chdir("d")
"""


@pytest.mark.parametrize(
    "source", [KILLS_ALL.replace("HOW", "SIGKILL"), KILLS_ALL.replace("HOW", "SIGSTOP"), DEEP]
)
async def test_a_program_that_spoils_its_sandbox_has_no_reward(
    sandboxes: Sandboxes, source: str
) -> None:
    handler = Program(command=["python", "-I", "-S", "-c", source], score=["echo", "1"])
    async with scripted(Script()) as (_, agent):
        with pytest.raises(errors.SandboxSpoiledError) as lost:
            await lived(handler, job(sandboxes), agent)
    assert await handler.run_exception(lost.value) == Score(reward=0.0, success=False)


async def test_a_missing_program_gives_no_reward(sandboxes: Sandboxes) -> None:
    async with scripted(Script()) as (_, agent):
        with pytest.raises(errors.SandboxError, match="No such file"):
            await lived(Program(command=["/no/such/agent"], score=BY_ANSWER), job(sandboxes), agent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": []}, "options.command must have at least a program"),
        ({"command": "python agent.py"}, "options.command: Expected `array`, got `str`"),
        ({"score": "nowhere:f"}, "options.score: cannot import nowhere"),
        ({"score": HERE + "NOT_CALLABLE"}, "options.score must be a function or a command"),
        ({"score": [1]}, "options.score: Expected `str`"),
        ({"submission": []}, r"options.submission must have at least one path, got \[\]"),
        (
            {"submission": ["/etc"]},
            "options.submission: only must have paths relative to the work folder",
        ),
        (
            {"submission": ["../x"]},
            "options.submission: only must have paths relative to the work folder",
        ),
        ({"score": []}, r"options.score must be a function or a command, got \[\]"),
        ({"files": {"a": 1}}, "options.files: Expected `str`"),
        ({"unreadable": "drop"}, "options.unreadable must be 'ignore' or 'refuse', got 'drop'"),
        ({"timeout_s": 0.0}, "options.timeout_s must be positive and finite"),
        (
            {"image": "relative"},
            "options of the sandbox: .*image must be 'host' or an absolute path",
        ),
        ({"limits": {"processes": 1}}, "limits.processes must be at least 4"),
        ({"limits": {"wings": 1}}, "unknown field `wings`"),
        ({"env": {"a-b": ""}}, "env must have names"),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Program(**{"command": ["x"], "score": BY_ANSWER, **options})


HOST_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"folder": "none"}, "options.folder must be a folder, got '.*/none'"),
    "link": (
        {"folder": "link"},
        "options.folder must have only links within it, .*/up -> [.][.]/x",
    ),
    "fifo": ({"folder": "fifo"}, "options.folder must have only files, .*, got .*/fifo/pipe"),
    "size": (
        {"folder": "size"},
        r"options.folder must have at most .* bytes, .* as of .*/size/two with 600 bytes: make an",
    ),
    "missing": (
        {"packages": ["no-such-package"]},
        "options.packages must be installed on this host, got 'no-such-package'",
    ),
    "ours": ({"packages": ["rollweave"]}, "options.packages must not have rollweave"),
}


@pytest.mark.parametrize("case", HOST_OPTIONS)
def test_refuses_before_a_run_what_no_sandbox_can_have(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("link", "fifo", "size"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "link/up").symlink_to("../x")
    os.mkfifo(tmp_path / "fifo/pipe")
    for name in ("one", "two"):
        (tmp_path / "size" / name).write_bytes(bytes(600))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "FOLDER_BYTES", 1000)
    options, message = HOST_OPTIONS[case]
    options = {"command": ["x"], "score": BY_ANSWER, **options}
    with pytest.raises(errors.ConfigError, match=message):
        Program.make_task(index=0, seed=3, split=Split.TRAIN, options=options)


def test_tasks_are_lines_and_no_line_is_in_two_splits(tmp_path: Path) -> None:
    lines = [{"question": number, "seed": "mine"} for number in range(80)]
    path, other = tmp_path / "tasks.jsonl", tmp_path / "held.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    other.write_text(json.dumps({"question": "held"}))

    def epoch(split: Split, start: int = 0, **more: Any) -> list[Any]:
        options = {"tasks": str(path), **more}
        tasks = [
            Program.make_task(index=index, seed=3, split=split, options=options)
            for index in range(start, start + 200)
        ]
        return [payload_of(task)["question"] for task in tasks]

    parts = {split: set(epoch(split)) for split in Split}
    assert sorted(question for part in parts.values() for question in part) == list(range(80))
    count = len(parts[Split.TRAIN])
    first, second = epoch(Split.TRAIN)[:count], epoch(Split.TRAIN, count)[:count]
    assert sorted(first) == sorted(second) == sorted(parts[Split.TRAIN])
    assert first != second
    assert set(epoch(Split.TEST, held_out=str(other))) == {"held"}
    assert set(epoch(Split.TRAIN, held_out=str(other))) == set(range(80))
    empty = [
        Program.make_task(index=index, seed=3, split=Split.TRAIN, options={}) for index in range(5)
    ]
    assert len({task.seed for task in empty}) == 5
    assert {task.payload for task in empty} == {"{}"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", ":1: must be a JSON object: TypeError: got"),
        ("{", ":1: must be a JSON"),
        ("", "has none"),
    ],
)
def test_refuses_an_invalid_file_of_tasks(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=message):
        Program.make_task(index=0, seed=3, split=Split.TRAIN, options={"tasks": str(path)})
    with pytest.raises(errors.ConfigError, match="must be a readable file"):
        Program.make_task(index=0, seed=3, split=Split.TRAIN, options={"tasks": str(tmp_path)})


SDK = """
import asyncio, os, agents, openai
agents.set_tracing_disabled(True)

@agents.function_tool
def add(a: int, b: int) -> int:
    \"\"\"The sum of two numbers.\"\"\"
    open("added", "a").write(f"{a}+{b};")
    return a + b

async def main(streamed):
    model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=openai.AsyncOpenAI())
    agent = agents.Agent(name="adder", instructions="Add with the tool.", tools=[add], model=model)
    if streamed:
        result = agents.Runner.run_streamed(agent, "What is 2 + 3?")
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, "What is 2 + 3?")
    print(result.final_output)

asyncio.run(main(False))
asyncio.run(main(True))
"""


@pytest.mark.slow
async def test_the_agents_sdk_runs_unchanged_inside(sandboxes: Sandboxes) -> None:
    """Requires the extra `agents`."""
    pytest.importorskip("agents", reason="needs the extra `agents`")
    handler = Program(
        packages=["openai-agents"],
        command=["python", "agent.py"],
        files={"agent.py": SDK},
        score=HERE + "by_files",
        outputs=["added"],
    )
    async with scripted(Script([CALL, "It is 5.", CALL, "It is 5 again."])) as (gateway_, agent):
        await lived(handler, job(sandboxes), agent)
        sequences = gateway_.close("s").sequences
    result = handler.final_result()
    assert result["rc"] == 0, result["stderr"]
    expected = ("It is 5.\nIt is 5 again.\n", "2+3;2+3;")
    assert (result["stdout"], result["outputs"]["added"]) == expected
    assert [len(sequence.turns) for sequence in sequences] == [2, 2]


class Refusing:
    """Records the image of the sandbox that is requested, and starts none."""

    def __init__(self) -> None:
        self.images: list[str] = []

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.images.append(spec.image)
        raise errors.SandboxError("there is none")

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        raise NotImplementedError


async def test_a_task_may_name_its_image() -> None:
    boxes, named = Refusing(), {"image": "usual.toml", "image_field": "picture"}
    for payload in ({"picture": f"sha256:{'0' * 64}"}, {"picture": "own.tar"}, {"n": 1}):
        handler = Program(command=["true"], score=BY_ANSWER, **named)  # type: ignore[arg-type]
        with pytest.raises(errors.SandboxError, match="there is none"):
            await handler.init(job(boxes, **payload))
    assert boxes.images == [f"sha256:{'0' * 64}", "own.tar", "usual.toml"]
    with pytest.raises(
        errors.ConfigError, match=r"options\.image_field: picture of a task: image must"
    ):
        await Program(command=["true"], score=BY_ANSWER, **named).init(  # type: ignore[arg-type]
            job(boxes, picture="ubuntu:latest")
        )
