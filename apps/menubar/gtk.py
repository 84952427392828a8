"""Draw the menu in the tray of a Linux desktop with pystray on GTK."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_spec.errors import NotFound

from .menu import Click, Entry, Item, Menu, Separator, Submenu

NEEDS = "it needs a display, python3-gi with GTK 3, and pip install 'mlx-spec[menubar]'"

try:
    import gi

    gi.require_version("Gdk", "3.0")
    gi.require_version("Gtk", "3.0")
    from gi.repository import Gdk, Gio, GLib, Gtk
except (ImportError, ValueError) as error:
    raise NotFound(f"a tray menu cannot be shown here ({error}): {NEEDS}") from error

if not Gtk.init_check(None)[0]:  # without GTK pystray would look for X11 by itself, and fail as that does
    raise NotFound(f"a tray menu cannot be shown here (there is no display): {NEEDS}")

try:
    import pystray
    from PIL import Image, ImageDraw
except ImportError as error:
    raise NotFound(f"a tray menu cannot be shown here ({error}): {NEEDS}") from error

SIDE = 64  # pixels
INK, PAPER = (255, 255, 255, 255), (38, 92, 166, 255)
BOLT = ((36, 6), (14, 36), (29, 36), (25, 58), (50, 26), (34, 26))


class GtkView:
    """A tray icon."""

    def __init__(self) -> None:
        try:
            Gio.bus_get_sync(Gio.BusType.SESSION, None)  # pystray would hang without one
        except GLib.Error as error:
            raise NotFound(f"a tray menu needs the D-Bus of a desktop session ({error.message})") from error
        self._icon = pystray.Icon("mlx_spec", _image(), "mlx-spec")
        if not self._icon.HAS_MENU:
            raise NotFound("pystray has no GTK here and could show no menu: install python3-gi with GTK 3")
        self._on_click: Callable[[Click], None] | None = None

    def run(self, on_start: Callable[[], None], on_click: Callable[[Click], None]) -> None:
        self._on_click = on_click

        def setup(icon: Any) -> None:
            icon.visible = True
            GLib.idle_add(on_start)

        with suppress(
            GLib.Error
        ):  # at its end pystray withdraws notifications; a desktop may have no service for them
            self._icon.run(setup)

    def show(self, menu: Menu) -> None:
        self._icon.menu = pystray.Menu(*map(self._entry, menu.entries))

    def copy(self, text: str) -> None:
        GLib.idle_add(_copy, text)

    def close(self) -> None:
        self._icon.stop()

    def _entry(self, entry: Entry, *, radio: bool = False) -> Any:
        if isinstance(entry, Separator):
            return pystray.Menu.SEPARATOR
        if isinstance(entry, Submenu):
            inner = [self._entry(one, radio=True) for one in entry.entries]
            return pystray.MenuItem(entry.label, pystray.Menu(*inner))
        return self._item(entry, radio=radio)

    def _item(self, item: Item, *, radio: bool) -> Any:
        def clicked(_icon: Any, _item: Any) -> None:
            if item.click is not None and self._on_click is not None:
                self._on_click(item.click)

        checked = None if item.checked is None else lambda _: bool(item.checked)
        enabled = item.click is not None
        return pystray.MenuItem(item.label, clicked, checked=checked, radio=radio, enabled=enabled)


def _copy(text: str) -> None:
    board = Gtk.Clipboard.get(Gdk.SELECTION_CLIPBOARD)
    board.set_text(text, -1)
    board.store()


def _image() -> Any:
    image = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((2, 2, SIDE - 3, SIDE - 3), radius=14, fill=PAPER)
    draw.polygon(BOLT, fill=INK)
    return image
