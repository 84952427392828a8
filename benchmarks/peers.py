"""The decoders of mlx-lm and mlx-vlm, on the same checkpoints."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from arms import Arms, Decoder, Folders, Prompt, Read, Step
from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

EXTRA_VISION = {  # an empty vision tower: mlx-vlm builds one although the checkpoint has none
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "position_embedding_size": 4,
}


def asked(prompt: Prompt) -> dict[str, Any]:
    """How many tokens, and which of them are banned: as both packages take it."""
    processors = make_logits_processors(prompt.bias) if prompt.bias else None
    return {"max_tokens": prompt.count, "logits_processors": processors}


def progress(read: Read) -> Callable[[int, int], None]:
    """What mlx-lm tells how much of the prompt it has read; all of it is when the first token is there."""
    return lambda done, total: read() if done < total else None


def of_mlx_lm(folders: Folders) -> Arms:
    """mlx-lm's loop, the same with text, and its speculative loop where there is a draft model."""
    model, tokenizer = mlx_lm.load(str(folders.target))[:2]
    mx.eval(model.parameters())
    endless = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[-1])

    @cache
    def small() -> nn.Module:
        loaded = mlx_lm.load(str(folders.draft_model))[0]
        mx.eval(loaded.parameters())
        return loaded

    def tokens(prompt: Prompt, read: Read) -> Iterator[Step]:
        settings = {**asked(prompt), "prompt_progress_callback": progress(read)}
        for token, _ in generate_step(mx.array(prompt.tokens), model, **settings):
            yield [int(token)], 0

    def text(prompt: Prompt, read: Read) -> Iterator[Step]:
        settings = {**asked(prompt), "prompt_progress_callback": progress(read)}
        for response in stream_generate(model, endless, mx.array(prompt.tokens), **settings):
            yield [int(response.token)], 0

    def speculative(K: int) -> Decoder:
        drafting = small()

        def run(prompt: Prompt, _: Read) -> Iterator[Step]:
            ids = mx.array(prompt.tokens)
            for token, *_ in speculative_generate_step(
                ids, model, drafting, num_draft_tokens=K, **asked(prompt)
            ):
                yield [int(token)], 0

        return run

    arms: Arms = {"mlx-lm": lambda: tokens, "mlx-lm, text": lambda: text}
    if folders.draft_model is not None:
        arms |= {f"mlx-lm draft model, K={k}": partial(speculative, k) for k in range(1, 9)}
    return arms


def of_mlx_vlm(folders: Folders) -> Arms:
    """mlx-vlm's loop, plain and with its own MTP rounds. Empty where it is not installed."""
    if importlib.util.find_spec("mlx_vlm") is None:
        print("mlx-vlm is not installed: its arms are left out\n")
        return {}

    @cache
    def models(K: int) -> tuple[nn.Module, Any, Any]:  # of one arm: its rounds keep state in the drafter
        from mlx_vlm.speculative.drafters import load_drafter
        from mlx_vlm.utils import load_model

        config = json.loads((folders.target / "config.json").read_text())
        target = folders.target
        if config.get("vision_config", 0) is None:
            target = folders.copy(target, None, vision_config=EXTRA_VISION)
        model = load_model(target, strict=False)
        mx.eval(model.parameters())
        return model, *(load_drafter(str(folders.drafter)) if folders.drafter else (None, None))

    def decoder(K: int) -> Decoder:
        from mlx_vlm.generate.ar import generate_step as vlm_step

        model, drafter, kind = models(K)
        mtp = {"draft_model": drafter, "draft_kind": kind, "draft_block_size": K + 1} if K else {}

        def run(prompt: Prompt, _: Read) -> Iterator[Step]:
            ids, settings = mx.array([prompt.tokens]), {**asked(prompt), **mtp}
            for token, *_ in vlm_step(ids, model, None, None, temperature=0.0, **settings):
                yield [int(token)], 0

        return run

    depths = range(1, 9) if folders.drafter is not None else ()
    return {
        "mlx-vlm": partial(decoder, 0),
        **{f"mlx-vlm K={k}": partial(decoder, k) for k in depths},
    }
