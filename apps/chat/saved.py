"""Conversations on the disk: the files of `/save`, and the kept files that the program writes unasked.

A kept file has one JSON object a line. If the program is killed, at most the last line is lost:

    {"format": ..., "messages": [...], ...}   the conversation, as `/save` writes it
    {"asked": CONTENT}                        a message, when it is sent
    {"kind": KIND, "text": TEXT}              a piece of its answer
    {"turn": [MESSAGE, ANSWER]}               the complete turn; empty if no answer came

A change other than a turn writes the whole conversation again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from platformdirs import user_data_path

from mlx_spec.checkpoint.files import typed_path, write_atomically
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound, SpecError
from mlx_spec.session import Piece

from .pictures import Content, is_stored, shown

# The first fields of a saved conversation. The version grows when the form changes.
FORMAT: dict[str, Any] = {"format": "mlx_spec conversation", "version": 1}
KEPT_SUFFIX = ".jsonl"
OWNER_ONLY = 0o600  # mode of the files of conversations and of the input history


def file_named(name: str) -> Path:
    """Return the file that a typed name means. Raises InvalidValue."""
    path = typed_path(name or ".")
    if path.name in ("", ".."):
        raise InvalidValue("give the name of a file, such as /save talk.json")
    return path if path.suffix else typed_path(path.with_name(path.name + ".json"))


def replaced(file: Path) -> dict[str, Any] | None:
    """Return the conversation in a file that `write` would replace; None without a file.

    Raises InvalidValue for a file that is not a conversation.
    """
    if not file.exists():
        return None
    try:
        return read(file)
    except SpecError as error:
        raise InvalidValue(f"{file} is not a saved conversation: take another name") from error


def write(file: Path, saved: Mapping[str, Any]) -> None:
    """Write a conversation, also over another file. Raises InvalidValue."""
    _write_text(file, json.dumps(_labelled(saved), indent=2, ensure_ascii=False) + "\n")


def read(file: Path) -> dict[str, Any]:
    """Return a saved or kept conversation of this release or an older one.

    Raises NotFound and BadCheckpoint.
    """
    try:
        is_kept = file.suffix == KEPT_SUFFIX
        # Some editors write a byte order mark. The last line of a kept file may end inside a character.
        text = file.read_bytes().decode("utf-8-sig", "replace" if is_kept else "strict")
        content = _kept_content(text) if is_kept else json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()  # fails for half a character: "\\ud83d"
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {file}: /save writes one, /load lists what was kept") from error
    except OSError as error:
        raise NotFound(f"{file} cannot be read ({error.strerror}): give another file") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file} is not valid JSON: give a file that /save wrote") from error
    return _checked(file, content)


def _checked(file: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT["format"]:
        raise BadCheckpoint(f"{file} is not a saved conversation: give a file that /save wrote")
    version = content.get("version")
    newest = FORMAT["version"]
    if not isinstance(version, int) or version > newest:
        raise BadCheckpoint(
            f"{file} has version {version}, this release reads up to {newest}: it takes a newer mlx_spec"
        )
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise BadCheckpoint(f"{file} does not hold a list of messages: it was changed since /save wrote it")
    system, settings = content.get("system"), content.get("settings")
    return content | {
        "system": system if isinstance(system, str) else None,
        "settings": settings if isinstance(settings, dict) else {},
    }


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and is_stored(message.get("content"))


def _labelled(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {**FORMAT, **saved}


# --- kept conversations


class Journal:
    """Keeps the conversation of this process in a file, which it locks against other processes."""

    def __init__(self, folder: Path | None, note: Callable[[str], None]) -> None:
        """Keep files in `folder`, or nothing if it is None. `note` shows why nothing more is kept."""
        self._folder, self._note = folder, note
        self._file: TextIO | None = None
        self._written: Mapping[str, Any] = {}
        self._is_asked = False

    def close(self) -> None:
        """Close the file; the next message begins another one."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def leave_deleted(self) -> None:
        """Close the file if it was deleted; the next message begins another one."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()

    def go_on(self, file: Path, saved: Mapping[str, Any]) -> None:
        """Continue the kept file of a conversation; if another process has it, the next message copies it."""
        self.close()
        if self._folder is None or file.parent != self._folder:
            return
        try:
            self._file = _locked(file, os.O_RDWR)
        except OSError:
            return
        if os.pread(self._file.fileno(), 1, max(file.stat().st_size - 1, 0)) != b"\n":
            self._file.write("\n")  # ends the half line that a killed process left
        self._written = saved

    def ask(self, message: Content, saved: Mapping[str, Any]) -> None:
        """Keep a message that is sent now; `saved` is the conversation before it."""
        if self._folder is None:
            return
        if self._file is None:
            self._open(self._folder)
            self._write(_labelled(saved))
            self._written = saved
        self.keep(saved)
        self._write({"asked": message})
        self._is_asked = True

    def add(self, piece: Piece) -> None:
        if piece.text:
            self._write({"kind": piece.kind, "text": piece.text})

    def keep(self, saved: Mapping[str, Any]) -> None:
        """Write what has changed since the last call."""
        before, now = self._written.get("messages", []), saved["messages"]
        is_turn = now[:-2] == before and saved == {**self._written, "messages": now}
        if self._is_asked and (is_turn or saved == self._written):
            self._write({"turn": now[-2:] if is_turn else []})
        elif saved != self._written:
            self._write(_labelled(saved))
        self._written, self._is_asked = saved, False

    def _open(self, folder: Path) -> None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}{KEPT_SUFFIX}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = _locked(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._stop(error)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._note(f"this conversation is not kept: {self._folder} cannot be written ({error.strerror})")
        with suppress(OSError):  # it tries to write once more
            self.close()
        self._folder = self._file = None


def _locked(file: Path, flags: int) -> TextIO:
    """Open a file to append to, and lock it. Raises OSError, also if another process has its lock.

    The package filelock would empty the file that it locks.
    """
    handle = os.open(file, flags | os.O_APPEND, OWNER_ONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return open(handle, "a", encoding="utf-8", errors="replace")


def kept_folder() -> Path:
    """Return the folder of kept conversations."""
    return user_data_path("mlx_spec") / "conversations"


def kept_files() -> list[Path]:
    """Return the kept conversations, the newest first. An empty file is left by a chat that was killed."""
    dated = []
    for file in kept_folder().glob(f"*{KEPT_SUFFIX}"):
        try:
            stat = file.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        if stat.st_size:
            dated.append((stat.st_mtime_ns, file))
    return [file for _, file in sorted(dated, reverse=True)]


def newest() -> Path:
    """Return the file of the conversation that was written last. Raises NotFound."""
    for file in kept_files():
        return file
    raise NotFound(f"no conversation was kept in {kept_folder()} yet: `mlx-spec chat` begins one")


def kept_rows(most: int = 20) -> list[tuple[str, ...]]:
    """Return a row about each of the newest conversations: number, date, turns, first words, name."""
    rows: list[tuple[str, ...]] = []
    for number, file in enumerate(kept_files()[:most], 1):
        try:
            messages = read(file)["messages"]
        except SpecError as error:
            rows.append((str(number), "", "", str(error), file.stem))
            continue
        words = " ".join(shown(messages[0]["content"]).split()) if messages else ""
        date = time.strftime("%d %b %H:%M", time.localtime(file.stat().st_mtime))
        rows.append((str(number), date, turns(messages), words[:48] + "…" * (len(words) > 48), file.stem))
    return rows


def find(name: str) -> Path:
    """Return the file that a typed name means: a path, or the name or number of a kept conversation."""
    file = file_named(name)
    if typed_path(name).is_file() or file.exists():
        return typed_path(name) if typed_path(name).is_file() else file
    files = kept_files()
    if name.isascii() and name.isdecimal() and len(name) < 7 and 0 < int(name) <= len(files):
        return files[int(name) - 1]
    return next((kept for kept in files if kept.stem == name), file)


def find_kept(name: str) -> Path:
    """Return the file of a kept conversation by its name or number. Raises NotFound."""
    file = find(name)
    if file.parent != kept_folder() or not file.is_file():
        raise NotFound(f"there is no kept conversation {name}: /load lists them")
    return file


def rename(file: Path, name: str) -> Path:
    """Give a kept conversation another name, and return its file. Raises InvalidValue."""
    if "/" in name or name.startswith(".") or name.isdecimal() or not name.isprintable():
        raise InvalidValue(f"{name!r} cannot be a name: give words, not a path or a number")
    new = file.with_name(f"{name}{KEPT_SUFFIX}")
    if new.exists():
        raise InvalidValue(f"there is another conversation {name}: take another name")
    try:
        file.rename(new)
    except OSError as error:
        raise InvalidValue(f"{file} cannot be renamed ({error.strerror}): take another name") from error
    return new


def delete(file: Path) -> None:
    """Delete a kept conversation. Raises InvalidValue."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidValue(f"{file} cannot be deleted ({error.strerror}): change its permissions") from error


