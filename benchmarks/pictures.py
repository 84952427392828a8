"""Take the pictures of the README: the chat program on a terminal, or the page of the server.

    python benchmarks/pictures.py terminal [--model M] [--num-draft-tokens K] [FILE]  # results/chat.svg
    python benchmarks/pictures.py page [--model M] [--num-draft-tokens K] [--dark] [FILE]  # results/page.png

Both show SmolLM2 or the demo pair at work; nothing is staged. The first runs `mlx-spec chat --highlight` on a
pseudo-terminal and draws its output with its colours. The second asks questions in a real browser, and needs
Chromium.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text
from serving import serving

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import chromium

RESULTS = Path(__file__).parent / "results"
QUESTIONS = {
    "demo": (
        "What does os.path.join do?",
        "Write code that reads a JSON file",
        "How can I parse command line arguments?",
    ),
    "smollm2": (
        "Write a short Python function that reads a CSV file and returns its rows. Only the code.",
        "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    ),
}
COLUMNS = 108  # of the terminal
WARM_UP = ("What does zip do?", "Count from 1 to 40.")  # asked first: they teach the policy
READY = "document.querySelector('#state').dataset.state === 'ready' && document.querySelector('#model').value"
SETTLE_S = 7.0  # the page shows memory, which the server reads every two seconds
WIDTH, HEIGHT = 1280, 890  # CSS pixels


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = options.add_subparsers(dest="kind", required=True)
    terminal, page = kinds.add_parser("terminal"), kinds.add_parser("page")
    terminal.add_argument("file", nargs="?", type=Path, default=RESULTS / "chat.svg")
    page.add_argument("file", nargs="?", type=Path, default=RESULTS / "page.png")
    page.add_argument("--dark", action="store_true")
    for kind in (terminal, page):
        kind.add_argument("--model", choices=QUESTIONS, default="smollm2")
        kind.add_argument("--quick", action="store_true", help="one question")
        kind.add_argument("--num-draft-tokens", metavar="K", help="fix the draft length")
    settings = options.parse_args()
    questions = QUESTIONS[settings.model][: 1 if settings.quick else None]
    if settings.kind == "terminal":
        picture = draw_terminal(settings.model, questions, settings.num_draft_tokens)
    else:
        picture = draw_page(settings.model, questions, settings.num_draft_tokens, dark=settings.dark)
    temporary = settings.file.with_name(f".{settings.file.name}.tmp")
    temporary.write_bytes(picture)
    temporary.replace(settings.file)
    print(f"{settings.file}: {len(picture) / 1000:.0f} kB")


def draw_terminal(model: str, questions: tuple[str, ...], draft_tokens: str | None) -> bytes:
    """Return an SVG of what the chat program prints for these questions."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for question in questions:
        fixed = ["--num-draft-tokens", draft_tokens] if draft_tokens else []
        command = [model, "--highlight", *fixed, "-p", question]
        console.print(Text(f"$ mlx-spec chat {' '.join(command[:-1])} {question!r}", style="bold"))
        console.print(Text.from_ansi(run_chat(command)))
        console.print()
    return console.export_svg(title="mlx-spec chat").encode()


def run_chat(arguments: list[str]) -> str:
    """Return what the chat program writes to a terminal, with its escape sequences."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_spec.chat", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            new = os.read(reader, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            new = b""
        if not new:
            break
        output += new
    os.close(reader)
    if process.wait() != 0:
        sys.exit(output.decode(errors="replace"))
    return output.decode().replace("\r\n", "\n")


def draw_page(model: str, questions: tuple[str, ...], draft_tokens: str | None, *, dark: bool) -> bytes:
    """Return a PNG of the page after these questions."""
    binary = chromium.found()
    if binary is None:
        sys.exit("Chromium was not found: install it")
    fixed = ["--num-draft-tokens", draft_tokens] if draft_tokens else []
    with (
        serving(model, "--port", "8080", *fixed) as server,
        chromium.browser(binary) as browser,
        browser.tab() as tab,
    ):
        tab.open(server.url, WIDTH, HEIGHT, scale=1.25)
        tab.prefer("dark" if dark else "light")
        tab.until(READY)
        ask(tab, WARM_UP)
        tab.until("!document.querySelector('#send').hidden")
        tab.click("#new-chat")
        ask(tab, questions)
        time.sleep(SETTLE_S)
        tab.value("document.activeElement.blur()")
        if tab.complaints:
            sys.exit(f"the page reported errors: {tab.complaints}")
        return tab.picture()


def ask(tab: chromium.Tab, questions: tuple[str, ...]) -> None:
    for number, question in enumerate(questions, 1):
        tab.until("!document.querySelector('#send').hidden && document.activeElement.id === 'message'")
        tab.write(question)
        tab.press("Enter")
        answered = f"document.querySelectorAll('.turn.assistant[aria-busy=false]').length === {number}"
        tab.until(answered, seconds=90)


if __name__ == "__main__":
    main()
