"""A newcomer's path in a real browser: from the demo to a real model and an answer about a file."""

from __future__ import annotations

from support.chromium import Tab
from support.endpoint import serving
from support.page import DONE, FREE, ask, choose_files, press, reload, text, visit
from support.served import PLAIN, load_once

ROWS = "[...document.querySelectorAll('#models-disk li')].map((one) => one.textContent)"
NAME = "gemma-4-e2b"


def press_in(tab: Tab, row: str, words: str) -> None:
    """Press a button in the row of a model."""
    tab.value(
        f"[...[...document.querySelectorAll('.models li')].find((one) => one.textContent.startsWith({row!r}))"
        f".querySelectorAll('button')].find((one) => one.textContent === {words!r}).click()"
    )


def test_a_newcomer_comes_from_the_demo_to_a_real_model(hub, tab, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("the cat sat on the mat\n")
    with serving(PLAIN, load_once) as server:
        visit(tab, server.base_url)
        tab.until("!document.querySelector('#get-model').hidden")
        tab.click("#get-one")
        tab.until(f"{ROWS}[0].startsWith('demo')")
        assert "fits with 4k of context" in tab.value(ROWS)[0] and "loaded" in tab.value(ROWS)[0]
        press_in(tab, NAME, "Get")
        tab.until("document.querySelector('.question')?.textContent.startsWith('Fetch ')")
        press(tab, "Fetch")
        tab.until(f"{ROWS}.some((row) => row.startsWith('{NAME}'))")
        press_in(tab, NAME, "Load")
        tab.until(f"document.querySelector('#model').value === '{NAME}'")
        tab.until(f"{ROWS}.find((row) => row.startsWith('{NAME}')).includes('Unload')")
        tab.press("Escape")
        tab.until("!document.querySelector('#models').open")
        choose_files(tab, "#files", note)
        tab.until("document.querySelector('#attached')?.textContent.includes('tokens')")
        tab.value("document.querySelector('#max-completion-tokens').value = 8")
        tab.value("history.replaceState(null, '', '#models')")  # as the menu of macOS opens the page
        ask(tab, "What sat?")
        assert not tab.value("document.querySelector('#models').open"), "an answer opens the models again"
        tab.value("history.replaceState(null, '', './')")
        assert "note.txt" in text(tab, ".said") and text(tab, ".facts").startswith(f"{NAME} · ")
        tab.until(FREE)
        press(tab, "Race")
        tab.until("document.querySelectorAll('.race .result').length === 2")
        tab.until(FREE)
        reload(tab)
        tab.until(f"{DONE} === 1 && document.querySelector('#model').value === '{NAME}'")
        tab.click("#show-models")
        tab.until(f"{ROWS}.some((row) => row.startsWith('{NAME}'))")
        press_in(tab, NAME, "Unload")
        tab.until(f"{ROWS}.find((row) => row.startsWith('{NAME}')).includes('Remove')")
        press_in(tab, NAME, "Remove")
        tab.until("document.querySelector('.question')?.textContent.includes('from this disk?')")
        tab.value("document.querySelector('.question button').click()")
        tab.until(f"!{ROWS}.some((row) => row.startsWith('{NAME}'))")
        assert tab.complaints == []
