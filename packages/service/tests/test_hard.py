"""Robustness of a service: unusual input, races, failing disks and engines, and ends at
unfavorable moments.
"""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import pytest

from packages.service.tests.api import call, game, get, status_of, submit, wait_until
from packages.service.tests.rollout_service import Program, Serving, service_config, serving
from rollweave.engine.clients.base import Generates
from rollweave.engine.clients.transport import OnRetry
from rollweave.record.journal import Replay, RunJournal
from rollweave.schema.base import TrajectoryId
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.events import RolloutCancelled
from rollweave_service.client import RolloutClient
from rollweave_service.messages import EngineRequest, Error, RolloutRequest
from tests.support.fake_runs import ROOT, run_dir, turns_done, until_turns_done
from tests.support.mounts import can_mount

DRAWN = "packages.service.tests.drawn:Drawn"


# Input.


async def test_accepts_unusual_ids(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        async with RolloutClient(service.address) as client:
            for name in ("step-7/3", "a@b:c", "...", "a/../b", "//", "x" * 200):
                answer = await client.rollout(RolloutRequest(handler="game", index=0, id=name))
                assert (answer.id, answer.members[0].stop_reason) == (name, "finished")


async def test_accepts_huge_numbers_and_deep_payloads(tmp_path: Path) -> None:
    huge = b"1" + b"0" * 400
    with serving(service_config(tmp_path)) as service:
        for name in (b"max_turns", b"max_tokens", b"max_turn_tokens"):
            raw = b'{"handler": "game", "index": 1, "limits": {"%s": %s}}' % (name, huge)
            assert await status_of(service, "POST", "/v1/rollouts", raw=raw) == 202
        raw = (
            b'{"handler": "game", "id": "nested", "payload": {"x": ' + b"[" * 99 + b"]" * 99 + b"}}"
        )
        assert await status_of(service, "POST", "/v1/rollouts", raw=raw) == 202
        answer = await get(service, "/v1/rollouts/nested?wait=30")
        assert answer["members"][0]["stop_reason"] == "finished"
        headers = {"Content-Encoding": "gzip"}
        status, body, _ = await call(
            service, "POST", "/v1/rollouts", raw=b"not compressed", headers=headers
        )
        assert (status, body["error"]["type"]) == (400, "invalid")


async def test_refuses_invalid_http_without_logging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    negative = b"POST /v1/rollouts HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n"
    with serving(service_config(tmp_path)) as service:
        host, port = service.address.removeprefix("http://").split(":")
        for raw in (b"no request\r\n\r\n", negative):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw)
            assert b"400 Bad Request" in await reader.readline()
            writer.close()
    assert "Error handling request" not in caplog.text


# Races.


