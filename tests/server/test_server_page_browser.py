"""The page in a real browser, before a real server on the demo pair, and before recorded events."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from support.chromium import Tab
from support.endpoint import ANSWER, CHAT, CLOSED, DEMO, READ, ROUND, SHUTDOWN, Stub, listening, serving
from support.page import (
    DONE,
    FREE,
    QUESTION,
    READY,
    ask,
    choose_files,
    keep_downloads,
    log,
    press,
    reload,
    streamed,
    text,
    texts,
    visit,
)
from support.waiting import wait_until

from mlx_spec.apps.server.engine.answers import ChoiceEnded, PromptProgress, PromptRead, TextDelta
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.tokenizer.stream import TokenText
from mlx_spec.vision.pictures import read_picture

TINY = str(Path(__file__).parents[1] / "golden" / "e2b" / "target")
MODELS = {
    "demo": PairSpec("demo", num_draft_tokens=4),
    "tiny": PairSpec(TINY, num_draft_tokens=4),
    "alone": PairSpec(TINY, "none"),
}


ENDS = {"1": -100, "15": -100}  # the demo's end tokens; without them it does not stop
KEPT = """import('./page/store.js').then(async ({listConversations, listExchanges}) =>
  listExchanges((await listConversations())[0].id))"""
RECORD = """window.lengths = []; new MutationObserver(() => {
  const length = document.querySelector('.turn.assistant:last-child .answer')?.textContent.length ?? 0;
  if (length !== window.lengths.at(-1)) window.lengths.push(length);
}).observe(document.querySelector('#log'), {childList: true, subtree: true, characterData: true})"""
WATCH = """window.seen = []; new MutationObserver(() => {
  const state = document.querySelector('#state');
  window.seen.push([state.dataset.state, state.textContent, document.querySelector('.phase')?.textContent,
    document.querySelector('progress')?.value, document.querySelector('#speed').textContent]);
}).observe(document.body, {childList: true, subtree: true, characterData: true, attributes: true})"""
ENDLESS = f"""window.fetched ??= window.fetch; window.fetch = (path, options) => {{
  if (options?.body) options.body = JSON.stringify(
    {{...JSON.parse(options.body), logit_bias: {ENDS}, max_completion_tokens: 2000}});
  return window.fetched(path, options);
}}"""


@pytest.fixture(scope="module")
def server() -> Iterator[httpx2.Client]:
    """A client of a server that drafts in every round, whatever it costs."""
    with serving(Settings(tuple(ServedModel(name, spec) for name, spec in MODELS.items()))) as client:
        yield client


def test_an_answer_streams_coloured_and_moves_the_figures(server, tab):
    visit(tab, server.base_url)
    assert text(tab, "#endpoint") == str(server.base_url.join("/v1"))
    assert tab.value("document.querySelector('#model').value") == "demo"
    tab.value(RECORD)
    ask(tab)
    tab.until("Number(document.querySelector('#speed').textContent) > 0")
    assert text(tab, "#speed-note") == "this answer" and text(tab, "#per-round") != "–"
    plain = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    said = server.post(CHAT, json=plain).json()["choices"][0]["message"]["content"]
    assert text(tab, ".turn.assistant .answer") == said
    lengths = tab.value("window.lengths.filter((n) => n)")
    assert lengths and lengths == sorted(lengths)
    drafted = texts(tab, ".answer .run.drafter")
    own = tab.value("document.querySelectorAll('.answer .run.target').length")
    assert drafted and own and sum(map(len, drafted)) < len(said)
    assert tab.value("document.querySelector('.run.k1').title") == "drafter, token 1 of the draft"
    for chart in ("speed-chart", "length-chart", "acceptance"):
        tab.until(f"document.querySelector('#{chart} svg[role=img]')")
    assert text(tab, "#acceptance .aside") == "drafter"
    drawn = "document.querySelector('#speed-chart svg').outerHTML"
    first = tab.value(drawn)
    ask(tab, "and what is functools.lru_cache for?")
    tab.until("document.querySelectorAll('.turn.assistant .facts').length === 2")
    assert tab.value(drawn) != first
    assert "reused" in text(tab, ".turn:last-child .facts"), "a second turn goes on from the first"
    assert tab.complaints == []
    assert all(url.startswith(str(server.base_url)) for url in tab.requested)
    server.post(CHAT, json={"messages": [{"role": "user", "content": QUESTION}]})
    tab.until("document.querySelector('#speed-note').textContent === \"another client's answer\"")
    assert "MB" in text(tab, "#memory-note")
    assert text(tab, "#reason").startswith("Drafts: as many tokens as you asked for")


def cancelled(server: httpx2.Client) -> float:
    """Return how many answers of the demo have been stopped."""
    found = server.get("/metrics.json").json()["models"].get("demo", {})
    return float(found.get("cancelled_total", 0))


def test_stop_ends_the_answer_and_the_next_one_works(server, tab):
    visit(tab, server.base_url)
    before = cancelled(server)
    tab.value(ENDLESS)
    for how in ("click", "key"):
        tab.until("document.activeElement.id === 'message'")
        tab.write(QUESTION)
        tab.press("Enter")
        tab.until("document.querySelector('.turn:last-child .answer')?.textContent.length > 60")
        assert tab.value("document.querySelector('.turn:last-child').ariaBusy") == "true"
        tab.click("#stop") if how == "click" else tab.press("Escape")
        tab.until("document.querySelector('.turn:last-child .facts')?.textContent.includes('stopped')")
        assert text(tab, "#announce") == "Stopped"
        facts = text(tab, ".turn:last-child .facts")
        assert "tokens/s" in facts and "drafted" in facts, "a stopped answer keeps its figures"
    wait_until(lambda: cancelled(server) == before + 2)  # the server has to stop, too
    tab.value("window.fetch = window.fetched")
    tab.click("#new-chat")
    assert tab.value("document.querySelectorAll('.turn').length") == 0
    ask(tab)
    assert "os.path.join" in text(tab, ".turn.assistant .answer")


def test_shift_enter_starts_a_line_and_settings_reach_the_server(server, tab):
    visit(tab, server.base_url)
    tab.click("#settings summary")
    tab.value("document.querySelector('#max-completion-tokens').value = 3")
    tab.value("document.querySelector('#settings').dispatchEvent(new Event('input'))")
    assert "temperature 0 · up to 3 tokens" in text(tab, "#settings-summary")
    tab.value("document.querySelector('#message').focus()")
    tab.write("What does zip")
    tab.press("Enter", shift=True)
    tab.write("do?")
    assert tab.value("document.querySelector('#message').value") == "What does zip\ndo?"
    tab.press("Enter")
    tab.until("document.querySelector('.facts')?.textContent.includes('cut at the longest answer')")
    facts = text(tab, ".facts")
    assert facts.startswith("demo · ") and re.search("of 3 tokens drafted|as fast as plain · 3 tokens", facts)
    whole = {
        "model": "demo",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What does zip\ndo?"}],
    }
    said = server.post(CHAT, json=whole).json()["choices"][0]["message"]["content"]
    assert text(tab, ".turn > .answer") != said
    tab.value("document.querySelector('#max-completion-tokens').value = ''")
    tab.until(FREE)
    press(tab, "Continue")
    tab.until("document.querySelector('.turn .foot') && !document.querySelector('#send').hidden")
    assert text(tab, ".turn > .answer") == said, "a cut answer goes on as if it had not been cut"
    tab.click("#highlight")
    paint = "getComputedStyle(document.querySelector('.answer .run')).backgroundImage"
    assert tab.value(paint) == "none", "no mark of any kind when nobody wants them"


def test_a_key_is_asked_for_and_kept_in_memory(tab):
    with listening(Stub(ANSWER), Settings(DEMO, api_key="secret")) as url:
        tab.open(url)
        tab.until("!document.querySelector('#key-form').hidden")
        tab.click("#key")
        tab.write("wrong")
        tab.press("Enter")
        tab.until("document.querySelector('#key-problem').textContent.includes('wrong')")
        tab.value("document.querySelector('#key').value = 'secret'")
        tab.press("Enter")
        tab.until("document.querySelector('#key-form').hidden && document.querySelector('#model').value")
        assert tab.value("document.querySelector('#key').value") == ""
        ask(tab)
        kept = tab.value(f"(async () => JSON.stringify([localStorage, sessionStorage, await {KEPT}]))()")
        kept += tab.value("document.cookie")
        assert "Hello you" in kept and "secret" not in kept


HOSTILE = (
    '<img src=x onerror="window.hit=1"> **bold and `code`** *so*\n\n'
    "- one\n- two\n\n```html\n<b>&amp;</b>\n```\nend\n\n"
    "````md\n```\nfour\n```\n````\n\n~~~\ntildes\n~~~\n\n```so``` ends no text\n\n```python\n{}\n```\n"
)
PROGRAM = "if x:\n    return '<b>&amp; # \\'' + \"open  # a 'comment' of 12\nclass_1 = 0x1F"


def test_text_is_shown_and_never_run(stage, tab):
    sources = (None, "gemma4_assistant", "lookup", "grammar", "prediction")
    said = HOSTILE.replace("{}", PROGRAM)
    parts = [said[i : i + 3] for i in range(0, len(said), 3)]
    pieces = (
        TextDelta(0, "answer", part, (), (TokenText(part, sources[i % 5], i % 5),))
        for i, part in enumerate(parts)
    )
    rounds = (event for piece in pieces for event in (piece, ROUND))
    stage.show((PromptRead(5, 2), *rounds, ChoiceEnded(0, "stop"), CLOSED))
    ask(tab)
    assert tab.value("window.hit === undefined && !document.querySelector('.answer img')")
    assert '<img src=x onerror="window.hit=1"> bold and code so' in text(tab, ".answer p")
    assert text(tab, ".answer strong") == "bold and code" and text(tab, ".answer em") == "so"
    assert text(tab, ".answer pre code") == "<b>&amp;</b>" and text(tab, ".answer .language") == "html"
    codes = texts(tab, ".answer code")
    assert codes == ["code", "<b>&amp;</b>", "```\nfour\n```", "tildes", "so", PROGRAM]
    items = texts(tab, ".answer li")
    assert items == ["one", "two"]
    for name in ("target", "drafter", "lookup", "grammar", "prediction"):
        assert tab.value(f"document.querySelectorAll('.answer .run.{name}').length"), name
    for words in ("drafter, 1st", "copied from the text", "forced by the format", "from the prediction"):
        assert words in text(tab, "#legend")
    assert "gemma4_assistant" not in text(tab, "#legend"), "families do not matter to users"
    marks = "[...document.querySelectorAll('.code:last-of-type .KIND')].map((n) => n.innerText).join('')"
    coloured = {"keyword": "ifreturn", "string": "'<b>&amp; # \\''", "number": "0x1F"}
    for kind, expected in {**coloured, "comment": "# a 'comment' of 12"}.items():
        assert tab.value(marks.replace("KIND", kind)) == expected
    assert text(tab, ".code:last-of-type code") == PROGRAM
    tab.value("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    for button, expected in ((".code:last-of-type button", PROGRAM), (".actions button", said)):
        tab.click(button)
        assert tab.value("window.copied") == expected


# --- what happens before an answer, and after it


def test_loading_and_reading_are_shown(stage, tab):
    stub = stage.show()
    assert text(tab, "#speed") == "–" and "not measured yet" in text(tab, "#speed-note")
    ask(tab)
    tab.until("document.querySelector('#speed').textContent === '20.0'")
    tab.value(WATCH)
    stub.state = replace(stub.state, loading="smol")
    loads, begins, reads, streams = (threading.Event() for _ in range(4))
    parts = (PromptProgress(1512, 0, 0), begins, PromptProgress(1512, 0, 1024), reads)
    stub.events = (loads, *parts, *ANSWER[:3], ROUND, streams, *ANSWER[3:])
    tab.write("Again")
    tab.press("Enter")
    tab.until("document.querySelector('.phase')?.textContent === 'loading smol …'")
    stub.state = replace(stub.state, loading=None)
    loads.set()
    for share, waits in ((0, begins), (1024 / 1511, reads)):
        tab.until(f"document.querySelector('progress')?.value === {share}")
        waits.set()
    tab.until("document.querySelector('.turn:last-child > .answer')?.textContent === 'Hel'")  # in steps
    streams.set()
    tab.until(f"{DONE} === 2 && !document.querySelector('.phase')")
    tab.until(READY)
    seen = [tuple(one) for one in tab.value("window.seen")]
    loading, reading = "loading smol …", "reading 1,512 tokens"
    assert ("wait", "loading smol", loading, None, "–") in seen, "the speed is that of another answer"
    assert {one[3] for one in seen if one[2] == reading} >= {0, 1024 / 1511}
    assert not any(one[0] == "ready" for one in seen if one[2])


RACE = "[...document.querySelectorAll('.actions button')].find((n) => n.textContent === 'Race').click()"


def test_a_race_runs_below_its_answer(server, tab):
    visit(tab, server.base_url)
    ask(tab)
    tab.until(FREE)
    said = text(tab, ".turn > .answer")
    tab.value(
        "window.bodies = []; window.sent = window.fetch; window.fetch = (path, options) => {"
        "if (path === 'race') window.bodies.push(JSON.parse(options.body));"
        "return window.sent(path, options) }"
    )
    tab.value(RACE)
    tab.until("document.querySelectorAll('.race .result').length === 2")
    tails = texts(tab, ".racer .tail")
    assert tails == [said] * 2
    assert tab.value("[...document.querySelectorAll('.pace')].every((n) => n.style.width !== '')")
    assert text(tab, ".race .result:last-child") == "every token the same ✓"
    assert text(tab, "#announce").endswith("every token the same ✓")
    (body,) = tab.value("window.bodies")
    assert (
        body["messages"] == [{"role": "user", "content": QUESTION}] and body["max_completion_tokens"] == 256
    )
    tab.value("document.querySelector('#temperature').value = 0.7")
    tab.until(FREE)
    tab.value("document.querySelector('#max-completion-tokens').value = 20")
    tab.value(RACE)
    tab.until("window.bodies.length === 2 && document.querySelectorAll('.race .result').length === 2")
    assert (
        tab.value("window.bodies[1].seed") == 0 and tab.value("window.bodies[1].max_completion_tokens") == 20
    )
    tab.until(FREE)
    lines = "[...document.querySelectorAll('.race .result')].map((n) => n.textContent)"
    result = tab.value(lines)
    reload(tab)
    assert tab.value(lines)[-2:] == result, "how it ended is kept"
    tab.value(ENDLESS.replace("2000", "1500"))
    before = cancelled(server)
    tab.value(RACE)
    tab.until("document.querySelectorAll('.racer').length === 2")
    tab.press("Escape")
    tab.until("document.querySelector('.race .result')?.textContent === 'The race was stopped.'")
    wait_until(lambda: cancelled(server) == before + 1)
    assert tab.complaints == []


def choose(tab: Tab, model: str) -> None:
    tab.value(
        f"(() => {{ const box = document.querySelector('#model'); box.value = '{model}';"
        "box.dispatchEvent(new Event('change')) })()"
    )


def test_figures_are_those_of_the_chosen_model(server, tab):
    visit(tab, server.base_url)
    ask(tab)
    choose(tab, "tiny")
    tab.until("document.querySelector('#reason').textContent === 'tiny has not answered yet.'")
    assert text(tab, "#speed") == "–" and not tab.value("document.querySelector('#acceptance svg')")
    tab.value("document.querySelector('#max-completion-tokens').value = 12")
    ask(tab)
    assert text(tab, ".turn:last-child .facts").startswith("tiny · as fast as plain · 12 tokens")
    assert "drafter" not in text(tab, "#acceptance")
    choose(tab, "demo")
    tab.until("document.querySelector('#acceptance').textContent.includes('drafter')")
    assert f" · {text(tab, '#speed')} tokens/s · " in text(tab, ".facts")


def test_a_race_that_cannot_be_says_why(server, tab):
    visit(tab, server.base_url)
    choose(tab, "alone")
    tab.value("document.querySelector('#max-completion-tokens').value = 4")
    ask(tab)
    tab.until(FREE)
    tab.value(RACE)
    tab.until("document.querySelector('.race .result')")
    assert "nothing drafts with this model" in text(tab, ".race")
    assert not tab.value("document.querySelector('.racer')")


def test_a_failure_can_be_retried_and_a_reload_loses_nothing(stage, tab):
    stub = stage.show((READ, TextDelta(0, "answer", "Hal"), ROUND, SHUTDOWN), 390, 844)
    ask(tab)
    assert text(tab, ".turn .problem") == "shutting down" and text(tab, ".turn > .answer") == "Hal"
    stub.events = ANSWER
    tab.click(".actions .again")  # Retry
    tab.until("document.querySelector('.turn > .answer').textContent.includes('Hello you')")
    tab.until(FREE)
    assert not tab.value("document.querySelector('.turn .problem')")
    assert tab.value("document.documentElement.scrollWidth") == 390
    tab.click("#show-figures")
    before = tab.value("document.querySelector('#log').innerHTML")
    assert "lookup" in before and "Hm." in before
    reload(tab)
    assert tab.value("document.querySelector('#log').innerHTML") == before
    assert tab.value("!document.querySelector('#figures').hidden"), "a phone shows them on demand"
    ask(tab, "and?")
    sent = stub.requests[-1].prompt.messages
    assert [one["content"] for one in sent] == [QUESTION, "Hello you", "and?"]
    tab.click("#show-chats")
    tab.click("#new-chat")
    reload(tab)
    assert tab.value("document.querySelectorAll('.turn').length") == 0


# --- what is drawn


MARKDOWN = r"""# Top
## Next
1. first
   - nested
     1. deep
