"""Tokenizers of each kind, and texts to try them with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import (
    Tokenizer as FastTokenizer,
)

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from mlx_spec.tokenizer.thinking import Markers

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


def sentencepiece_like() -> FastTokenizer:
    """Spaces are U+2581 with one in front of the text; unknown characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {c: len(vocab) + i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyz,.!")}
    tokenizer = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace(size: int = 512) -> FastTokenizer:
    """As in Mistral and Llama 2: words with U+2581 in front, bytes, <s> before a prompt, CodeLlama's marks.

    Tokens are many, so that most that a random model draws begin with a space.
    """
    tokenizer = sentencepiece_like()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    letters = sorted(token for token in vocab if len(token) == 1 and token.isalpha())
    pairs = [("▁", a) for a in letters] + [(f"▁{a}", b) for a in letters for b in letters]
    merges = pairs[: size - len(vocab) - 4]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level(
    texts: Sequence[str] = SAMPLES,
    added: Sequence[str] = (),
    size: int = 400,
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
) -> FastTokenizer:
    """Bytes are letters, as in GPT-2. The thinking markers and `added` tokens are not special."""
    tokenizer = FastTokenizer(models.BPE())
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
    "sentencepiece": Tokenizer(sentencepiece_like(), None, ()),
    "byte_level": Tokenizer(byte_level(), None, ()),
    "golden": Tokenizer(read_fast_tokenizer(Checkpoint(GOLDEN)), None, ()),
    "demo": Tokenizer(read_fast_tokenizer(Checkpoint(DEMO)), None, ()),
}


def marked(
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    template: str = "",
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """Return a vocabulary of bytes and `merges`, with marks that are tokens or that the template names."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|ends|>", *special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return Tokenizer(
        tokenizer, ChatTemplate(template, {}) if template else None, [tokenizer.token_to_id("<|ends|>")]
    )


HARMONY = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")]
TURN = [("<", "/"), ("</", "t"), ("k", ">"), ("k>", "Ċ"), ("<", "a")]  # tokens that begin or end within a tag
MARKED = {
    "harmony": marked(HARMONY),
    "muse": marked(["<|start|>", "<|message|>", "<|eom|>"]),
    "solar": marked(["<|begin|>", "<|think|>", "<|content|>", "<|end|>"]),
    "kimi-k3": marked(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]),
    "brackets": marked(["[THINK]", "[/THINK]", "[CALLS]"]),
    "seed": marked(added=["<seed:think>", "</seed:think>"]),
    "text": marked(template="{{ '<think>' }} and </think>", merges=TURN),
    "text-answer": marked(template="<think> and </think>, <answer> and </answer>", merges=TURN),
}
