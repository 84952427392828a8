"""Drive a headless Chromium by its DevTools protocol through a pipe: no package, no port.

Used by the tests of the server's page and by pictures.py.
"""

from __future__ import annotations

import base64
import json
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers have no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-startup-window",  # its new tab, which no test sees, takes two seconds of CPU
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-site-isolation-trials",  # every process of pages takes half a second to start
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache,ProactivelySwapBrowsingInstance",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  # seconds
KEYS = {  # code, virtual key, text
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "k": ("KeyK", 75, ""),
    "O": ("KeyO", 79, ""),
    "/": ("Slash", 191, ""),
}
CONTROL, SHIFT = 2, 8

Json = dict[str, Any]


def found() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class _Pipe:
    """Messages of the protocol: JSON, each ended by a zero byte."""

    def __init__(self, sending: IO[bytes], receiving: IO[bytes]) -> None:
        self._sending, self._receiving = sending, receiving
        self._held = b""
        self.count = 0  # of commands

    def send(self, message: Json) -> None:
        self._sending.write(json.dumps(message).encode() + b"\0")
        self._sending.flush()

    def next(self, seconds: float) -> Json | None:
        """Return the next message; None after a timeout. Raises EOFError when the browser ends."""
        end = time.monotonic() + seconds
        while b"\0" not in self._held:
            if not select.select([self._receiving], [], [], max(end - time.monotonic(), 0))[0]:
                return None
            more = self._receiving.read1(1 << 16)  # type: ignore[attr-defined]
            if not more:
                raise EOFError("the browser has ended")
            self._held += more
        message, _, self._held = self._held.partition(b"\0")
        found: Json = json.loads(message)
        return found


@dataclass
class Tab:
    """A page with its messages and requests."""

    pipe: _Pipe
    session: str | None = None
    target: str | None = None
    context: str | None = None  # its storage is shared with the tab `beside` it only
    beside: Tab | None = None
    events: list[Json] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> Json:
        """Send a command and return its result."""
        self.pipe.count += 1
        number = self.pipe.count
        message: Json = {"id": number, "method": method, "params": parameters}
        self.pipe.send(message | ({"sessionId": self.session} if self.session else {}))
        while True:
            answer = self.pipe.next(PATIENCE)
            if answer is None:
                raise TimeoutError(method)
            if "id" not in answer:
                self.events += [answer] if answer.get("sessionId") == self.session else []
            elif answer["id"] == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: Json = answer["result"]
                return result

    def open(self, url: str, width: int = 1280, height: int = 800, scale: float = 1) -> None:
        """Load a page in a window of that many CSS pixels."""
        if self.session is None:
            if self.beside is None:
                self.context = self.call("Target.createBrowserContext")["browserContextId"]
            else:
                self.context = self.beside.context
            blank = self.call("Target.createTarget", url="about:blank", browserContextId=self.context)
            self.target = blank["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.resize(width, height, scale)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        """Leave the page and remove all that it stored; the next one is loaded in the same process."""
        if self.session is not None:
            origin = self.value("sessionStorage.clear(), location.origin")  # the command below leaves that
            self.call("Page.navigate", url="about:blank")
            self.until("location.href === 'about:blank'")
            self.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
            self.events.clear()

    def close(self) -> None:
        """Close the page."""
        target, self.session = self.target, None
        if target is not None:
            self.call("Target.closeTarget", targetId=target)
            if self.beside is None:
                self.call("Target.disposeBrowserContext", browserContextId=self.context)

    def crash(self) -> None:
        """Kill the process of the page; it can be loaded again."""
        self.call("Inspector.enable")
        self.pipe.count += 1
        self.pipe.send({"id": self.pipe.count, "method": "Page.crash", "sessionId": self.session})
        while (event := self.pipe.next(PATIENCE)) and event.get("method") != "Inspector.targetCrashed":
            pass  # the command itself has no answer

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Change the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression, or what it promises, is true."""
        end = time.monotonic() + seconds
        while not self.value(f"(async () => Boolean(await ({expression})))()"):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def write(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        """Press and release a key."""
        code, number, text = KEYS[key]
        about = {
            "key": key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": SHIFT * shift + CONTROL * control,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click on the middle of an element; it must be on top there."""
        where = self.value(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'nearest'}); const box = node.getBoundingClientRect();"
            "const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];"
            "return node.contains(document.elementFromPoint(x, y)) ? [x, y] : null })()"
        )
        if where is None:
            raise RuntimeError(f"{selector} is covered or out of sight")
        mouse = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **mouse)

    def picture(self) -> bytes:
        """Return a PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    @property
    def requested(self) -> list[str]:
        """Return the addresses of all requests so far."""
        sent = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[str]:
        """Return errors and warnings of the page and of the browser."""
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        thrown = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        said = [e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        bad = [
            " ".join(filter(None, (entry["text"], entry.get("url"))))
            for entry in logged
            if entry["level"] in ("error", "warning")
        ]
        bad += [json.dumps(one["exceptionDetails"]) for one in thrown]
        return bad + [json.dumps(one["args"]) for one in said if one["type"] in ("error", "warning")]


@dataclass(frozen=True)
class Browser:
    """A running Chromium."""

    pipe: _Pipe

    @contextmanager
    def tab(self, beside: Tab | None = None) -> Iterator[Tab]:
        """Open a tab, which may share the storage of another one; close it with the context."""
        made = Tab(self.pipe, beside=beside)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def browser(binary: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own; remove both with the context."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wired = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'  # it reads from 3 and writes to 4
        process = subprocess.Popen(
            ["sh", "-c", wired, binary, *FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Browser(_Pipe(process.stdin, process.stdout))
        finally:
            process.stdin.close()  # the browser ends when nobody drives it
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
