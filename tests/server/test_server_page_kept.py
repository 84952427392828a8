"""What the page keeps, in a real browser: between tabs, in a full store, in files, and by conversation."""

from __future__ import annotations

import json

from support.chromium import Tab
from support.page import (
    FREE,
    ask,
    choose_files,
    keep_downloads,
    log,
    press,
    reload,
    streamed,
    text,
    visit,
)

TITLES = "[...document.querySelectorAll('#chat-list .title')].map((one) => one.textContent)"


def shown(tab: Tab) -> list[str]:
    return list(tab.value(TITLES))


def test_tabs_never_undo_changes_of_each_other(browser, stage, tab):
    stage.show(streamed("One"))
    with browser.tab(tab) as other:
        ask(tab, "A")
        visit(other, stage.url)
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


def test_a_full_store_says_so_and_loses_no_answer(stage, tab):
    stage.show(streamed("One"))
    ask(tab, "A")
    tab.value(
        "window.put = IDBObjectStore.prototype.put;"
        "IDBObjectStore.prototype.put = function () {"
        " throw new DOMException('full', 'QuotaExceededError') }"
    )
    ask(tab, "B")
    tab.until("document.querySelector('#not-kept').textContent.includes('storage of this browser is full')")
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


PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>endobj
4 0 obj<</Length 44>>stream
BT /F1 18 Tf 20 100 Td (Words of a page) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
"""


def fill(tab: Tab, selector: str, value: str) -> None:
    tab.value(
        f"(() => {{ const box = document.querySelector({selector!r}); box.value = {value!r};"
        "box.dispatchEvent(new Event('input', {bubbles: true}));"
        "box.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )


def test_a_conversation_owns_its_settings_and_comes_back_from_an_export(stage, tab, tmp_path):
    stub = stage.show()
    fill(tab, "#system", "You are a pirate.")
    fill(tab, "#temperature", "0.5")
    fill(tab, "#preset-name", "pirate")
    tab.value("document.querySelector('#keep-preset').click()")
    ask(tab, "A")
    assert [one["content"] for one in stub.requests[-1].prompt.messages] == ["You are a pirate.", "A"]
    tab.value("document.querySelector('#new-chat').click()")
    assert tab.value("document.querySelector('#system').value") == "", "a prompt stays in its conversation"
    ask(tab, "B")
    assert [one["content"] for one in stub.requests[-1].prompt.messages] == ["B"]
    tab.value("document.querySelectorAll('#chat-list .title')[1].click()")
    tab.until("document.querySelector('#system').value === 'You are a pirate.'")
    keep_downloads(tab)
    press(tab, "Export JSON")  # of the last one
    press(tab, "Export Markdown")
    tab.until("window.files.length === 2")
    exported, written = tab.value("window.files")
    assert written.startswith("# A\n\n## System\n\nYou are a pirate.\n\n## You\n\nA\n\n")
    found = json.loads(exported)
    assert found["messages"][0] == {"role": "system", "content": "You are a pirate."}
    assert found["settings"]["temperature"] == "0.5"
    found["title"], found["exchanges"][0]["images"] = "Back", ["https://evil.example/x.png"]
    (tmp_path / "a.json").write_text(json.dumps(found))
    (tmp_path / "b.json").write_text('{"exchanges": 3}')
    choose_files(tab, "#import-files", tmp_path / "a.json", tmp_path / "b.json")
    tab.until("document.querySelector('#not-kept').textContent.includes('b.json is not a conversation')")
    assert shown(tab) == ["Back", "B", "A"] and log(tab) == ["A", "Hello you"]
    assert tab.value("document.querySelector('#system').value") == "You are a pirate."
    tab.value("document.querySelector('#new-chat').click()")
    fill(tab, "#preset", "pirate")
    assert tab.value("document.querySelector('#temperature').value") == "0.5"
    assert tab.value("document.querySelector('#system').value") == "You are a pirate."
    reload(tab)
    assert shown(tab) == ["Back", "B", "A"]
    assert tab.complaints == [] and all(one.startswith(stage.url) for one in tab.requested)


def test_files_and_long_pastes_are_attached_and_counted(stage, tab, tmp_path):
    (tmp_path / "code.py").write_text("print('```')\n")
    (tmp_path / "page.pdf").write_bytes(PDF)
    (tmp_path / "other.bin").write_bytes(b"\xff\x00")
    names = ("code.py", "page.pdf", "other.bin")
    stub = stage.show()
    choose_files(tab, "#files", *(tmp_path / name for name in names))
    tab.until("document.querySelector('#file-problem').textContent.startsWith('other.bin is not text')")
    tab.value(
        "(() => { const data = new DataTransfer(); data.items.add('long '.repeat(1000), 'text/plain');"
        "document.querySelector('#message').dispatchEvent(new ClipboardEvent('paste',"
        "{clipboardData: data, bubbles: true, cancelable: true})) })()"
    )
    chips = "[...document.querySelectorAll('#attached .chip')].map((one) => one.textContent)"
    counted = ["code.py7 tokens", "page.pdf7 tokens", "pasted.txt7 tokens"]
    tab.until(f"JSON.stringify({chips}) === {json.dumps(json.dumps(counted, separators=(',', ':')))}")
    tab.until("document.querySelector('#context-words').textContent === '7 of 64 tokens'")
    ask(tab, "What?")
    sent = stub.requests[-1].prompt.messages[-1]["content"]
    assert sent.startswith("code.py\n````\nprint('```')\n````\n\npage.pdf\n```\nWords of a page\n```\n\n")
    assert sent.endswith("\n\nWhat?") and "long long" in sent
    reload(tab)
    assert "page.pdf" in text(tab, ".said") and "long long" not in text(tab, ".said")
    ask(tab, "More?")
    assert stub.requests[-1].prompt.messages[0]["content"] == sent
    assert tab.complaints == [] and all(one.startswith(stage.url) for one in tab.requested)


LONG = """(async () => {
  const { listConversations, newId } = await import('./page/store.js');
  await listConversations();
  const database = await new Promise((done) => {
    indexedDB.open('mlx_spec').onsuccess = (event) => done(event.target.result);
  });
  const writing = database.transaction(['conversations', 'exchanges'], 'readwrite');
  const [conversations, exchanges] = ['conversations', 'exchanges'].map((name) => writing.objectStore(name));
  const conversation = newId();
  const told = { id: conversation, title: 'Long', leaf: null, updated: 1, deleted: null, settings: null };
  conversations.put(told);
  let parent = null;
  for (let i = 0; i < 2500; i += 1) {
    const id = newId();
    exchanges.put({ id, conversation, parent, question: `question ${i}`, images: [],
      answer: { text: `answer **${i}** is here`, runs: [[0, null, 0]] },
      thinking: null, facts: [], problem: null });
    parent = id;
  }
  await new Promise((done) => { writing.oncomplete = done; });
  database.close();
})()"""


def test_keys_search_and_five_thousand_messages(stage, tab):
    stage.show()
    tab.value(LONG)
    reload(tab)
    tab.until(f"{TITLES}.length === 1")
    tab.press("k", control=True)
    tab.until("document.querySelector('dialog.palette').open")
    tab.write("answer **1234**")
    tab.until("document.querySelector('#palette-list li')?.textContent.includes('1234')")
    tab.call("Performance.enable")
    began = tab.call("Performance.getMetrics")
    tab.press("Enter")
    tab.until("document.querySelector('.turn:last-child')?.textContent.includes('2499')")
    ended = tab.call("Performance.getMetrics")
    seconds = [
        next(one["value"] for one in found["metrics"] if one["name"] == "TaskDuration")
        for found in (began, ended)
    ]
    assert seconds[1] - seconds[0] < 4, "14 s of drawing, once"
    assert tab.value("document.querySelectorAll('.turn').length") == 100
    tab.value("document.querySelector('#log').scrollTop = 0")
    tab.until("document.querySelectorAll('.turn').length === 200")
    assert text(tab, ".turn .said") == "question 2400"
    tab.value("document.querySelector('#message').focus()")
    tab.write("And now?")
    tab.press("Enter")
    tab.until("document.querySelector('.turn:last-child .foot')")
    assert "Thought for" in text(tab, ".turn:last-child .thoughts summary")
    assert not tab.value("document.querySelector('.turn:last-child .thoughts').open")
    tab.until(FREE)
    tab.press("ArrowUp")
    assert tab.value("document.activeElement.value") == "And now?"
    tab.press("Escape")
    tab.value("document.activeElement.blur()")
    tab.press("/")
    assert tab.value("document.activeElement.id") == "message"
    tab.press("O", control=True, shift=True)
    tab.until("document.querySelectorAll('.turn').length === 0")
    assert tab.complaints == []
