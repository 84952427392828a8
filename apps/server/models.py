"""The models of a server: names, and the pairs that are loaded within its memory."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_spec import load
from mlx_spec.apps.server.conversations import Conversations
from mlx_spec.apps.server.failures import Failure, no_such_model, unavailable
from mlx_spec.apps.server.grammars import Grammars
from mlx_spec.apps.server.memory import is_here, machine_bytes, need_of, text_of
from mlx_spec.apps.server.settings import Served, Settings
from mlx_spec.apps.server.tools import dialect_of
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.files import human_bytes, one_line
from mlx_spec.pair import Pair
from mlx_spec.text import Text

WARM_UP = 12  # tokens

_log = logging.getLogger("mlx_spec.server")

Loader = Callable[[Served], Pair]


@dataclass(frozen=True)
class ModelCard:
    """A model as clients see it. What only a loaded one can tell is None until it was loaded once."""

    name: str
    aliases: tuple[str, ...]
    created: int  # seconds since 1970, when the server began
    loaded: bool = False
    context_length: int | None = None
    thinks: bool | None = None  # whether it can be asked to
    tools: bool | None = None  # whether its template takes them


@dataclass
class Loaded:
    """A pair, its conversations and its grammars."""

    name: str
    pair: Pair
    conversations: Conversations
    grammars: Grammars
    used: float  # time.monotonic() of the last request

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.pair.info.target_bytes + self.pair.info.drafter_bytes


def load_served(served: Served) -> Pair:
    """Load a pair as it was configured. Raises SpecError."""
    return load(
        served.target,
        served.drafter,
        num_draft_tokens=served.num_draft_tokens,
        kv_bits=served.kv_bits,
    )


class Models:
    """Names and texts are for any thread. Whatever loads or unloads is for the engine thread alone."""

    def __init__(self, settings: Settings, loader: Loader = load_served) -> None:
        self._settings = settings
        self._loader = loader
        self._served = {served.name: served for served in settings.models}
        self._names = {**dict(settings.aliases), **{name: name for name in self._served}}
        _check_names(settings)
        created = int(time.time())
        self._cards = {
            name: ModelCard(name, tuple(a for a, b in settings.aliases if b == name), created)
            for name in self._served
        }
        self._loaded: dict[str, Loaded] = {}
        self._reading = threading.Lock()
        self._texts: dict[str, Text] = {}  # of models that were not loaded when their text was needed
        self.budget = machine_bytes() if settings.memory_bytes is None else settings.memory_bytes

    @property
    def first(self) -> str:
        """The name of the model that is loaded at start."""
        return self._settings.models[0].name

    def resolve(self, name: str | None) -> str:
        """The model that a name or alias stands for; None: the first one. Raises Failure (404)."""
        if name is None:
            return self.first
        found = self._names.get(name)
        if found is None:
            raise no_such_model(name, ", ".join(self._served))
        return found

    def cards(self) -> tuple[ModelCard, ...]:
        """All models, loaded or not."""
        return tuple(self._cards.values())

    def text(self, name: str) -> Text:
        """The tokenizer and template of a model, loaded or not. For any thread. Raises Failure (503)."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded.pair.text
        with self._reading:
            try:
                if name not in self._texts:
                    self._texts[name] = text_of(self._served[name])
            except SpecError as error:
                _log.error("%s cannot be read: %s", name, error)
                raise unavailable(f"model {name!r} could not be loaded", "model_not_loaded") from error
            return self._texts[name]

    def loaded(self) -> tuple[Loaded, ...]:
        """The models that are loaded."""
        return tuple(self._loaded.values())

    def ready(self, name: str, busy: Collection[str]) -> Loaded | None:
        """A model, loaded if need be; None while that has to wait until a busy one is done.

        Raises Failure (503) where the memory does not suffice or loading fails; its cause says more than a
        client is told.
        """
        if name not in self._loaded:
            served = self._served[name]
            try:
                if self._has_to_wait(served, busy):
                    return None
                self._load(served)
            except Failure:
                raise
            except Exception as error:
                _log.error("%s could not be loaded: %s", name, one_line(error), exc_info=_traceback(error))
                raise unavailable(f"model {name!r} could not be loaded", "model_not_loaded") from error
        loaded = self._loaded[name]
        loaded.used = time.monotonic()
        return loaded

    def expire(self, busy: Collection[str]) -> None:
        """Unload what nobody has used for the settings' `idle_seconds`."""
        limit = self._settings.idle_seconds
        if limit is None:
            return
        now = time.monotonic()
        for name in self._unused(busy):
            if now - self._loaded[name].used >= limit:
                self.unload(name)

    def unload(self, name: str) -> None:
        """Give the memory of a model back."""
        self._loaded.pop(name)
        self._cards[name] = replace(self._cards[name], loaded=False)
        _free()
        _log.info("unloaded %s", name)

    def close(self) -> None:
        """Unload all."""
        for name in tuple(self._loaded):
            self.unload(name)

    def _has_to_wait(self, served: Served, busy: Collection[str]) -> bool:
        """Make room for a model. Says whether it has to wait. Raises Failure where it never fits."""
        if not self._loaded and not is_here(served):
            return False  # the first one may be downloaded
        need = need_of(served)
        pinned = sum(one.weights for one in self.loaded() if self._served[one.name].pinned)
        if need.total > self.budget - pinned:
            beside = f", of which models that stay loaded take {human_bytes(pinned)}" if pinned else ""
            message = f"model {served.name!r} needs {need} and the server may use {human_bytes(self.budget)}{beside}"
            raise Failure(503, message, type="server_error", code="insufficient_memory")
        unused = self._unused(busy)
        over = self._weights() + need.total - self.budget
        if over > sum(self._loaded[name].weights for name in unused):
            return True
        for name in unused:
            if self._weights() + need.total > self.budget:
                self.unload(name)
        for loaded in self.loaded():
            loaded.conversations.shrink(need.total)
        return False

    def _load(self, served: Served) -> None:
        started = time.perf_counter()
        try:
            pair = self._loader(served)
            _warm_up(pair)
        except BaseException:
            _free()
            raise
        name, text = served.name, pair.text
        conversations = Conversations(pair.open, self._settings.conversations, partial(self._room, name))
        grammars = Grammars(text, pair.info.vocab_size)
        self._loaded[name] = Loaded(name, pair, conversations, grammars, time.monotonic())
        self._cards[name] = replace(
            self._cards[name],
            loaded=True,
            context_length=pair.info.context_length,
            thinks=text.thinks,
            tools=find_tool_format(text) is not None,
        )
        _log.info("loaded %s in %.1f s", name, time.perf_counter() - started)

    def _unused(self, busy: Collection[str]) -> list[str]:
        """Models that may be unloaded, the one used longest ago first."""
        free = [name for name in self._loaded if name not in busy and not self._served[name].pinned]
        return sorted(free, key=lambda name: self._loaded[name].used)

    def _weights(self) -> int:
        return sum(loaded.weights for loaded in self.loaded())

    def _room(self, name: str) -> int:
        """Bytes for the conversations of a model: what weights and those of other models leave."""
        others = sum(one.conversations.nbytes for one in self.loaded() if one.name != name)
        return self.budget - self._weights() - others


def _check_names(settings: Settings) -> None:
    names = [served.name for served in settings.models]
    if not names:
        raise InvalidValue("a server needs a model: name at least one")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidValue(f"two models are called {twice!r}: give each a name of its own")
    for alias, name in settings.aliases:
        if name not in names:
            raise InvalidValue(f"alias {alias!r} stands for {name!r}, which is none of {', '.join(names)}")


def _warm_up(pair: Pair) -> None:
    """A few tokens, so that the first request does not wait for what is compiled on first use."""
    text = pair.text
    prompt = text.prompt([{"role": "user", "content": "Hello"}]) if text.chats else [0]
    for _ in pair.generate(prompt, max_tokens=WARM_UP):
        pass


def _traceback(error: Exception) -> Exception | None:
    """What of an error goes to the log behind its text: nothing of one whose text says it all."""
    return None if isinstance(error, SpecError) else error


def _free() -> None:
    gc.collect()
    mx.clear_cache()
