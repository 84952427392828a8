"""Does a model with a large vocabulary decode as fast as in mlx-lm, and are its nuclei exact?

Settings: greedy, Google's for Gemma (temperature 1, top_k 64, top_p 0.95; here with a seed), and JSON by a
schema. Arms: mlx-lm, first and last, mlx_spec plain and with lookup. All decode the same float32 weights in
turns of `--burst` tokens, a fixed number of tokens past any end of text. mlx-lm has no grammar, so it decodes
greedy text where others decode JSON. Plain text and text with lookup must be equal.

Then the tokens that top_p keeps are compared to a sort in float64: on `--rows` rows of this model, and on
10,000 random rows of a small vocabulary, with ties.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from arms import PROMPTS, Decoder, Prompt, Read, Step, conversation, read_prompts
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import dequantize_model
from timing import AGAIN, BASE, PLAIN, Block, finish, interval, measure, parser, table

from mlx_spec import load
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.hub import find
from mlx_spec.sampling import LogitsProcessor, Sampling

ARMS = (PLAIN, AGAIN, "lookup")
ITEM = {"type": "object", "properties": {"name": {"type": "string", "minLength": 12}}, "required": ["name"]}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}  # longer than any answer here
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.1},
)


def main() -> None:
    settings = arguments()
    started = time.time()
    pair, folder = load(settings.target, "none"), find(settings.target).folder
    copying = load(settings.target, "lookup")
    model = mlx_lm.load(str(folder))[0]
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    mx.eval(model.parameters())
    grammar = compile_grammar(
        "json_schema", json.dumps(SCHEMA), pair.tokenizer, pair.info.vocab_size, seconds=60.0
    )
    wanted = argparse.Namespace(**vars(settings) | {"prompts": PROMPTS / "general", "tokens": 1, "least": 1})
    found = [
        Prompt(prompt.kind, prompt.tokens, settings.tokens, pair.tokenizer.eos)
        for prompt in read_prompts(wanted, pair, folder)
    ]
    google = Sampling(temperature=1.0, top_k=64, top_p=0.95, seed=settings.seed)
    results: dict[str, Any] = {}
    for name, sampling in {
        "greedy": Sampling(),
        "Google's": google,
        "JSON": Sampling(grammar=grammar),
    }.items():
        decoders = {BASE: theirs(model, sampling)}
        decoders |= {arm: conversation(pair, sampling) for arm in ARMS[:2]}
        decoders[ARMS[2]] = conversation(copying, sampling)
        results[name] = figures(measure(decoders, list(ARMS), found, settings), settings.seed)
        print(name)
        table(["arm", "tokens/s", "times mlx-lm", "texts unlike plain"], results[name]["rows"])
    results["nuclei"] = nuclei(model, found, settings)
    finish("large_vocabulary", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="smollm2", help="a model that mlx-lm loads, too, or a GGUF file")
    options.add_argument("--kinds", nargs="+", default=["chat", "code", "prose"], help="of prompts")
    options.add_argument("--per-kind", type=int, default=2, help="prompts of each kind")
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--repeats", type=int, default=4, help="blocks a prompt; the first is dropped")
    options.add_argument("--burst", type=int, default=8, help="tokens of a turn")
    options.add_argument("--rows", type=int, default=88, help="rows of the model whose nuclei are compared")
    settings = options.parse_args()
    if settings.quick:
        settings.tokens, settings.repeats, settings.per_kind, settings.rows = 4, 2, 1, 4
        settings.kinds = settings.kinds[:1]
    return settings


def theirs(model: Any, sampling: Sampling) -> Decoder:
    """Return mlx-lm's loop with the same temperature and filters."""
    sampler = make_sampler(temp=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)

    def run(prompt: Prompt, read: Read) -> Iterator[Step]:
        steps = generate_step(
            mx.array(prompt.tokens),
            model,
            max_tokens=prompt.count,
            sampler=sampler,
            logits_processors=make_logits_processors(prompt.bias),
            prompt_progress_callback=lambda done, total: read() if done < total else None,
        )
        for token, _ in steps:
            yield [int(token)], 0

    return run


