"""Tokens <-> text: encoding, decoding, chat prompts, and the marks around a model's thoughts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.files import one_line, read_object
from mlx_spec.reading import Detokenizer, Marks
from mlx_spec.reading import Kind as Kind
from mlx_spec.reading import Reader as Reader
from mlx_spec.template import REASONING, ChatTemplate, Message, read_template, special_tokens
from mlx_spec.written import Written

MARKS = (
    Marks("<|channel>", "<channel|>", "thought\n"),
    Marks("<think>", "</think>"),
    Marks("<longcat_think>", "</longcat_think>"),
    Marks("<|think:start|>", "<|think:end|>"),
)


class Text:
    """The tokenizer of a target, its chat template and the tokens that end an answer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.eos = frozenset(eos)
        special = (i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.controls = self.eos.union(special)  # tokens that are no text
        found = (m for m in MARKS if None not in (self.token_id(m.open), self.token_id(m.close)))
        self.marks = next(found, None)
        self._written = Written(tokenizer)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    @property
    def thinks(self) -> bool:
        """Whether the model marks its thoughts, and the template can ask for them or not."""
        return self.marks is not None and "enable_thinking" in (
            self._template.source if self._template else ""
        )

    def token_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary writes it; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def serialized(self) -> str:
        """The tokenizer in the format of tokenizer.json."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; special tokens written in it count as such, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A decoder of one stream of tokens."""
        return Detokenizer(self.decode)

    def written(self, token: int) -> bytes:
        """The bytes of one token, perhaps half a character; of a special token its name."""
        return self._written(token)

    def prompt_tokens(self, text: str) -> list[int]:
        """The tokens of a plain text to be continued, with the special tokens that its tokenizer adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation up to where the model's answer begins.

        `tools` are function definitions as OpenAI's API has them, `variables` more of what a template reads.
        Thoughts of turns before the last user message are left out. Raises InvalidValue where there is no
        chat template or it refuses the messages.
        """
        if self._template is None:
            raise InvalidValue(
                "this target has no chat template: give it a prompt as tokens, without a session"
            )
        stripped = self._stripped(messages)
        return self.encode(
            self._template.render(stripped, thinking=thinking, tools=tools, variables=variables)
        )

    def reader(self, prompt: Sequence[int] = (), *, calls: Marks | None = None) -> Reader:
        """A reader of the answer to `prompt`, whose end may already open the thoughts.

        `calls` are the marks of tool calls, to be read as text of their own kind.
        """
        if self.marks is None:
            return Reader(self, "answer", calls=calls)
        opened = self.decode_raw(prompt[-16:]).rstrip().endswith(_opening(self.marks))
        return Reader(self, "thinking" if opened else "answer", thoughts=self.marks, calls=calls)

    def plain_reader(self) -> Reader:
        """A reader of a text in which nothing is marked: all of it is answer."""
        return Reader(self, "answer")

    def decode_raw(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _stripped(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` without the thoughts of earlier turns."""
        last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=0)
        return [self._without_thoughts(m) if i < last else m for i, m in enumerate(messages)]

    def _without_thoughts(self, message: Message) -> Message:
        if message.get("role") != "assistant":
            return message
        kept = {key: value for key, value in message.items() if key not in REASONING}
        content, marks = kept.get("content"), self.marks
        if marks is not None and isinstance(content, str):
            kept["content"] = _cut(content, marks)
        return kept


def _opening(marks: Marks) -> str:
    return (marks.open + marks.header).rstrip()


def _cut(content: str, marks: Marks) -> str:
    """`content` without what stands between the marks, or before a mark that only closes."""
    if marks.close not in content and marks.open not in content:
        return content
    parts = content.split(marks.close)
    before = "" if marks.open not in parts[0] else parts[0].split(marks.open)[0]
    rest = [part.split(marks.open)[0] for part in parts[1:]]
    return (before + "".join(rest)).strip()


def read_text(folder: Path, config: Mapping[str, Any]) -> Text:
    """The text side of the checkpoint in `folder`, whose config.json is `config`. Raises BadCheckpoint."""
    tokenizer = read_tokenizer(folder)
    eos = {*_ids(config.get("eos_token_id")), *_ids((config.get("text_config") or {}).get("eos_token_id"))}
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos.update(_ids(read_object(generation).get("eos_token_id")))
    own = tokenizer.token_to_id(special_tokens(folder).get("eos_token", ""))
    return Text(tokenizer, read_template(folder), eos if own is None else eos | {own})


def has_tokenizer(folder: Path) -> bool:
    """Whether the checkpoint in `folder` brings a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`: its tokenizer.json as it is, anything else as transformers converts it."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise BadCheckpoint(f"{file} is no tokenizer ({one_line(error)}): download it again") from error
    if not has_tokenizer(folder):
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json or tokenizer.model: download or convert it again"
        )
    return _converted(folder)


def _converted(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True).backend_tokenizer
    except Exception as error:  # whatever the converter of this family raises
        raise BadCheckpoint(f"{folder} has a tokenizer that cannot be read ({one_line(error)})") from error
    if not isinstance(tokenizer, Tokenizer):
        raise BadCheckpoint(f"{folder} has a tokenizer that cannot be read: save it as tokenizer.json")
    return tokenizer


def _ids(value: Any) -> list[int]:
    """A token id, a list of them or nothing, as a list."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
