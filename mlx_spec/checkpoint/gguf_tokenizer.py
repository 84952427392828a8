"""Turn the tokenizer in a GGUF file's metadata into the files of a checkpoint.

Byte-level BPE names its pre-tokenizer; a name that is not in `PRE_TOKENIZERS` is refused. Sentencepiece has
scores instead of merges, except Gemma 4's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlx_spec.checkpoint.gguf import unread
from mlx_spec.checkpoint.gguf_cuts import PRE_TOKENIZERS

SPACE = "▁"  # of sentencepiece


class TokenType(IntEnum):
    """The types of tokens in GGUF that are not part of text."""

    CONTROL = 3
    USER_DEFINED = 4


def read_gguf_tokenizer(
    file: Path, metadata: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """Return the tokenizer, the content of tokenizer_config.json, and the tokens that end an answer.

    Raises BadCheckpoint for a kind or a cut that is not known.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or kind not in KINDS:
        raise unread(file, f"has a tokenizer of the kind {kind}, {', '.join(KINDS)} are read")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind != "gpt2":  # user-defined tokens have plain spaces, others the letter for a space
        tokens = [
            t.replace(" ", SPACE) if y == TokenType.USER_DEFINED else t
            for t, y in zip(tokens, types, strict=True)
        ]
    tokenizer = KINDS[kind](file, metadata, tokens)
    for special, wanted in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
        names = [token for token, number in zip(tokens, types, strict=True) if number == wanted]
        if kind != "gpt2" and not special:  # runs of spaces and lines are merged like others
            names = [name for name in names if name.strip(SPACE + "\n\t")]
        added = [AddedToken(name, special=special, normalized=False) for name in names]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    known = {
        name: tokens[index]
        for name, key in keys.items()
        if (index := _named(metadata, key, tokens)) is not None
    }
    cut = PRE_TOKENIZERS.get(_cut(metadata))
    usual = kind == "llama" or (cut is not None and cut.with_bos)
    with_bos = metadata.get("tokenizer.ggml.add_bos_token", usual)
    if with_bos and kind != "gemma4" and "bos" in known:  # Gemma 4's template writes it
        bos = known["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    config = {f"{name}_token": token for name, token in known.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    templates = _templates(metadata)
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    named = (_named(metadata, key, tokens) for key in ("eos", "eot", "eom"))
    closing = _closing(tokens, types)
    return tokenizer, config, list(dict.fromkeys([*(i for i in named if i is not None), *closing]))


def _closing(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Return the tokens that end an answer, by their text: chat templates close a turn with them."""
    ends = (
        "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end|> <|end_of_text|> <end_of_turn> <turn|>".split()
    )
    return [i for i, token in enumerate(tokens) if token in ends and types[i] in tuple(TokenType)]


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
    unnamed = "tokenizer.chat_template"  # others follow it after a point
    named = {key.removeprefix(f"{unnamed}."): text for key, text in texts.items() if f"{unnamed}." in key}
    return ({"default": texts[unnamed]} if unnamed in texts else {}) | named


def _named(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """Return the id of a named token, None if the vocabulary has none: some files say -1, in 32 bits."""
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return token if isinstance(token, int) and 0 <= token < len(tokens) else None


def _cut(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre"))


def _byte_level(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    name = _cut(metadata)
    if name not in PRE_TOKENIZERS:
        if "tokenizer.ggml.pre" not in metadata:
            raise unread(file, "does not say how text is cut")
        raise unread(file, f"cuts text as {name} before merging, which is not known")
    vocab = {token: index for index, token in enumerate(tokens)}
    cut = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(vocab, _written_merges(metadata), ignore_merges=cut.whole_words))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _written_merges(metadata) or _merges_by_rank(vocab, _ranks(metadata, tokens))
    unknown = _named(metadata, "unknown", tokens)
    name = None if unknown is None else tokens[unknown]
    model = models.BPE(vocab, merges, unk_token=name, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.model") == "llama" and metadata.get(
        "tokenizer.ggml.add_space_prefix", True
    )
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _written_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    # The second half may begin with a space, the first may not.
    pairs = (merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges") or ())
    return [(left, right) for left, _, right in pairs]


def _ranks(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    """Return the rank of each token; lower ranks are merged first.

    User-defined tokens, such as runs of spaces, come first, the longest of them before the others. Gemma's
    scores are not ranks; the order of its tokens is.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    by_order = str(metadata.get("general.architecture")).startswith("gemma") or not scores
    ranks = list(range(len(tokens))) if by_order else [-score for score in scores or ()]
    lowest = min(ranks)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return [
        lowest - len(token) if kind == TokenType.USER_DEFINED else rank
        for token, kind, rank in zip(tokens, types, ranks, strict=True)
    ]


def _merges_by_rank(vocab: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs that merge into a token, sorted by its rank, then by the ids of the pair."""
    merges, lengths = [], sorted({0, *map(len, vocab)})
    for token, index in vocab.items():
        # Parts are no longer than the longest shorter token: one of a million letters takes no time.
        longest = lengths[max(bisect_left(lengths, len(token)) - 1, 0)]
        for cut in range(max(len(token) - longest, 1), min(len(token), longest + 1)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                merges.append((ranks[index], left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(merges)]


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
