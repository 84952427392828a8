"""Does a newcomer get from nothing to a real model in the page, without a terminal and without a dead end?

    python benchmarks/newcomer.py [FOLDER]    # a screenshot of each step in FOLDER

`mlx-spec serve demo` starts with an empty home and a local hub, which holds a small pair of the tests.
Chromium opens the page, fetches the pair, loads it, asks with a text file, races, and comes back after a
restart. The page may complain of nothing, but Chromium logs each look for a server that is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from serving import ROOT, serving

sys.path.append(str(ROOT / "tests"))

from support import chromium, hub_stand_in
from support.hub_stand_in import ASSISTANT, E2B
from support.page import READY, ask, press
from support.ports import free_ports

NAME = "gemma-4-e2b"  # of the pair in the catalogue
ROW = f"[...document.querySelectorAll('.models li')].find((one) => one.textContent.startsWith('{NAME}'))"
FREE = "!document.querySelector('#send').hidden"


def press_in_row(tab: chromium.Tab, words: str) -> None:
    """Press a button in the row of the model."""
    tab.value(
        f"[...{ROW}.querySelectorAll('button')].find((one) => one.textContent === '{words}').click()",
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()) / "newcomer")
    folder = options.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    golden = ROOT / "tests" / "golden" / "e2b"
    seconds: dict[str, float] = {}
    (port,) = free_ports(1)
    with (
        tempfile.TemporaryDirectory() as home,
        hub_stand_in.serving({E2B: golden / "target", ASSISTANT: golden / "assistant"}) as hub,
        chromium.browser(chromium.found() or "chromium") as browser,
        browser.tab() as tab,
    ):
        place = Path(home)
        os.environ.update({k: v for k, v in hub.variables(place).items() if k != "PATH"})
        chosen = f"document.querySelector('#model').value === '{NAME}'"
        closed = "!document.querySelector('#models').open && document.querySelector('#away').hidden"
        note = place / "note.txt"
        note.write_text("the cat sat on the mat\n")

        def step(words: str, act: Callable[[], object]) -> None:
            began = time.monotonic()
            act()
            seconds[words] = time.monotonic() - began
            (folder / f"{len(seconds):02}-{words.replace(' ', '-')}.png").write_bytes(tab.picture())

        def look() -> None:
            tab.click("#get-one")
            tab.until(ROW)

        def fetch() -> None:
            press_in_row(tab, "Get")
            tab.until("document.querySelector('.question')")
            press(tab, "Fetch")
            tab.until(f"{ROW}?.textContent.includes('Load')")

        def load() -> None:
            press_in_row(tab, "Load")
            tab.until(chosen)
            tab.press("Escape")

        def attach() -> None:
            box = tab.call("Runtime.evaluate", expression="document.querySelector('#files')")
            tab.call("DOM.setFileInputFiles", files=[str(note)], objectId=box["result"]["objectId"])
            tab.until("document.querySelector('#attached').textContent.includes('token')")
            tab.value("document.querySelector('#max-completion-tokens').value = 48")
            ask(tab, "What sat on the mat?")
            tab.until(FREE)

        def race() -> None:
            press(tab, "Race")
            tab.until("document.querySelectorAll('.race .result').length === 2")
            tab.until(FREE)

        def come_back() -> None:
            tab.open(f"http://127.0.0.1:{port}")
            tab.until(READY)
            tab.until("document.querySelector('.race .result')")

        with serving("--port", str(port)):
            step(
                "open",
                lambda: (
                    tab.open(f"http://127.0.0.1:{port}"),
                    tab.until(READY),
                    tab.until("!document.querySelector('#get-model').hidden"),
                ),
            )
            step("see the catalogue", look)
            step("fetch", fetch)
            step("load", load)
            step("ask with a file", attach)
            step("race", race)
        with serving("--port", str(port)):
            step("come back after a restart", come_back)
            step(
                "load its model again",
                lambda: (tab.click("#load-away"), tab.until(chosen), tab.until(closed)),
            )
        refused = f"net::ERR_CONNECTION_REFUSED http://127.0.0.1:{port}/page/health"
        complaints = [line for line in tab.complaints if not line.endswith(refused)]
    for words, taken in seconds.items():
        print(f"{words:<28}{taken:6.1f} s")
    print(json.dumps({"benchmark": "newcomer", "results": {"seconds": seconds, "complaints": complaints}}))
    if complaints:
        sys.exit(1)


if __name__ == "__main__":
    main()