async def test_accepts_one_of_several_concurrent_requests_with_the_same_id(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        requests = (submit(service, id="same", index=index) for index in range(8))
        answers = [status for status, _, _ in await asyncio.gather(*requests)]
        assert sorted(answers) == [202] + [409] * 7


def drawing(directory: Path, **options: Any) -> Any:
    options = {"log": str(directory / "log"), "gate": str(directory / "gate"), **options}
    return service_config(directory, task={"env": DRAWN}, options=options)


async def drawn(directory: Path, line: str) -> None:
    log = directory / "log"
    while not log.exists() or line not in log.read_text():  # noqa: ASYNC110 (another thread writes it)
        await asyncio.sleep(0.01)


async def test_tasks_are_drawn_one_at_a_time_even_if_a_client_disconnects(tmp_path: Path) -> None:
    with serving(drawing(tmp_path)) as service:
        disconnecting = asyncio.create_task(submit(service, id="left", index=0))
        await drawn(tmp_path, "begin 0")
        disconnecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disconnecting
        next_one = asyncio.create_task(submit(service, id="next", index=1))
        for _ in range(3):  # with each answer, the service has noticed the disconnection
            await call(service, "GET", "/health")
        (tmp_path / "gate").touch()
        assert (await next_one)[0] == 202
        expected = ["begin 0", "end 0", "begin 1", "end 1"]
        assert (tmp_path / "log").read_text().split("\n")[:4] == expected
        assert await status_of(service, "GET", "/v1/rollouts/left") == 404


async def test_prorl_stop_cancels_a_job_whose_task_is_being_drawn(tmp_path: Path) -> None:
    with serving(drawing(tmp_path)) as service:
        await call(service, "POST", "/start", {})
        job = {"instance": {"data_source": "game", "index": 0}}
        waiting = asyncio.create_task(call(service, "POST", "/process", job))
        await drawn(tmp_path, "begin 0")
        assert await status_of(service, "POST", "/stop", {}) == 200
        (tmp_path / "gate").touch()
        status, answer, _ = await waiting
        assert (status, answer["success"], answer["finish"]) == (200, False, False)


@pytest.mark.parametrize("flaw", [{"payload": {"a": 1}}, {"seed": 2**70}])
async def test_refuses_a_task_that_cannot_be_serialized(
    tmp_path: Path, flaw: dict[str, Any]
) -> None:
    with serving(drawing(tmp_path, flaw=flaw)) as service:
        status, body, _ = await submit(service, index=1)
        assert (status, body["error"]["type"]) == (400, "invalid")
        assert "make_task must return a Task" in body["error"]["message"]
        assert (await get(service, "/health"))["submitted"] == 0


# Connections.


@pytest.mark.extended
async def test_idle_connections_block_no_client_and_excess_requests_are_refused(
    tmp_path: Path,
) -> None:
    """Under a limit of 600 files, 700 idle connections have no effect; while 300
    requests wait, others are refused.
    """
    gate = tmp_path / "gate"
    program = Program(service_config(tmp_path, options={"wait": str(gate)}), files=600)
    host, _, port = program.address.removeprefix("http://").partition(":")
    writers: list[asyncio.StreamWriter] = []
    try:
        await submit(program, id="x")
        waiting = asyncio.create_task(call(program, "GET", "/v1/rollouts/x?wait=60"))
        await wait_until(program, "/health", lambda health: health["run"] == 1)
        for number in range(700):
            writers.append((await asyncio.open_connection(host, port))[1])
            if number % 2:
                writers[-1].write(b"GET /health HTTP/1.1\r\nHo")
        assert await status_of(program, "GET", "/health") == 200
        request = f"GET /v1/rollouts/x?wait=60 HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()

        async def wait_for_it() -> None:
            writers.append((await asyncio.open_connection(host, port))[1])
            writers[-1].write(request)

        for _ in range(310):
            await wait_for_it()
        refusal = None
        # only some of the excess connections get an answer
        while refusal is None or refusal[0] != 503:
            with contextlib.suppress(aiohttp.ClientError):
                refusal = await submit(program, id="late", payload={"x": "x" * 100_000})
            # an admitted call may have taken the place of a request not yet read
            await wait_for_it()
        _, body, headers = refusal
        error = msgspec.convert(body, Error).error  # as the client reads it
        assert (error.type, headers["Retry-After"]) == ("busy", "1")
        assert "at most 300 connections" in error.message
        gate.touch()
        assert (await waiting)[1]["state"] == "done"
        async with RolloutClient(program.address) as client:
            assert (await client.rollout(RolloutRequest(handler="game", index=0))).state == "done"
    finally:
        gate.touch()
        for writer in writers:
            writer.close()
        assert program.terminate() == 0
    assert "open files" not in (tmp_path / "stderr").read_text()


# Restarts.


async def test_draining_without_an_engine_keeps_accepted_rollouts(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    service = Serving(config, registered=True)
    await call(service, "POST", "/v1/rollouts", {"rollouts": [game(id=f"k{i}") for i in range(5)]})
    waiting = asyncio.create_task(call(service, "GET", "/v1/rollouts/k0?wait=60"))
    await wait_until(service, "/health", lambda health: health["queued"] == 5)
    await asyncio.to_thread(service.stop, drain=True)
    assert (await waiting)[1]["state"] == "queued"
    assert "5 rollouts are kept for the next start" in service.observer.warnings[-1].message
    with serving(service_config(tmp_path)) as again:  # with engines
        for number in range(5):
            answer = await get(again, f"/v1/rollouts/k{number}?wait=30")
            assert answer["members"][0]["stop_reason"] == "finished"


@pytest.mark.variants
@pytest.mark.parametrize("left", ["nothing", "an older one"])
@pytest.mark.parametrize("done", [True, False])
async def test_refuses_a_journal_without_its_job_database(
    tmp_path: Path, left: str, done: bool
) -> None:
    """Otherwise new requests would reuse names of rollouts in the journal and the
    store.
    """
    config = service_config(tmp_path)
    jobs, older = run_dir(config) / "jobs.sqlite", tmp_path / "older"
    with serving(config, registered=not done):
        pass
    jobs.rename(older)
    jobs.write_bytes(older.read_bytes())
    with serving(config, registered=not done) as service:
        await submit(service, id="x")
        await call(service, "GET", f"/v1/rollouts/x?wait={30 if done else 0}")
        service.stop(drain=True)
    jobs.unlink()
    if left == "an older one":
        older.rename(jobs)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"must hold the jobs\.sqlite that belongs to its journal\.bin"
        ):
            Serving(config, registered=not done).stop()


def test_directory_errors_name_no_option_of_another_command(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    with serving(config):
        pass
    other = service_config(tmp_path, run={"name": "service", "seed": 6})
    with pytest.raises(ConfigError, match=r"^run\.seed must stay as the run began, 5, got 6"):
        Serving(other).stop()
    full = service_config(tmp_path, run={"name": "full"})
    run_dir(full).mkdir()
    (run_dir(full) / "notes.txt").touch()
    with pytest.raises(
        ConfigError,
        match=r"full must be empty or hold a run, found other files and no config\.toml$",
    ):
        Serving(full).stop()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"got the file .*/file$"):
            Serving(service_config(tmp_path, run={"name": "x", "dir": str(place)})).stop()


async def test_unrecorded_results_are_delivered_again_after_a_restart(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    program = Program(config, registered=True)
    try:
        await submit(program, id="x")
        await wait_until(program, "/health", lambda health: health["queued"] == 1)
    finally:
        program.kill()
    run = run_dir(config)
    core = Replay(run / "journal.bin", load(run / "config.toml")).finish()
    event = RolloutCancelled(trajectory_id=TrajectoryId("r1.0"))
    # the service is killed between this event and its result
    with RunJournal(run / "journal.bin") as journal:
        journal.append(1.0, event, core.handle(1.0, event))
    with serving(config, registered=True) as service:
        answer = await get(service, "/v1/rollouts/x?wait=30")
        assert (answer["state"], answer["members"][0]["stop_reason"]) == ("done", "cancelled")


async def test_rollouts_of_a_killed_service_continue(tmp_path: Path) -> None:
    """Their turns are not sampled again, and nothing is recorded once they are over."""
    gate = tmp_path / "open"
    config = service_config(tmp_path, options={"wait": str(gate)})
    program = Program(config)
    try:
        await submit(program, id="x", members=3)
        until_turns_done(config, 3)
    finally:
        program.kill()
    gate.touch()
    with serving(config) as service:
        answer = await get(service, "/v1/rollouts/x?wait=30")
        assert [one["stop_reason"] for one in answer["members"]] == ["finished"] * 3
        turns = turns_done(config)
        assert sorted(one.turn for one in turns if one.replayed) == [0, 0, 0]
    assert not (run_dir(config) / "turns").exists()


async def test_a_stopped_service_restarts_from_a_compact_journal(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    for start in range(2):
        with serving(config) as service:
            assert (await get(service, "/health"))["submitted"] == start
            await submit(service, id=f"x{start}")
            await call(service, "GET", f"/v1/rollouts/x{start}?wait=30")
        run = run_dir(config)
        replay = Replay(run / "journal.bin", load(run / "config.toml"))
        assert replay.finish().state.counters.submitted == start + 1
        assert replay.events == 0


async def test_a_result_whose_file_was_deleted_is_gone(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    with serving(config) as service:
        await submit(service, id="x")
        assert await status_of(service, "GET", "/v1/rollouts/x?wait=30") == 200
        (run_dir(config) / "trajectories" / "000000.bin").unlink()
        status, body, _ = await call(service, "GET", "/v1/rollouts/x")
        assert (status, body["error"]["type"]) == (410, "gone")


def test_an_incomplete_model_leaves_no_directory(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"must have a tokenizer\.json"):
        Serving(config).stop()
    assert not run_dir(config).exists()


async def test_streams_continue_while_the_service_drains(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    service = Serving(service_config(tmp_path, options={"wait": str(gate)}))
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(service.address + "/v1/events?after=0") as stream,
        ):
            await submit(service, id="x")
            await wait_until(service, "/health", lambda health: health["run"] == 1)
            poll = asyncio.create_task(call(service, "GET", "/v1/completions?wait=60"))
            service.ask_to_stop(drain=True)
            await wait_until(service, "/health", lambda health: health["status"] == "closing")
            gate.touch()
            assert (await stream.content.readline()).startswith(b"id: 1")
            assert [one["rollout"] for one in (await poll)[1]["completions"]] == ["x"]
    finally:
        gate.touch()
        service.stop()


@pytest.mark.slow
@pytest.mark.skipif(
    not can_mount(), reason="needs a user namespace in which a tmpfs may be mounted"
)
@pytest.mark.parametrize("spare", [0, 300_000, 1_000_000])
def test_a_full_disk_never_loses_an_accepted_rollout(tmp_path: Path, spare: int) -> None:
    command = [
        "unshare",
        "-Urm",
        sys.executable,
        "-m",
        "packages.service.tests.small_disk",
        str(tmp_path),
        str(spare),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Engines.


def refuse(request: EngineRequest, name: str, failed: OnRetry) -> Generates:
    raise ConfigError(f"{name}: dialect must be another one, got {request.dialect!r}")


@pytest.mark.extended
async def test_an_unusable_engine_harms_nothing(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    body = {"address": "http://127.0.0.1:1", "dialect": "prorl"}
    for start in range(2):
        with serving(config, make_backend=refuse) as service:
            for _ in range(2):
                status, answer, _ = await call(service, "POST", "/v1/engines", body)
                assert (status, answer["id"][0]) == (202, "x")
                await wait_until(
                    service,
                    "/v1/engines",
                    lambda answer: answer["engines"][-1]["status"] == "removed",
                )
                # and two local ones
                assert len((await get(service, "/v1/engines"))["engines"]) == 3
            assert any(
                "dialect must be another one" in warning.message
                for warning in service.observer.warnings
            )
            await submit(service, id=f"x{start}")
            answer = await get(service, f"/v1/rollouts/x{start}?wait=30")
            assert answer["members"][0]["stop_reason"] == "finished"


class Waiting:
    """An engine that never becomes ready."""

    def __init__(self, request: EngineRequest, name: str, failed: OnRetry) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(self) -> NoReturn:
        await self.lost
        raise EngineError("it was never ready")

    def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("killed")

    async def close(self) -> None:
        self.kill()


async def test_an_address_is_registered_once(tmp_path: Path) -> None:
    make_backend: Any = Waiting
    config = service_config(tmp_path)
    with serving(config, make_backend=make_backend, registered=True) as service:
        body = {"address": "http://127.0.0.1:1", "dialect": "prorl"}
        answer = await asyncio.gather(
            *(call(service, "POST", "/v1/engines", body) for _ in range(20))
        )
        assert {(status, engine["id"]) for status, engine, _ in answer} == {(202, "x0")}
