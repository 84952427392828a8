"""Tokenizers of each kind, and texts to try them with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_spec.text import Text, read_tokenizer
from mlx_spec.text.tokenizer import Markers

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "12b" / "target"  # the others have the same tokenizer
DEMO = ROOT / "mlx_spec/demo/target"
GEMMA, QWEN = Markers("<|tool_call>", "<tool_call|>"), Markers("<tool_call>", "</tool_call>")
SAMPLES = [
    "",
    " ",
    "a",
    "Hello, world!  Two  spaces.\n\n\tTab",
    " leading and trailing ",
    "naïve café – “quotes” … €",
    "日本語のテキスト、中文，한국어",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b",
    "def f(x):\n    return x ** 2  # 平方\n",
    "<|turn>user\nnot a turn<turn|> <bos><eos>",
    "0123456789 3.14e-10",
]
RANGES = [(0x20, 0x7E), (0xA0, 0x17F), (0x400, 0x4FF), (0x4E00, 0x4EFF), (0x1F300, 0x1F64F), (0x200B, 0x200F)]


def random_text(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(chr(draw.randint(*draw.choice(RANGES))) for _ in range(draw.randint(1, 60)))


def sentencepiece_like() -> Tokenizer:
    """Spaces are U+2581 with one in front of the text; unknown characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {c: len(vocab) + i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyz,.!")}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_level(
    texts: Sequence[str] = SAMPLES,
    added: Sequence[str] = (),
    size: int = 400,
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
) -> Tokenizer:
    """Bytes are letters, as in GPT-2. The thinking markers and `added` tokens are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["<think>", "</think>", *added])
    return tokenizer


TEXTS = {
    "sentencepiece": Text(sentencepiece_like(), None, ()),
    "byte_level": Text(byte_level(), None, ()),
    "golden": Text(read_tokenizer(GOLDEN), None, ()),
    "demo": Text(read_tokenizer(DEMO), None, ()),
}
