"""Two models that recite a text, each with a tokenizer of its own: a target, and a drafter for it."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec.drafters.retokenized import Retokenized, encode_after, retokenized_source
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from support import tiny
from support.pairs import TEMPLATE
from support.vocabularies import byte_level

KINDS = ("words", "syllables")
CONTROLS = ["<bos>", "<|turn>", "<turn|>", "<eos>"]
# Every word once, and every character of several bytes: what follows a token depends on nothing else.
RECITED = (
    " Speculative decoding drafts several tokens with some smaller model then verifies them at once 😀 by"
    " larger ones; accepted text never changes: café世 or 12345 = x_y(z)\treturn [each] # done!\n"
)


@cache
def bytes_and_words() -> FastTokenizer:
    """Byte-level BPE over words, as of GPT-2: a word is one token, an emoji is four."""
    plain = RECITED.replace("😀", "").replace("世", "")
    return byte_level([plain, " one two three assistant\n user\n"] * 4, size=480, special=CONTROLS)


@cache
def syllables() -> FastTokenizer:
    """A tokenizer like sentencepiece's: at most four letters a token, a space before every text, bytes."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]{1,4}"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    plain = RECITED.replace("😀", "").replace("世", "").replace(" ", "▁")
    trained.train_from_iterator([plain] * 4, trainer)
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys([*names, *learnt]))}
    merges = [
        (left, word[len(left) :])
        for word in learnt
        for left in (word[:i] for i in range(1, len(word)))
        if left in trained.get_vocab() and word[len(left) :] in trained.get_vocab()
    ]
    tokenizer = FastTokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>"])
    return tokenizer


def taught(model: nn.Module, tokens: list[int], sure: float = 6.0) -> nn.Module:
    """`model` with an LM head that makes it recite `tokens` over and over, from wherever it is."""
    model.model.embed_tokens.weight *= 16  # the rest of a text matters, but not much
    several = tokens * 3
    hidden = model.model(mx.array([several]))[0, :-1]
    hidden /= mx.linalg.norm(hidden, axis=-1, keepdims=True)
    heads = mx.zeros(model.lm_head.weight.shape)
    heads = heads.at[mx.array(several[1:])].add(hidden)
    heads /= mx.maximum(mx.linalg.norm(heads, axis=-1, keepdims=True), 1e-6)
    model.lm_head.weight = sure * heads / hidden.shape[-1] ** 0.5  # several times `sure` in logits
    mx.eval(model.parameters())
    return model


@cache
def text_of(kind: str) -> Tokenizer:
    """With a chat template, whatever the tokenizer knows of its marks."""
    tokenizer = bytes_and_words() if kind == "words" else syllables()
    return Tokenizer(tokenizer, ChatTemplate(TEMPLATE, {}), [tokenizer.token_to_id("<eos>")])


def recited(kind: str) -> list[int]:
    tokens = encode_after(text_of(kind), b"", RECITED.encode())
    assert tokens is not None and len(set(tokens)) > 0.9 * len(tokens)
    return tokens


def size_of(kind: str) -> int:
    return 32 * (len(text_of(kind).vocabulary()) // 32 + 1)


@cache
def target_of(kind: str) -> nn.Module:
    """Its window holds 16 tokens; the sequences here are several times as long."""
    return taught(tiny.sliding(scale=0.05, num_hidden_layers=2, vocab_size=size_of(kind)), recited(kind))


def untaught(kind: str) -> nn.Module:
    return tiny.full(1, scale=0.05, num_hidden_layers=1, vocab_size=size_of(kind), tie_word_embeddings=False)


@cache
def model_of(kind: str) -> nn.Module:
    return taught(untaught(kind), recited(kind))


def drafter_for(kind: str) -> Retokenized:
    """With the other tokenizer."""
    other = KINDS[1 - KINDS.index(kind)]
    return Retokenized(model_of(other), size_of(other), text_of(kind), text_of(other))


def prompt_of(kind: str, count: int = 20) -> list[int]:
    start = text_of(kind).token_id("<bos>")
    assert start is not None
    return [start, *recited(kind)[:count]]


def pair_of(kind: str, K: int) -> Pair:
    other = KINDS[1 - KINDS.index(kind)]
    source = retokenized_source("other", model_of(other), size_of(other), text_of(kind), text_of(other))
    facts = PairInfo(kind, "other", size_of(kind), None, 0, 0)
    return Pair(facts, text_of(kind), target_of(kind), [source], FixedPolicy(K))
