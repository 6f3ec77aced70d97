"""Opens pages in headless Chromium, through the protocol of ChromeDriver."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
)
ANSWER_S = 60  # the longest time for one call
STARTS = 10  # of a server that finds its port taken
LOG = {"browser": "ALL", "performance": "ALL"}


@dataclass(frozen=True)
class Visit:
    """What a page did when it was opened."""

    console: list[str] = field(default_factory=list)
    """Warnings and errors."""
    requests: list[str] = field(default_factory=list)
    """Addresses that it asked."""
    failed: list[str] = field(default_factory=list)
    """Requests without an answer, or with an error."""


@contextlib.contextmanager
def started(command: list[str], told: str) -> Iterator[int]:
    """A server as a process of its own, until the end of the block. Gives the port that it tells.

    A server whose port is taken is started again: ChromeDriver takes any port that is free on
    IPv6, and ends if another process holds the port of that number on IPv4.
    """
    for _ in range(STARTS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                assert process.stdout is not None
                said = ""
                for line in process.stdout:
                    if found := re.search(told, line):
                        yield int(found[1])
                        return
                    said += line
            finally:
                process.terminate()
        if "port not available" not in said:
            break
    raise RuntimeError(f"{command[0]} ended without telling its port:\n{said}")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on this host."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with started([*command, "--directory", str(folder)], r"port (\d+)") as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    assert DRIVER is not None
    options = {"binary": CHROMIUM, "args": [*FLAGS.split(), f"--user-data-dir={profile}"]}
    wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": LOG}}
    with started([DRIVER, "--port=0"], r"successfully on port (\d+)") as port:
        address = f"http://127.0.0.1:{port}/session"
        session = call("POST", address, {"capabilities": wanted})["sessionId"]
        try:
            browser = Browser(f"{address}/{session}")
            browser.open("about:blank")  # the first page of a browser has requests of its own
            yield browser
        finally:
            call("DELETE", f"{address}/{session}")


def call(method: str, address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.load(answer)["value"]


@dataclass(frozen=True)
class Browser:
    """One window. ``session``: the address of its session in ChromeDriver."""

    session: str

    def open(self, address: str) -> Visit:
        """Load a page, wait until it is loaded, and say what it did."""
        call("POST", f"{self.session}/url", {"url": address})
        visit = Visit([f"{line['level']}: {line['message']}" for line in self._log("browser")])
        for line in self._log("performance"):
            event = json.loads(line["message"])["message"]
            note(visit, event["method"], event["params"])
        return visit

    def width(self, pixels: int) -> None:
        """Set the width of the window. A window itself cannot be as narrow as a phone."""
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        call("POST", f"{self.session}/goog/cdp/execute", command)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns in the page; waits for a Promise."""
        body = {"script": script, "args": arguments}
        return call("POST", f"{self.session}/execute/sync", body)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = call("POST", f"{self.session}/se/log", {"type": kind})
        return [line for line in lines if kind != "browser" or line["level"] != "INFO"]


def note(visit: Visit, event: str, params: dict[str, Any]) -> None:
    """Add an event of the network to what is known of a visit."""
    if event == "Network.requestWillBeSent":
        visit.requests.append(params["request"]["url"])
    elif event == "Network.responseReceived" and params["response"]["status"] >= 400:
        visit.failed.append(f"{params['response']['status']} {params['response']['url']}")
    elif event == "Network.loadingFailed":
        visit.failed.append(params["errorText"])
