"""The tokens that a checkpoint adds to its vocabulary, and their roles, as transformers reads them.

tokenizer.json has a list of added tokens. `added_tokens_decoder` of tokenizer_config.json takes precedence:
fine-tunes often write their tokens only there. Without it, added_tokens.json and special_tokens_map.json
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import AGAIN, one_line
from mlx_spec.errors import BadCheckpoint

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class _Stated:
    """Tokens that the files beside tokenizer.json state."""

    roles: dict[str, AddedToken]  # by key, such as `eos_token`
    extra: list[AddedToken]  # special tokens without a role
    tokens: dict[int, AddedToken]
    is_complete: bool  # True if `tokens` replace the list in tokenizer.json


def special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the texts of the tokens that have a role, such as `bos_token`. Raises BadCheckpoint."""
    return {key: token.content for key, token in _read(checkpoint).roles.items()}


def stated_tokens(checkpoint: Checkpoint) -> set[str]:
    """Return the texts of all tokens that the files beside tokenizer.json state. Raises BadCheckpoint."""
    stated = _read(checkpoint)
    return {token.content for token in [*stated.roles.values(), *stated.extra, *stated.tokens.values()]}


def add_tokens(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Add to a tokenizer.json what the files beside it state. Raises BadCheckpoint."""
    stated, in_file = _read(checkpoint), tokenizer.get_added_tokens_decoder()
    tokens = stated.tokens if stated.is_complete else stated.tokens | in_file
    known = {token.content for token in (in_file | tokens).values()}
    roles = {token.content for token in stated.roles.values()}
    wanted = [tokens[id] for id in sorted(tokens)]
    wanted += [token for token in [*stated.roles.values(), *stated.extra] if token.content not in known]
    for token in wanted:
        token.special = token.special or token.content in roles
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    new = [token for token in wanted if present.get(token.content) != token]
    absent = {token.content for token in new if tokenizer.token_to_id(token.content) is None}
    if new:
        tokenizer.add_tokens(new)
    for id, token in stated.tokens.items():
        if token.content in absent and tokenizer.token_to_id(token.content) != id:
            raise BadCheckpoint(
                f"{checkpoint.folder} states {token.content!r} as token {id}, where tokenizer.json has no "
                "place for it: save the tokenizer again with transformers"
            )


def fix_mistral_cut(tokenizer: Tokenizer, config: Mapping[str, Any], vocabulary: int = 100_000) -> None:
    """Replace the wrong pre-tokenizer with which some of Mistral's tokenizers were published.

    As transformers, for models whose `config` was written before transformers 5 and that have a larger
    vocabulary than `vocabulary`.
    """
    kind, version = config.get("model_type"), str(config.get("transformers_version") or 0)
    is_affected = kind in (None, "mistral", "mistral3", "voxtral", "ministral", "pixtral")
    cut = tokenizer.pre_tokenizer
    small = tokenizer.get_vocab_size() <= vocabulary
    if cut is None or small or not (config and is_affected and Version(version) < Version("5.0.0")):
        return
    from mlx_spec.checkpoint.gguf_cuts import PRE_TOKENIZERS

    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["tekken"].patterns[0]), "isolated")
    if isinstance(cut, pre_tokenizers.Sequence):
        cut[0] = split
        return
    if isinstance(cut, pre_tokenizers.Metaspace):
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cut])


def _read(checkpoint: Checkpoint) -> _Stated:
    config = checkpoint.json("tokenizer_config.json")
    listed, new, old = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
    extra = config.get(new) or config.get(old)
    is_complete = listed in config
    try:
        if is_complete:
            tokens = {int(id): _token(value) for id, value in config[listed].items()}
        else:
            more = checkpoint.json("special_tokens_map.json")
            others = None
            if isinstance(extra, dict) or not config.keys() & {new, old}:
                config |= extra or {}
                extra, others = more.get(new), more.get(old)
            else:
                extra = [*_listed(extra), *_listed(more.get(new))]
            config |= {key: _token(value, special=True) for key, value in _roles(more).items()}
            # A role that tokenizer_config.json writes as an object does not make a token special.
            special = {str(value) for value in [*map(config.get, ROLES), *map(_token, _listed(extra))]}
            tokens = {
                int(id): AddedToken(name, special=name in special, normalized=name not in special)
                for name, id in checkpoint.json("added_tokens.json").items()
            }
            extra = extra or others
        named = _roles(config) | (extra if isinstance(extra, dict) else {})
        roles = {key: _token(value, special=True) for key, value in named.items()}
        return _Stated(roles, [_token(value, special=True) for value in _listed(extra)], tokens, is_complete)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadCheckpoint(
            f"the added tokens that {checkpoint.folder} states cannot be read ({one_line(error)}): {AGAIN}"
        ) from error


def _roles(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens with a role: the usual ones, then one model's own, such as `image_token`."""
    usual = {key: config[key] for key in ROLES if config.get(key)}
    more = {key: v for key, v in config.items() if key.endswith("_token") and isinstance(v, str | AddedToken)}
    return usual | more


def _listed(extra: Any) -> Iterable[Any]:
    return extra if isinstance(extra, list) else ()


def _token(value: Any, *, special: bool = False) -> AddedToken:
    """Return a token that is written as its text, or as an object with its properties."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, dict):
        flags = {
            key: bool(value[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in value
        }
        return AddedToken(value["content"], **flags, special=special or bool(value.get("special")))
    return AddedToken(value, special=special)
