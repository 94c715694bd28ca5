"""The service over HTTP: its API, clients, shutdown, and recovery."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import stat
import threading
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from packages.service.tests.api import call, game, get, status_of, submit, wait_until
from packages.service.tests.rollout_service import Program, Serving, service_config, serving
from rollweave.schema.errors import ConfigError
from rollweave_service import rollouts
from rollweave_service.client import (
    ClientClosedError,
    NoServiceError,
    RolloutClient,
    Rollouts,
    ServiceError,
)
from rollweave_service.messages import RolloutRequest
from tests.support.fake_runs import assert_no_processes
from tests.support.http import ATTACKS


async def test_a_rollout_returns_tokens_and_reward(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        status, body, _ = await submit(service, id="a/1", members=3)
        assert (status, len(body["members"])) == (202, 3)
        assert body["state"] in ("queued", "running")  # as the engines are ready sooner or later
        status, body, _ = await call(service, "GET", "/v1/rollouts/a%2F1?wait=30")
        assert (status, body["state"]) == (200, "done")
        for member in body["members"]:
            result = member["result"]
            expected = ("finished", "finished", "none")
            assert (member["stop_reason"], result["stop_reason"], result["blame"]) == expected
            assert result["reward"] is not None
            (sequence,) = result["sequences"]
            assert (
                len(sequence["tokens"])
                == len(sequence["logprobs"])
                == sequence["segments"][-1]["end"]
            )
            assert {
                segment["version"]
                for segment in sequence["segments"]
                if segment["kind"] == "output"
            } == {0}
        status, body, _ = await call(service, "GET", "/v1/completions")
        assert {one["rollout"] for one in body["completions"]} == {"a/1"}
        assert body["next"] == 3
        assert await get(service, "/v1/handlers") == {"handlers": ["game"]}
        status, text, _ = await call(service, "GET", "/metrics")
        assert 'rollweave_delivered_total{stop_reason="finished"} 3' in text.decode()


async def test_a_request_may_contain_its_payload(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        body = {"handler": "game", "id": "own", "payload": {"any": [1, "ü"]}, "seed": 7}
        assert await status_of(service, "POST", "/v1/rollouts", body) == 202
        answer = await get(service, "/v1/rollouts/own?wait=30")
        task = answer["members"][0]["result"]["task"]
        assert (json.loads(task["payload"]), task["seed"]) == ({"any": [1, "ü"]}, 7)


async def test_submitting_twice_is_submitting_once(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        answers = await asyncio.gather(*(submit(service, id="same") for _ in range(8)))
        assert {status for status, _, _ in answers} == {202}
        assert (await get(service, "/v1/rollouts/same?wait=30"))["state"] == "done"
        assert (await submit(service, id="same"))[1]["state"] == "done"
        status, body, _ = await submit(service, id="same", index=2)
        assert (status, body["error"]["type"]) == (409, "conflict")
        assert (await get(service, "/health"))["submitted"] == 1


RULES = [
    {"index": -1},
    {"index": 1.5},
    {"members": 0},
    {"members": 1e9},
    {"id": "a b"},
    {"id": ".."},
    {"unknown": 1},
    {"sampling": {"top_p": 0}},
    {"limits": {"time_s": -1}},
]
"""Fields of a request that break a rule."""

WRONG = [
    *((json.dumps(game(**fields)).encode(), 400) for fields in RULES),
    (b"", 400),
    (b"[]", 400),
    (b'{"handler": "game", "index": 1, "sampling": {"temperature": NaN}}', 400),
    (b'{"handler": "game", "payload": {"x": ' + b"[" * 100 + b"]" * 100 + b"}}", 400),
    (json.dumps({"rollouts": [game(), game(handler="no")]}).encode(), 404),
    (json.dumps({"rollouts": [game(id="x"), game(id="x", index=2)]}).encode(), 409),
    (b'{"handler":' * 2000, 400),
    (b'{"handler": "game", "payload": {"x": "' + b"x" * (17 << 20) + b'"}}', 413),
]


async def test_refuses_invalid_requests_without_effect(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        for raw, expected in WRONG:
            status, body, _ = await call(service, "POST", "/v1/rollouts", raw=raw)
            assert status == expected, (raw[:80], body)
            assert body["error"]["message"]
        for method, path, rule in (
            ("GET", "/v2", "the path must be one that /openapi.json names, got '/v2'"),
            (
                "PATCH",
                "/v1/rollouts",
                "the method must be GET,HEAD,POST for '/v1/rollouts', got PATCH",
            ),
            ("POST", "/v1/rollouts", f"the body must have at most {16 << 20} bytes, got more"),
        ):
            _, body, _ = await call(
                service, method, path, raw=b"x" * (17 << 20) if method == "POST" else None
            )
            assert body["error"]["message"] == rule
        for method, path, expected in (
            ("GET", "/v1/rollouts/none", 404),
            ("DELETE", "/v1/rollouts/none", 404),
            ("GET", "/v1/rollouts/none?wait=soon", 400),
            ("GET", "/v1/completions?after=-1", 400),
            ("GET", "/v1/completions?limit=nan", 400),
            *(("GET", f"/v1/rollouts?limit={limit}", 400) for limit in (0, 1001)),
            *(("GET", f"/v1/rollouts?{query}", 400) for query in ("after=-1", "unfinished=yes")),
            ("DELETE", "/v1/engines/x9", 404),
            ("DELETE", "/v1/engines/e0?drain=perhaps", 400),
            ("PATCH", "/v1/rollouts", 405),
            ("GET", "/v2", 404),
        ):
            status, body, _ = await call(service, method, path)
            assert (status, bool(body["error"]["message"])) == (expected, True), path
        assert (await get(service, "/health"))["submitted"] == 0


async def test_refuses_batches_that_exceed_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "QUEUE", 10)
    gate = tmp_path / "gate"
    config = service_config(tmp_path, options={"wait": str(gate)}, rollout={"max_running": 2})
    with serving(config) as service:
        accepted = refused = 0
        for number in range(40):
            status, body, headers = await submit(service, id=f"j{number}")
            accepted += status == 202
            refused += status == 429
            if status == 429:
                assert (body["error"]["type"], headers["Retry-After"]) == ("full", "1")
        assert accepted + refused == 40
        assert 10 <= accepted <= 14
        # as many as may ever wait come again, more never
        for count, status in ((10, 429), (11, 413)):
            batch = {"rollouts": [game(id=f"b{number}") for number in range(count)]}
            assert await status_of(service, "POST", "/v1/rollouts", batch) == status
        assert await status_of(service, "GET", "/v1/rollouts/b0") == 404
        gate.touch()
        for number in range(40):
            status, body, _ = await call(service, "GET", f"/v1/rollouts/j{number}?wait=30")
            accepted -= status == 200 and body["state"] == "done"
        assert accepted == 0


async def test_cancels_a_rollout_in_every_stage(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = service_config(tmp_path, options={"wait": str(gate)}, rollout={"max_running": 2})
    with serving(config) as service:
        for name in ("running", "waiting"):
            await submit(service, id=name, members=2)
        await wait_until(
            service, "/v1/rollouts/running", lambda answer: answer["members"][0]["stage"] == "run"
        )
        for name in ("waiting", "running"):
            assert await status_of(service, "DELETE", f"/v1/rollouts/{name}") == 202
            answer = await get(service, f"/v1/rollouts/{name}?wait=30")
            expected = ["cancelled", "cancelled"]
            assert [member["stop_reason"] for member in answer["members"]] == expected
            assert all(
                (member["result"] is None) == (name == "waiting") for member in answer["members"]
            )
        health = await get(service, "/health")
        assert health["init"] == 0
        assert health["run"] == 0
        assert health["closing"] == 0
        assert health["turns_running"] == 0


async def test_events_contain_every_completion_once(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        seen: Counter[str] = Counter()

        async def listen(session: aiohttp.ClientSession, after: str) -> str:
            async with session.get(
                service.address + "/v1/events", headers={"Last-Event-ID": after}
            ) as answer:
                async for line in answer.content:
                    if line.startswith(b"id: "):
                        after = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        seen[json.loads(line[6:])["rollout"]] += 1
                        if sum(seen.values()) % 5 == 0:
                            return after  # the connection breaks
            return after

        async with aiohttp.ClientSession() as session:
            after = "0"
            await call(
                service, "POST", "/v1/rollouts", {"rollouts": [game(id=f"e{i}") for i in range(20)]}
            )
            while sum(seen.values()) < 20:
                after = await listen(session, after)
        assert seen == {f"e{i}": 1 for i in range(20)}


@pytest.mark.variants
@pytest.mark.parametrize("stage", ["reset", "step", "score"])
async def test_a_failing_environment_gives_no_reward(tmp_path: Path, stage: str) -> None:
    config = service_config(
        tmp_path, task={"env": "packages.service.tests.broken:Broken"}, options={"stage": stage}
    )
    with serving(config) as service:
        await submit(service, id="x")
        answer = await get(service, "/v1/rollouts/x?wait=60")
        (member,) = answer["members"]
        expected = "reward_error" if stage == "score" else "env_error"
        assert member["stop_reason"] == expected
        assert member["result"]["reward"] is None
        assert member["result"]["blame"] == "environment"
        assert "broken on purpose" in member["result"]["error"]
        assert config.rollout.retries == 2
        assert member["attempt"] == 1, (
            "what fails twice in the same words is not tried a third time"
        )


async def test_requires_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", "tschüss")
    with serving(service_config(tmp_path), token_env="OUR_TOKEN") as service:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "tschüss"}):
            status, body, _ = await call(service, "GET", "/v1/handlers", headers=headers)
            assert (status, body["error"]["type"]) == (401, "unauthorized")
        assert await status_of(service, "GET", "/health") == 200
        assert (
            await status_of(
                service, "GET", "/v1/handlers", headers={"Authorization": "Bearer tschüss"}
            )
            == 200
        )


async def test_generates_a_token_that_local_clients_find(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    directory, tokens = tmp_path / "service", []
    for _ in range(2):  # the second finds the first one's
        with serving(config, no_token=False) as service:
            tokens.append(service.token)
            assert (directory / "token").read_text().strip() == service.token
            assert stat.S_IMODE((directory / "token").stat().st_mode) == 0o600
            for path in ("/v1/handlers", "/metrics", "/status", "/openapi.json", "/nowhere"):
                assert await status_of(service, "GET", path) == 401
            assert await status_of(service, "GET", "/health") == 200
            async with RolloutClient(directory) as client:
                assert (
                    await client.rollout(RolloutRequest(handler="game", index=1))
                ).state == "done"
    assert tokens[0] == tokens[1]
    with pytest.raises(ValueError, match="the directory of a running service"):
        RolloutClient(directory)


async def test_plain_sandboxes_require_a_flag(tmp_path: Path) -> None:
    config = service_config(tmp_path, sandbox={"backend": "plain"})
    with pytest.raises(
        ConfigError,
        match=r"sandbox.backend must isolate .* `rollweave serve --unsandboxed` allows that",
    ):
        Serving(config)
    assert not (tmp_path / "service").exists()
    with serving(config, unsandboxed=True) as service:
        assert await status_of(service, "GET", "/health") == 200


async def test_web_pages_cannot_reach_a_service_without_a_token(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        for method, headers, status in ATTACKS:
            raw = b'{"handler": "game", "index": 1, "id": "x"}' if method == "POST" else None
            answer, body, _ = await call(service, method, "/v1/rollouts", raw=raw, headers=headers)
            expected = (status, "media_type" if status == 415 else "foreign")
            assert (answer, body["error"]["type"]) == expected
        assert await status_of(service, "GET", "/v1/rollouts/x") == 404


def test_reports_invalid_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READ_FROM_A_FILE", "secret\n")
    for access, words in (
        ({"host": "0.0.0.0"}, "--no-token must be left out"),
        ({"token_env": "NO_SUCH_VARIABLE"}, "--token-env must name a variable"),
        ({"token_env": "READ_FROM_A_FILE"}, "without a line's end"),
        ({"names": ("a b",)}, "--allow-host"),
    ):
        with pytest.raises(ConfigError, match=words):
            Serving(service_config(tmp_path), **access).stop()


@pytest.mark.variants
@pytest.mark.parametrize("drain", [True, False])
async def test_stopping_drains_or_cancels_and_leaves_nothing(tmp_path: Path, drain: bool) -> None:
    gate = tmp_path / "gate"
    config = service_config(tmp_path, options={"wait": str(gate)})
    service = Serving(config)
    try:
        await call(
            service, "POST", "/v1/rollouts", {"rollouts": [game(id=f"d{i}") for i in range(12)]}
        )
        await wait_until(service, "/health", lambda health: health["run"] > 0)
        waiting = asyncio.create_task(call(service, "GET", "/v1/rollouts/d0?wait=30"))
        service.ask_to_stop(drain=drain)
        await wait_until(service, "/health", lambda health: health["status"] == "closing")
        assert not drain or (await submit(service, id="late"))[0] == 503
        gate.touch()
        await asyncio.to_thread(service.wait)
        with contextlib.suppress(aiohttp.ClientError):
            assert (await waiting)[1]["state"] == "done"
    finally:
        gate.touch()
        service.stop()
    assert_no_processes(config)
    with serving(config) as again:  # what was done is still there
        for number in range(12):
            answer = await get(again, f"/v1/rollouts/d{number}")
            assert answer["members"][0]["stop_reason"] == ("finished" if drain else "cancelled")


async def test_a_killed_service_loses_nothing(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = service_config(tmp_path, options={"wait": str(gate)}, rollout={"max_running": 4})
    for life in range(3):
        program = Program(config)
        try:
            batch = {"rollouts": [game(id=f"k{life}-{i}") for i in range(20)]}
            assert await status_of(program, "POST", "/v1/rollouts", batch) == 202
            if life == 1:
                gate.touch()
                await call(program, "GET", "/v1/rollouts/k0-3?wait=30")
                gate.unlink()
        finally:
            program.kill()
    gate.touch()
    program = Program(config)
    try:
        for life in range(3):
            for number in range(20):
                answer = await get(program, f"/v1/rollouts/k{life}-{number}?wait=30")
                expected = ("done", "finished")
                assert (answer["state"], answer["members"][0]["stop_reason"]) == expected
                assert answer["members"][0]["result"]["reward"] is not None
        body = await get(program, "/v1/completions?limit=1000")
        assert len(body["completions"]) == len({one["member"] for one in body["completions"]}) == 60
    finally:
        assert program.terminate() == 0
    assert_no_processes(config)


async def test_a_lost_engine_costs_only_time(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    with serving(config) as service:
        (Path(config.model.path or "") / "kill-engine").touch()
        await call(
            service, "POST", "/v1/rollouts", {"rollouts": [game(id=f"e{i}") for i in range(8)]}
        )
        for number in range(8):
            answer = await get(service, f"/v1/rollouts/e{number}?wait=60")
            assert answer["members"][0]["stop_reason"] == "finished"
        assert any("restarted" in warning.message for warning in service.observer.warnings)


async def test_a_lost_worker_costs_only_time(tmp_path: Path) -> None:
    """All rollouts run in workers; one of these is killed while they do."""
    where = tmp_path / "where"
    where.mkdir()
    config = service_config(
        tmp_path,
        task={"env": "tests.support.game:Located"},
        options={"where": str(where)},
        workers={"count": 2},
    )
    with serving(config) as service:
        rollouts = {"rollouts": [game(id=f"w{i}") for i in range(8)]}
        await call(service, "POST", "/v1/rollouts", rollouts)
        async with asyncio.timeout(60):
            while len(pids := [*where.glob("reset-*")]) < 2:  # noqa: ASYNC110 (both run rollouts)
                await asyncio.sleep(0.01)
        os.kill(int(pids[0].name.removeprefix("reset-")), signal.SIGKILL)
        (where / "open").touch()
        for number in range(8):
            answer = await get(service, f"/v1/rollouts/w{number}?wait=60")
            (member,) = answer["members"]
            assert member["stop_reason"] == "finished"
            assert member["result"]["reward"] is not None
        assert any("w" in one.component for one in service.observer.warnings)
    assert str(os.getpid()) not in {path.name.split("-")[1] for path in where.glob("score-*")}


# The client.


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a client wait less between its attempts, of which it makes as many."""
    monkeypatch.setattr("rollweave_service.client.MAX_BACKOFF_S", 0.2)


