"""The renderer of Linux against stand-ins of GTK and pystray: entries, marks and clicks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlx_spec.apps.menubar.menu import Action, Click, Item, Menu, Separator, Submenu

VIEW = "mlx_spec.apps.menubar.gtk"


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    gi, pil, pystray = MagicMock(), MagicMock(), MagicMock()
    gi.repository.GLib.Error = RuntimeError
    gi.repository.GLib.idle_add = lambda work, *given: work(*given)
    gi.repository.Gtk.init_check.return_value = [True]
    pystray.Menu = lambda *entries: entries
    pystray.Menu.SEPARATOR = "---"
    pystray.MenuItem = lambda label, action, **settings: SimpleNamespace(
        label=label, action=action, **settings
    )
    pystray.Icon.return_value.run = lambda setup: setup(pystray.Icon.return_value)
    for name, module in {"gi": gi, "gi.repository": gi.repository, "PIL": pil, "pystray": pystray}.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(VIEW, None)
    from mlx_spec.apps.menubar.gtk import GtkView

    yield GtkView()
    sys.modules.pop(VIEW)


def test_entries_and_clicks(view):
    started: list[bool] = []
    clicks: list[Click] = []
    view.run(lambda: started.append(True), clicks.append)
    assert started == [True] and view._icon.visible
    off = Item("off", Click(Action.DRAFTER, "none"), True)
    stop = Item("Stop", Click(Action.STOP))
    view.show(Menu("", (Item("61 tok/s"), Separator(), stop, Submenu("Draft", (off,)))))
    line, separator, stopping, draft = view._icon.menu
    assert (line.label, line.enabled, separator, stopping.enabled) == ("61 tok/s", False, "---", True)
    (inner,) = draft.action
    assert (draft.label, inner.label, inner.radio, inner.checked(inner)) == ("Draft", "off", True, True)
    for entry in (line, stopping, inner):
        entry.action(view._icon, entry)
    assert clicks == [stop.click, off.click]
