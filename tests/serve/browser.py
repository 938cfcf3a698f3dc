"""A headless Chromium, driven through its DevTools protocol over a pipe."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30
"""Seconds after which an answer that has not come will not come."""
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --remote-debugging-pipe"
).split()
_ONLY_THIS_MACHINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_START = 'in=$1 out=$2; shift 2; exec "$@" 3</proc/self/fd/$in 4>/proc/self/fd/$out'
"""Chromium reads what it is told from descriptor 3, and answers on 4."""


def find() -> str | None:
    """Chromium's command, if it is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running browser; close it. profile: a directory of its own."""

    def __init__(self, command: str, profile: Path) -> None:
        its_input, self._output = os.pipe()
        self._input, its_output = os.pipe()
        given = [command, *_FLAGS, _ONLY_THIS_MACHINE, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["sh", "-c", _START, "sh", str(its_input), str(its_output), *given],
            pass_fds=(its_input, its_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result. Events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        os.write(
            self._output, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        )
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            self.events.append(said)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._input], [], [], PATIENCE)[0], f"no word from Chromium in {PATIENCE} s"
            got = os.read(self._input, 2**16)
            assert got, f"Chromium has ended, with {self._process.wait()}"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, haste: float = 1, **view: Any) -> "Tab":
        """Show a page in a new tab. haste: how much shorter its timers are than it believes.

        view: of Emulation.setDeviceMetricsOverride.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        if view:
            tab.call("Emulation.setDeviceMetricsOverride", **view)
        hurry = f"const wait = setTimeout; setTimeout = (call, ms) => wait(call, ms / {haste});"
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=f"{{{hurry}}}")
        tab.call("Page.navigate", url=url)
        return tab

    def close(self) -> None:
        """End it."""
        os.close(self._output)
        os.close(self._input)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Tab:
    """A page that is shown."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript comes to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, element_id: str) -> str:
        """What an element says; nothing before it is there."""
        return self.value(f"document.getElementById({json.dumps(element_id)})?.innerText ?? ''")

    def wait_for(self, element_id: str, right: str | Callable[[str], bool]) -> str:
        """An element's text as soon as it is right."""
        end = time.monotonic() + PATIENCE
        while True:
            text = self.text(element_id)
            if right(text) if callable(right) else text == right:
                return text
            assert time.monotonic() < end, f"{element_id} says {text!r}"
            time.sleep(0.05)

    def said(self, method: str) -> list[dict[str, Any]]:
        """Parameters of this tab's events of one kind, so far."""
        self.value("0")
        events = self._browser.events
        mine = [event for event in events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] == method]

    @property
    def requested(self) -> list[str]:
        """URLs that the page asked for, data of its own left out."""
        urls = [event["request"]["url"] for event in self.said("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]

    @property
    def complaints(self) -> list[Any]:
        """Exceptions, and whatever the console calls an error or a warning."""
        logged = [event["entry"] for event in self.said("Log.entryAdded")]
        printed = self.said("Runtime.consoleAPICalled")
        return [
            *self.said("Runtime.exceptionThrown"),
            *[entry for entry in logged if entry["level"] in ("error", "warning")],
            *[each for each in printed if each["type"] in ("error", "warning", "assert")],
        ]
