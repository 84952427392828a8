"""The renderer of macOS against a stand-in that records, and that knows only selectors it may use."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from support.waiting import LIMIT

from mlx_spec import __version__
from mlx_spec.apps.menubar.menu import Action, Click, Figures, Item, Menu, Phase, State, menu

EVENT = "otherEventWithType_location_modifierFlags_timestamp_windowNumber_context_subtype_data1_data2_"
ALLOWED = {
    "NSApplication": "sharedApplication setActivationPolicy_ setDelegate_ run stop_ postEvent_atStart_ "
    "replyToApplicationShouldTerminate_",
    "NSUserDefaults": "standardUserDefaults removeObjectForKey_",
    "NSStatusBar": "systemStatusBar statusItemWithLength_",
    "NSStatusItem": "setAutosaveName_ setVisible_ button setMenu_",
    "NSStatusBarButton": "setImage_ setImagePosition_ setTitle_ window",
    "NSWindow": "occlusionState",
    "NSImage": "imageWithSystemSymbolName_accessibilityDescription_ setTemplate_",
    "NSMenu": "alloc init setAutoenablesItems_ addItem_ removeAllItems setDelegate_",
    "NSMenuItem": "alloc initWithTitle_action_keyEquivalent_ separatorItem setTitle_ setEnabled_ setState_ "
    "setTarget_ setTag_ setSubmenu_ tag",
    "NSEvent": EVENT,
    "NSPasteboard": "generalPasteboard clearContents setString_forType_",
}
# What selectors return where that is of another kind than the receiver.
MAKES = {"statusItemWithLength_": "NSStatusItem", "button": "NSStatusBarButton", "window": "NSWindow"}
VISIBLE = 2
CONSTANTS = {
    "NSApplicationActivationPolicyAccessory": 1,
    "NSControlStateValueOff": 0,
    "NSControlStateValueOn": 1,
    "NSEventTypeApplicationDefined": 15,
    "NSImageLeft": 2,
    "NSTerminateLater": 2,
    "NSTerminateNow": 1,
    "NSPasteboardTypeString": "public.utf8-plain-text",
    "NSVariableStatusItemLength": -1.0,
    "NSWindowOcclusionStateVisible": VISIBLE,
}


class Screen:
    """The state that the stand-ins share: their calls, the queue of the main thread, the occlusion."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.main: queue.Queue[Callable[[], None]] = queue.Queue()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.shared: dict[str, Native] = {}
        self.occlusion = VISIBLE
        self.stopped = False
        self.main_thread = threading.get_ident()

    def of(self, selector: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls."""
        return [arguments for _, name, arguments in self.calls if name == selector]

    def run(self) -> None:
        while not self.stopped:
            self.main.get(timeout=LIMIT)()


class Native:
    """An object, or a class, of AppKit. There is one of each kind, but for those that are allocated."""

    def __init__(self, kind: str, screen: Screen) -> None:
        self.kind, self.screen = kind, screen
        self.values: dict[str, Any] = {}
        self.children: list[Native] = []

    def __getattr__(self, selector: str) -> Callable[..., Any]:
        assert selector in ALLOWED[self.kind].split(), f"{self.kind} must not be sent {selector}"
        return partial(self._send, selector)

    def _send(self, selector: str, *arguments: Any) -> Any:
        assert len(arguments) == selector.count("_"), f"{selector} with {len(arguments)} arguments"
        assert threading.get_ident() == self.screen.main_thread, f"{selector} off the main thread"
        self.screen.calls.append((self.kind, selector, arguments))
        if selector.startswith("set"):
            self.values[selector] = arguments[0]
        match selector:
            case "run":
                return self.screen.run()
            case "stop_":
                self.screen.stopped = True
            case "occlusionState":
                return self.screen.occlusion
            case "tag":
                return self.values["setTag_"]
            case "addItem_":
                self.children.append(arguments[0])
            case "removeAllItems":
                self.children.clear()
            case "alloc" | "separatorItem":
                return Native(self.kind, self.screen)
            case "init":
                return self
            case "initWithTitle_action_keyEquivalent_":
                self.values["setTitle_"] = arguments[0]
                return self
        kind = MAKES.get(selector, self.kind)
        return self.screen.shared.setdefault(kind, Native(kind, self.screen))


class NSObject:
    """To be subclassed."""

    @classmethod
    def alloc(cls) -> NSObject:
        return cls()

    def init(self) -> NSObject:
        return self


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    found = Screen()
    kit, helper, tools = ModuleType("AppKit"), ModuleType("AppHelper"), ModuleType("PyObjCTools")
    kit.__dict__.update(CONSTANTS, NSObject=NSObject, **{kind: Native(kind, found) for kind in ALLOWED})
    helper.__dict__.update(
        callAfter=lambda work, *given: found.main.put(lambda: work(*given)),
        callLater=lambda seconds, work, *given: found.later.append((seconds, lambda: work(*given))),
    )
    tools.__dict__.update(AppHelper=helper)
    bridge = ModuleType("objc")
    bridge.__dict__.update(typedSelector=lambda signature: lambda method: method)
    modules = {"AppKit": kit, "PyObjCTools": tools, "PyObjCTools.AppHelper": helper, "objc": bridge}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("mlx_spec.apps.menubar.cocoa", None)
    yield found
    sys.modules.pop("mlx_spec.apps.menubar.cocoa", None)


def view_of(said: list[str]) -> Any:
    return importlib.import_module("mlx_spec.apps.menubar.cocoa").CocoaView(said.append)


def ran(screen: Screen, *menus: Menu, then: Callable[[Any], None] = lambda view: None) -> list[Click]:
    """The clicks of a run that shows menus, does something from another thread, and is closed."""
    clicks: list[Click] = []
    view = view_of([])

    def work() -> None:
        for one in menus:
            view.show(one)
        then(view)
        view.close()

    thread = threading.Thread(target=work)
    view.run(thread.start, clicks.append)
    thread.join(LIMIT)
    return clicks


def printed(native: Native, indent: str = "") -> str:
    """The tree of a menu as text: what can be clicked, what is marked."""
    lines = []
    for child in native.children:
        values = child.values
        if "setTitle_" not in values:
            lines.append(f"{indent}---")
            continue
        mark = "✓ " if values.get("setState_") == 1 else ""
        lines.append(
            f"{indent}{mark}{values['setTitle_']}{'' if values.get('setEnabled_', 1) else ' (grey)'}"
        )
        if inner := values.get("setSubmenu_"):
            lines.append(printed(inner, f"{indent}    "))
    return "\n".join(lines)


def top(screen: Screen) -> Native:
    ((found,),) = screen.of("setMenu_")
    return found


DRAFTERS = (Item("auto", Click(Action.DRAFTER), True), Item("off", Click(Action.DRAFTER, "none"), False))
SMALL = Menu("61", (Item("61 tok/s"), None, Item("Stop", Click(Action.STOP)), Menu("Draft", DRAFTERS)))


def test_every_phase_is_drawn_with_the_allowed_selectors(screen):
    menus = [menu(State(phase=phase, url="http://127.0.0.1:8080", login=True)) for phase in Phase]
    ran(screen, *menus)
    titles = [child.values.get("setTitle_") for child in top(screen).children]
    labels = [entry and entry.label for entry in menus[-1].entries]
    assert titles == labels
    icons = [icon for icon, _ in screen.of("imageWithSystemSymbolName_accessibilityDescription_")]
    assert {"bolt", "bolt.slash", "hourglass", "exclamationmark.triangle"} == set(icons)
    assert screen.of("stop_") == [(None,)] and len(screen.of("postEvent_atStart_")) == 1


def test_structure_marks_and_title(screen):
    ran(screen, SMALL)
    assert printed(top(screen)) == "61 tok/s (grey)\n---\nStop\nDraft\n    ✓ auto\n    off"
    assert screen.of("setTitle_")[0] == ("61",)


def test_the_policy_is_set_and_stale_defaults_go_before_the_item_is_made(screen):
    ran(screen, SMALL)
    order = [name for _, name, _ in screen.calls]
    made = order.index("statusItemWithLength_")
    assert order.index("setActivationPolicy_") < made and order.index("removeObjectForKey_") < made
    assert screen.of("setAutosaveName_") == [("mlx-spec",)] and screen.of("setVisible_") == [(True,)]


def test_a_click_is_the_command_of_its_item(screen):
    def click(view: Any) -> None:
        def press() -> None:
            items = top(screen).children
            off = items[3].values["setSubmenu_"].children[1]
            for native in (items[0], items[2], off):  # the first is only read
                native.values["setTarget_"].chosen_(native)

        screen.main.put(press)

    assert ran(screen, SMALL, then=click) == [Click(Action.STOP), Click(Action.DRAFTER, "none")]


def test_the_system_waits_until_a_quit_has_ended_the_server(screen):
    """`terminate:` never returns from `run`, so the view is closed before macOS is told to go on."""
    replies: list[int] = []

    def log_out(view: Any) -> None:
        (delegate,) = screen.of("setDelegate_")[0]
        screen.main.put(lambda: replies.append(delegate.applicationShouldTerminate_(None)))
        screen.main.put(lambda: replies.append(len(screen.of("replyToApplicationShouldTerminate_"))))

    assert ran(screen, SMALL, then=log_out) == [Click(Action.QUIT)]
    assert replies == [2, 0]  # later, and not before the view was closed
    assert screen.of("replyToApplicationShouldTerminate_") == [(True,)]
    (delegate,) = screen.of("setDelegate_")[0]
    assert delegate.applicationShouldTerminate_(None) == 1  # it has nothing to end any more


def test_a_quit_from_the_menu_asks_the_system_nothing(screen):
    ran(screen, SMALL)
    assert screen.of("replyToApplicationShouldTerminate_") == []


def test_a_menu_of_the_same_shape_is_changed_in_place(screen):
    other = Menu("62", (Item("62 tok/s"), *SMALL.entries[1:]))
    ran(screen, SMALL, other)
    assert len(screen.of("removeAllItems")) == 1
    assert printed(top(screen)).startswith("62 tok/s")
    screen.stopped = False
    screen.calls.clear()
    ran(screen, SMALL, Menu("", SMALL.entries[:2]))
    assert len(screen.of("removeAllItems")) == 2
    assert printed(top(screen)) == "61 tok/s (grey)\n---"


def test_a_working_menu_printed_as_text(screen):
    busy = Figures(61.0, "at least 1.8 × faster", 6_200_000_000, running=2, waiting=1)
    state = State(
        Phase.RUNNING, "http://127.0.0.1:8080", names=("demo",), models={"a/b": 10**9}, figures=busy
    )
    ran(screen, menu(state))
    (icon,) = screen.of("imageWithSystemSymbolName_accessibilityDescription_")
    assert icon == ("bolt.fill", "mlx-spec, answering")
    assert printed(top(screen)) == TREE.strip().replace("VERSION", __version__)


TREE = """
demo at 127.0.0.1:8080 (grey)
at least 1.8 × faster · 61 tokens/s · 6.2 GB (grey)
2 requests running, 1 waiting (grey)
---
Start (grey)
Stop
Restart
---
Model
    ✓ demo
    a/b (1.0 GB)
    ---
    Get a model…
Draft
    ✓ auto
    off
    lookup
---
Copy endpoint URL
Copy environment example
Open chat page
Open logs
---
Launch at login
Version VERSION (grey)
Quit and stop the server
"""


def test_models_are_listed_again_when_the_menu_opens(screen):
    def opens(view: Any) -> None:
        (delegate,) = screen.of("setDelegate_")[-1]
        screen.main.put(lambda: delegate.menuWillOpen_(None))

    assert ran(screen, SMALL, then=opens) == [Click(Action.OPENED)]


def test_copy_goes_to_the_pasteboard(screen):
    ran(screen, then=lambda view: view.copy("http://127.0.0.1:8080/v1"))
    sent = [name for kind, name, _ in screen.calls if kind == "NSPasteboard"]
    assert sent == ["generalPasteboard", "clearContents", "setString_forType_"]
    assert screen.of("setString_forType_") == [("http://127.0.0.1:8080/v1", "public.utf8-plain-text")]


@pytest.mark.parametrize("seen", [True, False])
def test_a_hidden_item_is_shown_again_and_then_said(screen, seen):
    said: list[str] = []
    view = view_of(said)
    view.run(view.close, lambda command: None)
    screen.occlusion = VISIBLE if seen else 0
    screen.calls.clear()
    assert [seconds for seconds, _ in screen.later] == [5.0, 15.0]
    screen.later[0][1]()
    assert screen.of("setVisible_") == ([] if seen else [(False,), (True,)]) and said == []
    screen.later[1][1]()
    assert len(said) == (0 if seen else 1) and all("System Settings" in text for text in said)
