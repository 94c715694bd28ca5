"""Text that is not valid UTF-8, from environments, handlers and clients, must not end a
service or prevent its restart.
"""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from packages.service.tests.api import call, get, status_of, submit
from packages.service.tests.rollout_service import Program, service_config, serving
from rollweave.core.policy.retry import MAX_WORLDS_LOST
from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.root import RunConfig
from tests.support.fake_runs import run_dir

PLACES = [
    ({}, "", "finished"),
    ({"isolation": "process"}, "", "finished"),
    ({}, "reset", "env_error"),
    ({"isolation": "process"}, "reset", "env_error"),
    ({}, "step", "env_error"),
    ({}, "score", "reward_error"),
    ({"isolation": "process"}, "score", "reward_error"),
    ({"env": "packages.service.tests.invalid_text:Handler"}, "", "finished"),
    ({"env": "packages.service.tests.invalid_text:Handler"}, "init", "env_error"),
    ({"env": "packages.service.tests.invalid_text:Handler"}, "run", "env_error"),
    ({"env": "packages.service.tests.invalid_text:Handler"}, "eval", "reward_error"),
    ({"env": "packages.service.tests.invalid_text:Handler"}, "result", "finished"),
]


def words(directory: Path, raises: str, task: dict[str, Any]) -> RunConfig:
    return service_config(
        directory,
        task={"env": "packages.service.tests.invalid_text:InvalidText", **task},
        options={"raises": raises} if raises else {},
        rollout={"retries": 0},
    )


@pytest.mark.variants
@pytest.mark.parametrize(("task", "raises", "reason"), PLACES)
async def test_invalid_text_affects_only_its_own_rollout(
    tmp_path: Path, task: dict[str, Any], raises: str, reason: str
) -> None:
    with serving(words(tmp_path, raises, task)) as service:
        await call(service, "POST", "/start", {})
        for number in range(2):
            assert (await submit(service, id=f"r{number}"))[0] == 202
            answer = await get(service, f"/v1/rollouts/r{number}?wait=30")
            member = answer["members"][0]
            assert member["stop_reason"] == reason
            if raises and raises != "result":
                assert "\ufffd words \ufffd" in member["result"]["error"]
        if not task.get("isolation"):
            status, _, _ = await call(
                service,
                "POST",
                "/process",
                {"instance": {"data_source": "game", "index": 0}, "job_id": "p"},
            )
            assert status == 200


async def test_a_killed_service_resumes_rollouts_with_invalid_text(tmp_path: Path) -> None:
    config = words(tmp_path, "reset", {})
    service = Program(config)
    for number in range(20):
        assert (await submit(service, id=f"r{number}"))[0] == 202
    service.kill()
    with serving(config) as again:
        for number in range(20):
            answer = await get(again, f"/v1/rollouts/r{number}?wait=30")
            assert answer["members"][0]["stop_reason"] == "env_error"
    assert not TrajectoryReader(run_dir(config) / "trajectories").damaged


@pytest.mark.slow
async def test_a_rollout_that_kills_the_service_is_abandoned_after_some_restarts(
    tmp_path: Path,
) -> None:
    config = words(tmp_path, "", {"env": "packages.service.tests.invalid_text:Killer"})
    service = Program(config)
    assert (await submit(service, id="poison"))[0] == 202
    for _ in range(MAX_WORLDS_LOST - 1):
        assert service.process.wait(60) == 1
        service.kill()
        service = Program(config)
    assert service.process.wait(60) == 1
    service.kill()
    with serving(config) as again:
        answer = await get(again, "/v1/rollouts/poison?wait=30")
        assert answer["members"][0]["stop_reason"] == "world_lost"
        assert any("is given up" in warning.message for warning in again.observer.warnings)


