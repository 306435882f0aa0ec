"""Chromium, driven by its DevTools protocol; aiohttp, which Lightning needs too, is the client."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_PATIENCE = 60.0


class Tab:
    """A tab of the browser.

    Attributes:
        troubles: errors and warnings of the console, violations of the page's policy, and dialogs.
        requests: addresses that were fetched, or would have been.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.troubles: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; notes the events that come before its answer."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), _PATIENCE)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            await self._note(message.get("method"), message.get("params", {}))

    async def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.troubles.append(json.dumps(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.troubles.append(about["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.troubles.append(f"dialog: {about['message']}")
            number = next(self._numbers)
            accept = {"method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            await self._socket.send_json({"id": number, **accept})
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        for _ in range(int(_PATIENCE / 0.1)):
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {script}; {self.troubles}")

    async def point_at(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def _tab(page: Path) -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            place = Path(profile, "DevToolsActivePort")
            for _ in range(int(_PATIENCE / 0.1)):
                if place.is_file() and (port := place.read_text().partition("\n")[0]):
                    break
                await asyncio.sleep(0.1)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [t for t in await answer.json() if t["type"] == "page"]
                address = tabs[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.call(f"{domain}.enable")
                    await tab.screen(1400, 900)
                    await tab.call("Page.navigate", url=page.as_uri())
                    await tab.until(
                        "document.readyState == 'complete' && location.protocol == 'file:'"
                    )
                    yield tab
        finally:
            browser.kill()
            await browser.wait()


def in_browser(page: Path, visit: Callable[[Tab], Awaitable[None]]) -> Tab:
    """Opens a page, and calls ``visit`` with its tab; returns the tab with what it noted."""

    async def go() -> Tab:
        async with _tab(page) as tab:
            await visit(tab)
        return tab

    return asyncio.run(go())
