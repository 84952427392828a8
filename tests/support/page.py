"""Use the page of a server in a browser: ask, press buttons, read what is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_spec.apps.server.engine.answers import ChoiceEnded, Event, TextDelta
from mlx_spec.apps.server.engine.metrics import Metrics, Status
from mlx_spec.tokenizer.stream import TokenText
from support import chromium
from support.chromium import Tab
from support.endpoint import ANSWER, CLOSED, READ, ROUND, Step, Stub

BROWSER = chromium.found()
QUESTION = "What does os.path.join do?"
READY = "document.querySelector('#state').dataset.state === 'ready' && document.querySelector('#model').value"
FREE = "!document.querySelector('#send').hidden"  # no answer comes
DONE = "document.querySelectorAll('.turn.assistant[aria-busy=false]').length"


def visit(tab: Tab, url: object, *size: int) -> None:
    tab.open(str(url), *size)
    tab.until(READY)


@dataclass(frozen=True)
class Stage:
    """The page in a tab, before an engine that plays events."""

    stub: Stub
    url: str
    tab: Tab

    def play(self, events: Iterable[Step] = ANSWER, *, images: bool = False) -> Stub:
        """Let the engine be as good as new."""
        self.stub.replay(events)
        self.stub.images, self.stub.state, self.stub.metrics = (
            images,
            Status("ready"),
            Metrics(self.stub.status),
        )
        return self.stub

    def show(self, events: Iterable[Step] = ANSWER, *size: int, images: bool = False) -> Stub:
        stub = self.play(events, images=images)
        visit(self.tab, self.url, *size)
        return stub


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({selector!r}).textContent"))


def texts(tab: Tab, selector: str) -> list[str]:
    return list(tab.value(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)"))


def choose_files(tab: Tab, selector: str, *files: Path) -> None:
    box = tab.call("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
    tab.call("DOM.setFileInputFiles", files=[str(one) for one in files], objectId=box["result"]["objectId"])


def keep_downloads(tab: Tab) -> None:
    """Let `window.files` have the texts of files that the page saves from now on."""
    tab.value(
        "window.files = [];"
        "URL.createObjectURL = (blob) => { blob.text().then((t) => files.push(t)); return 'about:blank#' };"
        "HTMLAnchorElement.prototype.click = () => {}"
    )


def ask(tab: Tab, question: str = QUESTION) -> None:
    before = tab.value(DONE)
    tab.until("!document.querySelector('#send').hidden && document.activeElement.id === 'message'")
    tab.write(question)
    tab.press("Enter")
    tab.until(f"{DONE} > {before}")


def streamed(said: str) -> tuple[Event, ...]:
    parts = [said[i : i + 3] for i in range(0, len(said), 3)]
    pieces = (
        TextDelta(0, "answer", part, (), (TokenText(part, ("lookup", None)[i % 2], i % 2),))
        for i, part in enumerate(parts)
    )
    rounds = (event for piece in pieces for event in (piece, ROUND))
    return (READ, *rounds, ChoiceEnded(0, "stop"), CLOSED)


def log(tab: Tab) -> list[str]:
    return list(tab.value("[...document.querySelectorAll('.said, .turn > .answer')].map((n) => n.innerText)"))


def press(tab: Tab, words: str) -> None:
    """Press the last button with these words, in a menu, too."""
    tab.value(
        f"[...document.querySelectorAll('button')].findLast((one) => one.textContent === {words!r}).click()"
    )


# The page may write a record once more when a write has ended: the third transaction is after both.
WRITTEN = """new Promise((done, fail) => {
  const opening = indexedDB.open("mlx_spec");
  opening.onerror = fail;
  opening.onsuccess = () => {
    const read = (times) => {
      if (!times) { opening.result.close(); return done(); }
      const transaction = opening.result.transaction(["conversations", "exchanges"]);
      transaction.objectStore("exchanges").count();
      transaction.oncomplete = () => read(times - 1);
    };
    read(3);
  };
})"""


def reload(tab: Tab) -> None:
    """Load the page again once its conversations are written: a reload cuts a write off."""
    tab.value(WRITTEN)
    tab.value("window.isOld = true")
    tab.call("Page.reload")
    tab.until(f"!window.isOld && document.querySelector('#state') && {READY}")
