"""A serving engine and the lender beside it, in processes of their own: they never
compute at the same time, and neither one waits for a dead or hanging other.
"""

import contextlib
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.servers.tests.lending_processes import WAIT_S, Program, until
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineSpec, LendSpec
from rollweave_servers.baton import SCHEDULER, Baton, check, connect
from rollweave_servers.lending import rollweave_lending as shared
from rollweave_servers.lending.rollweave_lending import Counts, Memory, Row, Serving, Step
from tests.support.tiny_models import build, save

PATIENT_S = "10"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def engine(path: str) -> Iterator[Program]:
    with Program("serving_engine.py", path) as program:
        yield program


def lender(path: str, patience_s: str = PATIENT_S) -> Program:
    return Program("lending_program.py", path, patience_s)


def overlapping(serving: list[tuple[int, int]], rollouts: list[tuple[int, int]]) -> list[Any]:
    return [
        (step, rollout)
        for step in serving
        for rollout in rollouts
        if step[0] < rollout[1] and rollout[0] < step[1]
    ]


def interval(program: Program) -> tuple[int, int]:
    """Return the next rollout step of a lender."""
    while " " not in (line := program.read_line()):
        assert line == "step"
    began, ended = map(int, line.split())
    return began, ended


def test_the_two_never_compute_at_the_same_time(engine: Program, path: str) -> None:
    with lender(path) as other:
        rollouts = [interval(other) for _ in range(5)]
        serving = []
        for _ in range(4):
            serving += engine.ask(25)
            rollouts.append(interval(other))
        while rollouts[-1][0] < serving[-1][1]:
            rollouts.append(interval(other))
    assert not overlapping(serving, rollouts)
    between = [rollout for rollout in rollouts if serving[0][0] < rollout[0] < serving[-1][0]]
    assert between, "rollouts must have steps while the engine serves"


@pytest.mark.parametrize("kills", [True, False])
def test_an_engine_does_not_wait_for_a_lender_that_is_lost_in_a_step(
    engine: Program, path: str, kills: bool
) -> None:
    with lender(path, "0.2") as other:
        while other.read_line() != "step":
            pass
        other.process.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
        assert len(engine.ask(5)) == 5
        until(lambda: not engine.ask(0), "the lender must be dropped")
        with lender(path) as another:
            interval(another)
            assert len(engine.ask(5)) == 5
        until(lambda: not engine.ask(0), "the other lender must be dropped")
        if not kills:  # it connects again, and computes again
            other.process.send_signal(signal.SIGCONT)
            until(lambda: engine.ask(0), "the lender must connect again")
            first = interval(other), interval(other)  # one was under way
            assert not overlapping(engine.ask(5), [*first, interval(other)][1:])


def test_a_lender_does_not_compute_beside_a_lost_engine(path: str) -> None:
    wake = threading.Condition()
    with Program("serving_engine.py", path) as engine:
        baton = Baton(path, patience_s=10.0, wake=wake)
        until(baton.take, "an idle engine makes an offer")
        baton.release()
        engine.process.send_signal(signal.SIGSTOP)
        until(lambda: not took(baton), "there are no beats")
        assert baton.snapshot() is None
        engine.process.send_signal(signal.SIGCONT)
        until(lambda: took(baton), "there are beats again")
        engine.process.kill()
        until(lambda: not took(baton), "the engine is gone")
    with Program("serving_engine.py", path):  # its socket is still there
        until(lambda: took(baton), "the next engine must be found")
        baton.close()


def took(baton: Baton) -> bool:
    taken = baton.take() is not None
    if taken:
        baton.release()
    return taken


def endless() -> Iterator[Row]:
    while True:
        yield Row(1, 1, 0, 0, 0)


