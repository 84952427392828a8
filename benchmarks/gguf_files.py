"""Is a GGUF file read right: its tensors, and text past a sliding window? (needs torch and gguf)

Tensors: the floats that `checkpoint/gguf.py` unpacks are compared to the gguf package's; so are the tensors
of the checkpoint, which rounds Q6_K to 8 bits. "Largest" is the largest difference over the largest weight.

Text: greedy answers in float32 to prompts of `--prompt` tokens, plain and with `--drafts` draft tokens of
lookup; end-of-text tokens are banned. transformers reads the file itself. Each token must be its first choice
after the tokens before it. One prompt repeats a text, so that drafts are accepted. Both sides decode with the
exact floats of the file, so a copy of the checkpoint is written with the gguf package's weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from timing import finish, parser, table

from mlx_spec import Sampling, load
from mlx_spec.checkpoint.gguf import GGUF, read_gguf
from mlx_spec.checkpoint.gguf_model import ARCHITECTURES, _architecture, _names, gguf_folder

Arrays = dict[str, mx.array]
GROUP = 32  # weights of a scale
TEXT = (Path(__file__).parent / "README.md").read_text(encoding="utf-8") * 2


def main() -> None:
    settings = arguments()
    started = time.time()
    gguf, folder = read_gguf(settings.file), gguf_folder(settings.file)
    kinds: dict[str, dict[str, float]] = {}
    weights = compare_tensors(gguf, folder, kinds)
    table(
        ["type", "tensors", "equal when unpacked", "largest in the checkpoint"],
        [[k, v["tensors"], v["equal"], f"{v['largest']:.2g}"] for k, v in kinds.items()],
    )
    with tempfile.TemporaryDirectory() as place:
        write_floats(Path(place), folder, weights)
        texts = decode(Path(place), settings)
    judge(texts, settings.file)
    table(
        [
            "prompt",
            "drafts",
            "tokens of prompt",
            "tokens",
            "rounds",
            "others than transformers'",
            "smallest lead",
        ],
        [
            [t["prompt"], t["drafts"], len(t["ids"]), len(t["tokens"]), t["rounds"], t["differ"], t["lead"]]
            for t in texts
        ],
    )
    shown = [{key: value for key, value in t.items() if key not in ("ids", "tokens")} for t in texts]
    finish("gguf_files", {"tensors": kinds, "texts": shown}, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("file", type=Path, help="a GGUF file of a model")
    options.add_argument("--prompt", type=int, default=700, help="tokens, more than a window")
    options.add_argument("--tokens", type=int, default=72, help="of an answer")
    options.add_argument("--drafts", type=int, default=4, help="draft tokens of a round")
    settings = options.parse_args()
    if settings.quick:
        settings.prompt, settings.tokens = 20, 4
    return settings


def compare_tensors(gguf: GGUF, folder: Path, kinds: dict[str, dict[str, float]]) -> Arrays:
    """Count by type what is equal. Return the exact weights, as the checkpoint names and orders them."""
    from gguf import GGUFReader, dequantize

    held: Arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= mx.load(str(file))
    config = json.loads((folder / "config.json").read_text())
    found, exact = ARCHITECTURES[gguf.metadata["general.architecture"]], {}
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf.file).tensors}
    for name, new in _names(gguf, _architecture(gguf)).items():
        tensor, part = gguf.tensors[name], name.split(".")[-2]
        right = dequantize(stored[name].data, stored[name].tensor_type).reshape(tensor.shape)
        unpacked = {key: mx.array(value) for key, value in gguf.read(name).items()}
        equal = np.array_equal(floats(unpacked, "", tensor.kind.bits, tensor.kind.name == "BF16"), right)
        if found.interleaved and part in ("attn_q", "attn_k"):
            heads = config["num_key_value_heads" if part == "attn_k" else "num_attention_heads"]
            right = right.reshape(heads, -1, 2, *right.shape[1:]).swapaxes(1, 2).reshape(right.shape)
        right = right - 1 if found.norms_plus_one and part.endswith("norm") else right
        key = new if new in held else f"{new}.weight"
        held_bits = tensor.kind.bits or 8  # of Q6_K
        off = np.abs(floats(held, key.removesuffix("weight"), held_bits) - right).max()
        counts = kinds.setdefault(tensor.kind.name, {"tensors": 0, "equal": 0, "largest": 0.0})
        counts["tensors"] += 1
        counts["equal"] += int(equal)
        counts["largest"] = max(counts["largest"], float(off / np.abs(right).max()))
        exact[key] = mx.array(right.astype(np.float32))
    return exact


def floats(arrays: Arrays, prefix: str, bits: int, is_bfloat16: bool = False) -> Any:
    """Return the tensor that these arrays hold under a prefix, as float32 of NumPy."""
    if f"{prefix}scales" in arrays:
        parts = [arrays[prefix + key] for key in ("weight", "scales", "biases")]
        return np.array(mx.dequantize(parts[0], *(p.astype(mx.float32) for p in parts[1:]), GROUP, bits))
    array = arrays[f"{prefix}weight"] if f"{prefix}weight" in arrays else arrays[prefix]
    return np.array((array.view(mx.bfloat16) if is_bfloat16 else array).astype(mx.float32))


def write_floats(place: Path, folder: Path, weights: Arrays) -> None:
    for file in folder.glob("*.json"):
        shutil.copy(file, place)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization", None)
    (place / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    mx.save_safetensors(str(place / "model.safetensors"), weights, {"format": "mlx"})


def decode(folder: Path, settings: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for drafter, drafts in (("none", None), ("lookup", settings.drafts)):
        pair = load(str(folder), drafter, num_draft_tokens=drafts)
        whole = pair.tokenizer.prompt_tokens(TEXT)
        half = whole[: settings.prompt // 2 + 60]
        prompts = {"text": whole[: settings.prompt], "repeated text": (half + half[1:])[: settings.prompt]}
        ban = dict.fromkeys(pair.tokenizer.eos, float("-inf"))
        for name, ids in prompts.items():
            sampling = Sampling(logit_bias=ban)
            rounds = list(pair.generate(ids, sampling=sampling, max_tokens=settings.tokens))
            tokens = [token for round in rounds for token in round.tokens]
            text = {"prompt": name, "drafts": drafts or 0, "ids": ids, "tokens": tokens}
            found.append(text | {"rounds": len(rounds), "banned": sorted(pair.tokenizer.eos)})
    return found


def judge(texts: list[dict[str, Any]], file: Path) -> None:
    """Count the tokens that are not transformers' first choice, and its smallest lead over the second."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for text in texts:
        ids, tokens = text["ids"], text["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :]
        logits[:, text.pop("banned")] = float("-inf")
        best = logits.topk(2)
        text["differ"] = int((best.indices[:, 0] != torch.tensor(tokens)).sum())
        text["lead"] = round(float((best.values[:, 0] - best.values[:, 1]).min()), 4)


if __name__ == "__main__":
    main()