def figures(blocks: list[list[Block]], seed: int) -> dict[str, Any]:
    """Return a row for each arm: speed, its ratio to mlx-lm, and how many texts differ from plain's."""
    every = [block for by_prompt in blocks for block in by_prompt]
    rows: list[list[object]] = [[BASE, round(float(np.median([b.first.decode for b in every])), 1), 1.0, "-"]]
    for arm in ARMS:
        ratio = interval([[b.ratio(arm, BASE, "decode") for b in by_prompt] for by_prompt in blocks], seed)
        speed = round(float(np.median([b.runs[arm].decode for b in every])), 1)
        differ = sum(b.runs[arm].tokens != b.runs[PLAIN].tokens for b in every)
        rows.append([arm, speed, "{:.2f} [{:.2f}, {:.2f}]".format(*ratio), f"{differ} of {len(every)}"])
    return {"rows": rows, "null": interval([[b.null for b in by_prompt] for by_prompt in blocks], seed)}


# --- nuclei


def nuclei(model: Any, prompts: list[Prompt], settings: argparse.Namespace) -> dict[str, Any]:
    """Compare the tokens that filters keep to a sort in float64, for real rows and for random rows."""
    each = -(-settings.rows // len(prompts))
    real = [np.array(model(mx.array(p.tokens)[None])[0, -each:].astype(mx.float32)) for p in prompts]
    block = np.concatenate(real)[: settings.rows]
    found: dict[str, Any] = {}
    for top_p in (0.5, 0.95):
        sizes, differ, beyond = [], 0, 0
        for row in block:
            kept, expected, margin = compare(row, top_p=top_p)
            sizes.append(len(expected))
            differ += kept != expected
            beyond += kept != expected and margin > 2e-6  # else the sum's own rounding decides
        found[f"real rows, top_p {top_p}"] = [len(block), int(np.median(sizes)), differ, beyond]
    chance = np.random.default_rng(settings.seed)
    for fields in FILTERS:
        count = 10 if settings.quick else 10_000 // len(FILTERS)
        steps = chance.choice([0.25, 0.5, 1.0], size=count)
        differ = beyond = 0
        for step in steps:
            row = (np.round(chance.normal(size=500) * 3 / step) * step).astype(np.float32)
            kept, expected, margin = compare(row, **fields)
            differ += kept != expected
            beyond += kept != expected and margin > 2e-6
        found[f"random rows, {fields}"] = [count, "-", differ, beyond]
    head = ["", "rows", "tokens kept, median", "differ", "by more than rounding"]
    table(head, [[name, *values] for name, values in found.items()])
    return found


def compare(row: np.ndarray, **fields: Any) -> tuple[set[int], set[int], float]:
    """Return the kept tokens of logits [V], the tokens that a float64 sort keeps, and the sum's margin."""
    processor = LogitsProcessor(Sampling(1.0, **fields), 0, len(row))
    block, none = mx.array(row)[None], mx.array([], dtype=mx.int32)
    found = processor.candidates(block, [], none)
    if found.fits and not found.fits[0].all().item():
        found = processor.candidates(block, [], none, exact=True)
    columns = np.flatnonzero(np.array(found.weights)[0])
    kept = columns if found.ids is None else np.array(found.ids)[0, columns]
    order = np.lexsort((np.arange(len(row)), -row))[: fields.get("top_k") or None]
    p = np.exp(row[order].astype(np.float64) - row.max())
    p /= p.sum()
    sums, top_p, margin = np.cumsum(p), fields.get("top_p", 1.0), 1.0
    if top_p < 1:
        order = order[: np.searchsorted(sums, top_p) + 1]
        margin = float(np.abs(sums - top_p).min())
    expected = order[p[: len(order)] >= fields.get("min_p", 0.0) * p[0]]
    return set(map(int, kept)), set(map(int, expected)), margin


if __name__ == "__main__":
    main()
