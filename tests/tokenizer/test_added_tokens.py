"""Added tokens and tokens with a role are those of transformers, wherever a checkpoint states them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import exchanged
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.tokenizer import Tokenizer, differing_token, read_tokenizer
from mlx_spec.tokenizer.added_tokens import fix_mistral_cut, special_tokens
from mlx_spec.tokenizer.tokenizer import read_fast_tokenizer

NAMES = ("<|end|>", "<|im_start|>", "<|im_end|>", "<pad>", "<x y>", "<tool>", "<s>", "</s>")
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SIZE = 256
CHATML = {str(SIZE + i): {"content": NAMES[1 + i], **PLAIN, "special": True} for i in range(2)}


def letters() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(folder: Path, tokenizer: FastTokenizer, files: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": {"model_type": "llama"}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def same_as_transformers(folder: Path, texts: list[str]) -> Tokenizer:
    checkpoint = read_checkpoint(folder)
    ours, theirs = read_tokenizer(checkpoint), AutoTokenizer.from_pretrained(folder)
    assert ours.vocabulary() == theirs.get_vocab()
    assert special_tokens(checkpoint) == theirs.special_tokens_map
    assert ours.eos == {i for i in [theirs.eos_token_id] if i is not None}
    for text in texts:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == tokens and ours.prompt_tokens(text) == theirs.encode(text)
        assert ours.decode_raw(tokens) == theirs.decode(tokens)
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    return ours


def random_checkpoint(seed: int, folder: Path) -> list[str]:
    """Write a checkpoint whose files state tokens here and there. Return texts of them."""
    draw = random.Random(seed)

    def flags() -> dict[str, bool]:
        return {name: draw.random() < 0.3 for name in (*PLAIN, "special")}

    def roles(form: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for role in draw.sample(("bos_token", "eos_token", "pad_token", "image_token"), draw.randrange(4)):
            name = draw.choice(NAMES)
            found[role] = name if role == "image_token" else draw.choice([name, {"content": name, **form}])
        return found

    tokenizer = letters()
    tokenizer.add_tokens([AddedToken(name, **flags()) for name in draw.sample(NAMES, draw.randrange(5))])
    own = tokenizer.get_added_tokens_decoder()
    others = [name for name in draw.sample(NAMES, 3) if tokenizer.token_to_id(name) is None]
    config = roles(PLAIN | {"__type": "AddedToken"})
    if draw.random() < 0.5:
        ids = {token.content: i for i, token in own.items()} | {
            n: SIZE + len(own) + i for i, n in enumerate(others)
        }
        config["added_tokens_decoder"] = {i: {"content": name, **flags()} for name, i in ids.items()}
    if draw.random() < 0.5:
        config[draw.choice(["extra_special_tokens", "additional_special_tokens"])] = draw.sample(NAMES, 2)
    files: dict[str, Any] = {"tokenizer_config": config}
    if draw.random() < 0.4:
        files["special_tokens_map"] = roles(PLAIN)
    if draw.random() < 0.4:
        files["added_tokens"] = {name: SIZE + len(own) + i for i, name in enumerate(others)}
    write(folder, tokenizer, files)
    return ["".join(draw.choices([*NAMES, "a ", " b", "é", "日\n", "  "], k=12)) for _ in range(3)]


def test_tokens_are_those_of_transformers_wherever_they_are_stated(tmp_path: Path) -> None:
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        same_as_transformers(folder, random_checkpoint(seed, folder))


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_a_fine_tune_are_whole_and_end_answers(special: bool, tmp_path: Path) -> None:
    """tokenizer.json knows neither token, and calls <|end|> what tokenizer_config.json does not."""
    tokenizer = letters()
    tokenizer.enable_truncation(3)  # as training left it: no text is cut for that
    tokenizer.enable_padding(length=8, pad_token="<|im_end|>")
    files: dict[str, Any] = {
        "added_tokens_decoder": CHATML,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    write(tmp_path, tokenizer, {"tokenizer_config": files})
    text = same_as_transformers(tmp_path, ["<|im_start|>user\nhello<|im_end|>"])
    assert text.encode("<|im_start|>") == [SIZE] and text.eos == {SIZE + 1}
    tokenizer = letters()
    tokenizer.add_tokens([AddedToken("<|end|>", special=not special)])
    files["added_tokens_decoder"] = {SIZE: {"content": "<|end|>", **PLAIN, "special": special}}
    write(tmp_path, tokenizer, {"tokenizer_config": files})
    text = same_as_transformers(tmp_path, ["a<|end|>b"])
    assert text.decode(text.encode("a<|end|>b")) == "ab" and SIZE in text.controls


def test_a_drafter_without_the_tokens_of_the_target_has_another_tokenizer(tmp_path: Path) -> None:
    for name, tokens in (("target", CHATML), ("drafter", {}), ("same", CHATML)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, letters(), {"tokenizer_config": {"added_tokens_decoder": tokens}})
    target, drafter, same = (read_checkpoint(tmp_path / name) for name in ("target", "drafter", "same"))
    tokenizer = read_tokenizer(target)
    found = differing_token(drafter, target, tokenizer)
    assert found is not None and f"token {SIZE} is None for the drafter" in found
    assert differing_token(same, target, tokenizer) is None
    fewer = read_tokenizer(drafter)  # the other way round: the drafter has more
    found = differing_token(target, drafter, fewer)
    assert found is not None and f"token {SIZE} is '<|im_start|>' for the drafter" in found
    # another file with the size and time of the target's
    ours, theirs = (tmp_path / name / "tokenizer.json" for name in ("target", "same"))
    for folder in (ours.parent, ours.parent, theirs.parent):  # there and back: the same text of JSON
        exchanged(folder, 5, 6)
    assert theirs.stat().st_size == ours.stat().st_size
    shutil.copystat(ours, theirs)
    found = differing_token(same, target, tokenizer)
    assert found is not None and found.startswith("token 5 is ")


@pytest.mark.parametrize(
    ("config", "sequence", "fixed"),
    [
        ({"model_type": "mistral", "transformers_version": "4.50.0"}, True, True),
        ({"model_type": "mistral3"}, False, True),
        ({"model_type": "mistral", "transformers_version": "5.0.0"}, True, False),
        ({"model_type": "llama"}, False, False),
    ],
)
def test_the_cut_of_mistral_is_fixed_where_transformers_does(
    config: dict, sequence: bool, fixed: bool, tmp_path: Path
) -> None:
    tokenizer = letters()
    tokenizer.model = models.BPE(tokenizer.get_vocab() | {f"ab{i}": 256 + i for i in range(100_001)}, [])
    if sequence:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    write(tmp_path, tokenizer, {"tokenizer_config": {"fix_mistral_regex": True}, "config": config})
    theirs = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.pre_tokenizer
    ours, words = read_fast_tokenizer(read_checkpoint(tmp_path)).pre_tokenizer, "HelloWorld 12 it's\n/x"
    assert ours.pre_tokenize_str(words) == theirs.pre_tokenize_str(words)
    assert (ours.pre_tokenize_str(words) != tokenizer.pre_tokenizer.pre_tokenize_str(words)) == fixed
    small = letters()
    fix_mistral_cut(small, config)
    assert small.to_str() == letters().to_str()
