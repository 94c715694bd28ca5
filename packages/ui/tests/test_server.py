"""The server answers requests with the token and no others, and each mistake with one
line.
"""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollweave_ui import server
from rollweave_ui.runs import Runs
from rollweave_ui.server import FILES, WRONG_TOKEN, serving
from tests.support.synthetic_run import write_run

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=2).path


@pytest.fixture
def runs(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "made-up")
    return tmp_path


@pytest.fixture
async def address(runs: Path) -> AsyncIterator[str]:
    async with serving(Runs(runs), token=TOKEN, port=0) as served:
        yield served


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of a numeric address
    async with aiohttp.ClientSession(cookie_jar=jar) as opened:
        yield opened


PATHS = [*FILES, "/api/runs", "/api/run?run=made-up", "/metrics", "/api/nothing"]


async def test_without_the_token_there_is_one_line(
    address: str, session: aiohttp.ClientSession
) -> None:
    for path, token in itertools.product(PATHS, (None, "wrong", TOKEN[:-1], "", "ä")):
        separator = "&" if "?" in path else "?"
        asked = path if token is None else f"{path}{separator}token={token}"
        async with session.get(address + asked) as answer:
            assert answer.status == 403, asked
            assert await answer.text() == WRONG_TOKEN + "\n"
        bearer = {"Authorization": f"Bearer {token}x"}
        async with session.get(address + path, headers=bearer) as answer:
            assert answer.status == 403, bearer


async def test_the_printed_address_sets_a_cookie_and_loses_the_token(
    address: str, session: aiohttp.ClientSession
) -> None:
    assert address.startswith("http://127.0.0.1:")
    async with session.get(f"{address}/?token={TOKEN}") as answer:
        assert (answer.status, answer.url.query_string, answer.url.path) == (200, "", "/")
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        (first,) = answer.history
        assert "HttpOnly" in first.headers["Set-Cookie"]
        assert "SameSite=Strict" in first.headers["Set-Cookie"]
    async with session.get(f"{address}/api/runs") as answer:
        assert [run["name"] for run in (await answer.json())["runs"]] == ["made-up"]
    async with session.get(
        f"{address}/api/runs", headers={"Origin": "http://evil.example"}
    ) as answer:
        assert answer.status == 403
    async with session.get(f"{address}/api/runs", headers={"Host": "evil.example"}) as answer:
        assert answer.status == 421


async def test_a_bearer_is_admitted_too(address: str, session: aiohttp.ClientSession) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with session.get(f"{address}/metrics", headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/plain")
        assert 'rollweave_run_up{run="made-up",state="finished"} 0' in await answer.text()


MISTAKES = [
    ("/api/run?run=gone", 404, "there is no run 'gone' in "),
    ("/api/run?run=../made-up", 404, "there is no run '../made-up' in "),
    ("/api/attempt?run=made-up&id=g77.0", 404, "there is no attempt g77.0 in made-up"),
    ("/api/attempts?run=made-up&least=high", 400, "least must be a number, got 'high'"),
    ("/api/attempts?run=made-up&limit=%EF%BC%91", 400, "limit must be a number from 1 to 200"),
    ("/api/attempts?run=made-up&limit=9000", 400, "limit must be a number from 1 to 200"),
    ("/api/attempts?run=made-up&order=any", 400, "order must be one of newest, oldest"),
    ("/api/lanes?run=made-up&bins=nan", 400, "bins must be a number from 1 to 1000"),
    ("/api/nothing", 404, "Not Found"),
]
"""Paths with a mistake, with the status and a part of the line that answers it."""


async def test_a_mistake_is_one_line(address: str, session: aiohttp.ClientSession) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path, status, line in MISTAKES:
        async with session.get(address + path, headers=headers) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert line in error
            assert "\n" not in error


async def test_every_view_is_answered_and_nothing_is_written(
    address: str, session: aiohttp.ClientSession, runs: Path
) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in runs.rglob("*")}

    before = files()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path in (
        *FILES,
        "/api/runs",
        "/api/run?run=made-up",
        "/api/lanes?run=made-up&from=1&to=2&bins=10",
        "/api/attempts?run=made-up&domain=calculator&least=0&order=longest&offset=3&limit=5",
        "/api/attempt?run=made-up&id=g1.1&attempt=0",
    ):
        async with session.get(address + path, headers=headers) as answer:
            assert answer.status == 200, path
            assert await answer.read()
    assert files() == before


class Hanging(Runs):
    """Runs on a file system that hangs until `answer` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.answer = threading.Event()

    def overview(self) -> dict[str, Any]:
        self.answer.wait()
        return super().overview()


def test_a_file_system_that_hangs_delays_neither_other_answers_nor_the_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_S", 0.2)
    monkeypatch.setattr(server, "MAX_READERS", 2)
    hanging = Hanging(runs)

    async def ask() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            serving(hanging, token=TOKEN, port=0) as address,
            aiohttp.ClientSession(headers=headers) as session,
        ):

            async def get(path: str) -> tuple[int, str]:
                async with session.get(address + path) as answer:
                    return answer.status, await answer.text()

            late = (503, '{"error":"files were not read within 0.2 s: a file system may hang"}')
            assert await get("/api/runs") == late
            assert (await get("/api/run?run=made-up"))[0] == 200
            assert await get("/api/runs") == late
            assert "2 other requests wait for files" in (await get("/api/run?run=made-up"))[1]

    asyncio.run(ask())  # which waits for all threads of the loop's own
    hanging.answer.set()


def test_a_run_that_another_thread_reads_for_too_long_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave_ui.files.HELD_S", 0.01)
    seen = Runs(runs)
    view = seen.get("made-up")
    with view._lock:
        (row,) = seen.overview()["runs"]
    assert row["text"].endswith(
        "made-up has been read for more than 0.01 s: its file system may hang"
    )
    assert seen.overview()["runs"][0]["state"] != "damaged"
