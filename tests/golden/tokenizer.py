"""A Gemma-style tokenizer of 512 tokens (BPE, byte fallback, Gemma 4's control tokens) and its corpus."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from variants import VOCAB

CORPUS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "Speculative decoding drafts several tokens and verifies them in one pass.",
    "A small model proposes and a large model checks every proposal.",
    "def add(a, b):\n    return a + b\n",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "for i in range(10):\n    print(i)\n",
    "What is the capital of France? The capital of France is Paris.",
    "What is the capital of Italy? The capital of Italy is Rome.",
    "What is the capital of Spain? The capital of Spain is Madrid.",
    "one two three four five six seven eight nine ten",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "The cat sat on the mat. The dog sat on the log. The frog sat on the rock.",
    "She sells sea shells by the sea shore. He sells red bricks by the red wall.",
    '{"name": "tiny", "layers": 4, "hidden": 64, "heads": [1, 2, 3, 4]}',
    "Once upon a time there was a tiny model that wanted to learn to read and write.",
    "Roses are red, violets are blue, sugar is sweet, and so are you.",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
]

BOS, EOS = 2, 1
BASIC = ["<pad>", "<eos>", "<bos>", "<unk>"]
CONTROL = (
    '<|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|> <|channel> '
    "<channel|> <|turn> <turn|> <|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|video|>"
).split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(_filled(_fit()))),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=CONTROL,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return fast


def _fit() -> Tokenizer:
    pinned = BASIC + CONTROL + [f"<0x{i:02X}>" for i in range(256)]
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Replace(" ", "▁")  # spaces become U+2581, no dummy prefix
    # While fitting, merges stop at word starts, which makes the vocabulary word-like.
    tok.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁\n]*|\n|[^▁\n]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=pinned,
        show_progress=False,
        max_token_length=12,
        initial_alphabet=["▁", "\n"],
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tok


def _filled(tok: Tokenizer) -> dict:
    """The tokenizer as data: byte tokens were special only to pin their ids; unused ids get a name."""
    blob = json.loads(tok.to_str())
    blob["added_tokens"] = [t for t in blob["added_tokens"] if not t["content"].startswith("<0x")]
    vocab = blob["model"]["vocab"]
    for i in range(VOCAB - len(vocab)):
        vocab[f"<unused{i}>"] = len(vocab)
    if len(vocab) != VOCAB:
        raise ValueError(f"vocabulary of {len(vocab)} tokens, wanted {VOCAB}")
    return blob
