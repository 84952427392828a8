"""A picture of the chat program at work: its own output on a terminal, colours and all, as SVG.

Runs `mlx-spec chat --highlight -p QUESTION` on a pseudo-terminal for a few questions of the demo pair and
draws what comes: each token in the colour of where it came from, `│` at the end of every round, and the line
that says what speculation did. The last line is the JSON record.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from timing import finish, parser

QUESTIONS = (
    "What does os.path.join do?",
    "Write code that reads a JSON file",
    "What is functools.lru_cache for?",
)
COLUMNS, WIDTH, HEIGHT, MARGIN = 108, 8.4, 19, 16  # of the terminal; pixels of a character and around all
SGR = re.compile(r"\x1b\[([\d;]*)m")
LEVELS = (0, 95, 135, 175, 215, 255)  # of the 6 x 6 x 6 colour cube
FOREGROUND, FADED, BACKGROUND = "#e6edf3", "#8b949e", "#0d1117"


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--num-draft-tokens", metavar="K", help="fixes the draft length (default: what pays)"
    )
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "chat.svg")
    settings = options.parse_args()
    started = time.time()
    lines: list[str] = []
    for question in QUESTIONS[: 1 if settings.quick else None]:
        fixed = ["--num-draft-tokens", settings.num_draft_tokens] if settings.num_draft_tokens else []
        command = ["--target", "demo", "--highlight", *fixed, "-p", question]
        lines.append(f"\x1b[1m$ mlx-spec chat {' '.join(command[2:-1])} {question!r}\x1b[0m")
        lines += [part for line in shown(command).splitlines() for part in wrapped(line)]
        lines.append("")
    picture = drawn(lines)
    temporary = settings.out.with_name(f".{settings.out.name}.tmp")
    temporary.write_text(picture, encoding="utf-8")
    temporary.replace(settings.out)
    finish("terminal_picture", {"lines": len(lines), "bytes": len(picture)}, settings, started)


def shown(arguments: list[str]) -> str:
    """What the chat program writes to a terminal."""
    end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_spec.chat", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=clean | {"TERM": "xterm-256color"},
    )
    os.close(terminal)
    found = b""
    while True:
        try:
            new = os.read(end, 65536)
        except OSError:  # Linux, where the other end was closed
            new = b""
        if not new:
            break
        found += new
    os.close(end)
    if process.wait() != 0:
        sys.exit(found.decode(errors="replace"))
    return found.decode()


def wrapped(line: str) -> Iterator[str]:
    """A line in pieces of the terminal's width, each with the style it begins in."""
    style, piece, column = "", "", 0
    for part in re.split(r"(\x1b\[[\d;]*m)", line):
        if SGR.fullmatch(part):
            style = part
            piece += part
            continue
        for character in part:
            if column == COLUMNS:
                yield piece
                piece, column = style, 0
            piece, column = piece + character, column + 1
    yield piece


def drawn(lines: list[str]) -> str:
    """The terminal as SVG."""
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), len(lines) * HEIGHT + 2 * MARGIN
    rows = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + HEIGHT * (i + 0.75):.1f}">{"".join(spans(line))}</text>'
        for i, line in enumerate(lines)
    )
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        "<title>mlx-spec chat with drafted tokens coloured by where they came from</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>\n'
        f'<g font-family="{font}" font-size="14" fill="{FOREGROUND}" xml:space="preserve">\n{rows}\n</g>\n'
        "</svg>\n"
    )


def spans(line: str) -> Iterator[str]:
    """The pieces of a line, each placed by its column and in its colour."""
    column, fill, weight = 0, FOREGROUND, "normal"
    for i, part in enumerate(SGR.split(line)):
        if i % 2:
            fill, weight = styled(part)
        elif part:
            x = MARGIN + column * WIDTH
            length = f' textLength="{len(part) * WIDTH:.1f}"' if len(part) > 1 else ""
            yield f'<tspan x="{x:.1f}" fill="{fill}" font-weight="{weight}"{length}>{escape(part)}</tspan>'
            column += len(part)


def styled(codes: str) -> tuple[str, str]:
    """Colour and weight of a sequence of SGR codes."""
    match [int(code or 0) for code in codes.split(";")]:
        case [38, 5, color]:
            return cube(color), "normal"
        case [1]:
            return FOREGROUND, "bold"
        case [2]:
            return FADED, "normal"
        case _:
            return FOREGROUND, "normal"


def cube(color: int) -> str:
    """A colour of xterm's 256: of the cube, or a grey."""
    if color >= 232:
        return f"#{8 + 10 * (color - 232):02x}" + f"{8 + 10 * (color - 232):02x}" * 2
    place = color - 16
    return "#" + "".join(f"{LEVELS[place // step % 6]:02x}" for step in (36, 6, 1))


if __name__ == "__main__":
    main()
