"""The options of `mlx-spec serve`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mlx_spec import __version__
from mlx_spec.apps.command import Parser, integer, number
from mlx_spec.apps.server.settings import GB, Limits, ServedModel, Settings, is_loopback

DEMO = "demo"
PORTS = 65535


def parse(arguments: Sequence[str] | None) -> Settings:
    """Settings from a command line. Leaves with status 2 and one line on stderr when it makes no sense."""
    known = parser()
    given = known.parse_args(arguments)
    try:
        return _settings(given)
    except ValueError as error:
        known.error(str(error))


def parser() -> Parser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser("serve", "Answer requests of OpenAI's and Anthropic's clients on this machine.")
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    _add_models(parser)
    _add_network(parser)
    _add_limits(parser)
    return parser


def _add_models(parser: Parser) -> None:
    group = parser.add_argument_group("models", "The first is loaded at once, the others when asked for.")
    group.add_argument(
        "--target",
        metavar="REPO_OR_FOLDER",
        help="model that answers: Hugging Face name or folder (default: the small bundled demo)",
    )
    group.add_argument(
        "--drafter",
        metavar="REPO_OR_FOLDER",
        help='model that drafts for it; "lookup" copies from the text so far, "none" is plain decoding '
        "(default: the one made for the target, if there is one)",
    )
    group.add_argument(
        "--model",
        metavar="NAME=TARGET[,DRAFTER]",
        action="append",
        default=[],
        help="one more model and the name it goes by; may be repeated",
    )
    group.add_argument(
        "--alias", metavar="ALIAS=NAME", action="append", default=[], help="another name of a model"
    )
    group.add_argument(
        "--pin", metavar="NAME", action="append", default=[], help="never unload this model once it is loaded"
    )
    group.add_argument(
        "--num-draft-tokens",
        metavar="K",
        type=integer(0),
        help="draft tokens in each round; 0 is no speculation (default: what pays)",
    )
    group.add_argument(
        "--kv-bits", metavar="{4,8}", type=int, choices=(4, 8), help="quantize the KV cache (default: do not)"
    )


def _add_network(parser: Parser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host", default=Settings.host, help="address to listen on (default %(default)s: this machine only)"
    )
    group.add_argument(
        "--port", metavar="N", type=integer(0), default=Settings.port, help="0 is any (default %(default)s)"
    )
    group.add_argument("--api-key", metavar="KEY", help="refuse requests without this key")
    group.add_argument("--api-key-file", metavar="FILE", type=Path, help="the same, read from a file")
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another name under which the server may be addressed",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="web pages that may use the server, such as http://localhost:3000 (default: only its own)",
    )
    group.add_argument("--log-file", metavar="FILE", type=Path, help="log requests: path, status, seconds")


def _add_limits(parser: Parser) -> None:
    group = parser.add_argument_group("limits")
    limits = Limits()
    group.add_argument(
        "--memory", metavar="GB", type=_above_zero, help="for weights and caches (default: what fits)"
    )
    group.add_argument(
        "--idle", metavar="SECONDS", type=_above_zero, help="unload a model after that long (default: never)"
    )
    whole: tuple[tuple[str, int, int, str], ...] = (
        ("--max-waiting", 0, limits.waiting, "requests in the queue"),
        ("--max-running", 1, limits.running, "requests that take turns"),
        ("--conversations", 1, Settings.conversations, "conversations kept with their caches, per model"),
    )
    for name, least, default, about in whole:
        text = f"{about} (default %(default)s)"
        group.add_argument(name, metavar="N", type=integer(least), default=default, help=text)


def _above_zero(text: str) -> float:
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number above 0")
    return value


def _settings(given: argparse.Namespace) -> Settings:
    """Raises ValueError, whose text says what is wrong."""
    models = _models(given)
    key = _key(given.api_key, given.api_key_file)
    if key is None and not is_loopback(given.host):
        raise ValueError(f"--host {given.host} is open to other machines: give it an --api-key, too")
    if given.port > PORTS:
        raise ValueError(f"--port {given.port}: ports end at {PORTS}")
    for origin in given.cors_origin:
        _check_origin(origin)
    return Settings(
        models=models,
        host=given.host,
        port=given.port,
        api_key=key,
        hosts=tuple(given.allow_host),
        origins=tuple(given.cors_origin),
        aliases=_aliases(given.alias, [model.name for model in models]),
        memory_bytes=None if given.memory is None else round(given.memory * GB),
        idle_seconds=given.idle,
        conversations=given.conversations,
        limits=Limits(waiting=given.max_waiting, running=given.max_running),
        log_file=given.log_file,
    )


def _models(given: argparse.Namespace) -> tuple[ServedModel, ...]:
    named = [_named("--model", text, "NAME=TARGET[,DRAFTER]") for text in given.model]
    if named and given.drafter is not None and given.target is None:
        raise ValueError("--drafter goes with --target: write --model NAME=TARGET,DRAFTER")
    found: list[tuple[str, str, str | None]] = []
    if given.target is not None or not named:
        target = DEMO if given.target is None else given.target
        found.append((Path(target).expanduser().name or target, target, given.drafter))
    for name, text in named:
        target, _, drafter = text.partition(",")
        found.append((name, target, drafter or None))
    names = [name for name, _, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two models are called {twice!r}: give each a name of its own")
    for name in given.pin:
        _check_known("--pin", name, names)
    return tuple(
        ServedModel(name, target, drafter, given.num_draft_tokens, given.kv_bits, pinned=name in given.pin)
        for name, target, drafter in found
    )


def _aliases(texts: Sequence[str], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = [_named("--alias", text, "ALIAS=NAME") for text in texts]
    for alias, name in found:
        _check_known("--alias", name, names)
        if alias in names:
            raise ValueError(f"--alias {alias}: a model goes by that name")
    return tuple(found)


def _named(option: str, text: str, form: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ValueError(f"{option} {text}: write {form}")
    return name, value


def _check_known(option: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ValueError(f"{option} {name}: there is no such model, only {', '.join(names)}")


def _key(key: str | None, file: Path | None) -> str | None:
    if key is not None and file is not None:
        raise ValueError("--api-key and --api-key-file: give one of them")
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {file} cannot be read") from error
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError("the API key must be printable ASCII, not empty, without spaces around it")
    return key


def _check_origin(origin: str) -> None:
    if origin == "*":
        return
    try:
        parts = urlsplit(origin)
        right = bool(parts.scheme and parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right or parts.path or parts.query or parts.username is not None:
        raise ValueError(f"--cors-origin {origin}: write scheme://host or scheme://host:port, or *")
