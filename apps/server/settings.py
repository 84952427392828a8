"""The settings of a server, and the options of `mlx-spec serve` that set them.

Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from mlx_spec.checkpoint.files import typed_path
from mlx_spec.cli import command
from mlx_spec.cli.command import (
    MODEL_PANEL,
    BadOptions,
    LoadOptions,
    NoEarlierAnswers,
    Version,
    above_zero,
    expanded,
    flag,
    option,
)
from mlx_spec.hub.catalog import DEMO, PairSpec

GB = 10**9
ANY_ORIGIN = "*"
LOCAL_PAGES = "localhost"  # stands for the pages of all servers on this machine, on any port
ANY_NAME = "://*"  # after a scheme: all origins that have it
DEFAULT_PORTS = {"http": 80, "https": 443}
# Begins the error of a server whose port is taken; the menu bar looks for it.
CANNOT_LISTEN = "cannot listen on"


@dataclass(frozen=True)
class ServedModel:
    """A pair to load when a request asks for its name, and how the server keeps it."""

    name: str
    spec: PairSpec
    pinned: bool = False  # never unloaded
    ranks: int = 1  # machines over which the target is split


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that is bound to `host`."""
    address = ip_address(host)
    return address.is_loopback if address else host.lower() == "localhost"


def ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an address; None if it is a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def normal_origin(origin: str) -> str:
    """Return an origin for comparison: lower case, with a port; "" if the text is not an origin.

    SCHEME://* and SCHEME:// stand for all origins with a scheme that no page of the web has.
    """
    no_origin = "null"  # what a browser sends for local files, and for sandboxed frames of any page
    if origin in (ANY_ORIGIN, LOCAL_PAGES, no_origin):
        return origin
    scheme, separator, name = origin.lower().partition("://")
    is_scheme = re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and scheme not in DEFAULT_PORTS
    if separator and name in ("", "*") and is_scheme:
        return scheme + ANY_NAME
    address = _name_and_port(origin)
    if address is None or origin.startswith("//"):
        return ""
    return f"{urlsplit(origin).scheme}://{address[0]}:{address[1]}"


def origin_names(origin: str) -> set[str]:
    """Return the entries of a list of allowed origins that would allow `origin`: itself and its groups."""
    normal = normal_origin(origin)
    scheme = normal.partition("://")[0]
    is_local = scheme in DEFAULT_PORTS and is_loopback((_name_and_port(origin) or ("", 0))[0])
    return {normal, scheme + ANY_NAME, *([LOCAL_PAGES] if is_local else [])} if normal else set()


def is_same_origin(origin: str, host: str) -> bool:
    """Return True if a page's origin has the name and port that its request is sent to."""
    scheme = urlsplit(origin).scheme if normal_origin(origin) else ""
    return scheme in DEFAULT_PORTS and _name_and_port(origin) == _name_and_port(f"{scheme}://{host}")


def _name_and_port(url: str) -> tuple[str, int] | None:
    """Return the host of an origin, in lower case, and its port; None if the URL has more parts."""
    try:
        parts = urlsplit(url)
        port = DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        return None
    is_more = parts.username is not None or parts.path.strip("/") or parts.query or "*" in parts.netloc
    return (parts.hostname, port) if parts.hostname and not is_more else None


Names = list[str] | None
model_option = partial(option, panel=MODEL_PANEL)
network_option = partial(option, panel="Network")
limit_option = partial(option, panel="Limits")
folder_option = partial(limit_option, value="FOLDER", callback=expanded)


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body_bytes: int = 32 * 2**20  # a photo in base64 is 11 MB
    text_bytes: int = 8 * 2**20  # of a body, pictures not included; no context holds as much
    choices: int = 16  # n, or prompts times n
    stop_strings: int = 64  # completion in editors sends long lists
    schema_bytes: int = 256 * 2**10  # of the output format, and of each tool
    tools: int = 128
    grammar_seconds: float = 10.0  # CPU time for compiling a grammar


