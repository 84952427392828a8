"""Is a GGUF file read right? SmolLM2's greedy text against mlx-lm's, its tokens against transformers'.

Both sides decode in float32 with separate copies of the weights. mlx_spec loads `--target` as users do, with
lookup and the adaptive draft length. mlx-lm loads the checkpoint that mlx_spec wrote from the file, and
dequantizes it. End-of-text tokens are banned, so that every text has `--tokens` tokens. Tokens of texts with
code, numbers, several languages, emoji and runs of spaces and lines are compared: mlx_spec's `Tokenizer` to
transformers' AutoTokenizer on the same checkpoint.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from arms import PROMPTS, Prompt, conversation, read_prompts
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import dequantize_model
from timing import finish, parser, table
from transformers import AutoTokenizer

from mlx_spec import load
from mlx_spec.hub import find
from mlx_spec.tokenizer import Tokenizer

CHARACTERS = 120_000
WORDS = (
    "déjà vu naïve русский язык 日本語のテキスト 中文字符 한국어 العربية עברית हिन्दी ไทย Ελληνικά "
    "ǅ ﬁ e\u0301 ½ Ⅷ ٣٤ \U0001f469\u200d\U0001f469\u200d\U0001f467 😀 🇩🇪 \u200b \ufeff \u00a0 "
    "I'll they'RE DON'T camelCase __init__ != ==> … “q” </div> a\\nb http://a.b/c?d=1"
).split(" ")
GAPS = ("", " ", "  ", "\n", "\t", "     ", "\r\n", "\n\n\n", " \n ")


def main() -> None:
    settings = arguments()
    started = time.time()
    pair = load(settings.target, "lookup")
    folder = find(settings.target).folder
    tokens = compare_tokens(pair.tokenizer, folder, 2000 if settings.quick else CHARACTERS, settings.seed)
    print(f"{tokens['characters']} characters, {tokens['tokens']} tokens, {tokens['differ']} texts differ\n")
    model = mlx_lm.load(str(folder))[0]
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    ours = conversation(pair)
    texts = []
    for prompt in all_prompts(settings, pair, folder):
        begun = time.perf_counter()
        steps = list(ours(prompt, lambda: None))
        middle = time.perf_counter()
        expected = greedy(model, prompt)
        found = [token for step, _ in steps for token in step]
        same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)
        seconds = middle - begun, time.perf_counter() - middle
        texts.append({"kind": prompt.kind, "differs at": same, "rounds": len(steps), "seconds": seconds})
        print(f"{len(texts)} {prompt.kind} {same}", file=sys.stderr, flush=True)
    report(texts, settings.tokens)
    finish("smollm2", {"tokens": tokens, "texts": texts}, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="smollm2", help="a GGUF file, or smollm2")
    options.add_argument("--prompts", type=Path, help="a folder of prompts, see arms.py")
    options.add_argument("--tokens", type=int, default=100, help="of a text")
    options.add_argument("--per-kind", type=int, default=5, help="prompts of a kind and folder")
    settings = options.parse_args()
    if settings.quick:
        settings.tokens, settings.per_kind = 3, 1
    return settings


def compare_tokens(tokenizer: Tokenizer, folder: Path, characters: int, seed: int) -> dict[str, int]:
    """Compare the tokens of random texts of about 1000 characters."""
    reference = AutoTokenizer.from_pretrained(folder)
    chance = random.Random(seed)
    code = "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*.py")))
    size = count = differ = 0
    while size < characters:
        begin = chance.randrange(max(1, len(code) - 600))
        parts = [code[begin : begin + 600]]
        for _ in range(40):
            number = str(chance.randrange(10 ** chance.randrange(1, 12)))
            parts += [chance.choice(WORDS), chance.choice(GAPS), number, chance.choice(GAPS)]
        piece = "".join(parts)
        found = tokenizer.encode(piece)
        differ += (
            found != reference.encode(piece, add_special_tokens=False) or tokenizer.decode_raw(found) != piece
        )
        size, count = size + len(piece), count + len(found)
    return {"characters": size, "tokens": count, "differ": differ}


def all_prompts(settings: argparse.Namespace, pair: Any, folder: Path) -> list[Prompt]:
    """Return the prompts of all kinds, each with `--tokens` tokens to generate."""
    folders = [settings.prompts] if settings.prompts else [PROMPTS / "general", PROMPTS / "demo"]
    wanted = vars(settings) | {"tokens": 1, "kinds": None, "least": 1}
    found = []
    for place in folders:
        found += read_prompts(argparse.Namespace(**wanted | {"prompts": place}), pair, folder)
    return [Prompt(prompt.kind, prompt.tokens, settings.tokens, pair.tokenizer.eos) for prompt in found]


def greedy(model: Any, prompt: Prompt) -> list[int]:
    """Return mlx-lm's text."""
    processors = make_logits_processors(logit_bias=prompt.bias)
    steps = generate_step(
        mx.array(prompt.tokens), model, max_tokens=prompt.count, logits_processors=processors
    )
    return [int(token) for token, _ in steps]


def report(texts: list[dict[str, Any]], tokens: int) -> None:
    rows = []
    for kind in sorted({text["kind"] for text in texts}):
        own = [text for text in texts if text["kind"] == kind]
        differ = sum(text["differs at"] is not None for text in own)
        a_round = len(own) * tokens / sum(text["rounds"] for text in own)
        rows.append([kind, len(own), differ, f"{a_round:.2f}"])
    table(["kind", "texts", "differ", "tokens a round"], rows)


if __name__ == "__main__":
    main()