def test_an_engine_does_not_wait_for_a_lender_without_work(path: str) -> None:
    serving = Serving(path, {"rows": 4}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(lambda: serving.lends, "the lender must be admitted")
    for _ in range(20):
        serving.begin_step()
        serving.end_step(None, Counts(1, 0, 0, 8), endless)
    until(baton.snapshot, "the lender must read the load")
    assert baton.snapshot() == (0, 0, Counts(1, 0, 0, 8), [], None), "the counts alone"
    baton.close()
    serving.close()
    assert not Path(path).exists()


def test_a_lender_that_looks_away_does_not_delay_the_engine(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(lambda: took(baton), "an idle engine makes an offer")
    baton.look_away()
    for _ in range(3):
        serving.begin_step()
        assert serving.lends
        serving.end_step(None, Counts(1, 0, 0, 8), list)
    baton.close()
    serving.close()


def test_a_request_that_has_just_arrived_waits_for_no_further_step(path: str) -> None:
    """The offer of an idle engine says nothing of it."""
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(baton.snapshot, "the lender must be admitted")
    assert baton.take() is None  # it wants the baton now
    until(lambda: (snapshot := baton.snapshot()) and snapshot.offer, "an offer")
    step = threading.Thread(target=serving.begin_step)
    step.start()
    until(lambda: baton.take() is None, "it is recalled")
    step.join(WAIT_S)
    assert not step.is_alive()
    baton.close()
    serving.close()


def await_beats(words: "memoryview[int]") -> None:
    beats = set[int]()
    until(lambda: len(beats) > 3 or beats.add(words[shared.BEAT]), "the engine beats")


def test_an_engine_without_requests_makes_offers_between_its_steps_alone(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    engine = connect(path)
    words = engine.memory.words
    words[shared.WANTS] = 1
    for number in range(3):
        until(lambda: words[shared.OFFERED] > words[shared.ANSWERED], "an idle engine offers")
        words[shared.ANSWERED] = words[shared.OFFERED]
        serving.begin_step()
        words[shared.ANSWERED] = offered = words[shared.OFFERED]
        await_beats(words)
        assert words[shared.OFFERED] == offered, "nothing is offered in a step"
        words[shared.WANTS] = 0
        serving.end_step(None, Counts(number % 2, number // 2, 0, 8), list)
        words[shared.WANTS] = 1
        if number:  # it has requests, one that runs or one that waits
            await_beats(words)
            assert words[shared.OFFERED] == offered
            serving.end_step(None, Counts(0, 0, 0, 8), list)
    engine.close()
    serving.close()


@pytest.mark.parametrize(
    ("patience_s", "waits_s"), [(0.0, 0.05), (0.3, 0.3), (10.0, 10.0), (99.0, 10.0)]
)
def test_an_engine_waits_as_long_as_its_lender_says_within_bounds(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, waits_s: float
) -> None:
    """The time is injected. A byte that is no answer does not end the wait."""
    now, polls = 100.0, 0

    class Poll:
        def register(self, *_: object) -> None:
            pass

        def poll(self, milliseconds: float) -> bool:
            nonlocal now, polls
            polls += 1
            if polls == 1:
                now += 0.01
                there.send(b"?")
                return True
            now += milliseconds / 1e3 + 1e-6
            return False

    fd = os.memfd_create("test")
    os.truncate(fd, shared.size(2))
    memory, (here, there) = Memory(fd, 2), socket.socketpair()
    lender = shared.Lender(here, memory)
    lender.offered = 7
    memory.words[shared.PATIENCE] = int(1e9 * patience_s)
    with monkeypatch.context() as patch:
        patch.setattr(shared.time, "monotonic", lambda: now)
        patch.setattr(shared.select, "poll", Poll)
        assert not lender.await_answer()
    assert now - 100.0 == pytest.approx(waits_s, abs=1e-5)
    assert memory.words[shared.RECALLED] == 7
    assert there.recv(9) == b"\0", "the lender is woken"
    memory.words[shared.ANSWERED] = 7
    assert lender.await_answer()
    assert not lender.has_gone
    there.close()
    assert lender.has_gone
    memory.words[shared.ANSWERED] = 6
    assert not lender.await_answer(), "the end of the connection ends the wait"
    memory.close()
    here.close()
    os.close(fd)


def test_a_lender_that_connects_during_a_step_gets_no_offer_before_its_end(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    serving.begin_step()
    engine = connect(path)
    words = engine.memory.words
    words[shared.WANTS] = 1
    until(lambda: serving.lends, "the lender must be admitted")
    await_beats(words)
    snapshot = engine.memory.read()
    assert snapshot is not None
    assert (words[shared.OFFERED], snapshot.offer, snapshot.rows) == (0, 0, None)
    rows = [Row(1, 1, 0, 0, 0)]
    serving.end_step(None, Counts(1, 0, 0, 8), lambda: rows)
    snapshot = engine.memory.read()
    assert snapshot is not None
    assert (words[shared.OFFERED], snapshot.offer, snapshot.rows) == (1, 1, rows)
    words[shared.ANSWERED] = 1
    serving.begin_step()
    serving.end_step(None, Counts(9, 0, 0, 8), endless)
    snapshot = engine.memory.read()
    assert snapshot is not None
    assert (snapshot.offer, snapshot.rows) == (2, None), "there is no room for all"
    engine.close()
    serving.close()


def test_a_failed_admission_ends_neither_lending_nor_beats(
    path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(path, {}, rows=4)
    create, failures = os.memfd_create, 3

    def fail(*arguments: Any) -> int:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return create(*arguments)

    monkeypatch.setattr(os, "memfd_create", fail)
    for _ in range(3):
        assert refusal(path) == "Expecting value: line 1 column 1 (char 0)"
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(lambda: took(baton), "the next lender is admitted")
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "ROLLWEAVE_LENDING: no lender is admitted for now: [Errno 24] Too many open files"
    )
    baton.close()
    serving.close()


def test_another_server_at_the_path_must_serve_the_same_model(path: str) -> None:
    first = Serving(path, {"model": "m"}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    server = baton.about["server"]
    first.close()
    second = Serving(path, {"model": "m"}, rows=8)
    until(baton.snapshot, "the second server must be found")
    assert baton.about["server"] != server
    assert baton.about["rows"] == 8
    second.close()
    third = Serving(path, {"model": "other"}, rows=4)
    until(lambda: baton.error, "the third server must be refused")
    assert baton.error == (
        f"CHECKPOINT must be the model that the server at {path} serves, other, got m"
    )
    until(lambda: not third.lends, "the lender must go")
    assert baton.snapshot() is None
    baton.close()
    third.close()


def test_an_engine_waits_for_the_rollout_step_under_way_and_for_no_other(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(baton.take, "an idle engine makes an offer")
    step = threading.Thread(target=serving.begin_step)
    step.start()
    lender = serving._lender
    assert lender is not None
    until(lambda: lender.memory.words[shared.RECALLED] == lender.offered, "a recall")
    assert step.is_alive()
    baton.release()
    assert baton.take() is None
    step.join(WAIT_S)
    assert not step.is_alive()
    assert serving.lends
    baton.close()
    serving.close()


def test_a_recall_is_not_answered_while_a_rollout_step_runs(path: str) -> None:
    """Whatever the thread of the connection does meanwhile."""
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=0.25, wake=threading.Condition())
    until(baton.take, "an idle engine makes an offer")
    memory = baton._memory
    assert memory is not None
    words = memory.words
    assert words[shared.PATIENCE] == 250_000_000
    words[shared.PATIENCE] = 10**10  # so that the engine waits
    step = threading.Thread(target=serving.begin_step)
    step.start()
    until(lambda: words[shared.RECALLED] == words[shared.OFFERED], "a recall")
    for look_away in (False, True):
        if look_away:
            baton.look_away()
        baton._heed(memory)
        assert words[shared.ANSWERED] != words[shared.OFFERED]
    baton.release()
    assert words[shared.ANSWERED] == words[shared.OFFERED]
    step.join(WAIT_S)
    assert not step.is_alive()
    baton.close()
    serving.close()


@pytest.mark.parametrize(
    ("looks", "considered", "settled"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_a_recall_of_an_offer_that_is_not_taken_is_answered(
    path: str, monkeypatch: pytest.MonkeyPatch, looks: bool, considered: bool, settled: bool
) -> None:
    """The thread that computes has a moment to look at it, if it does look."""
    waits = list[bool]()
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(lambda: took(baton), "an idle engine makes an offer")
    threads = {one.name: one.daemon for one in threading.enumerate()}
    assert threads["baton"], "it must not keep the process"
    assert threads["lending"], "nor this one that of a server"
    baton.look_away()
    memory = baton._memory
    assert memory is not None
    words = memory.words
    until(lambda: words[shared.OFFERED] > words[shared.ANSWERED], "an offer")
    baton._looks, baton._considered = looks, words[shared.OFFERED] * considered
    monkeypatch.setattr(
        baton._changed, "wait_for", lambda settled, limit_s: waits.append(settled()), raising=False
    )
    baton._heed(memory)
    assert words[shared.ANSWERED] < words[shared.OFFERED], "it is not recalled"
    assert waits == []
    words[shared.RECALLED] = words[shared.OFFERED]  # as the engine does
    baton._heed(memory)
    assert waits == [settled]
    assert words[shared.ANSWERED] == words[shared.OFFERED]
    baton.close()
    serving.close()


@pytest.mark.parametrize(("rests_s", "wants"), [(-1.0, 0), (1000.0, 1)])
def test_a_lender_without_work_wants_nothing_after_a_while(
    path: str, monkeypatch: pytest.MonkeyPatch, rests_s: float, wants: int
) -> None:
    monkeypatch.setattr("rollweave_servers.baton.RESTS_S", rests_s)
    serving = Serving(path, {}, rows=4)
    baton = Baton(path, patience_s=10.0, wake=threading.Condition())
    until(lambda: took(baton), "an idle engine makes an offer")
    baton.rest()
    assert baton._memory is not None
    assert baton._memory.words[shared.WANTS] == wants
    assert not baton._looks
    baton.close()
    serving.close()


# The memory


def test_a_lender_cannot_change_the_size_of_the_memory(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(path)
        _, (fd,), _, _ = socket.recv_fds(connection, 4096, 1)
        for nbytes in (0, 2 * shared.size(4)):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        os.close(fd)
    serving.close()


STEPS = st.builds(Step, *4 * [st.integers(0, 2**60)])
ROWS = st.builds(Row, *5 * [st.integers(0, 2**60)])


@given(steps=st.lists(STEPS, max_size=2 * shared.STEPS), rows=st.lists(ROWS, max_size=6))
def test_a_snapshot_has_the_latest_steps_and_all_rows_that_fit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], rows: list[Row]
) -> None:
    path = str(tmp_path_factory.mktemp("s") / "s")
    serving = Serving(path, {}, rows=4)
    engine = connect(path)
    memory = engine.memory
    memory.words[shared.WANTS] = 1
    until(lambda: serving.lends, "the lender must be admitted")
    for step in steps:
        memory.words[shared.ANSWERED] = memory.words[shared.OFFERED]
        serving.begin_step()
        serving.end_step(step, Counts(1, 2, 3, 4), lambda: rows)
    if steps:
        snapshot = memory.read()
        assert snapshot is not None
        assert snapshot.steps == steps[-shared.STEPS :]
        assert (snapshot.done, snapshot.counts) == (len(steps), Counts(1, 2, 3, 4))
        assert snapshot.rows == (rows if len(rows) <= 4 else None)
    serving.close()
    engine.close()


@given(place=st.integers(0, shared.size(2) - 8 * shared.FIRST - 1), value=st.integers(1, 255))
def test_a_snapshot_with_a_wrong_byte_is_not_read(place: int, value: int) -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, shared.size(2))
    memory = Memory(fd, 2)
    rows = [Row(1, 2, 3, 4, 5), Row(6, 7, 8, 9, 10)]
    words = [1, 1, 1, 0, 9, 8, 0, 2, *[0] * (4 * shared.STEPS), *rows[0], *rows[1]]
    memory.write(memoryview(bytearray(b"".join(n.to_bytes(8, "little") for n in words))).cast("q"))
    snapshot = memory.read()
    assert snapshot is not None
    assert snapshot.rows == rows
    content = memory.words.cast("B")
    content[8 * shared.FIRST + place] ^= value
    assert memory.read() is None
    content.release()
    memory.close()
    os.close(fd)


# Wrong servers


def spec_of(model: str, path: str) -> EngineSpec:
    lend = LendSpec(socket="", ttft_s=1.0, tpot_s=1.0, beside=path)
    return EngineSpec(id=EngineId("e"), model=model, lend=lend)


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(spec_of("m", path), "m")
    text = str(caught.value)
    start = (
        f"--beside must be the socket of a vLLM on host {socket.gethostname()} that was started "
        f"with --scheduler-cls {SCHEDULER}, got {path}: "
    )
    assert text.startswith(start)
    return text.removeprefix(start)


def test_a_path_without_a_server_is_refused(path: str) -> None:
    assert refusal(path) == "No such file or directory"
    Path(path).touch()
    assert refusal(path) == "Connection refused"
    assert refusal("x" * 200) == "AF_UNIX path too long"


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"HTTP/1.1 400 Bad Request", "Expecting value: line 1 column 1 (char 0)"),
        (b"[]", "list indices must be integers or slices, not str"),
        (b'{"protocol": 7}', "its protocol is 7, ours 1"),
        (b'{"protocol": 1, "taken": true}', "it has another lender"),
        (b'{"protocol": 1, "taken": false}', "list index out of range"),
    ],
)
def test_another_server_is_refused(path: str, hello: bytes, why: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(hello)
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert refusal(path) == why
        thread.join(WAIT_S)


def test_a_second_lender_and_a_wrong_checkpoint_are_refused(engine: Program, path: str) -> None:
    check(spec_of("m", path), "m")
    check(spec_of(str(Path("m").absolute()), path), "m2")
    with pytest.raises(ConfigError, match=r"the model that the server at .* serves"):
        check(spec_of("/n", path), "n")
    with lender(path) as other:
        interval(other)
        assert refusal(path) == "it has another lender"


def test_a_second_lender_is_refused_and_takes_nothing_from_the_first(path: str) -> None:
    serving = Serving(path, {"model": "m"}, rows=4)
    first = connect(path)
    first.memory.words[shared.WANTS] = 1
    until(lambda: serving.lends, "the lender must be admitted")
    for _ in range(2):
        assert refusal(path) == "it has another lender"
    offered = first.memory.words[shared.OFFERED]
    first.memory.words[shared.ANSWERED] = offered
    until(lambda: first.memory.words[shared.OFFERED] > offered, "the first one has offers")
    first.close()
    second = connect(path)
    assert second.about["model"] == "m"
    second.close()
    serving.close()


def test_only_its_user_may_connect_and_a_second_engine_is_refused(path: str) -> None:
    serving = Serving(path, {}, rows=4)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(FileExistsError, match="another serving engine lends"):
        Serving(path, {}, rows=4)
    serving.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_path_of_another_file_is_refused_and_the_file_stays(path: str, kind: str) -> None:
    place = Path(path)
    match kind:
        case "file":
            place.write_text("secret")
        case "folder":
            place.mkdir()
        case "link":
            place.symlink_to("nowhere")
    rule = f"ROLLWEAVE_LENDING must be the path of a socket, got {path}, which is another file"
    with pytest.raises(FileExistsError, match=f"^{re.escape(rule)}$"):
        Serving(path, {}, rows=4)
    assert place.is_symlink() or place.is_dir() or place.read_text() == "secret"


def test_the_socket_of_a_hanging_engine_is_refused(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        with pytest.raises(FileExistsError, match="another serving engine lends"):
            Serving(path, {}, rows=4)
    assert Path(path).is_socket()


def test_an_engine_that_ends_leaves_the_socket_of_the_next_one(path: str) -> None:
    first = Serving(path, {}, rows=4)
    os.unlink(path)
    second = Serving(path, {}, rows=4)
    first.close()
    assert Path(path).is_socket()
    second.close()
    first.close()
    assert not Path(path).exists()


def test_the_command_refuses_a_missing_server_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(build("qwen3"), model)
    missing = tmp_path / "none"
    (tmp_path / "secret").write_text("secret")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rollweave.cli.main", "engine", str(model)),
            *("--lend", "127.0.0.1:9", "--secret-file", str(tmp_path / "secret")),
            *("--beside", str(missing), "--token-file", str(tmp_path / "token")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--beside must be the socket of a vLLM on host {socket.gethostname()}" in line
    assert str(missing) in line


def test_the_folder_of_the_scheduler_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollweave_servers.lending"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert (Path(done.stdout.strip()) / "rollweave_vllm_lending.py").is_file()
