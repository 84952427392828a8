"""How fast is decoding, against mlx-lm and mlx-vlm on the same weights in the same run?

Arms of mlx-lm: its `generate_step`; "text" is `stream_generate`, which also detokenises; "draft model" is its
speculative decoding with `--draft-model`. Arms of mlx_spec: plain, at fixed K, adaptive (one policy for all
prompts, as in a conversation; "cold": a new policy for each), with lookup, with a draft model, without a
drafter, and with a random drafter, whose weights were shuffled. Arms of mlx-vlm: plain, and with its MTP
rounds. All are greedy, do not stop at end-of-text tokens and generate the same number of tokens: as many as
the plain answer has, at most `--tokens`. Texts to continue get `--tokens` more, with end-of-text tokens
banned.

Protocol: each prompt and repeat is one block, with mlx-lm first and last, and the other arms between in the
order of a balanced Latin square. The arms of a block decode in turns of `--burst` tokens, each with its own
caches, so that changes of the machine within a second affect all of them. Nothing is queued between two
bursts, which costs plain decoding about one percent. An arm is compared to the mean of the two mlx-lm runs of
its block, and to the mean of its two plain runs of mlx_spec ("plain, again" is an arm like any other). The
second mlx-lm run over the first is the null arm. The first block of each prompt is dropped, and so are blocks
whose null is off by more than `--spread`. Figures over all prompts and by kind are geometric means of the
prompts' median ratios, with bootstrap 95 % intervals that draw prompts first.

"decode" counts from the end of the prompt without its last token; "whole" is end to end. A decoder with a
queue begins its second token before it returns the first, and a decoder that is about to draft does not. If
time were counted from the first token, the first kind would have a pass for free. Packages that do not say
when the prompt has been read (mlx-vlm, mlx-lm with a draft model) are still counted from the first tokens.
Tokens are compared to mlx-lm's: how many prompts differ, and at which position first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from arms import Arms, Decoder, Folders, Prompt, Read, Step, ours, read_prompts, size
from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from timing import BASE, finish, measure, parser, summary, table

OURS = ["no drafter", "plain", "plain, again", *(f"K={k}" for k in range(1, 7)), "adaptive", "adaptive, cold"]
USELESS = ["lookup", "random drafter, adaptive", "random drafter, K=4"]
SMALL = ["mlx-lm draft model, K=2", "mlx-lm draft model, K=4", "draft model, K=2", "draft model, K=4"]
PEERS = ["mlx-vlm", *(f"mlx-vlm K={k}" for k in range(1, 5))]
DEFAULT = ["mlx-lm, text", *OURS, *USELESS, *SMALL, "draft model, adaptive", *PEERS]
QUICK = ["plain", "plain, again", "K=2", "adaptive", "lookup", *USELESS[1:2], *SMALL[::2], *PEERS[:3:2]]
EXTRA_VISION = {  # an empty vision tower: mlx-vlm builds one although the checkpoint has none
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "position_embedding_size": 4,
}
MEASURES = ("decode", "whole", "to plain")
COUNTS = ("tokens/s", "tokens a step", "differ")


def main() -> None:
    settings = arguments()
    started = time.time()
    folders = Folders.find(settings.target, settings.drafter, settings.draft_model)
    if settings.dense:
        folders = folders.dequantized()
    if settings.dtype:
        folders = folders.cast(settings.dtype)
    pair, arms = ours(folders, settings.seed)
    arms |= {**of_mlx_lm(folders), **of_mlx_vlm(folders)}
    names = [name for name in settings.arms if name in arms]
    prompts = read_prompts(settings, pair, folders.target)
    decoders = {name: arms[name]() for name in (BASE, *names)}
    blocks = measure(decoders, names, prompts, settings)
    results = summary(blocks, prompts, names, settings)
    report(results, prompts)
    results["parameters"] = size(folders)
    finish("decode", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="demo", help="demo, smollm2 or a folder")
    options.add_argument("--drafter", help="a folder")
    options.add_argument("--draft-model", help="a folder: a small model with the target's vocabulary")
    options.add_argument("--prompts", type=Path, help="a folder like those in prompts/, or one file of it")
    options.add_argument("--kinds", nargs="+", help="of prompts, if not all")
    options.add_argument("--per-kind", type=int, help="prompts of each kind, if not all")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--least", type=int, default=16, help="tokens of a shorter answer are gone on with")
    options.add_argument("--repeats", type=int, default=9, help="blocks a prompt; the first is dropped")
    options.add_argument("--arms", nargs="+", default=DEFAULT)
    options.add_argument("--dtype", help="cast all weights, as to float32")
    options.add_argument("--dense", action="store_true", help="dequantize the target to float32")
    options.add_argument("--burst", type=int, default=16, help="tokens of a turn")
    options.add_argument("--spread", type=float, default=0.04)
    settings = options.parse_args()
    if settings.quick:
        settings.tokens, settings.repeats, settings.per_kind, settings.arms = 8, 2, 1, QUICK
        settings.kinds = settings.kinds or ["chat", "prose"]
    return settings


def report(results: dict[str, Any], prompts: list[Prompt]) -> None:
    lengths = [prompt.count for prompt in prompts]
    low, high = results["null, quartiles"]
    quiet, total = results["blocks within the spread"], results["blocks"]
    print(f"\n{len(prompts)} prompts, {min(lengths)} to {max(lengths)} new tokens; ratios to mlx-lm")
    print(f"mlx-lm: {results['mlx-lm tokens/s']} tokens/s")
    print(f"null arm: {show(results['null'])}, quartiles {low} to {high}")
    print(f"{quiet} of {total} blocks are within the spread", end="")
    print("; all were used\n" if results["noisy blocks used"] else "\n")
    head = "arm|decode|whole|decode, to plain|tokens/s|tokens a step|prompts that differ|first at".split("|")
    rows = [
        [name, *(show(r[m]) for m in MEASURES), *(r[c] for c in COUNTS), shown(r["first at"])]
        for name, r in results["arms"].items()
    ]
    table(head, rows)
    print("By kind of prompt, decode, ratios to mlx_spec plain; * where tokens differ from mlx-lm's:\n")
    table(["arm", *results["kinds"]], by_kind(results))


def by_kind(results: dict[str, Any]) -> list[list[str]]:
    kinds = results["kinds"].values()
    return [
        [name, *(show(kind[name]["to plain"]) + ("*" if kind[name]["differ"] else "") for kind in kinds)]
        for name in results["arms"]
    ]


def shown(place: int | None) -> object:
    return "-" if place is None else place


def show(values: list[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3f} [{values[1]:.3f}, {values[2]:.3f}]"


def asked(prompt: Prompt) -> dict[str, Any]:
    """Return the number of tokens and the banned ones as arguments of both packages."""
    processors = make_logits_processors(prompt.bias) if prompt.bias else None
    return {"max_tokens": prompt.count, "logits_processors": processors}


def progress(read: Read) -> Callable[[int, int], None]:
    """Return a callback for mlx-lm that calls `read` when all but the last prompt token is processed."""
    return lambda done, total: read() if done < total else None


def of_mlx_lm(folders: Folders) -> Arms:
    """Return mlx-lm's loop, the same with text, and its speculative loop if there is a draft model."""
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
    """Return mlx-vlm's loop, plain and with its own MTP rounds; nothing if it is not installed."""
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


if __name__ == "__main__":
    main()