async def test_drops_only_requests_that_cannot_be_read(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    with serving(config) as service:
        for name in ("torn", "odd", "good"):
            assert (await submit(service, id=name))[0] == 202
            await call(service, "GET", f"/v1/rollouts/{name}?wait=30")
    with contextlib.closing(sqlite3.connect(run_dir(config) / "jobs.sqlite")) as jobs, jobs:
        jobs.execute("UPDATE jobs SET request = ? WHERE id = 'torn'", (b'{"handler": "\xff',))
        jobs.execute("UPDATE jobs SET task = ? WHERE id = 'odd'", (b'{"id": 3}',))
    with serving(config) as again:
        for name in ("torn", "odd"):
            assert await status_of(again, "GET", f"/v1/rollouts/{name}") == 404
        assert (await get(again, "/v1/rollouts/good"))["state"] == "done"
        abandoned = [
            warning.component
            for warning in again.observer.warnings
            if "cannot be read" in warning.message
        ]
        assert abandoned == ["rollout torn", "rollout odd"]


SURROGATE = b"%ED%B2%80"


REQUESTS = [
    ("GET", b"/v1/rollouts/" + SURROGATE, b"", b""),
    ("GET", b"/v1/rollouts/%FF%00", b"", b""),
    ("GET", b"/v1/rollouts/\xff", b"", b""),
    ("DELETE", b"/v1/rollouts/" + SURROGATE, b"", b""),
    ("DELETE", b"/v1/engines/" + SURROGATE, b"", b""),
    ("DELETE", b"/v1/engines/a?drain=" + SURROGATE, b"", b""),
    ("GET", b"/v1/rollouts/a?wait=%FF", b"", b""),
    ("GET", b"/v1/completions?after=" + SURROGATE, b"", b""),
    ("GET", b"/v1/events", b"Last-Event-ID: \xff\r\n", b""),
    ("GET", b"/v1/handlers", b"Authorization: Bearer \xff\xfe\r\n", b""),
    ("GET", b"/" + SURROGATE, b"", b""),
    ("POST", b"/v1/rollouts", b"", rb'{"handler": "\ud800", "index": 1}'),
    ("POST", b"/v1/rollouts", b"", rb'{"handler": "\udc80\ud800", "index": 1}'),
    ("POST", b"/v1/rollouts", b"", b'{"handler": "\xff", "index": 1}'),
    ("POST", b"/v1/rollouts", b"", rb'{"handler": "game", "payload": {"\udc80": "\ud800"}}'),
    ("POST", b"/v1/rollouts", b"", rb'{"handler": "game", "id": "\u0000", "index": 1}'),
    ("POST", b"/v1/engines", b"", rb'{"address": "http://\ud800:1", "dialect": "vllm"}'),
    ("POST", b"/add_llm_server", b"", rb'{"address": "\ud800"}'),
    ("POST", b"/cancel", b"", rb'{"job_id": "\ud800"}'),
    ("POST", b"/cancel", b"", rb'{"job_id": "\u0000"}'),
    ("POST", b"/process", b"", rb'{"instance": {"data_source": "\ud800"}}'),
    (
        "POST",
        b"/process",
        b"",
        rb'{"instance": {"data_source": "game", "x": "\ud800"}, '
        rb'"sampling_params": {"\udc80": 1}}',
    ),
]
"""Method, path, header and body of requests with text that is none."""


async def raw_status(address: str, method: str, path: bytes, header: bytes, body: bytes) -> int:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"%s %s HTTP/1.1\r\nHost: %s:%s\r\n" % (
        method.encode(),
        path,
        host.encode(),
        port.encode(),
    )
    writer.write(
        head
        + header
        + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    async with asyncio.timeout(30):
        status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_invalid_text_of_a_client_never_causes_a_500(tmp_path: Path) -> None:
    failures = []
    with serving(service_config(tmp_path)) as service:
        await call(service, "POST", "/start", {})
        for request in REQUESTS:
            status = await raw_status(service.address, *request)
            health = await status_of(service, "GET", "/health")
            if status >= 500 or health != 200:
                failures.append((request, status, health))
    assert failures == []
