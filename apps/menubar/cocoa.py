"""Draw the menu in the menu bar of macOS with PyObjC. AppKit is used on the main thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mlx_spec.device import install_command
from mlx_spec.errors import NotFound

from .menu import Action, Click, Item, Menu

try:
    import AppKit
    import objc
    from PyObjCTools import AppHelper
except ImportError as error:
    raise NotFound(f"{error.name or 'PyObjC'} is missing: {install_command('server,menubar')}") from error

NAME = "mlx-spec"  # macOS remembers the place of the item under this name
CHECKS_S = (5.0, 15.0)  # seconds after the start at which the item must be visible


class Clicks(AppKit.NSObject):
    """Receives clicks, and hears that the menu opens; the tag of an item is its index in the menu."""

    def menuWillOpen_(self, menu: Any) -> None:
        self.view.opened()

    def chosen_(self, sender: Any) -> None:
        self.view.clicked(sender.tag())


class MenuBarDelegate(AppKit.NSObject):
    """Hears that macOS wants to end the program: at logout and shutdown, or after a Quit from elsewhere."""

    @objc.typedSelector(b"Q@:@")  # an NSApplicationTerminateReply, not an object
    def applicationShouldTerminate_(self, sender: Any) -> int:
        return int(self.view.asked_to_terminate())


class CocoaView:
    """Draws a menu. `run` belongs to the main thread; the other methods may be called from any."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._on_click: Callable[[Click], None] | None = None
        self._clicks = Clicks.alloc().init()
        self._delegate = MenuBarDelegate.alloc().init()
        self._clicks.view = self._delegate.view = self
        self._is_terminating = self._is_closed = False
        self._shape: list[Any] = []  # of the menu that is drawn: kinds of entries, and submenus
        self._natives: list[Any] = []  # NSMenuItem of each Item, in order
        self._item_clicks: list[Click | None] = []

    def run(self, on_start: Callable[[], None], on_click: Callable[[Click], None]) -> None:
        """Show the menu until it is closed. Call `on_start` once on the main thread when the loop runs."""
        self._on_click = on_click
        self._app = AppKit.NSApplication.sharedApplication()
        self._app.setDelegate_(self._delegate)
        # Set once, before the item is made. Other programs switch from a regular program to an accessory
        # (Caffeine#14, codeburn#147).
        self._app.setActivationPolicy_(AppKit.NSApplicationActivationPolicyAccessory)
        defaults = AppKit.NSUserDefaults.standardUserDefaults()
        # macOS 26 remembers items that it hid (jundot/omlx#1497). Without these keys it shows the item again.
        for key in (f"NSStatusItem Visible {NAME}", f"NSStatusItem VisibleCC {NAME}"):
            defaults.removeObjectForKey_(key)
        bar = AppKit.NSStatusBar.systemStatusBar()
        self._item = bar.statusItemWithLength_(AppKit.NSVariableStatusItemLength)
        self._item.setAutosaveName_(NAME)
        self._item.setVisible_(True)
        self._icon = ("", "")  # that is drawn, and the state in words
        self._item.button().setImagePosition_(AppKit.NSImageLeft)
        self._menu = _new_menu()
        self._menu.setDelegate_(self._clicks)
        self._item.setMenu_(self._menu)
        for seconds in CHECKS_S:
            AppHelper.callLater(seconds, self._check_visible, seconds)
        AppHelper.callAfter(on_start)
        self._app.run()

    def show(self, menu: Menu) -> None:
        AppHelper.callAfter(self._draw, menu)

    def copy(self, text: str) -> None:
        AppHelper.callAfter(_copy, text)

    def close(self) -> None:
        """Make `run` return."""
        AppHelper.callAfter(self._stop)

    def clicked(self, tag: int) -> None:
        click = self._item_clicks[tag]
        if click is not None and self._on_click is not None:
            self._on_click(click)

    def opened(self) -> None:
        if self._on_click is not None:
            self._on_click(Click(Action.OPENED))

    def asked_to_terminate(self) -> int:
        """Quit as after a click, and let macOS wait: it would end the process without a return of `run`."""
        if self._is_closed or self._on_click is None:
            return int(AppKit.NSTerminateNow)
        self._is_terminating = True
        self._on_click(Click(Action.QUIT))
        return int(AppKit.NSTerminateLater)

    def _draw(self, menu: Menu) -> None:
        """Change the items in place if the structure is the same: an open menu then stays open."""
        self._item.button().setTitle_(menu.label)
        if (icon := (menu.icon, menu.state)) != self._icon:
            self._icon, about = icon, f"{NAME}, {menu.state}" if menu.state else NAME
            image = AppKit.NSImage.imageWithSystemSymbolName_accessibilityDescription_(menu.icon, about)
            image.setTemplate_(True)
            self._item.button().setImage_(image)
        entries = list(_walk(menu))
        items = [entry for entry in entries if isinstance(entry, Item)]
        self._item_clicks = [item.click for item in items]
        shape = [(e.label, len(e.entries)) if isinstance(e, Menu) else type(e) for e in entries]
        if shape != self._shape:
            self._shape, self._natives = shape, []
            self._menu.removeAllItems()
            self._build(self._menu, menu)
        for native, item in zip(self._natives, items, strict=True):
            native.setTitle_(item.label)
            native.setEnabled_(item.click is not None)
            on = AppKit.NSControlStateValueOn if item.checked else AppKit.NSControlStateValueOff
            native.setState_(on)

    def _build(self, into: Any, menu: Menu) -> None:
        for entry in menu.entries:
            if entry is None:
                into.addItem_(AppKit.NSMenuItem.separatorItem())
            elif isinstance(entry, Menu):
                holder, inner = _new_item(entry.label, None), _new_menu()
                holder.setSubmenu_(inner)
                into.addItem_(holder)
                self._build(inner, entry)
            else:
                native = _new_item(entry.label, "chosen:")
                native.setTarget_(self._clicks)
                native.setTag_(len(self._natives))
                self._natives.append(native)
                into.addItem_(native)

    def _check_visible(self, seconds: float) -> None:
        """Show the item again if it is hidden: macOS 26 parks items off the screen."""
        window = self._item.button().window()
        if window is not None and window.occlusionState() & AppKit.NSWindowOcclusionStateVisible:
            return
        if seconds < CHECKS_S[-1]:
            self._item.setVisible_(False)
            self._item.setVisible_(True)
        else:
            self._notify(
                "macOS hides the menu-bar item: allow it in System Settings under Menu Bar, or make room in "
                "the bar"
            )

    def _stop(self) -> None:
        self._is_closed = True
        if self._is_terminating:
            self._app.replyToApplicationShouldTerminate_(True)  # does not return: macOS ends the process
        self._app.stop_(None)
        # The loop only notices the stop after its next event.
        event = AppKit.NSEvent.otherEventWithType_location_modifierFlags_timestamp_windowNumber_context_subtype_data1_data2_(  # noqa: E501
            AppKit.NSEventTypeApplicationDefined, (0.0, 0.0), 0, 0.0, 0, None, 0, 0, 0
        )
        self._app.postEvent_atStart_(event, True)


def _new_menu() -> Any:
    menu = AppKit.NSMenu.alloc().init()
    menu.setAutoenablesItems_(False)
    return menu


def _new_item(label: str, action: str | None) -> Any:
    return AppKit.NSMenuItem.alloc().initWithTitle_action_keyEquivalent_(label, action, "")


def _walk(menu: Menu) -> Iterator[Item | Menu | None]:
    """Yield the entries in order, entries of a submenu after it."""
    for entry in menu.entries:
        yield entry
        if isinstance(entry, Menu):
            yield from _walk(entry)


def _copy(text: str) -> None:
    board = AppKit.NSPasteboard.generalPasteboard()
    board.clearContents()
    board.setString_forType_(text, AppKit.NSPasteboardTypeString)
