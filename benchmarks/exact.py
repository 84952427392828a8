"""Is drafted text the text of plain decoding in half precision, with the kernels of a Mac?

On Metal a pass of several rows may round otherwise than passes of one row, so near ties fall otherwise. Here
`tests/support/metal.py` chooses kernels as MLX does on a chip and imitates their orders of sums on a CPU. So
differences are SIMULATED; texts, rounds, caches and row classes are the product's.

Each prompt is answered plainly, and in other ways: with drafts of several lengths, right and spoiled, with
lookup, beside another answer in a batch, after a rewind, and in a second turn, also from a saved cache. Half
of the texts are greedy, half are seeded (temperature 0.8). All tokens are compared, and the bits of K and V
in all layers. "off" are the same texts without row classes, as with `--exact off`: so a text can differ.

    exact.py MODEL [--chips M1 M3 M5 own] [--texts 100] [--tokens 150] [--skip 0]

MODEL is a folder or a GGUF file, whose weights stay quantized; activations are in bfloat16. `--skip` leaves
out the first texts, so that a long run can be cut into parts. `--chips own` takes MLX's own kernels on
this machine. Those of a CPU are a control: they round a row alike in every pass of half precision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from arms import temporary_folder
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import metal
from support.exact_arms import Ways

from mlx_spec import load
from mlx_spec.hub import find
from mlx_spec.model.row_class import RowClass
from mlx_spec.pair import Pair
from mlx_spec.sampling import GREEDY, Sampling

CHIPS = {
    "M1": metal.M1,
    "M1 Max": metal.M1_MAX,
    "M3": metal.M3,
    "M3 Max": metal.M3_MAX,
    "M5": metal.M5,
    "own": None,
}
TOPICS = ("rivers", "bees", "bread", "the moon", "chess", "glass", "whales", "maps", "clocks", "tea")
FORMS = (
    "Write a short story about {} and a child.",
    "Explain how {} came to matter to people.",
    "Give five facts about {} with reasons.",
    "Write a Python function that counts {} in a list.",
    "What would the world be without {} today?",
    "Compare {} in the past and in the present.",
    "Make a plan to teach {} to a class.",
    "Write a letter to a friend about {}.",
    "What are common mistakes about {}?",
    "Describe a museum of {} room by room.",
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2", help="a folder, a GGUF file, or smollm2")
    options.add_argument("--chips", nargs="+", choices=CHIPS, default=["M3"])
    options.add_argument("--texts", type=int, default=100)
    options.add_argument("--skip", type=int, default=0, help="texts to leave out at the beginning")
    options.add_argument("--tokens", type=int, default=150, help="of a text")
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options.add_argument("--off", type=int, default=20, help="texts to compare without row classes, too")
    settings = options.parse_args()
    if settings.quick:
        settings.texts, settings.tokens, settings.off = 1, 4, 1
    os.environ.setdefault("MLX_SDPA_BLOCKS", "128")  # as mlx_spec sets it where MLX uses Metal
    started = time.time()
    folder = in_dtype(find(settings.model).folder, settings.dtype)
    os.environ["XDG_CACHE_HOME"] = str(
        temporary_folder()
    )  # classes that were imitated are for no other program
    results: dict[str, Any] = {}
    for chip in settings.chips:
        known: dict[object, np.ndarray] = {}
        imitated = CHIPS[chip]
        with nullcontext() if imitated is None else metal.metal(imitated, known_rows=known):
            pair = load(folder, "lookup", num_draft_tokens=3, exact="off")
            pair.rows = pair.measured_rows()
            results[chip] = compare(pair, chip, known, settings)
    finish("exact", results, settings, started)


def in_dtype(folder: Path, dtype: str) -> Path:
    """Return a copy of a checkpoint with all floats in one type; integers stay, also those of a GGUF file."""
    new, wanted = temporary_folder(), getattr(mx, dtype)
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            tensors = {
                name: array.astype(wanted) if mx.issubdtype(array.dtype, mx.floating) else array
                for name, array in dict(mx.load(str(file)).items()).items()
            }
            mx.save_safetensors(str(new / file.name), tensors, {"format": "mlx"})
        elif file.name == "config.json":
            config = json.loads(file.read_text())
            kept = {key: value for key, value in config.items() if not key.startswith("gguf")}
            (new / file.name).write_text(json.dumps(kept | {"dtype": dtype}))
        else:
            (new / file.name).symlink_to(file.resolve())
    return new


def compare(
    pair: Pair, chip: str, known: dict[object, np.ndarray], settings: argparse.Namespace
) -> dict[str, Any]:
    """Compare all texts on one chip, print a table and return its figures.

    `known` keeps the rows of the last texts: one of them is the other answer of a batch.
    """
    prompts = [form.format(topic) for form, topic in itertools.product(FORMS, TOPICS)]
    prompts = [prompts[i * 11 % len(prompts)] for i in range(len(prompts))]  # all forms and topics early
    rows, by_way, added = pair.rows, dict[str, list[int]](), deque[int]()
    print(f"{chip}: {rows.words}", flush=True)
    for number in range(settings.skip, min(settings.skip + settings.texts, len(prompts))):
        sampling = GREEDY if number % 2 == 0 else Sampling(temperature=0.8, seed=7)
        prompt, beside = tokens_of(pair, prompts[number]), tokens_of(pair, prompts[number - 2])
        before = len(known)
        for exact in (True, False) if number - settings.skip < settings.off else (True,):
            pair.rows = rows if exact else RowClass()
            lengths = sorted({1, 2, 4, min(rows.most, 8) - 1}) if exact else [4]
            for found in Ways(pair, prompt, sampling, settings.tokens, lengths).compare([beside]):
                counts = by_way.setdefault(found.way + ("" if exact else ", off"), [0, 0, 0, 0])
                differs = found.differs_at is not None, bool(found.layers)
                for i, more in enumerate((1, *differs, found.tokens)):
                    counts[i] += more
        added.append(len(known) - before)
        if len(added) > 2:
            for key in list(itertools.islice(known, added.popleft())):
                del known[key]
        unequal = [way for way, counts in by_way.items() if counts[1] or counts[2]]
        print(f"{number + 1} {prompts[number]} So far different: {unequal}", file=sys.stderr, flush=True)
    pair.rows = rows
    print()
    head = ["way", "texts", "texts differ", "K or V differ", "tokens"]
    table(head, [[way, *counts] for way, counts in by_way.items()])
    return {"class": rows.words, "ways": by_way}


def tokens_of(pair: Pair, text: str) -> list[int]:
    """Return the prompt of a question, or of a text to continue if the model has no chat template."""
    if pair.tokenizer.chats:
        return list(pair.tokenizer.prompt([{"role": "user", "content": text}]))
    return list(pair.tokenizer.encode(f"{text}\n\n"))


if __name__ == "__main__":
    main()
