"""Small models that recite one text in tokens of their own, and tokenizers that cut it differently."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_spec.text import Text
from mlx_spec.text.chat_template import ChatTemplate

CONTROLS = ["<bos>", "<|turn>", "<turn|>", "<eos>"]
TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\n' + m['content'] + '<turn|>\n' }}"
    "{% endfor %}{{ '<|turn>assistant\n' }}"
)
# Every word once, and every character of several bytes: what follows a token depends on nothing else.
RECITED = (
    " Speculative decoding drafts several tokens with some smaller model then verifies them at once 😀 by"
    " larger ones; accepted text never changes: café世 or 12345 = x_y(z)\treturn [each] # done!\n"
)


@cache
def bytes_and_words() -> Tokenizer:
    """Byte-level BPE over words, as of GPT-2: a word is one token, an emoji is four."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, show_progress=False, initial_alphabet=alphabet, special_tokens=CONTROLS
    )
    plain = RECITED.replace("😀", "").replace("世", "")
    tokenizer.train_from_iterator([plain, " one two three assistant\n user\n"] * 4, trainer)
    return tokenizer


@cache
def syllables() -> Tokenizer:
    """A tokenizer like sentencepiece's: at most four letters a token, a space before every text, bytes."""
    trained = Tokenizer(models.BPE())
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
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>"])
    return tokenizer


def text_of(tokenizer: Tokenizer) -> Text:
    """With a chat template, whatever the tokenizer knows of its marks."""
    return Text(tokenizer, ChatTemplate(TEMPLATE, {}), [tokenizer.token_to_id("<eos>")])


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