@dataclass(frozen=True, kw_only=True)
class OptionSettings:
    """The settings that options give as they are."""

    draft_rank: Annotated[
        Literal[1] | None, model_option(help="of mlx.launch -n 2: rank 1 only drafts ahead", default="none")
    ] = None

    host: Annotated[
        str, network_option(value="HOST", help="address to listen on; the default is this machine only")
    ] = "127.0.0.1"
    port: Annotated[int, network_option(value="N", help="0 is any", min=0, max=65535)] = 8080
    allow_extra_parameters: Annotated[
        bool,
        flag(
            "--allow-extra-parameters",
            "accept unknown parameters without effect; each is logged once",
            "Network",
        ),
    ] = False
    log_file: Annotated[
        Path | None,
        network_option(value="FILE", help="log requests: path, status, seconds", callback=expanded),
    ] = None
    api_key: Annotated[str | None, network_option(value="KEY", help="refuse requests without this key")] = (
        None
    )

    idle_seconds: Annotated[
        float | None,
        limit_option(
            "--idle",
            value="SECONDS",
            help="unload a model after that long",
            default="never",
            callback=above_zero,
        ),
    ] = None
    max_waiting: Annotated[int, limit_option(value="N", help="requests in the queue", min=0)] = 32
    max_running: Annotated[
        int | None,
        limit_option(
            "--parallel", value="N", help="answers at a time, in one batch", default="what pays", min=1
        ),
    ] = None
    # Memory is the real limit; this one bounds the host's time.
    conversations: Annotated[
        int,
        limit_option(value="N", help="at most this many conversations keep their caches, per model", min=1),
    ] = 64
    store: Annotated[
        Path | None, folder_option(help="keep stored responses here, too", default="in memory only")
    ] = None
    cache_folder: Annotated[
        Path | None,
        folder_option(help="keep long prompts here, to read them once; private", default="do not"),
    ] = None


