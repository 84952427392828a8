"""The settings of a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

GB = 10**9
CANNOT_LISTEN = (
    "cannot listen on"  # begins the error of a server whose port is taken; the menu bar looks for it
)


@dataclass(frozen=True)
class ServedModel:
    """A model to serve: a target and its drafter, as `mlx_spec.load` takes them."""

    name: str
    target: str
    drafter: str | None = None
    num_draft_tokens: int | None = None
    kv_bits: int | None = None
    pinned: bool = False  # never unloaded


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all requests together."""

    waiting: int = 32  # requests in the queue, without those that run
    running: int = 4  # requests that take turns
    body_bytes: int = 8 * 2**20
    choices: int = 16  # n, or prompts times n
    stop_strings: int = 4
    schema_bytes: int = 256 * 2**10  # of the output format, and of each tool
    tools: int = 128
    grammar_seconds: float = 10.0  # for compiling a grammar


@dataclass(frozen=True)
class Settings:
    """The settings of a whole server."""

    models: tuple[ServedModel, ...]  # the first is loaded at start
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # further names under which the server may be addressed
    origins: tuple[str, ...] = ()  # other origins whose web pages may use the server
    aliases: tuple[tuple[str, str], ...] = ()  # another name, and the model that it stands for
    memory_bytes: int | None = None  # for weights and caches; None: a share of the machine's
    idle_seconds: float | None = None  # unload an unpinned model after this time; None: never
    conversations: int = 8  # sequences kept with their caches, per model
    cache_folder: Path | None = None  # where long prompts outlive the server; None: nowhere
    cache_folder_bytes: int = 20 * GB  # a few prompts of 20,000 tokens of a large model
    keepalive_seconds: float = 10.0  # between comments on a silent stream
    limits: Limits = Limits()
    allow_extra_parameters: bool = False  # unknown parameters are logged, not refused
    log_file: Path | None = None
    store: Path | None = None  # folder of stored responses; None: in memory only


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
