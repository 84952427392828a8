"""What the page keeps, in a real browser: between tabs, in a full store, in files, and by conversation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import chromium
from support.chromium import Browser, Tab
from support.endpoint import DEMO, listening
from support.page import BROWSER, ask, log, press, reload, streamed, visit

from mlx_spec.apps.server.settings import Settings

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: install Debian's package chromium")
TITLES = "[...document.querySelectorAll('#chat-list .title')].map((one) => one.textContent)"
FREE = "!document.querySelector('#send').hidden"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser(BROWSER or "") as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as opened:
        yield opened


def shown(tab: Tab) -> list[str]:
    return list(tab.value(TITLES))


def test_tabs_never_undo_changes_of_each_other(browser, tab):
    with listening(streamed("One"), Settings(DEMO)) as url, browser.tab(tab) as other:
        visit(tab, url)
        ask(tab, "A")
        visit(other, url)
        other.until(f"{TITLES}.length === 1")
        other.click("#chat-list .title")
        other.until("document.querySelectorAll('.turn').length === 2")
        press(tab, "Rename")
        tab.write("Named here")
        tab.press("Enter")
        other.until(f"{TITLES}[0] === 'Named here'")
        for one in (tab, other):
            one.value("document.querySelector('#message').focus()")
        ask(other, "B")
        ask(tab, "C")  # a branch beside B, which this tab learns of
        tab.until("document.querySelector('.turn:nth-child(3) .tools span')?.textContent === '2 of 2'")
        tab.call("Page.bringToFront")  # a hidden page asks the server nothing
        reload(tab)
        tab.until(f"{TITLES}[0] === 'Named here'")
        tab.until("document.querySelectorAll('.turn').length === 4")
        other.until(FREE)
        other.write("not sent yet")
        press(tab, "Delete")
        other.until("document.querySelector('#not-kept').textContent.includes('deleted in another tab')")
        assert log(other) == [] and shown(other) == []
        assert other.value("document.querySelector('#message').value") == "not sent yet"
        press(tab, "Undo")
        other.until(f"{TITLES}.length === 1")
        assert tab.complaints == [] and other.complaints == []


def test_a_full_store_says_so_and_loses_no_answer(tab):
    with listening(streamed("One"), Settings(DEMO)) as url:
        visit(tab, url)
        ask(tab, "A")
        tab.value(
            "window.put = IDBObjectStore.prototype.put;"
            "IDBObjectStore.prototype.put = function () {"
            " throw new DOMException('full', 'QuotaExceededError') }"
        )
        ask(tab, "B")
        tab.until(
            "document.querySelector('#not-kept').textContent.includes('storage of this browser is full')"
        )
        assert log(tab) == ["A", "One", "B", "One"] and not tab.value(
            "document.querySelector('#not-kept').hidden"
        )
        tab.value("document.querySelector('#not-kept').hidden = true")
        press(tab, "Rename")
        tab.write("New")
        tab.press("Enter")
        tab.until("!document.querySelector('#not-kept').hidden")
        tab.value("document.querySelector('#message').focus()")
        tab.value("IDBObjectStore.prototype.put = window.put")
        ask(tab, "C")
        tab.until("document.querySelector('#not-kept').hidden")
        reload(tab)
        assert shown(tab) == ["New"], "the next write takes what was not kept"
        assert tab.complaints == []
