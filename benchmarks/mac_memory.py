"""How much memory does MLX hold on a Mac while a long prompt is read, and when the server is idle?

Simulated: the rules by which MLX's allocator keeps freed buffers (tests/support/mac.py) serve the arrays of
each chunk of a prompt that grow with the context: scores, one mask, and new buffers of K and V as these grow.
Weights, K/V and kernels follow config.json and MLX 0.32.4 (checkpoint/memory.py, device/attention.py). Shapes
are those of the published models in 4 bits, with weights as published. "before" reads chunks of 1,024
tokens and gives freed buffers back after the last one, with MLX's own bounds. Nothing runs on a Mac here.

Usage: python benchmarks/mac_memory.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import mac

from mlx_spec.checkpoint.memory import ContextMemory
from mlx_spec.checkpoint.weights import kv_layers, target_shape
from mlx_spec.device.attention import FullAttention, Kernels

GIB = 2**30
M4 = Kernels("metal")
GEMMA4 = {"num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512}


def types(layers: int, period: int) -> list[str]:
    """Return the attention of layers of which each `period`-th sees all keys."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]


# Name, bytes of the weights in GiB, config.json.
MODELS = (
    (
        "Gemma 3 4B",
        2.4,
        {
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 2560,
            "sliding_window": 1024,
            "layer_types": types(34, 6),
        },
    ),
    (
        "Gemma 4 E4B",
        3.91,
        {
            **GEMMA4,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "hidden_size": 2560,
            "num_kv_shared_layers": 18,
            "layer_types": types(42, 6),
        },
    ),
    (
        "Gemma 4 12B",
        6.24,
        {
            **GEMMA4,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "hidden_size": 3840,
            "sliding_window": 1024,
            "layer_types": types(48, 6),
        },
    ),
    (
        "Qwen3.5 9B",
        5.0,
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 4096,
            "full_attention_interval": 4,
        },
    ),
)


def memory_of(gib: float, config: dict[str, object]) -> ContextMemory:
    layers, shape = kv_layers(config), target_shape(config)
    attention = FullAttention(int(str(config["num_attention_heads"])), shape.global_head_dim or 0)
    row_bytes = 24 * 2 * (shape.hidden_size or 0)
    window = shape.window or 0
    return ContextMemory(int(gib * GIB), layers.held, 0.0, attention, row_bytes, layers.window_held, window)


def held(
    memory: ContextMemory, full: int, machine: mac.Mac, prompt: int, *, mended: bool
) -> dict[str, float]:
    """Return the GiB that MLX holds while a prompt is read and when idle, and the parts that are needed."""
    metal, attention = mac.Allocator(machine), memory.attention
    assert attention is not None
    budget = machine.working_set - max(384 * 2**20, machine.working_set // 20)
    metal.set_wired_limit(budget if mended else machine.working_set)
    if mended:
        metal.set_cache_limit(max(2**29, (budget - memory.weights) // 10))
    metal.malloc(memory.weights)
    metal.malloc(memory.caches(0) + int((memory.window + 1280) * memory.window_bytes))
    capacity, start, scores_most = 0, 0, 0
    layers = [metal.malloc(0) for _ in range(2 * full)]  # K and V of each layer that sees all keys
    while start < prompt:
        rows = min(1024, prompt - start)
        if mended:
            rows = attention.longest_pass(start, rows, budget // 20, M4)
        end = start + rows
        mask = metal.malloc(rows * end)
        scores = attention.scores(rows, end, M4)
        scores_most = max(scores_most, scores)
        grows = end > capacity
        capacity = -(-end * 5 // 4 // 256) * 256 if grows else capacity
        for i, old in enumerate(layers):
            if grows:
                layers[i] = metal.malloc(int(capacity * memory.target_bytes / len(layers)))
                metal.free(old)
            if scores and i % 2:
                metal.free(metal.malloc(scores))
        metal.free(mask)
        if mended:
            metal.clear_cache()
        start = end
    peak = metal.peak_held
    metal.clear_cache()
    if mended:
        metal.set_wired_limit(0)
    caches = metal.active - memory.weights
    needed = metal.active + scores_most
    return {
        "held": peak / GIB,
        "needed": needed / GIB,
        "over": (peak - needed) / GIB,
        "idle": metal.held / GIB,
        "idle_wired": metal.wired / GIB,
        "caches": caches / GIB,
        "scores": scores_most / GIB,
    }


def main() -> None:
    figures = []
    for name, gib, config in MODELS:
        memory = memory_of(gib, config)
        kinds = config.get("layer_types")
        full = kinds.count("full_attention") if isinstance(kinds, list) else 8
        for size in (8, 16, 24):
            for prompt in (8192, 32768):
                if memory.weights + memory.caches(prompt) > 0.93 * mac.MACS[size].working_set:
                    continue  # refused
                rows = {
                    when: held(memory, full, mac.MACS[size], prompt, mended=when == "now")
                    for when in ("before", "now")
                }
                figures.append({"model": name, "mac_gb": size, "prompt": prompt, **rows})
    names = ("model", "Mac", "prompt", "weights + caches + scores", "held before", "held now")
    print("| " + " | ".join((*names, "idle before, wired", "idle now, wired")) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for each in figures:
        before, now = each["before"], each["now"]
        weights = now["needed"] - now["caches"] - now["scores"]
        cells = [each["model"], f"{each['mac_gb']} GB", f"{each['prompt'] // 1024}k"]
        cells += [f"{weights:.1f} + {now['caches']:.1f} + {now['scores']:.1f}"]
        cells += [f"{before['held']:.1f}", f"**{now['held']:.1f}**"]
        cells += [f"{before['idle']:.1f}, {before['idle_wired']:.1f}"]
        print("| " + " | ".join([*cells, f"{now['idle']:.1f}, {now['idle_wired']:.0f}"]) + " |")
    for size in (8, 16, 24):
        most = max(each["now"]["over"] for each in figures if each["mac_gb"] == size)
        print(f"{size} GB: at most {most:.2f} GiB above weights, caches and the scores of one chunk")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
