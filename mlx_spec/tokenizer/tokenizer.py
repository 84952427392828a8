"""Tokens <-> text: encoding, decoding, the bytes of a token, and chat prompts."""

from __future__ import annotations

import filecmp
import json
import math
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import AGAIN, one_line
from mlx_spec.checkpoint.generation import GenerationConfig, read_generation_config
from mlx_spec.errors import BadCheckpoint, InvalidValue, PromptTooLong
from mlx_spec.tokenizer.added_tokens import add_tokens, fix_mistral_cut, special_tokens, stated_tokens
from mlx_spec.tokenizer.chat_template import ChatTemplate, Message, read_template
from mlx_spec.tokenizer.history import CheckedPrompt, KnownChecks, render_history
from mlx_spec.tokenizer.recent import Recent, RecentEncodings
from mlx_spec.tokenizer.segments import Marks
from mlx_spec.tokenizer.thinking import find_marks

# Texts are tokenized one by one. A pool of threads would gain nothing, and warn at each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """The tokenizer of a target, its chat template, the tokens that end an answer, and its settings."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        template: ChatTemplate | None,
        eos: Collection[int],
        generation: GenerationConfig | None = None,
    ) -> None:
        self.generation = generation or GenerationConfig()
        self._tokenizer = tokenizer
        self._template = template
        self._encodings = RecentEncodings(
            partial(self._encoding, special=False), tokenizer.get_added_tokens_decoder().items()
        )
        self._checks = Recent[CheckedPrompt]()
        self.token_bytes = TokenBytes(tokenizer)
        self.marks: Marks | None = find_marks(template.source if template else "", self)
        stops = self.marks.stops if self.marks is not None else ()
        self.eos = frozenset(eos).union(i for i in map(self.token_id, stops) if i is not None)
        added = tokenizer.get_added_tokens_decoder()
        # A token that tokenizer.json calls special is left out by `decode`, even if other files deny that.
        hidden = (
            i for i, token in added.items() if token.special or (token.content and not self.decode([i]))
        )
        self.controls = self.eos.union(hidden)  # tokens that are not text

    @property
    def chats(self) -> bool:
        """Return True if there is a chat template."""
        return self._template is not None

    @property
    def template(self) -> str | None:
        """Return the source of the chat template, if there is one."""
        return self._template.source if self._template else None

    @property
    def thinks(self) -> bool:
        """Return True if the model marks its thinking and the chat template can turn it on."""
        source = self._template.source if self._template else ""
        return self.marks is not None and "enable_thinking" in source

    @cached_property
    def thinks_unasked(self) -> bool:
        """Return True if the template turns thinking on where a request says nothing about it."""
        question = [{"role": "user", "content": "?"}]
        try:
            unasked, on = (self.prompt(question, thinking=thinking) for thinking in (None, True))
        except InvalidValue:  # the template refuses a single question
            return False
        return self.thinks and unasked == on

    @property
    def may_think(self) -> bool:
        """Return True if answers may hold thinking, which a request may be able to turn on or off."""
        return self.thinks or (self.marks is not None and self.marks.named)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """Return every token with its id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def serialized(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`. Special tokens in it are read as such; none are added.

        Raises InvalidValue for a text that the tokenizer cannot read, such as half a surrogate pair.
        """
        return self._ids(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens. Raises InvalidValue if that fails."""
        return self._decoded(tokens, skip_special=True)

    def decode_raw(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens included. Raises InvalidValue if that fails."""
        return self._decoded(tokens, skip_special=False)

    def prompt_tokens(self, text: str, most: int | None = None) -> list[int]:
        """Return the tokens of a plain text to continue, with the special tokens that the tokenizer adds.

        A text that has more than `most` tokens, whatever they are, is not tokenized: raises PromptTooLong.
        """
        self._check_length(text, most)
        return self._ids(text, special=True)

    def prompt(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of a conversation. `options` and errors are those of `prompt_with_turns`."""
        return self.prompt_with_turns(messages, **options)[0]

    def prompt_with_turns(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool | None = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        expand: Callable[[str], str] = lambda rendered: rendered,
        scope: Hashable = None,
        most: int | None = None,
        begun: str = "",
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the tokens of a conversation up to the start of the model's answer, and its turns.

        If the answer was `begun`, it goes on after that text.

        Turns are numbers of tokens after which other prompts may go on otherwise. None is known without
        tokens that end a message.

        Without `thinking` (None) the template decides whether the model shall think. `tools` are function
        definitions as in OpenAI's API, `variables` further variables of the template. `expand` changes the
        rendered text before it is tokenized. What two conversations with one `scope`, such as an API key,
        begin with is checked and tokenized once. The template decides about the thinking of earlier turns.
        Raises PromptTooLong as `prompt_tokens` does, InvalidValue if there is no chat template or it refuses
        the messages, LostText if it leaves out a text of them.
        """
        if self._template is None:
            raise InvalidValue(
                "this target has no chat template: give it a prompt as tokens, without a session"
            )
        rendered = render_history(
            self._template,
            messages,
            thinking=thinking,
            tools=tools,
            variables=variables,
            known=KnownChecks(self._checks, scope),
        )
        expanded = expand(rendered.text) + begun
        self._check_length(expanded, most)
        encoded = self._encodings.encode(expanded, scope)
        more, turns = len(encoded.text) - len(rendered.text), set[int]()
        for turn in rendered.turns:
            # Pictures before it were written out, or only after it; those on both sides hide it.
            if encoded.text.endswith(rendered.text[turn:]):
                size = encoded.size_after(turn + more)
            elif encoded.text.startswith(rendered.text[:turn]):
                size = encoded.size_after(turn)
            else:
                size = None
            if size is not None:
                turns.add(size)
        return list(encoded.tokens), tuple(sorted(turns))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self._encoding(text, special=special).ids)

    def _encoding(self, text: str, *, special: bool) -> Encoding:
        try:
            # Unlike `encode`, this lets other threads run: a megabyte takes a second.
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        except TypeError as error:
            raise InvalidValue("a text holds half a surrogate pair: give text that is valid UTF-8") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust code that panics raises no Exception
            raise InvalidValue(f"the tokenizer fails on this text: {one_line(error)}") from error
        return encoding

    def _decoded(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        try:
            return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise InvalidValue(f"the tokenizer fails on these tokens: {one_line(error)}") from error

    def _check_length(self, text: str, most: int | None) -> None:
        """Raise PromptTooLong for a text that has more than `most` tokens, whatever they are."""
        if most is None or len(text) <= most or self._token_chars is None:
            return
        least = -(-len(text) // self._token_chars)
        if least > most:
            raise PromptTooLong.for_context(f"at least {least}", most)

    @cached_property
    def _token_chars(self) -> int | None:
        """Return the most characters of a text that a token stands for; None without a bound."""
        return longest_token(self._tokenizer)


class TokenBytes:
    """Returns the bytes of each token of a vocabulary, perhaps a part of a character.

    It knows byte-level BPE, which writes bytes as letters, and sentencepiece with its spaces and byte tokens.
    Tokens of other vocabularies are decoded one by one.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        steps = list(_steps(tokenizer.decoder))
        names = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in names
        # Such a decoder decodes token by token.
        self._piecewise = bool(names) and names <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
        self._byte_fallback = "ByteFallback" in names
        self._replacements = [pair for pair in map(_replacement, steps) if pair]
        self._cached: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of `token`; the name of a special token, nothing for an unknown id."""
        if token not in self._cached:
            piece = self._tokenizer.id_to_token(token)
            self._cached[token] = b"" if piece is None else self._bytes(token, piece)
        return self._cached[token]

    def _bytes(self, token: int, piece: str) -> bytes:
        if self._byte_level:
            if token in self._added or not set(piece) <= _byte_of_letter().keys():
                return piece.encode()
            return bytes(_byte_of_letter()[letter] for letter in piece)
        if not self._piecewise:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        # In sentencepiece this is a byte of a character that the vocabulary lacks.
        if self._byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _steps(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a tokenizer's decoder, normalizer or pre-tokenizer as tokenizer.json writes them."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        inner_parts = (step.get(name, ()) for name in ("decoders", "normalizers", "pretokenizers"))
        waiting = [*(inner for steps in inner_parts for inner in steps), *waiting]
        if step["type"] != "Sequence":
            yield step


def longest_token(tokenizer: FastTokenizer) -> int | None:
    """Return the most characters of a text that one token stands for.

    None if a token may stand for any number of them, as where spaces are dropped.
    """
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    kept = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
    for step in _steps(tokenizer.pre_tokenizer):
        if step["type"] not in kept or step.get("behavior") == "Removed":
            return None
    shrinks = 1
    for step in _steps(tokenizer.normalizer):
        match step:
            case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel"}:
                continue
            case {"type": "NFC" | "NFKC"}:
                shrinks *= 4  # the longest canonical decomposition of a character
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                shrinks *= math.ceil(len(old) / len(new))
            case _:
                return None
    model = tokenizer.model
    if not isinstance(model, BPE) or (model.unk_token and model.fuse_unk and not model.byte_fallback):
        return None
    return shrinks * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@cache
def _byte_of_letter() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes are their own letters, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer and chat template of a checkpoint. Raises BadCheckpoint."""
    tokenizer, end = _read(checkpoint)
    main = checkpoint.config
    configs = main, main.get("text_config") or {}, checkpoint.json("generation_config.json")
    stated = [config.get("eos_token_id") for config in configs]
    eos = {i for ids in stated for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
    ends = eos if end is None else eos | {end}
    return Tokenizer(tokenizer, read_template(checkpoint), ends, read_generation_config(checkpoint, ends))


def read_fast_tokenizer(checkpoint: Checkpoint) -> FastTokenizer:
    """Return the tokenizer of a checkpoint: its tokenizer.json, or a conversion by transformers.

    Raises BadCheckpoint.
    """
    return _read(checkpoint)[0]


def _read(checkpoint: Checkpoint) -> tuple[FastTokenizer, int | None]:
    folder, config = checkpoint.folder, checkpoint.json("tokenizer_config.json")
    file, kind = folder / "tokenizer.json", config.get("tokenizer_class")
    if kind == "NewlineTokenizer":  # it does more than its tokenizer.json says
        raise BadCheckpoint(f"{folder} has a {kind}, which writes <n> for a newline and is not read")
    if file.is_file():
        try:
            tokenizer = FastTokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the tokenizers library raises nothing narrower, and panics
            raise BadCheckpoint(
                f"{file} is not a tokenizer ({one_line(error)}): download it again"
            ) from error
        add_tokens(tokenizer, checkpoint)
        eos = tokenizer.token_to_id(special_tokens(checkpoint).get("eos_token", ""))
    else:
        tokenizer, eos = _converted(checkpoint, own_code="auto_map" in config)
    tokenizer.no_truncation()  # a length from training would silently drop text
    tokenizer.no_padding()
    if config.get("fix_mistral_regex") is True:
        # As it is in the file, which transformers reads, too; a folder with a tokenizer alone has none.
        fix_mistral_cut(tokenizer, checkpoint.published)
    return tokenizer, eos


def _converted(checkpoint: Checkpoint, *, own_code: bool) -> tuple[FastTokenizer, int | None]:
    folder = checkpoint.folder
    if not checkpoint.has_tokenizer:
        unread = ("tekken.json", "*.tiktoken", "tiktoken.model", "*.spm", "vocab.txt")
        other = next((f"{file.name} is not read: " for form in unread for file in folder.glob(form)), "")
        raise BadCheckpoint(f"{folder} has no tokenizer.json or tokenizer.model: {other}{AGAIN}")
    from transformers import AutoTokenizer  # a second to import

    try:
        theirs = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        tokenizer, eos = theirs.backend_tokenizer, theirs.eos_token_id
    except Exception as error:  # whatever the converter of this family raises
        why = "the code that it brings is never run" if own_code else one_line(error)
        raise BadCheckpoint(
            f"{folder} has a tokenizer that cannot be read ({why}): save it as tokenizer.json"
        ) from error
    if not isinstance(tokenizer, FastTokenizer):
        raise BadCheckpoint(f"{folder} has a tokenizer that cannot be read: save it as tokenizer.json")
    return tokenizer, eos


def differing_token(drafter: Checkpoint, target: Checkpoint, tokenizer: Tokenizer) -> str | None:
    """Return a description of the first token in which two tokenizers differ; None if they are equal.

    `tokenizer` is the target's. Raises BadCheckpoint for a tokenizer that cannot be read.
    """
    if not drafter.has_tokenizer:
        return None
    ours, theirs = (checkpoint.folder / "tokenizer.json" for checkpoint in (target, drafter))
    same = ours.is_file() and theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)
    if same and stated_tokens(target) == stated_tokens(drafter):
        return None
    expected = {i: token for token, i in tokenizer.vocabulary().items()}
    drafted = {
        i: token for token, i in read_fast_tokenizer(drafter).get_vocab(with_added_tokens=True).items()
    }
    differing = (i for i in sorted(expected.keys() | drafted.keys()) if expected.get(i) != drafted.get(i))
    first = next(differing, None)
    if first is None:
        return None
    return (
        f"token {first} is {drafted.get(first)!r} for the drafter {drafter.folder} and "
        f"{expected.get(first)!r} for the target {target.folder}"
    )
