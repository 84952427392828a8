"""Does a drafter in another process pay? Two processes on one machine: text and tokens a second.

The drafter is SmolLM2, dense and in float32. The target is SmolLM2 with additional layers. These cost as much
as others, but only add a little noise to the residual stream. So a pass of the target costs several passes of
the drafter, whose drafts are accepted most of the time. In float32 both wait for the memory that they share.
With a target in bfloat16 (`--dtype`) the CPU converts weights while the drafter reads memory. There are two
ranks, each with one thread of the BLAS that `use_blas` finds. All arms run on rank 0; in the last arm rank 1
drafts ahead.

plain; K, drafting before each pass; K, ahead: the same with the next draft prepared on rank 1 meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import mlx.core as mx
from arms import Prompt, fixed
from mlx.utils import tree_flatten
from timing import Run, finish, in_turns, interval, parser, table

from mlx_spec import load
from mlx_spec.device.blas import use_blas
from mlx_spec.distributed.ranks import Ranks, join
from mlx_spec.hub import find
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.load import draft_for

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.rank_processes import launched

# No new pages for every pass: malloc gives large blocks back at once.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}
PROMPTS = Path(__file__).parent / "prompts" / "chat.txt"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write(folder: Path, dtype: str = "float32", every: int = 1, noise: float = 0.0) -> str:
    """Write SmolLM2 with `every` layers for each original one: the original, and others that add noise."""
    source = find("smollm2").folder
    model = load("smollm2", "none")._model
    more: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        array = array.astype(getattr(mx, dtype))
        layer = name.removeprefix("model.layers.").split(".", 1)
        if len(layer) < 2 or not layer[0].isdigit():
            more[name] = array
            continue
        for i in range(every):
            is_output = i and layer[1].startswith(("self_attn.o_proj", "mlp.down_proj"))
            more[f"model.layers.{int(layer[0]) * every + i}.{layer[1]}"] = (
                noise * array if is_output else array
            )
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), more, {"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] *= every
    kept = {key: value for key, value in config.items() if key not in ("quantization", "gguf")}
    (folder / "config.json").write_text(json.dumps(kept | {"dtype": dtype}))
    for name in TOKENIZER:
        if (source / name).exists():
            (folder / name).symlink_to(source / name)
    return str(folder)


def lead(target: str, drafter: str, ranks: Ranks, settings: argparse.Namespace) -> int:
    """Run all arms on rank 0 and print a line of JSON."""
    pair = load(target, drafter, num_draft_tokens=1, draft_ranks=ranks)
    arms = {"plain": fixed(pair, 0)}
    for k in settings.lengths:
        arms |= {f"K = {k}": fixed(pair, k), f"K = {k}, ahead": fixed(pair, k, ahead=True)}
    found: dict[str, list[list[Run]]] = {name: [] for name in arms}
    for i, question in enumerate(PROMPTS.read_text().splitlines()[: settings.prompts]):
        tokens = pair.tokenizer.prompt([{"role": "user", "content": question}])
        done = [
            in_turns(list(arms.values()), Prompt("chat", tokens, settings.tokens), settings.burst, i + repeat)
            for repeat in range(settings.repeats)
        ]
        for name, runs in zip(arms, zip(*done, strict=True), strict=True):
            found[name].append(list(runs))
    print(json.dumps(compared(found, settings.seed)), flush=True)
    return 0


def compared(found: dict[str, list[list[Run]]], seed: int) -> dict[str, object]:
    """Return speeds over plain decoding, and of drafting ahead over the same length without."""
    results: dict[str, object] = {}
    for name, by_prompt in found.items():
        others = {"plain": found["plain"], "without": found.get(name.removesuffix(", ahead"), by_prompt)}
        ratios = {
            base: interval(
                [
                    [a.decode / b.decode for a, b in zip(ours, theirs, strict=True)]
                    for ours, theirs in zip(by_prompt, other, strict=True)
                ],
                seed,
            )
            for base, other in others.items()
        }
        runs = [run for runs in by_prompt for run in runs]
        texts = [[run.tokens for run in runs] for runs in by_prompt]
        wrong = sum(
            a != b for a, b in zip(texts, [[r.tokens for r in p] for p in found["plain"]], strict=True)
        )
        tokens = sum(len(run.tokens) for run in runs) / sum(len(run.drafted) for run in runs)
        results[name] = {**ratios, "tokens a round": round(tokens, 2), "prompts that differ": wrong}
    return results


def main() -> None:
    options = parser(__doc__)
    types, note = ("float32", "bfloat16", "float16"), "of the target; the drafter is float32"
    options.add_argument("--dtype", choices=types, default="float32", help=note)
    options.add_argument("--every", type=int, default=6, help="layers of the target for each of the drafter")
    options.add_argument("--noise", type=float, default=0.02, help="share that the others add to the stream")
    options.add_argument("--lengths", type=int, nargs="+", default=[1, 2])
    options.add_argument("--prompts", type=int, default=4)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--burst", type=int, default=16, help="tokens of a turn")
    options.add_argument("--pair", nargs=2, help="the folders of both models, for a rank")
    settings = options.parse_args()
    if settings.quick:
        settings.every, settings.prompts, settings.repeats, settings.tokens = 2, 1, 1, 8
    if settings.pair is not None:
        use_blas(threads=1)
        ranks = join()
        assert ranks is not None
        drafts = partial(draft_for, PairSpec(*settings.pair), ranks)
        sys.exit(ranks.run(drafts if ranks.rank else partial(lead, *settings.pair, ranks, settings)))
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        target = write(Path(folder) / "target", settings.dtype, settings.every, settings.noise)
        drafter = write(Path(folder) / "drafter")
        command = [*sys.argv, "--pair", target, drafter]
        with launched(Path(folder), command, command, environment=ENVIRONMENT) as ranks:
            said, errors = ranks[0].communicate()
        if ranks[0].returncode:
            sys.exit(errors)
        results = json.loads(said)
    rows = [
        [
            name,
            *(f"{x[0]:.2f} [{x[1]:.2f}, {x[2]:.2f}]" for x in (row["plain"], row["without"])),
            row["tokens a round"],
        ]
        for name, row in results.items()
    ]
    table(["", "over plain", "over the same without ahead", "tokens a round"], rows)
    finish("ahead_ranks", results, settings, started)


if __name__ == "__main__":
    main()
