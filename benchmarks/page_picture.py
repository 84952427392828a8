"""The picture of the page in the README: a real server on the demo pair, a real browser, three questions.

Run: python benchmarks/page_picture.py [--dark] [FILE]     (needs Chromium; the default is results/page.png)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import chromium
from serving import serving

QUESTIONS = (
    "What does os.path.join do?",
    "and what is functools.lru_cache for?",
    "Write code that reads a JSON file",
)
MORE = ("What does zip do?", "What does itertools.chain do?")  # asked first: they teach the policy
READY = "document.querySelector('#state').dataset.state === 'ready' && document.querySelector('#model').value"
SETTLE = 7.0  # seconds: memory is looked at every two
WIDTH, HEIGHT = 1280, 890  # CSS pixels


def ask(tab: chromium.Tab, questions: tuple[str, ...]) -> None:
    for number, question in enumerate(questions, 1):
        tab.until("!document.querySelector('#send').hidden && document.activeElement.id === 'message'")
        tab.write(question)
        tab.press("Enter")
        tab.until(f"document.querySelectorAll('.turn.assistant[aria-busy=false]').length === {number}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).parent / "results" / "page.png")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    binary = chromium.found()
    if binary is None:
        raise SystemExit("no Chromium here: install it")
    with serving("--port", "8080") as server, chromium.browser(binary) as browser, browser.tab() as tab:
        tab.open(server.url, WIDTH, HEIGHT, scale=1.25)
        tab.prefer("dark" if given.dark else "light")
        tab.until(READY)
        ask(tab, MORE)
        tab.until("!document.querySelector('#restart').hidden")
        tab.click("#restart")
        ask(tab, QUESTIONS)
        time.sleep(SETTLE)
        tab.value("document.activeElement.blur()")
        partial = given.file.with_suffix(".partial")
        partial.write_bytes(tab.picture())
        partial.replace(given.file)
        print(f"{given.file}: {given.file.stat().st_size / 1000:.0f} kB, {tab.complaints or 'no complaints'}")


if __name__ == "__main__":
    main()
