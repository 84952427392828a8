"""Load and unload the models of a server, within its memory; find them by their names."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_spec import load
from mlx_spec.checkpoint.config import Checkpoint, context_length
from mlx_spec.checkpoint.files import human_bytes, one_line
from mlx_spec.checkpoint.memory import MemoryNeed, context_memory, context_sizes, memory_need
from mlx_spec.decode import Batch
from mlx_spec.device import memory_for_models
from mlx_spec.errors import NotFound, NoVision, SpecError
from mlx_spec.grammar import Grammar, GrammarKind
from mlx_spec.grammar.matcher import compile_grammar, prepare_grammars
from mlx_spec.hub.download import on_disk
from mlx_spec.hub.names import locate
from mlx_spec.pair import Pair
from mlx_spec.tokenizer import Tokenizer, read_tokenizer
from mlx_spec.vision.vision import Vision, read_vision

from ..errors import LOG, Failure, unavailable, unknown_model
from ..settings import ServedModel, Settings
from ..tools.answer_grammar import CompileGrammar
from ..tools.formats import find_tool_format
from .prefix_cache import PrefixCache
from .prefix_files import MAX_AGE_S, CacheFolder, PrefixFiles, model_key

if TYPE_CHECKING:
    from mlx_spec.distributed.ranks import Ranks

WARM_UP_TOKENS = 12  # enough rounds to compile what the first request needs
LATEST = ":latest"  # the tag of a name without one, as Ollama lists names

Loader = Callable[[ServedModel], Pair]


@dataclass(frozen=True)
class ModelCard:
    """A model as clients see it. Optional fields are read from its files, and None until these are here."""

    name: str
    aliases: tuple[str, ...]
    created: int  # seconds since 1970, when the server started
    loaded: bool = False
    context_length: int | None = None
    contexts: tuple[Mapping[str, int | bool], ...] = ()  # tokens, bytes with weights, and if these fit
    thinks: bool | None = None  # answers may contain thinking
    tools: bool | None = None  # its chat template takes tools
    images: bool | None = None  # it reads pictures
    template: str | None = None  # the chat template
    sampling: Mapping[str, float] | None = None  # its own settings, which the page takes as defaults


@dataclass
class LoadedModel:
    """A pair with its cached sequences and compiled grammars."""

    name: str
    pair: Pair
    prefix_cache: PrefixCache
    compile: CompileGrammar
    batch: Batch
    token_bytes: float  # K/V of one token, upper bound
    last_used: float  # time.monotonic()
    idle_seconds: float | None  # unload it after this time; None: never

    @property
    def vision(self) -> Vision | NoVision:
        """Return what reads pictures, or why nothing does."""
        return self.pair.vision_or_reason

    @property
    def weights(self) -> int:
        """Return the bytes of all weights. They include the vision tower: a picture may come at any time."""
        info = self.pair.info
        return info.target_bytes + info.drafter_bytes + info.vision_bytes

    @property
    def caches(self) -> int:
        return self.prefix_cache.nbytes + self.batch.nbytes

    def has_room(self, tokens: int, unread: int) -> bool:
        """Return True if a prompt of `tokens` tokens fits beside the running ones, or if none runs.

        `unread` is the number of tokens that running prompts have not read yet.
        """
        used = self.prefix_cache.used_nbytes + unread * self.token_bytes
        is_alone = used + self.batch.nbytes == 0
        need = tokens * self.token_bytes + self.chunk_bytes(tokens)
        return is_alone or used + need <= self.prefix_cache.max_bytes()

    def chunk_bytes(self, tokens: int) -> int:
        """Return the bytes of the largest pass that reads a prompt of that many tokens."""
        return 0 if self.pair.memory is None else self.pair.memory.chunk(tokens)

    @property
    def expires_at(self) -> float:
        """Return when it is unloaded if it is not used again, in seconds since 1970."""
        if self.idle_seconds is None:
            return math.inf
        return time.time() - time.monotonic() + self.last_used + self.idle_seconds


def load_served(served: ServedModel, ranks: Ranks | None = None, draft_ranks: Ranks | None = None) -> Pair:
    """Load a pair as it was configured, over ranks or with a drafter on another one. Raises SpecError."""
    return load(**vars(served.spec), ranks=ranks, draft_ranks=draft_ranks)


def find_model(name: str | None, models: Mapping[str | None, str]) -> str:
    """Return the model of a name, with or without the tag `:latest`. Raises Failure (404)."""
    names = [name] if name is None else [name, name.removesuffix(LATEST), name + LATEST]
    for known_name in names:
        if known_name in models:
            return models[known_name]
    raise unknown_model(str(name), ", ".join(dict.fromkeys(models.values())))


class Models:
    """The models of a server. Only the engine thread loads and unloads; any may read names and tokenizers."""

    def __init__(self, settings: Settings, loader: Loader = load_served) -> None:
        self._settings = settings
        self._loader = loader
        self._served = {served.name: served for served in settings.models}
        self._names: dict[str | None, str] = {None: settings.models[0].name, **dict(settings.aliases)}
        self._names |= {name: name for name in self._served}
        created = int(time.time())
        self._cards = {
            name: ModelCard(name, tuple(a for a, b in settings.aliases if b == name), created)
            for name in self._served
        }
        self._loaded: dict[str, LoadedModel] = {}
        self._described: set[str] = set()  # models whose files were read for their cards, or cannot be read
        self.loading: str | None = None  # the model that is being loaded
        self.measuring: str | None = None  # the model whose costs are being measured
        self._folder = None
        if settings.cache_folder is not None:
            self._folder = CacheFolder(settings.cache_folder, settings.cache_folder_bytes)
        self.budget = memory_for_models() if settings.memory_bytes is None else settings.memory_bytes

    def resolve(self, name: str | None) -> str:
        """Return the model that a name or alias stands for, or the first for None. Raises Failure (404)."""
        return find_model(name, self._names)

    def served(self, name: str) -> ServedModel:
        """Return how a model is loaded and kept."""
        return self._served[name]

    def offer(self, served: ServedModel) -> None:
        """Add a model. Any thread may call this: others iterate over the dictionaries that it replaces."""
        name = served.name
        self._cards = {**self._cards, name: ModelCard(name, (), int(time.time()))}
        self._served = {**self._served, name: served}
        self._names = {**self._names, name: name}

    def withdraw(self, name: str) -> None:
        """Take a model out that is not loaded."""
        self._names = {key: value for key, value in self._names.items() if value != name}
        self._served = {key: value for key, value in self._served.items() if key != name}
        self._cards = {key: value for key, value in self._cards.items() if key != name}
        self._described.discard(name)

    def cards(self) -> tuple[ModelCard, ...]:
        """Return the cards of all models, loaded or not. The files of each model are read once."""
        for name, served in self._served.items():
            with suppress(SpecError, Failure):  # a damaged model: loading it will say what is wrong
                if name not in self._described and _is_local(served):
                    self._described.add(name)
                    stored, tokenizer = checkpoints_of(served), self.tokenizer(name)
                    config = stored[0].config
                    sizes = context_sizes(
                        context_memory(stored, served.spec.kv_bits, served.ranks), context_length(config)
                    )
                    self._cards[name] = replace(
                        self._cards[name],
                        context_length=context_length(config),
                        contexts=tuple(
                            {"tokens": tokens, "bytes": size, "fits": size <= self.budget}
                            for tokens, size in sizes.items()
                        ),
                        thinks=tokenizer.may_think,
                        tools=find_tool_format(tokenizer) is not None,
                        images=isinstance(self.vision(name), Vision),
                        template=tokenizer.template,
                        sampling=tokenizer.generation.sampling,
                    )
        return tuple(replace(card, loaded=name in self._loaded) for name, card in self._cards.items())

    def loaded(self) -> tuple[LoadedModel, ...]:
        return tuple(self._loaded.values())

    def tokenizer(self, name: str) -> Tokenizer:
        """Return the tokenizer and template of a model, loaded or not. Raises Failure (503)."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded.pair.tokenizer
        try:
            return _read_tokenizer(checkpoints_of(self._served[name])[0].folder)
        except SpecError as error:
            LOG.error("%s cannot be read: %s", name, error)
            raise unavailable(f"model {name!r} could not be loaded", "model_not_loaded") from error

    def vision(self, name: str) -> Vision | NoVision:
        """Return what reads pictures for a model, loaded or not, or why nothing does. Raises Failure."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded.vision
        if self._served[name].ranks > 1:
            return NoVision("it is split over several machines")
        tokenizer = self.tokenizer(name)
        return _read_vision(checkpoints_of(self._served[name])[0].folder, tokenizer)

    def ready(self, name: str, busy: Collection[str]) -> LoadedModel | None:
        """Return a model, loaded if need be; None if a busy model must end before there is memory for it.

        Raises Failure (503) if memory does not suffice or loading fails; only the log names the cause.
        """
        if name not in self._loaded:
            served = self._served[name]
            try:
                if not self._make_room(served, busy):
                    return None
                self._load(served)
            except Failure:
                raise
            except Exception as error:
                traceback = None if isinstance(error, SpecError) else error  # a SpecError needs no traceback
                LOG.error("%s could not be loaded: %s", name, one_line(error), exc_info=traceback)
                raise unavailable(f"model {name!r} could not be loaded", "model_not_loaded") from error
        loaded = self._loaded[name]
        loaded.last_used = time.monotonic()
        return loaded

    def expire(self, busy: Set[str]) -> None:
        """Unload the models that no request has used for their `idle_seconds`. `busy` are in use now."""
        now = time.monotonic()
        for name in busy & self._loaded.keys():
            self._loaded[name].last_used = now
        for name in self._unused(busy):
            limit = self._loaded[name].idle_seconds
            if limit is not None and now - self._loaded[name].last_used >= limit:
                self.unload(name)

    def check_costs(self, is_wanted: Callable[[], bool], most_s: float) -> None:
        """Measure doubtful costs of loaded pairs again, until `is_wanted` returns True before a pass.

        No pass begins that may take more than `most_s`. Another call goes on from there.
        """
        for loaded in self._loaded.values():
            self.measuring = loaded.name
            try:
                loaded.pair.check_costs(is_wanted, most_s)
            except Exception:  # such as too little memory: the known costs stay
                LOG.exception("the costs of %s could not be measured again", loaded.name)
            finally:
                self.measuring = None
            if is_wanted():
                return

    def unload(self, name: str) -> None:
        self._loaded.pop(name).prefix_cache.close()
        _free_memory()
        LOG.info("unloaded %s", name)

    def close(self) -> None:
        for name in tuple(self._loaded):
            self.unload(name)

    def _make_room(self, served: ServedModel, busy: Collection[str]) -> bool:
        """Unload models for a new one. Return False if a busy model must end before.

        Raises Failure if the model never fits.
        """
        if not self._loaded and not _is_local(served):
            return True  # the first model may be downloaded
        need = need_of(served)
        pinned = sum(one.weights for one in self.loaded() if self._served[one.name].pinned)
        if need.total > self.budget - pinned:
            reason = f", of which models that stay loaded take {human_bytes(pinned)}" if pinned else ""
            budget = human_bytes(self.budget)
            message = f"model {served.name!r} needs {need} and the server may use {budget}{reason}"
            raise Failure(503, message, type="server_error", code="insufficient_memory")
        unused = self._unused(busy)
        excess = self._weights() + need.total - self.budget
        if excess > sum(self._loaded[name].weights for name in unused):
            return False
        for name in unused:
            if self._weights() + need.total > self.budget:
                self.unload(name)
        for loaded in self.loaded():
            loaded.prefix_cache.shrink(need.total)
        return True

    def _load(self, served: ServedModel) -> None:
        started = time.perf_counter()
        self.loading = served.name
        try:
            pair = self._loader(served)
            # On another thread: only a request with a grammar has to wait for this.
            grammars = pair.tokenizer, pair.info.vocab_size
            threading.Thread(None, prepare_grammars, "grammars", grammars, daemon=True).start()
            _warm_up(pair)
            files = self._prefix_files(served, pair)
            self._keep_answers(served, pair)
        except BaseException:
            _free_memory()
            raise
        finally:
            self.loading = None
        name, budget = served.name, partial(self._cache_budget, served.name)
        pair.budget = partial(self._pair_budget, name)
        tokenizer, settings = pair.tokenizer, self._settings
        size, seconds = pair.info.vocab_size, settings.limits.grammar_seconds

        @lru_cache(32)  # agents send the same few schemas with every request
        def compile(kind: GrammarKind, source: str) -> Grammar:
            return compile_grammar(kind, source, tokenizer, size, seconds=seconds)

        need = need_of(served) if _is_local(served) else MemoryNeed(0, 0, 1)
        self._loaded[name] = LoadedModel(
            name,
            pair,
            PrefixCache(pair.open, settings.conversations, budget, files),
            compile,
            pair.batch(settings.max_running),
            need.caches / need.context,
            time.monotonic(),
            settings.idle_seconds,
        )
        LOG.info("loaded %s in %.1f s", name, time.perf_counter() - started)

    def _prefix_files(self, served: ServedModel, pair: Pair) -> PrefixFiles | None:
        """Return the stored prefixes of a model; None without a folder, or, with a warning, if it fails."""
        if self._folder is None:
            return None
        try:
            key = model_key(
                checkpoints_of(served),
                pair.drafter_names,
                served.spec.kv_bits,
                pair.rows.base,
                is_float32=served.spec.exact == "float32",
            )
            return PrefixFiles(self._folder, key, pair)
        except (SpecError, OSError) as error:
            LOG.warning("%s: --cache-folder is not used: %s", served.name, one_line(error))
            return None

    def _keep_answers(self, served: ServedModel, pair: Pair) -> None:
        """Let the pair keep earlier answers in the cache folder, if there is one."""
        if self._folder is not None and self._settings.earlier_answers:
            target = f"{served.spec.target} {checkpoints_of(served)[0].fingerprint}"
            pair.earlier.keep_in(self._folder.path, target, pair.info.vocab_size, MAX_AGE_S)

    def _unused(self, busy: Collection[str]) -> list[str]:
        """Return the models that may be unloaded, the one used longest ago first."""
        free = [name for name in self._loaded if name not in busy and not self._served[name].pinned]
        return sorted(free, key=lambda name: self._loaded[name].last_used)

    def _weights(self) -> int:
        return sum(loaded.weights for loaded in self.loaded())

    def _pair_budget(self, name: str) -> int:
        """Return the bytes that the weights of other models leave for a model and one conversation."""
        return self.budget - sum(one.weights for one in self.loaded() if one.name != name)

    def _cache_budget(self, name: str) -> int:
        """Return the bytes that weights and the caches of other models leave for the caches of a model."""
        others = sum(one.prefix_cache.nbytes for one in self.loaded() if one.name != name)
        shared = sum(one.batch.nbytes for one in self.loaded())
        return self.budget - self._weights() - others - shared


# --- turns


def next_in_queue(models: Sequence[str], loaded: Collection[str], passed: int, most: int = 8) -> int:
    """Return the place in the queue of the request that begins next.

    `models` are the models of the waiting requests, in order of arrival; at least one waits. A request for a
    loaded model goes first: loading takes seconds, and may unload the model of the next request. `passed` is
    the number of later requests that began before the first one. After `most` of them the first one is next.
    So at most `most` later requests pass any request.
    """
    if passed >= most:
        return 0
    return next((i for i, model in enumerate(models) if model in loaded), 0)


# --- memory


def need_of(served: ServedModel) -> MemoryNeed:
    """Return the memory that a model will take, from the headers of its files.

    Raises NotFound if it is not on this machine, BadCheckpoint if it is damaged.
    """
    checkpoints = checkpoints_of(served)
    for checkpoint in checkpoints:
        checkpoint.check_weights()
    return memory_need(checkpoints, served.ranks, kv_bits=served.spec.kv_bits)


def _is_local(served: ServedModel) -> bool:
    """Return True if a model can be loaded without a download."""
    try:
        return all(checkpoint.folder.is_dir() for checkpoint in checkpoints_of(served))
    except NotFound:
        return False


def checkpoints_of(served: ServedModel, *, complete: bool = True) -> list[Checkpoint]:
    """Return target and drafter, if the drafter is a checkpoint.

    Raises NotFound for a checkpoint that does not exist and, if `complete`, for one to be downloaded.
    """
    checkpoints = []
    for name in filter(None, locate(served.spec).checkpoints):
        checkpoint = on_disk(name)
        if checkpoint is not None:
            checkpoints.append(checkpoint)
        elif complete:
            raise NotFound(f"{name} is not on this machine: fetch it with `mlx-spec pull {name}`")
    return checkpoints


@lru_cache
def _read_vision(folder: Path, tokenizer: Tokenizer) -> Vision | NoVision:
    try:
        return read_vision(Checkpoint(folder), tokenizer)
    except NoVision as error:
        return error


@lru_cache
def _read_tokenizer(folder: Path) -> Tokenizer:
    return read_tokenizer(Checkpoint(folder))


def _warm_up(pair: Pair) -> None:
    """Generate a few tokens, so that the first request does not wait for compilation."""
    tokenizer = pair.tokenizer
    prompt = tokenizer.prompt_tokens("Hello") or [0]  # no chat template is rendered on the engine thread
    for _ in pair.generate(prompt, max_tokens=WARM_UP_TOKENS):
        pass


def _free_memory() -> None:
    gc.collect()
    mx.clear_cache()