@dataclass(frozen=True)
class Settings(OptionSettings):
    """The settings of a whole server."""

    models: tuple[ServedModel, ...]  # the first is loaded at start
    hosts: tuple[str, ...] = ()  # further names under which the server may be addressed
    origins: tuple[str, ...] = ()  # other origins whose web pages may use the server
    aliases: tuple[tuple[str, str], ...] = ()  # another name, and the model that it stands for
    memory_bytes: int | None = None  # for weights and caches; None: a share of the machine's
    cache_folder_bytes: int = 20 * GB  # a few prompts of 20,000 tokens of a large model
    earlier_answers: bool = True  # lookup copies from earlier answers with the same API key
    keepalive_seconds: float = 10.0  # between comments on a silent stream
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Options(LoadOptions, OptionSettings):
    """Answer requests of OpenAI's, Anthropic's and Ollama's clients on this machine."""

    version: Version = False

    models: Annotated[
        Names,
        model_option(
            "--model",
            value="NAME=TARGET[,DRAFTER]",
            help="one more, loaded when it is asked for; may be repeated",
        ),
    ] = None
    alias: Annotated[Names, model_option(value="ALIAS=NAME", help="another name of a model")] = None
    pin: Annotated[Names, model_option(value="NAME", help="never unload this model once it is loaded")] = None
    api_key_file: Annotated[
        Path | None,
        network_option(value="FILE", help="the same, from a file; or MLX_SPEC_API_KEY", callback=expanded),
    ] = None
    allow_host: Annotated[
        Names, network_option(value="NAME", help="another name under which the server may be addressed")
    ] = None
    cors_origin: Annotated[
        Names,
        network_option(
            value="ORIGIN",
            help="web pages that may use the server; localhost stands for all pages of this machine",
            default="its own pages, and installed applications",
        ),
    ] = None
    cache_folder_gb: Annotated[
        float | None, limit_option(value="GB", help="the most it holds", default="20", callback=above_zero)
    ] = None
    memory: Annotated[
        float | None,
        limit_option(value="GB", help="for weights and caches", default="what fits", callback=above_zero),
    ] = None
    no_earlier_answers: NoEarlierAnswers = False

    def settings(self) -> Settings:
        """Return the settings of the server. Raises BadOptions."""
        key = _key(self.api_key, self.api_key_file)
        if key is None and not is_loopback(self.host):
            raise BadOptions(f"--host {self.host} is open to other machines: give it an --api-key, too")
        if self.cache_folder_gb is not None and self.cache_folder is None:
            raise BadOptions("--cache-folder-gb goes with --cache-folder: name the folder, too")
        size = Settings.cache_folder_bytes if self.cache_folder_gb is None else self.cache_folder_gb * GB
        for origin in self.cors_origin or []:
            if not normal_origin(origin):
                forms = "scheme://host or scheme://host:port, localhost, or *"
                raise BadOptions(f"--cors-origin {origin}: write {forms}")
        for name in self.allow_host or []:
            if not re.fullmatch(r"[\w.-]+", name) and ip_address(name.strip("[]")) is None:
                raise BadOptions(f"--allow-host {name}: write the name alone, without scheme and port")
        models = self._models()
        names = [model.name for model in models]
        aliases = [_split("--alias", text, "ALIAS=NAME") for text in self.alias or []]
        for alias, name in aliases:
            _check_known("--alias", name, names)
            if alias in names:
                raise BadOptions(f"--alias {alias}: a model goes by that name")
        unchanged = {field.name: vars(self)[field.name] for field in fields(OptionSettings)}
        return Settings(
            models,
            hosts=tuple(self.allow_host or []),
            origins=tuple(self.cors_origin or []),
            aliases=tuple(aliases),
            memory_bytes=None if self.memory is None else round(self.memory * GB),
            cache_folder_bytes=round(size),
            earlier_answers=not self.no_earlier_answers,
            **unchanged | {"api_key": key},
        )

    def _models(self) -> tuple[ServedModel, ...]:
        named = [_split("--model", text, "NAME=TARGET[,DRAFTER]") for text in self.models or []]
        if named and self.drafter is not None and self.chosen is None:
            raise BadOptions("--drafter goes with --target: write --model NAME=TARGET,DRAFTER")
        models: list[ServedModel] = []
        if self.chosen is not None or DEMO not in [name for name, _ in named]:
            models.append(self._model(typed_path(self.spec.target).name or self.spec.target, self.spec))
        for name, text in named:
            target, _, drafter = text.partition(",")
            models.append(self._model(name, replace(self.spec, target=target, drafter=drafter or None)))
        names = [model.name for model in models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadOptions(f"two models are called {twice!r}: give each a name of its own")
        for name in self.pin or []:
            _check_known("--pin", name, names)
        return tuple(models)

    def _model(self, name: str, spec: PairSpec) -> ServedModel:
        return ServedModel(name, spec, pinned=name in (self.pin or []))


def parse(arguments: Sequence[str] | None) -> Settings:
    """Return the settings of a command line. Raises SystemExit with status 2 if an option is wrong."""
    options = command.parse(Options, "serve", arguments)
    try:
        return options.settings()
    except BadOptions as error:
        command.refuse("mlx-spec serve", str(error))


def _split(option: str, text: str, form: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise BadOptions(f"{option} {text}: write {form}")
    return name, value


def _check_known(option: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise BadOptions(f"{option} {name}: there is no such model, only {', '.join(names)}")


def _key(key: str | None, file: Path | None) -> str | None:
    if key is not None and file is not None:
        raise BadOptions("--api-key and --api-key-file: give one of them")
    if key is None and file is None:
        key = os.environ.get("MLX_SPEC_API_KEY") or None  # other users can read a command line, but not this
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadOptions(f"--api-key-file {file} cannot be read") from error
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise BadOptions("the API key must be printable ASCII, not empty, without spaces around it")
    return key