2. second ~~struck~~ [good](https://a.example/b "t") [bad](javascript:alert(1)) https://c.example main.py

| tea | 12 |
|:--|--:|
| **hot** | \* &amp; |

> said \(a^2\)
***
$$
\frac{1}{2}
+ x
$$
It costs $5 or $6, ![not fetched](https://d.example/x.png)

def bare(x):
    return x
"""
OUTLINE = """(() => { const walk = (node) => [...node.children].flatMap((one) =>
  one.matches('span, br, .code-head, button') && !one.matches('.formula') ? walk(one)
  : [one.matches('.formula') ? 'math:' + one.querySelector('math').getAttribute('display')
     : one.tagName.toLowerCase() + `(${walk(one).join(' ')})`.replace('()', '')]);
  return walk(document.querySelector('.turn.assistant > .answer')).join(' '); })()"""


def test_markdown_is_drawn_with_the_origin_of_each_token(stage, tab):
    stage.show(streamed(MARKDOWN))
    ask(tab)
    assert tab.value(OUTLINE) == (
        "h2 h3 ol(li(ul(li(ol(li)))) li(s a a)) "
        "div(table(thead(tr(th th)) tbody(tr(td(strong) td)))) blockquote(p(math:null)) hr "
        "math:block p(a) div(pre(code))"
    )
    links = "[...document.querySelectorAll('.answer a')].map((one) => [one.href, one.rel, one.textContent])"
    assert [tuple(one) for one in tab.value(links)] == [
        ("https://a.example/b", "noopener noreferrer", "good"),
        ("https://c.example/", "noopener noreferrer", "https://c.example"),
        ("https://d.example/x.png", "noopener noreferrer", "not fetched"),
    ]
    assert text(tab, ".answer td:last-child") == "* &"
    assert text(tab, ".answer pre code") == "def bare(x):\n    return x"
    untold = """(() => { const walker = document.createTreeWalker(
      document.querySelector('.answer'), NodeFilter.SHOW_TEXT, (node) =>
        node.data.trim() && !node.parentElement.closest('.run, .code-head, [href$=png]') ? 1 : 3);
      const found = [];
      while (walker.nextNode()) found.push(walker.currentNode.data);
      return found; })()"""
    assert tab.value(untold) == [], "every text has an origin"
    assert tab.complaints == [] and all(one.startswith(stage.url) for one in tab.requested)
    assert tab.value("document.querySelector('#latest').hidden")
    tab.value("document.querySelector('#log').scrollTop = 0")
    tab.until("!document.querySelector('#latest').hidden")
    tab.click("#latest")
    tab.until("document.querySelector('#latest').hidden")


# --- nothing is lost


DAILY = """- [x] done **so**
- [ ] to do

| a | b |
|---|---|
| one<br>two | three<br/>four |

A claim[^1] and <b>no tag</b>.

[^1]: https://a.example/source
[^two]: See `code`.

<details>
<summary>More *here*</summary>

- folded

<script>window.hit = 1</script>

</details>

مرحبا بالعالم.

- עברית
"""


def test_markdown_of_every_day_and_of_every_direction(stage, tab):
    stage.show(streamed(DAILY))
    ask(tab, "سؤال؟")
    assert tab.value(OUTLINE) == (
        "ul(li(input strong) li(input)) div(table(thead(tr(th th)) tbody(tr(td td)))) p(sup) "
        "p(sup a) p(sup code) details(summary(em) ul(li) p) p ul(li)"
    )
    boxes = "[...document.querySelectorAll('.answer .task')].map((one) => [one.checked, one.disabled])"
    assert tab.value(boxes) == [[True, True], [False, True]]
    assert tab.value("document.querySelector('.answer td').innerText") == "one\ntwo"
    assert text(tab, ".answer sup") == "1" and "<b>no tag</b>" in text(tab, ".turn > .answer > p")
    assert "<script>window.hit = 1</script>" in text(tab, ".answer details")
    assert tab.value("window.hit === undefined && !document.querySelector('.answer details').open")
    ways = "['.said', '.answer > p:last-of-type', '.answer > ul:last-child', '.answer > ul']"
    shown = f"{ways}.map((one) => getComputedStyle(document.querySelector(one)).direction)"
    assert tab.value(shown) == ["rtl", "rtl", "rtl", "ltr"]
    assert tab.complaints == []


def test_thoughts_fold_when_the_answer_begins(stage, tab):
    answers = threading.Event()
    thought = TextDelta(0, "thinking", "Hm.", (), (TokenText("Hm.", None, 0),))
    said = TextDelta(0, "answer", "Yes.", (), (TokenText("Yes.", None, 0),))
    stage.show((READ, thought, ROUND, answers, said, ROUND, ChoiceEnded(0, "stop"), CLOSED))
    tab.write(QUESTION)
    tab.press("Enter")
    tab.until("document.querySelector('.thoughts[open] .answer')?.textContent === 'Hm.'")
    answers.set()
    tab.until(DONE)
    for _ in range(2):
        assert re.fullmatch(r"Thought for [\d.]+ \S+", text(tab, ".thoughts:not([open]) summary"))
        assert text(tab, ".turn > .answer") == "Yes."
        reload(tab)


def test_another_try_and_an_edit_are_branches(stage, tab):
    stub = stage.show(streamed("One"))
    ask(tab, "A")
    ask(tab, "B")
    tab.write("draft")
    stub.events = streamed("Two")
    press(tab, "Retry")
    tab.until("document.body.textContent.includes('Two')")
    tab.until(FREE)
    assert log(tab) == ["A", "One", "B", "Two"] and text(tab, ".turn:nth-child(3) .tools span") == "2 of 2"
    press(tab, "‹")
    assert log(tab) == ["A", "One", "B", "One"]
    tab.click(".turn.user .tools button")  # Edit of the first question
    tab.value("document.querySelector('.edited').value = 'C'")
    tab.press("Enter")
    tab.until(f"{DONE} === 1 && {FREE}")
    assert log(tab) == ["C", "Two"]
    assert [one["content"] for one in stub.requests[-1].prompt.messages] == ["C"]
    reload(tab)
    assert log(tab) == ["C", "Two"] and tab.value("document.querySelector('#message').value") == "draft"
    press(tab, "‹")
    assert log(tab)[:2] == ["A", "One"] and len(log(tab)) == 4


def test_conversations_are_kept_renamed_exported_deleted_and_brought_back(stage, tab):
    titles = "[...document.querySelectorAll('#chat-list .title')].map((one) => one.textContent)"
    stage.show(streamed("One"))
    ask(tab, "A")
    tab.click("#new-chat")
    assert log(tab) == []
    ask(tab, "B")
    assert tab.value(titles) == ["B", "A"]
    press(tab, "Rename")  # the last one of the list
    tab.write("Old")
    tab.press("Enter")
    tab.until(f"{titles}[1] === 'Old'")
    keep_downloads(tab)
    press(tab, "Export Markdown")
    press(tab, "Export JSON")
    tab.until("window.files.length === 2")
    written, data = tab.value("window.files")
    assert written == "# Old\n\n## You\n\nA\n\n## Answer\n\nOne\n"
    assert json.loads(data)["messages"][1] == {"role": "assistant", "content": "One"}
    press(tab, "Delete")
    assert tab.value(titles) == ["B"]
    press(tab, "Undo")
    tab.until(f"{titles}.length === 2 && document.querySelector('.said').textContent === 'A'")
    reload(tab)
    tab.until(f"{titles}.length === 2")
    assert log(tab) == ["A", "One"]


def test_deleting_a_conversation_ends_its_answer(server, tab):
    visit(tab, server.base_url)
    tab.value(ENDLESS)
    tab.until("document.activeElement.id === 'message'")
    tab.write(QUESTION)
    tab.press("Enter")
    tab.until("document.querySelector('.turn:last-child .answer')?.textContent.length > 20")
    press(tab, "Delete")
    tab.until(FREE)
    wait_until(lambda: server.get("/health").json()["running"] == 0)
    assert tab.value("document.querySelectorAll('.turn').length") == 0
    press(tab, "Undo")
    tab.until("document.querySelector('.turn:last-child .facts')?.textContent.includes('stopped')")


def test_an_answer_outlives_the_tab_that_shows_it(stage, tab):
    stage.show((READ, TextDelta(0, "answer", "Half of"), ROUND, 30.0, *ANSWER))
    tab.write("A")
    tab.press("Enter")
    tab.until(f"{KEPT}.then((kept) => JSON.stringify(kept).includes('Half of'))")
    tab.crash()
    tab.call("Page.navigate", url=stage.url)
    tab.until(f"document.querySelector('#state') && {READY}")
    tab.until("document.querySelector('#chat-list .title')")
    tab.click("#chat-list .title")
    tab.until("document.querySelector('.said')")
    assert log(tab) == ["A", "Half of"] and "cut off" in text(tab, ".turn .problem")


def test_a_message_waits_until_the_model_is_loaded(stage, tab):
    stub = stage.play()
    stub.state = replace(stub.state, state="loading", loading="demo")
    tab.open(stage.url)
    tab.until("document.querySelector('#model').value")
    for name, value in {"top-p": 0.5, "top-k": 7, "min-p": 0.1, "seed": 3, "presence-penalty": 1}.items():
        tab.value(f"document.querySelector('#{name}').value = {value}")
    tab.write(QUESTION)
    tab.press("Enter")
    tab.until("document.querySelector('.phase')?.textContent === 'loading demo …'")
    assert not stub.requests
    stub.state = replace(stub.state, state="ready", loading=None)
    tab.until(DONE)
    assert text(tab, ".turn > .answer") == "Hello you"
    sampling, most = stub.requests[-1].sampling, stub.requests[-1].max_tokens
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 7, 0.1, 3)
    assert sampling.presence_penalty == 1 and most == 2048


# --- pictures

PASTE = """(async () => {
  const canvas = new OffscreenCanvas(2100, 1050);
  canvas.getContext('2d').fillRect(0, 0, 2100, 1050);
  const data = new DataTransfer();
  for (const [type, text] of Object.entries(TEXTS)) data.items.add(text, type);
  data.items.add(new File([await canvas.convertToBlob()], 'wide.png', {type: 'image/png'}));
  return document.dispatchEvent(
    new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}));
})()""".replace("TEXTS", "({})")


def test_a_pasted_picture_is_scaled_sent_and_kept(stage, tab):
    stub = stage.show(images=True)
    tab.until("document.querySelector('#files').accept === ''")
    table = PASTE.replace("({})", "({'text/plain': 'a', 'text/html': '<td>a</td>'})")
    assert tab.value(table), "a table goes into the message, not its picture"
    assert not tab.value(PASTE)
    tab.until("document.querySelector('#pictures img')")
    ask(tab, "Black?")
    assert not tab.value("document.querySelector('#pictures img')")
    picture, words = stub.requests[-1].prompt.messages[-1]["content"]
    assert words == {"type": "text", "text": "Black?"}
    assert read_picture(picture["image"].data).shape == (1024, 2048, 3)
    reload(tab)
    tab.until("document.querySelector('.said img')?.naturalWidth === 2048")
    ask(tab, "And now?")
    sent = stub.requests[-1].prompt.messages
    assert sent[0]["content"][0]["image"].data == picture["image"].data and sent[-1]["content"] == "And now?"
    assert tab.complaints == []


def picture_file(folder: Path, name: str, kind: str, picture: Image.Image, **options: Any) -> str:
    picture.save(folder / name, kind, **options)
    return str(folder / name)


def test_dropped_and_chosen_pictures_are_sent_as_they_look(stage, tab, tmp_path):
    """A photo that the phone was turned for, and one on a transparent ground, which stays exact."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.new("RGB", (60, 40), "white")
    photo.paste("red", (0, 0, 20, 40))  # on the left of the sensor: at the top of what is seen
    clear = Image.new("RGBA", (30, 20), (0, 0, 0, 0))
    clear.paste((10, 20, 30, 255), (0, 0, 10, 20))
    files = [
        picture_file(tmp_path, "phone.jpg", "JPEG", photo, exif=exif),
        picture_file(tmp_path, "clear.png", "PNG", clear),
    ]
    other = tmp_path / "notes.bin"
    other.write_bytes(b"no text\0")
    stub = stage.show(images=True)
    tab.until("document.querySelector('#files').accept === ''")
    where = {"x": 640, "y": 300, "data": {"items": [], "files": files, "dragOperationsMask": 1}}
    for kind in ("dragEnter", "dragOver", "drop"):
        tab.call("Input.dispatchDragEvent", type=kind, **where)
    tab.until("document.querySelectorAll('#pictures img').length === 2")
    choose_files(tab, "#files", files[1])
    tab.until("document.querySelectorAll('#pictures img').length === 3")
    tab.click("#pictures button:last-child")
    tab.until("document.querySelectorAll('#pictures img').length === 2")
    where["data"]["files"] = [str(other)]
    for kind in ("dragEnter", "dragOver", "drop"):
        tab.call("Input.dispatchDragEvent", type=kind, **where)
    tab.until("document.querySelector('#file-problem').textContent.startsWith('notes.bin is not text')")
    ask(tab, "What is it?")
    parts = stub.requests[-1].prompt.messages[-1]["content"]
    turned, shown = (read_picture(part["image"].data) for part in parts[:2])
    assert turned.shape == (60, 40, 3)
    assert turned[5, 20, 1] < 60 and turned[55, 20, 1] > 200
    assert shown[10, 5].tolist() == [10, 20, 30] and shown[10, 25].tolist() == [255, 255, 255]
    assert tab.complaints == []


def test_an_exported_conversation_keeps_its_pictures(stage, tab):
    stage.show(images=True)
    tab.until("document.querySelector('#files').accept === ''")
    for question in ("One?", "Two?"):
        tab.value(PASTE)
        tab.until("document.querySelector('#pictures img')")
        ask(tab, question)
    keep_downloads(tab)
    press(tab, "Export Markdown")
    tab.until("window.files.length")
    lines = tab.value("window.files")[0].split("\n\n")
    assert lines[:4] == ["# One?", "## You", "![Picture 1][picture-1]", "One?"]
    assert lines[6:9] == ["## You", "![Picture 2][picture-2]", "Two?"]
    assert [line.split(",")[0] for line in lines[-2:]] == [
        "[picture-1]: data:image/png;base64",
        "[picture-2]: data:image/png;base64",
    ]


def test_a_model_that_reads_no_pictures_is_offered_none(stage, tab):
    stage.show()
    tab.value(PASTE)
    tab.until("document.querySelector('#file-problem').textContent.includes('reads no pictures')")
    assert tab.value("document.querySelector('#files').accept && !document.querySelector('#pictures img')")
