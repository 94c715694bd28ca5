"""A headless Chromium, driven over its debugging protocol."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0
"""Maximum seconds for the browser to start."""

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # it runs as root, and opens only pages of ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def browser_path() -> str | None:
    """The path of a Chromium here; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    browser_path() is None, reason="there is no Chromium on this machine"
)
"""The mark of tests that need a browser."""


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        """Exceptions and errors of its scripts, and failed requests."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads(await self._socket.receive_str(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(
                    f"{parameters['entry']['text']} {parameters['entry'].get('url')}"
                )

    async def value(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)

    async def until(self, condition: str) -> None:
        """Wait until an expression is true on the page."""
        looked = (
            "new Promise((done) => { const look = () => { let met = false; try { met = "
            f"Boolean({condition}) }} catch {{ }} if (met) done(true); else setTimeout(look, 20); }};"
            f" look(); setTimeout(() => done(false), 60000); }})"
        )
        while True:
            try:
                met = await self.value(looked)
            except AssertionError:  # the page was left while it waited
                continue
            text = await self.value("document.body.innerText")
            assert met, f"not met: {condition}\n{text}"
            return

    async def text(self) -> str:
        """Return the visible text of the page."""
        text: str = await self.value("document.body.innerText")
        return text

    async def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        code = codes.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        keys = {"key": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **keys)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **keys)


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """Start a browser with one page, and end it with the context."""
    path = browser_path()
    assert path is not None, "there is no Chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "--window-size=1280,900",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"HOME": profile, "TMPDIR": profile},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_S):
                port = await _port(process)
            async with aiohttp.ClientSession() as session, _page(session, port) as page:
                yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            # its children have the pipe as well
            assert process.stderr is not None, "it is a pipe"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await process.wait()


async def _port(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None, "it is a pipe"
    while line := (await process.stderr.readline()).decode(errors="replace"):
        if "DevTools listening on ws://" in line:
            return line.split("ws://", 1)[1].split("/", 1)[0]
    raise AssertionError("Chromium ended before it listened")


@contextlib.asynccontextmanager
async def _page(session: aiohttp.ClientSession, port: str) -> AsyncIterator[Page]:
    async with session.get(f"http://{port}/json/list") as answer:
        target = next(each for each in await answer.json() if each["type"] == "page")
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
        page = Page(socket)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        yield page
