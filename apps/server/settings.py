"""The settings of a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

GB = 10**9
CANNOT_LISTEN = "cannot listen on"  # so begins what a server says that finds its port taken


@dataclass(frozen=True)
class Served:
    """A model to serve: a target and its drafter, as `mlx_spec.load` takes them."""

    name: str
    target: str
    drafter: str | None = None
    num_draft_tokens: int | None = None
    kv_bits: int | None = None
    pinned: bool = False  # never unloaded


@dataclass(frozen=True)
class Limits:
    """What one request and all of them together may take."""

    waiting: int = 32  # requests, those that run not counted
    running: int = 4  # requests that take turns
    body_bytes: int = 8 * 2**20
    choices: int = 16  # n, and prompts times n
    stop_strings: int = 4
    schema_bytes: int = 256 * 2**10
    tools: int = 128
    grammar_seconds: float = 10.0


@dataclass(frozen=True)
class Settings:
    """A whole server."""

    models: tuple[Served, ...]  # the first is loaded at start
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # more names under which the server may be addressed
    origins: tuple[str, ...] = ()  # web pages of other origins that may use it
    aliases: tuple[tuple[str, str], ...] = ()  # another name, and the model it stands for
    memory_bytes: int | None = None  # for weights and caches; None: a share of the machine's
    idle_seconds: float | None = None  # after which a model that is not pinned is unloaded
    conversations: int = 8  # kept with their caches, per model
    keepalive_seconds: float = 10.0  # between comments on a silent stream
    limits: Limits = Limits()
    log_file: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
