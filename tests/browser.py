"""Pages in headless Chromium, driven by its DevTools protocol over a pipe: what a reader sees, measured."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium is installed ({', '.join(NAMES)})")

ANSWER_SECONDS = 120  # a page whose renderer has died answers never
AUDIT = (Path(__file__).with_name("audit.js")).read_text(encoding="utf-8")
KEYS = {"Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


@dataclass
class Tab:
    """One page. troubles: what its console says, and its exceptions. requests: what it asked for besides itself."""

    browser: Browser
    session: str
    target: str
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loads: int = 0
    page: str = ""

    def send(self, method: str, **more: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **more)

    def heard(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert")
        ):
            self.troubles.append(json.dumps(told)[:500])
        elif method == "Log.entryAdded":
            self.troubles.append(f"{told['entry']['level']}: {told['entry']['text']} {told['entry'].get('url', '')}"[:500])
        elif method == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if url.partition("#")[0] != self.page and not url.startswith("data:"):
                self.requests.append(url[:200])

    def open(self, page: Path | str, *, seconds: float = 60) -> None:
        """page: a file, or an address. Returns when it is loaded."""
        self.page = page.resolve().as_uri() if isinstance(page, Path) else page
        loads = self.loads
        self.send("Page.navigate", url=self.page)
        self.wait_for_load(loads, seconds)

    def wait_for_load(self, before: int, seconds: float = 60) -> None:
        """before: how often it was loaded so far."""
        until = time.monotonic() + seconds
        while self.loads <= before:
            assert time.monotonic() < until, "the page was not loaded"
            self.browser.send("Browser.getVersion")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """scheme: "light" or "dark"."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def keep(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot, of the whole page or of what is in the window."""
        made = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)


class Browser:
    """A Chromium of its own, in a `with` block."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # High numbers: 3 and 4 are what Chromium reads and writes, and may be taken here.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 50) for end in (theirs_in, theirs_out)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder.name}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=place,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._to, self._from = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb", buffering=0)
        self._rest, self._number = b"", 0
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._to.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._from.close()
        self.folder.cleanup()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what comes before it is handed to the tabs."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        self._to.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told)
                return told["result"]
            if tab := self._tabs.get(told.get("sessionId", "")):
                tab.heard(told["method"], told["params"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], ANSWER_SECONDS)[0], "Chromium does not answer"
            read = self._from.read(2**20)
            assert read, "Chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def tab(self) -> Tab:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        return tab
