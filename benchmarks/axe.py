"""Is the page accessible by axe-core's rules: in all views, both themes, wide and narrow?

    npm pack axe-core && tar xzf axe-core-*.tgz        # a download for developers, which is not kept here
    python benchmarks/axe.py package/axe.min.js [FOLDER]    # a screenshot of each view in FOLDER

Chromium opens the page of a server that answers with a scripted text. Each view is judged by all rules that
axe-core has on (WCAG 2.0 to 2.2 A and AA, and its best practices). The exit status is 1 if one is violated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import ROOT
from timing import finish, table

sys.path.append(str(ROOT / "tests"))

from support import chromium
from support.endpoint import DEMO, READ, Stub, listening
from support.page import READY, ask, streamed

from mlx_spec.apps.server.engine.answers import TextDelta
from mlx_spec.apps.server.settings import Settings

ANSWER = """# Top

- [x] done
- [ ] open

| a | b |
|---|---|
| 1<br>2 | 3 |

A claim[^1].

[^1]: Source.

<details>
<summary>More</summary>

text

</details>

```python
if x:
    return 'a'  # c
```
"""
PASTE = """(() => {
  const data = new DataTransfer();
  data.items.add('long '.repeat(1000), 'text/plain');
  const paste = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  document.querySelector('#message').dispatchEvent(paste);
})()"""
JUDGE = """axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations.map(
  ({id, impact, nodes}) => [id, impact, nodes.length, nodes[0].html.slice(0, 160)]))"""


def views(tab: chromium.Tab, width: int) -> Iterator[str]:
    """Show the views of the page one after the other, and yield the name of each."""
    tab.until("!document.querySelector('#show-models').hidden")
    if tab.value("document.querySelectorAll('.turn').length"):
        tab.value("document.querySelector('#new-chat').click()")
    yield "welcome"
    tab.value("document.querySelector('#message').focus()")
    ask(tab, "What?")
    tab.value("document.querySelector('.thoughts').open = true")
    tab.value(PASTE)
    tab.until("document.querySelector('#context-words').textContent")
    yield "conversation"
    tab.value("document.querySelector('#settings').open = true")
    yield "settings"
    tab.value("document.querySelector('#settings').open = false")
    if tab.value("document.querySelector('#chats').hidden"):
        tab.value("document.querySelector('#show-chats').click()")
    tab.value("document.querySelector('details.menu').open = true")
    yield "conversations"
    if width < 600:  # the list covers the page
        tab.value("document.querySelector('#show-chats').click()")
    if tab.value("document.querySelector('#figures').hidden"):
        tab.value("document.querySelector('#show-figures').click()")
    yield "figures"
    tab.press("k", control=True)
    tab.until("document.querySelector('.palette').open")
    tab.write("w")
    yield "palette"
    tab.press("Escape")
    tab.until("!document.querySelector('.palette').open")
    tab.value("document.querySelector('#show-models').click()")
    tab.until("document.querySelector('#models-catalogue li')")
    yield "models"
    tab.value("document.querySelector('#models').close()")


def main() -> int:
    settings = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    settings.add_argument("axe", type=Path, help="axe.min.js of axe-core")
    settings.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()) / "axe")
    options = settings.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    axe, started = options.axe.read_text(encoding="utf-8"), time.time()
    events = (READ, TextDelta(0, "thinking", "Hm."), *streamed(ANSWER)[1:])
    rows, found = list[list[str]](), list[dict[str, Any]]()
    with (
        chromium.browser(chromium.found() or "chromium") as browser,
        browser.tab() as tab,
        listening(Stub(events), Settings(DEMO)) as url,
    ):
        for theme in ("light", "dark"):
            for width in (1280, 390):
                tab.open(str(url), width, 844)
                tab.prefer(theme)
                tab.until(READY)
                for view in views(tab, width):
                    time.sleep(0.6)  # transitions of colours end
                    violations = [*tab.value(f"{axe};0;{JUDGE}")]
                    picture = options.folder / f"{view}-{theme}-{width}.png"
                    picture.write_bytes(tab.picture())
                    rows.append([view, theme, str(width), str(len(violations))])
                    found += [{"view": view, "theme": theme, "width": width, "rule": v} for v in violations]
    table(["view", "theme", "width", "violations"], rows)
    finish("axe", {"views": len(rows), "violations": found}, options, started)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
