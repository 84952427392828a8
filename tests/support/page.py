"""Use the page of a server in a browser: ask, press buttons, read what is shown."""

from __future__ import annotations

from mlx_spec.apps.server.engine.answers import ChoiceEnded, TextDelta
from mlx_spec.tokenizer.stream import TokenText
from support import chromium
from support.chromium import Tab
from support.endpoint import CLOSED, READ, ROUND, Stub

BROWSER = chromium.found()
QUESTION = "What does os.path.join do?"
READY = "document.querySelector('#state').dataset.state === 'ready' && document.querySelector('#model').value"
DONE = "document.querySelectorAll('.turn.assistant[aria-busy=false]').length"


def visit(tab: Tab, url: object, *size: int) -> None:
    tab.open(str(url), *size)
    tab.until(READY)


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({selector!r}).textContent"))


def ask(tab: Tab, question: str = QUESTION) -> None:
    before = tab.value(DONE)
    tab.until("!document.querySelector('#send').hidden && document.activeElement.id === 'message'")
    tab.write(question)
    tab.press("Enter")
    tab.until(f"{DONE} > {before}")


def streamed(said: str, pause: float = 0.001) -> Stub:
    parts = [said[i : i + 3] for i in range(0, len(said), 3)]
    pieces = (
        TextDelta(0, "answer", part, (), (TokenText(part, ("lookup", None)[i % 2], i % 2),))
        for i, part in enumerate(parts)
    )
    rounds = (event for piece in pieces for event in (piece, ROUND))
    return Stub((READ, *rounds, ChoiceEnded(0, "stop"), CLOSED), pause=pause)


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
