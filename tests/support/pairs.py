"""Pairs of tiny models with a tokenizer of bytes: in memory, in folders, and decoded plainly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from mlx_spec.decode.loop import decode
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.errors import SpecError
from mlx_spec.load import load
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from support import tiny
from support.lossless import plain

TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|turn>' + m.role + '\n' + m.content | trim + '<turn|>\n' }}"
    "{% endfor %}{{ '<|turn>assistant\n' }}{% if enable_thinking %}{{ '<|channel>thought\n' }}{% endif %}"
)
SPECIAL = ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"]
KINDS = ["full", "sliding", "quantized", "recurrent", "shared"]


class Models(dict[str, nn.Module]):
    """A model of each kind, made when it is asked for: a process that has computed cannot be forked."""

    def __missing__(self, kind: str) -> nn.Module:
        high, low = mx.random.state[0].tolist()
        self[kind] = tiny.full(1) if kind == "quantized" else vars(tiny)[kind]()
        mx.random.seed(high << 32 | low)  # the numbers of a test do not depend on what ran before it
        return self[kind]


MODELS = Models()


def shallow() -> Iterator[None]:
    """Use models of as few layers as their kind needs; K/V of the last full layer are not quantized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "full", tiny.full(num_hidden_layers=1))
        patch.setitem(MODELS, "quantized", tiny.full(1, num_hidden_layers=2))
        for kind, make in (("sliding", tiny.sliding), ("recurrent", tiny.recurrent)):
            patch.setitem(MODELS, kind, make(num_hidden_layers=2))
        yield


def byte_tokenizer() -> FastTokenizer:
    """One token a byte. The bytes that UTF-8 never uses give their place to the special tokens."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {chr(0xF8 + i) for i in range(len(SPECIAL))})
    tokenizer = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.get_vocab_size() == tiny.VOCAB
    return tokenizer


TOKENIZER = byte_tokenizer()


def make_pair(
    kind: str, drafter: str = "same", *, K: int = 4, eos: tuple[int, ...] = (), context: int | None = None
) -> Pair:
    """A pair of tiny models. The drafter "same" is the target itself, so that most drafts are accepted."""
    model, kv_bits = MODELS[kind], 8 if kind == "quantized" else None
    tokenizer = Tokenizer(TOKENIZER, ChatTemplate(TEMPLATE, {}), eos)
    return pair_with(model, sources(drafter, model), K, tokenizer, context=context, kv_bits=kv_bits)


def pair_with(
    model: nn.Module,
    drafters: Sequence[DrafterSource],
    K: int,
    tokenizer: Tokenizer | None = None,
    *,
    context: int | None = None,
    kv_bits: int | None = None,
) -> Pair:
    """A pair of a model of 256 tokens and drafters, which draft K tokens."""
    names = [name for source in drafters for name in source.names]
    facts = PairInfo("tiny", ", ".join(names) or None, tiny.VOCAB, context, 0, 0)
    tokenizer = tokenizer or Tokenizer(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    policy = FixedPolicy(K if names else 0, names=names)
    return Pair(facts, tokenizer, model, list(drafters), policy, kv_bits)


def sources(drafter: str, model: nn.Module) -> list[DrafterSource]:
    vocabulary = VocabularySizes(tiny.VOCAB, tiny.VOCAB)
    made: dict[str, Callable[[], list[DrafterSource]]] = {
        "none": list,
        "lookup": lambda: [lookup_source()],
        "same": lambda: [draft_model_source("same", model, vocabulary)],
        "other": lambda: [draft_model_source("other", MODELS["quantized"], vocabulary)],
    }
    return made[drafter]()


def alone(pair: Pair, kind: str, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """Return the tokens of plain decoding with fresh caches."""
    bits = 8 if kind == "quantized" else None
    return plain(MODELS[kind], prompt, count, bits, sampling, pair.tokenizer.eos)


def generate(pair: Pair, held: CachedSequence, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt with a kept sequence, as those who keep one do."""
    rounds = decode(pair.prepare(held, prompt, max_tokens=count))
    held.rewind_to_prefix(text_prompt(prompt))
    emitted: list[int] = []
    for round in rounds:
        held.append(round.tokens)
        emitted += round.tokens
    return emitted


def save(model: nn.Module, folder: Path, **changes: Any) -> Path:
    """A checkpoint as mlx-lm writes them, with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {"max_position_embeddings": 512, "eos_token_id": 2, **dataclasses.asdict(model.args), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def refused(error: type[SpecError], *arguments: Any, **options: Any) -> str:
    """The message of the error that `load` raises: one line."""
    with pytest.raises(error) as caught:
        load(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message