def write_markdown(file: Path, saved: Mapping[str, Any]) -> None:
    """Write a conversation as Markdown: a heading for each message. Raises InvalidValue."""
    texts = [f"## System\n\n{saved['system']}\n"] if saved.get("system") else []
    for message in saved["messages"]:
        heading = "Question" if message["role"] == "user" else "Answer"
        texts.append(f"## {heading}\n\n{shown(message['content'])}\n")
    _write_text(file, "\n".join(texts))


def _write_text(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except OSError as error:
        raise InvalidValue(f"{file} cannot be written ({error.strerror}): take another name") from error


def turns(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of turns in words."""
    count = len(messages) // 2
    return f"{count} turn{'' if count == 1 else 's'}"


def _kept_content(text: str) -> dict[str, Any]:
    """Return the conversation in a kept file, with the unfinished last turn if it has an answer."""
    saved: dict[str, Any] = {"messages": []}
    asked: Content = ""
    texts = {"answer": "", "thinking": ""}  # of the answer to `asked`, which has not ended
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        match entry:
            case {"format": _, "messages": list()}:
                saved, asked, texts = entry, "", dict.fromkeys(texts, "")
            case {"asked": str() | list() as message}:
                saved["messages"] += _unfinished(asked, **texts)
                asked, texts = message, dict.fromkeys(texts, "")
            case {"kind": "answer" | "thinking" as kind, "text": str(piece)}:
                texts[kind] += piece
            case {"turn": list(turn)}:
                saved["messages"] += turn
                asked, texts = "", dict.fromkeys(texts, "")
    saved["messages"] += _unfinished(asked, **texts)
    return saved


def _unfinished(message: Content, answer: str, thinking: str) -> list[dict[str, Any]]:
    """Return the two messages of a turn; [] if no text of the answer came."""
    answer, thinking = answer.strip(), thinking.strip()
    if not answer + thinking:
        return []
    thought = {"reasoning_content": thinking} if thinking else {}
    return [{"role": "user", "content": message}, {"role": "assistant", "content": answer} | thought]