async def test_a_signal_ends_a_service_whose_loop_is_blocked(tmp_path: Path) -> None:
    config = service_config(tmp_path, task={"env": "tests.runtime.holding:Telling"})
    program = Program(config)
    try:
        async with RolloutClient([program.address]) as client:
            asking = asyncio.create_task(client.rollout(RolloutRequest(handler="game", index=0)))
            while b"a step begins" not in (tmp_path / "stderr").read_bytes():  # noqa: ASYNC110 (another process writes it)
                await asyncio.sleep(0.02)
            assert await asyncio.to_thread(program.terminate) in (130, -signal.SIGINT)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    finally:
        program.process.kill()
    assert b"Interrupted" not in (tmp_path / "stderr").read_bytes()
    assert_no_processes(config)


async def test_cancelling_a_call_cancels_the_rollout(tmp_path: Path) -> None:
    config = service_config(tmp_path, options={"wait": str(tmp_path / "gate")})
    with serving(config) as service:
        async with RolloutClient(service.address) as client:
            task = asyncio.create_task(
                client.rollout(RolloutRequest(handler="game", index=0, id="mine"))
            )
            await wait_until(service, "/health", lambda health: health["run"] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        answer = await get(service, "/v1/rollouts/mine?wait=30")
        assert answer["members"][0]["stop_reason"] == "cancelled"


def test_a_client_without_an_event_loop(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service, Rollouts(service.address) as rollouts:
        answer = rollouts.run(
            [RolloutRequest(handler="game", index=index, members=2) for index in range(5)]
        )
        assert [len(status.members) for status in answer] == [2] * 5
        with pytest.raises(ServiceError, match="handler must be one of game"):
            rollouts.run([RolloutRequest(handler="none", index=0)])


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_failed_or_interrupted_run_cancels_the_other_rollouts(
    tmp_path: Path, interrupted: bool
) -> None:
    """After an interrupt, or if one request is refused, the other rollouts are
    cancelled before `run` raises.
    """
    config = service_config(tmp_path, options={"wait": str(tmp_path / "gate")})
    requests = [
        RolloutRequest(handler="game", index=index, id=f"mine{index}") for index in range(5)
    ]
    with serving(config) as service:

        def interrupt() -> None:
            asyncio.run(wait_until(service, "/health", lambda health: health["submitted"] == 5))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with Rollouts(service.address) as rollouts:
            if interrupted:
                threading.Thread(target=interrupt).start()
                with pytest.raises(KeyboardInterrupt):
                    rollouts.run(requests)
            else:
                with pytest.raises(ServiceError, match="handler must be one of game"):
                    rollouts.run([*requests, RolloutRequest(handler="none", index=0)])
        asyncio.run(
            wait_until(
                service,
                "/health",
                lambda health: not (health["queued"] or health["init"] or health["run"]),
            )
        )
        delivered = asyncio.run(call(service, "GET", "/v1/completions"))[1]["completions"]
        assert {one["stop_reason"] for one in delivered} <= {"cancelled"}


def test_leaving_ends_the_thread_although_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    leave = RolloutClient.__aexit__

    async def interrupted(client: RolloutClient, *_: object) -> None:
        await leave(client)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.Event().wait()

    before = set(threading.enumerate())
    monkeypatch.setattr(RolloutClient, "__aexit__", interrupted)
    with pytest.raises(KeyboardInterrupt), Rollouts(f"http://127.0.0.1:{unused_tcp_port}"):
        pass
    assert set(threading.enumerate()) <= before


async def test_the_events_of_a_rollout_end_with_it(tmp_path: Path) -> None:
    with serving(service_config(tmp_path)) as service:
        for name in ("other", "mine"):
            await submit(service, id=name, members=3)
        text = await get(service, "/v1/events?rollout=mine")
        events = [
            json.loads(line.removeprefix("data: "))
            for line in text.decode().splitlines()
            if line.startswith("data:")
        ]
        assert [event["rollout"] for event in events] == ["mine"] * 3
        assert await status_of(service, "GET", "/v1/events?rollout=none") == 404
        answer = await get(service, "/v1/completions?rollout=mine&wait=60")
        assert [one["rollout"] for one in answer["completions"]] == ["mine"] * 3
        last = answer["next"]
        answer = await get(service, f"/v1/completions?rollout=mine&wait=60&after={last}")
        assert answer == {"completions": [], "next": last}  # at once: all of it is done


@pytest.mark.extended
def test_a_client_without_an_event_loop_uses_ids(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        serving(service_config(tmp_path, options={"wait": str(gate)})) as service,
        Rollouts(service.address) as rollouts,
    ):
        submitted = rollouts.submit(RolloutRequest(handler="game", index=0, members=2))
        other = rollouts.submit(RolloutRequest(handler="game", index=1))
        expected = [submitted.id, other.id]
        assert [one.id for one in rollouts.list_rollouts(unfinished=True)] == expected
        rollouts.cancel(other.id)
        assert rollouts.get(other.id, wait_s=60.0).members[0].stop_reason == "cancelled"
        gate.touch()
        assert [member.stop_reason for member in rollouts.stream(submitted.id)] == ["finished"] * 2


@pytest.mark.usefixtures("brief_waits")
async def test_fails_if_no_service_answers(unused_tcp_port: int) -> None:
    async with RolloutClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(NoServiceError, match=rf"{unused_tcp_port} \(.*Connect call failed"):
            await client.rollout(RolloutRequest(handler="game", index=0))


def test_refuses_invalid_addresses() -> None:
    for address in ("localhost:8300", "", "http://", "ftp://localhost"):
        with pytest.raises(ValueError, match="addresses must be http://host:port"):
            RolloutClient(["http://localhost:8300", address])


@pytest.mark.slow
async def test_runs_more_rollouts_than_open_files_are_allowed(tmp_path: Path) -> None:
    """With few free files the client polls less often, and the service does not count
    as dead.
    """
    gate = tmp_path / "gate"
    program = Program(service_config(tmp_path, options={"wait": str(gate)}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A test that runs late in a suite has more files open than one that runs alone.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, limits[1]))
    try:
        async with RolloutClient(program.address) as client, asyncio.TaskGroup() as group:
            requests = [RolloutRequest(handler="game", index=index) for index in range(300)]
            tasks = [group.create_task(client.rollout(request)) for request in requests]
            await wait_until(program, "/health", lambda health: health["submitted"] == 300)
            gate.touch()
        assert {task.result().state for task in tasks} == {"done"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        program.terminate()


@pytest.mark.extended
async def test_leaving_the_client_cancels_pending_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cancelled at the service, whether their request is under way or
    queued.
    """
    monkeypatch.setattr(rollouts, "QUEUE", 10)
    config = service_config(tmp_path, options={"wait": str(tmp_path / "gate")})
    with serving(config) as service:
        async with RolloutClient(service.address) as client:
            requests = [
                RolloutRequest(handler="game", index=index, id=f"r{index}") for index in range(40)
            ]
            tasks = [asyncio.create_task(client.rollout(request)) for request in requests]
            await wait_until(service, "/health", lambda health: health["submitted"] >= 10)
        answer = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in answer} == {ClientClosedError}
        await wait_until(
            service, "/v1/rollouts?unfinished=true", lambda answer: answer["rollouts"] == []
        )
        for call in (client.rollout(requests[0]), client.get("r0"), client.submit(requests[0])):
            with pytest.raises(ClientClosedError, match="must be used inside"):
                await call


def test_one_service_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    with (
        serving(config),
        pytest.raises(ConfigError, match=f"in use by another controller, process {os.getpid()}"),
    ):
        Serving(config).stop()
