"""What a conversation takes: scores of attention, K and V by config.json, and the most that fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import pytest
from support import mac, tiny

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.memory import ContextMemory, context_memory, memory_need
from mlx_spec.checkpoint.weights import kv_layers
from mlx_spec.decode.running import RunningSequence, prefill
from mlx_spec.device import memory_for_models, most_scores
from mlx_spec.device.attention import FullAttention, Kernels, kernels
from mlx_spec.errors import PromptTooLong
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling

M4, M5 = Kernels("metal"), Kernels("metal", is_neural=True)
GB = 10**9


@pytest.mark.parametrize(
    ("head_dim", "rows", "kernels", "keeps"),
    [
        *((dim, 1024, M4, False) for dim in (64, 80, 96, 128)),
        *((256, rows, M4, True) for rows in (100, 1024)),
        (256, 1024, M5, False),
        (512, 1023, M4, True),
        (512, 1024, M4, False),
        (512, 1024, Kernels("metal", (0, 32, 3)), True),
        (192, 1024, M5, True),
        (128, 1024, Kernels("cpu"), True),
        (128, 1024, Kernels("cuda"), False),
    ],
)
def test_which_passes_keep_their_scores(head_dim: int, rows: int, kernels: Kernels, keeps: bool) -> None:
    """Read in MLX 0.32.4 (backend/metal/scaled_dot_product_attention.cpp)."""
    assert FullAttention(16, head_dim).keeps_scores(rows, kernels) == keeps
    assert FullAttention(16, head_dim, is_quantized=True).keeps_scores(rows, kernels)


@pytest.mark.parametrize("start", [0, 8_000, 31_000, 127_000, 255_000])
def test_a_pass_shrinks_at_depth_where_its_scores_are_kept(start: int) -> None:
    most = 10**9 // 2
    for heads, head_dim, machine in ((32, 512, M4), (16, 256, M4), (8, 256, M4), (32, 128, M4)):
        attention = FullAttention(heads, head_dim)
        for rows in (1024, 700, 31):
            size = attention.longest_pass(start, rows, most, machine)
            assert size in (rows, 512, 256, 128, 64, 32) and size <= rows
            assert attention.scores(size, start + size, machine) <= most or size <= 32
            if head_dim == 128 or (head_dim == 512 and rows == 1024):
                assert size == rows  # never below 1024: shorter ones would keep their scores
    assert FullAttention(32, 256).longest_pass(start, 1024, most, M5) == 1024
    deep = FullAttention(32, 512).scores(1024, 262_144, Kernels("metal", (0, 32, 2)))
    assert deep > 17 * GB  # what one chunk took


def test_a_prompt_is_read_in_the_same_passes_by_its_depth() -> None:
    heads = most_scores() // (4 * 128 * 150)  # so many that 128 rows keep their scores for 150 tokens
    attention, target = FullAttention(heads, 16, number_bytes=4), LMTarget(tiny.full())
    sampler, prompt = Sampling().sampler(501, tiny.VOCAB), text_prompt(tiny.prompt(501))
    running = RunningSequence(target, (), FixedPolicy(0), sampler, prompt, 1, attention=attention)
    rows = [step.rows for step in running.prefill()]
    assert sum(rows) == 500 and rows[:-1] == sorted(rows[:-1], reverse=True) and {128, 64, 32} <= set(rows)
    whole = LMTarget(tiny.full())
    list(prefill(whole, (), prompt))
    logits = [each.verify(mx.array([5])) for each in (whole, target)]
    assert mx.abs(logits[0] - logits[1]).max() < 1e-3


# --- K and V

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}


def test_quantized_kv_take_less() -> None:
    token = {bits: kv_layers(QWEN3_8B, bits).held for bits in (None, 8, 4)}
    assert token[None] == 36 * 8 * 128 * 2 * 2
    assert 0.54 < token[8] / token[None] < 0.56 and 0.28 < token[4] / token[None] < 0.31


def test_models_whose_kv_are_not_a_layer_each() -> None:
    hybrid = kv_layers({**QWEN3_8B, "full_attention_interval": 4})
    assert 4 * hybrid.held == kv_layers(QWEN3_8B).held
    latent = kv_layers({**QWEN3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert latent.held == 36 * 576 * 2


@pytest.mark.parametrize("kind", ["full", "shared"])
def test_the_formula_agrees_with_the_caches(kind: str) -> None:
    model = getattr(tiny, kind)()
    target, config = LMTarget(model), dataclasses.asdict(model.args)
    target.prefill(tiny.prompt(40))
    layers = kv_layers(config.get("text_config") or config)
    assert 2 * layers.held == target.row_bytes  # float32 here


# --- the most that fits


def test_a_conversation_takes_more_the_longer_it_is() -> None:
    memory = ContextMemory(4 * GB, 100_000, 0, FullAttention(16, 256), 10_000, 50_000, 1024)
    sizes = [memory.total(tokens) for tokens in (2_048, 8_192, 32_768, 131_072)]
    assert sizes == sorted(sizes) and sizes[0] > 4 * GB
    for budget in (5 * GB, 8 * GB, 20 * GB):
        most = memory.most_tokens(budget)
        assert memory.total(most) <= budget < memory.total(most + 256) + 256 * 200_000
    assert memory.most_tokens(GB) == 0


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read() -> None:
    pair = mlx_spec.load("demo", "none")
    assert pair.memory is not None and pair.memory.target_bytes == 512
    prompt = [5] * 3000
    pair.generate(prompt, max_tokens=1)  # refused at once, or not at all
    pair.budget = lambda: pair.memory.weights + 10**6
    assert pair.token_limit([5] * 2000, 10**6) == 48  # a short question is always answered
    with pytest.raises(PromptTooLong) as refused:
        pair.generate(prompt, max_tokens=1)
    text = str(refused.value)
    assert "the prompt is too long: 3000 tokens > 2048 maximum" in text  # the words that agents look for
    assert "may use" in text and "MB" in text
    assert "--kv-bits" not in text  # the demo has no layer that it quantizes


def test_the_need_of_a_model_knows_kv_bits_and_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec import demo

    mac.imitate(monkeypatch)
    kernels.cache_clear()
    stored = [read_checkpoint(Path(demo.TARGET))]
    whole, packed = memory_need(stored), memory_need(stored, kv_bits=4)
    assert packed.caches <= whole.caches and whole.total == whole.weights + whole.caches + whole.chunk
    assert "to read them" in str(whole)
    assert context_memory(stored).chunk(4096) <= most_scores() + 1024 * 24 * 2 * 1024
    assert most_scores() == memory_for_models() // 20
    kernels.cache_clear()
