"""The page in a real browser: every view, by keyboard, with damaged runs, and without
an error of a script.
"""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollweave.record.rundir import RunDir
from rollweave_ui.runs import Runs
from rollweave_ui.server import serving
from tests.support.browser import Page, browsing, needs_browser
from tests.support.busy_runs import write_large_run, write_status
from tests.support.synthetic_run import write_run

pytestmark = needs_browser
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    write_run(directory / "made-up", steps=20)
    write_run(directory / "other", steps=8, error="no engine is left")
    return directory


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture
async def page(runs: Path) -> AsyncIterator[Page]:
    async with serving(Runs(runs), token=TOKEN, port=0) as address, browsing() as opened:
        await opened.open(f"{address}/?token={TOKEN}")
        await opened.until("document.querySelectorAll('tbody tr').length == 2")
        yield opened
        assert opened.errors == []


async def go(page: Page, fragment: str, condition: str) -> str:
    await page.value(f"void (location.hash = {fragment!r})")
    await page.until(condition)
    return await page.text()


async def test_every_view_shows_the_run(page: Page) -> None:
    text = await page.text()
    assert "no engine is left" in text
    assert "token" not in await page.value("location.search")
    text = await go(page, "#/run/made-up", "document.querySelector('#learning polyline')")
    assert "Where the time goes" in text
    assert "waiting for environments" in text
    await go(page, "#/run/made-up/timeline", "document.querySelector('#key li')")
    drawn = "new Set(document.querySelector('canvas').getContext('2d').getImageData(160, 0, 400, 200).data).size"
    assert await page.value(drawn) > 5
    condition = "document.querySelectorAll('#rows tbody tr').length == 100"
    text = await go(page, "#/run/made-up/trajectories", condition)
    assert "1–100 of 320" in text
    condition = "document.querySelectorAll('.tok').length == 4"
    text = await go(page, "#/run/made-up/trajectories/g9.1/0", condition)
    assert "go<down>" in text
    assert "weights 1 → 2" in text
    text = await go(page, "#/run/made-up/settings", "document.querySelector('#settings td')")
    assert "rollout.mode" in text
    condition = "document.querySelectorAll('#curves svg').length > 3"
    text = await go(page, "#/compare?run=made-up&run=other&run=gone", condition)
    assert "there is no run 'gone'" in text
    assert "Settings that differ" in text
    page.errors.clear()  # the browser logs the status 404


@pytest.mark.extended
async def test_filters_and_links_work_by_keyboard(page: Page) -> None:
    await page.press("Tab")
    focused = "document.activeElement.textContent"
    for _ in range(12):
        if await page.value(focused) == "made-up":
            break
        await page.press("Tab")
    assert await page.value(focused) == "made-up"
    await page.press("Enter")
    await page.until("document.querySelector('.tabs')")
    assert await page.value("location.hash") == "#/run/made-up"
    await go(page, "#/run/made-up/trajectories", "document.querySelector('#rows tbody tr')")
    await page.value("document.querySelector('[data-filter=text]').focus()")
    for key in "g9.":
        await page.press(key)
    await page.until("document.querySelectorAll('#rows tbody tr').length == 4")
    assert await page.value("document.activeElement.dataset.filter") == "text"


async def test_a_run_under_way_changes_as_it_writes(page: Page, runs: Path) -> None:
    run = RunDir(runs / "made-up")
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    run.summary.unlink()
    run.metrics.write_bytes(b"".join(lines[:half]))
    write_status(run, pid=os.getpid())
    condition = "document.querySelector('.wait.late') && document.querySelector('#learning svg')"
    text = await go(page, "#/run/made-up", condition)
    assert "environments of calculator" in text
    assert "2 min 48 s of 5 min 10 s" in text.replace("\n", " ")
    before = await page.value("document.querySelector('#learning svg').outerHTML.length")
    run.metrics.write_bytes(b"".join(lines))
    await page.until(f"document.querySelector('#learning svg').outerHTML.length > {before}")
    shutil.rmtree(run.path)
    await page.until("document.getElementById('failure')")
    assert "there is no run 'made-up'" in await page.text()
    page.errors.clear()  # the browser logs the status 404


@pytest.mark.extended
async def test_damaged_runs_are_one_line_each(page: Page, runs: Path) -> None:
    (runs / "made-up" / "summary.json").write_bytes(b"{")
    (segment,) = (runs / "made-up" / "trajectories").glob("*.bin")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    text = await go(page, "#/run/made-up/trajectories", "document.querySelector('.note.bad')")
    assert "summary.json: it is damaged and left out" in text
    await page.until("document.querySelectorAll('#rows tbody tr').length == 100")
    text = await page.text()
    assert "000000.bin" in text
    assert "<img" not in text


async def test_text_of_a_run_is_shown_and_never_executed(page: Page, runs: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "other", runs / name)
    await page.until("document.querySelectorAll('tbody tr').length == 3")
    assert name in await page.text()
    assert await page.value("document.querySelectorAll('img').length") == 0
    await page.value(
        "[...document.querySelectorAll('.name')].find((a) => a.textContent[0] == '<').click()"
    )
    await page.until("document.querySelector('.tabs')")
    assert name in await page.text()


async def test_a_wrong_token_is_one_line(runs: Path) -> None:
    async with serving(Runs(runs), token=TOKEN, port=0) as address, browsing() as page:
        await page.open(f"{address}/?token=wrong")
        await page.until("document.body.innerText.includes('the address must have the token')")


async def test_an_empty_directory_says_so(tmp_path: Path) -> None:
    async with serving(Runs(tmp_path), token=TOKEN, port=0) as address, browsing() as page:
        await page.open(f"{address}/?token={TOKEN}")
        await page.until("document.querySelector('.empty')")
        assert "No run has been started in this directory yet" in await page.text()
        assert page.errors == []


@pytest.mark.slow
async def test_16000_trajectories_are_on_the_page_at_once(tmp_path: Path) -> None:
    write_large_run(tmp_path / "large", trajectories=16_000)
    async with serving(Runs(tmp_path), token=TOKEN, port=0) as address, browsing() as page:
        await page.open(f"{address}/?token={TOKEN}")
        await page.until("document.querySelector('.name')")
        whole = "document.getElementById('range') && document.getElementById('range').textContent.includes('of 16,048')"
        await go(page, "#/run/large/trajectories", whole)
        assert page.errors == []
