"""Does a text change because its prompt, or the beginning of it, was read for another request?

Random sessions of conversations with a common beginning go through the prefix cache and the batch of the
server: they go on, ask further questions whose template leaves thinking out, are edited, repeated and cut
off. Up to three run at a time; few fit in memory, so caches are forked, taken over and dropped. A quarter of
the sessions keeps files. Each text is compared with the text of fresh caches. The tiny models have every kind
of cache, the drafters caches of their own, in float32. Prompts with a picture begin with those of
transformers' tests.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import random_sources, spans, tiny
from support.pairs import MODELS, make_pair
from support.shared_caches import Found, Talks, random_session

from mlx_spec.apps.server.engine.prefix_files import CacheFolder, PrefixFiles
from mlx_spec.decode import running
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt

CASES = (
    "full lookup, full eagle3, full mtp, quantized same, quantized lookup, sliding other, sliding lookup, "
    "shared same, shared lookup, recurrent lookup, recurrent other, recurrent none, qwen pictures, "
    "12b pictures"
).split(", ")


def pair_of(case: str) -> Pair:
    """Return a pair: its kind of caches and its drafter."""
    kind, drafter = case.split()
    if drafter == "pictures":
        return spans.pair_of(kind, {"qwen": "mtp", "12b": "assistant"}[kind])
    if drafter not in ("eagle3", "mtp"):
        return make_pair(kind, drafter, K=3)
    plain = make_pair(kind, "none")
    source = (
        random_sources.mtp(64, tiny.VOCAB)
        if drafter == "mtp"
        else random_sources.eagle3(64, tiny.VOCAB, range(tiny.VOCAB), (0, 1, 2))
    )
    return Pair(plain.info, plain.tokenizer, MODELS[kind], [source], FixedPolicy(3))


def session(case: str, seed: int) -> Found:
    """Return the counts of one random session."""
    draw, pair = random.Random(f"{case} {seed}"), pair_of(case)
    pictures = case.endswith("pictures")
    first = (
        spans.golden(case.split()[0], "one.0").prompt
        if pictures
        else text_prompt(draw.choices(range(tiny.VOCAB), k=90), (40, 90))
    )
    vocabulary = range(3, 200) if pictures else range(tiny.VOCAB)
    talks = Talks(draw, vocabulary, draw.choice((250, 400, 900)), first)
    running.PREFILL_STEP = draw.choice((32, 128, 1024))
    most = draw.choice((2, 4, 10)) * 10**6
    with tempfile.TemporaryDirectory() as folder:
        files = None
        if seed % 4 == 3:
            files = PrefixFiles(CacheFolder(Path(folder), 10**10), {"case": case}, pair)
        found = random_session(pair, talks, draw, 7, max_bytes=most, files=files)
        if files is not None:
            files.close([])
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--texts", type=int, default=2000)
    options.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    settings = options.parse_args()
    if settings.quick:
        settings.texts, settings.cases = 1, ["full lookup", "recurrent none"]
    started, results, seed = time.time(), dict[str, dict[str, Any]](), settings.seed
    while sum(found["texts"] for found in results.values()) < settings.texts or seed == settings.seed:
        for case in settings.cases:
            for name, count in asdict(session(case, seed)).items():
                results.setdefault(case, {}).setdefault(name, 0)
                results[case][name] += count
            if results[case]["differ"]:
                print(f"{case}, seed {seed}: a text differs", flush=True)
        seed += 1
        done = results.values()
        print(f"{sum(r['texts'] for r in done)} texts, {sum(r['differ'] for r in done)} differ", flush=True)
    rows = [[case, *found.values()] for case, found in results.items()]
    total = [sum(found[name] for found in results.values()) for name in next(iter(results.values()))]
    table(["caches and drafter", *next(iter(results.values()))], [*rows, ["all", *total]])
    finish("reuse", results, settings, started)


if __name__ == "__main__":
    main()
