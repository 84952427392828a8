"""Calculate the memory of a model with a conversation, by its number of tokens, and the most that fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlx_spec.checkpoint.config import Checkpoint, integer, stated_dtype, text_config
from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.checkpoint.owners import tower_bytes
from mlx_spec.checkpoint.targets import Config
from mlx_spec.checkpoint.weights import gguf_dtype, kv_layers, sizes_of, target_shape
from mlx_spec.device.attention import FullAttention, kernels


@dataclass(frozen=True)
class ContextMemory:
    """The bytes of a model, or of a target with its drafter, and of one conversation."""

    weights: int
    target_bytes: float  # K/V of one token in the caches of the target that keep every position
    drafter_bytes: float  # the same of the drafter
    attention: FullAttention | None  # None if the shape is not known
    row_bytes: int = 0  # activations of one row of a pass
    window_bytes: float = 0.0  # K/V of one token in the layers with a window
    window: int = 0  # tokens
    chunk_rows: int = 1024  # tokens of a prompt in one pass

    @property
    def token_bytes(self) -> float:
        """Return the bytes of one token in all caches that keep every position."""
        return self.target_bytes + self.drafter_bytes

    def caches(self, tokens: int) -> int:
        """Return the bytes of K and V. Buffers have room for a quarter more tokens than they hold."""
        in_window = min(tokens, self.window + self.chunk_rows + 256)
        return int(tokens * 1.25 * self.token_bytes + in_window * self.window_bytes)

    def chunk(self, tokens: int) -> int:
        """Return the bytes of the largest pass that reads a prompt of that many tokens."""
        rows = min(tokens, self.chunk_rows)
        if self.attention is None:
            return rows * self.row_bytes
        longest = self.attention.longest_pass(max(tokens - rows, 0), rows)
        # The last chunk is shorter, and some kernels begin at a whole one.
        shorter = self.attention.longest_pass(max(tokens - rows, 0), rows - 1)
        scores = (self.attention.scores(size, tokens, kernels()) for size in (longest, shorter))
        return longest * self.row_bytes + max(scores)

    def total(self, tokens: int) -> int:
        """Return the bytes of all while a prompt of that many tokens is read."""
        return self.weights + self.caches(tokens) + self.chunk(tokens)

    def most_tokens(self, budget: int, step: int = 256) -> int:
        """Return the most tokens of a conversation for which `budget` bytes suffice, in steps."""
        sizes = range(step, 2**22, step)
        return bisect_right(sizes, budget, key=self.total) * step


def context_memory(
    checkpoints: Sequence[Checkpoint], kv_bits: int | None = None, ranks: int = 1
) -> ContextMemory:
    """Return the memory of a target and its drafter by the headers of their files.

    Each of `ranks` machines has a part of the target.
    """
    target, *others = checkpoints
    config = target.config
    text, drafters = text_config(config), [text_config(other.config) for other in others]
    layers = kv_layers(text, kv_bits)
    return ContextMemory(
        int(sizes_of(target, 0).held) // ranks + sum(int(sizes_of(other, 0).held) for other in others),
        layers.held / ranks,
        sum(kv_layers(each).held for each in drafters),
        attention_of(config, kv_bits),
        24 * 2 * (target_shape(config).hidden_size or 0),  # about 24 arrays as wide as the hidden states
        layers.window_held / ranks + sum(kv_layers(each).window_held for each in drafters),
        target_shape(config).window or 2**30,
    )


def context_sizes(memory: ContextMemory, longest: int | None) -> dict[int, int]:
    """Return the bytes of a model with 8k, 32k and 128k tokens of conversation, up to its own context."""
    context = longest or 2**17
    lengths = [tokens for tokens in (2**13, 2**15, 2**17) if tokens <= context] or [context]
    return {tokens: memory.total(tokens) for tokens in lengths}


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes in memory of a model, or of a target and its drafter."""

    weights: int
    caches: int  # K/V of one conversation of `context` tokens
    context: int
    vision: int = 0  # the tower, which is read with the first picture
    chunk: int = 0  # the largest pass that reads the conversation

    @property
    def total(self) -> int:
        """Return all bytes."""
        return self.weights + self.caches + self.vision + self.chunk

    def __str__(self) -> str:
        vision = f"{human_bytes(self.vision)} of a vision tower, " if self.vision else ""
        return (
            f"{human_bytes(self.total)} ({human_bytes(self.weights)} of weights, {vision}"
            f"{human_bytes(self.caches)} for {self.context} tokens of conversation, "
            f"{human_bytes(self.chunk)} to read them)"
        )


def memory_need(
    checkpoints: Sequence[Checkpoint], ranks: int = 1, reserved: int = 8192, kv_bits: int | None = None
) -> MemoryNeed:
    """Return the memory that a target, its drafter and a conversation will take; load nothing.

    Each of `ranks` machines has a part of the target. The conversation has `reserved` tokens, at most as many
    as the target's context holds. Several machines read no pictures.
    """
    memory, target = context_memory(checkpoints, kv_bits, ranks), checkpoints[0]
    context = min(target.context or reserved, reserved)
    vision = 0 if ranks > 1 else tower_bytes(target.config, target.headers.tensors)
    chunk = 0
    with suppress(ImportError):  # models are listed without MLX
        chunk = memory.chunk(context)
    return MemoryNeed(memory.weights, memory.caches(context), context, vision, chunk)


def total_need(needs: Iterable[MemoryNeed]) -> MemoryNeed:
    """Return the memory of several models together, with the longest of their conversations."""
    each = list(needs)
    return MemoryNeed(
        sum(need.weights for need in each),
        sum(need.caches for need in each),
        max((need.context for need in each), default=0),
        sum(need.vision for need in each),
        max((need.chunk for need in each), default=0),
    )


def attention_of(config: Config, kv_bits: int | None = None) -> FullAttention | None:
    """Return the full attention of a target with this config.json; None if it has no heads."""
    text, shape = text_config(config), target_shape(config)
    heads, head_dim = integer(text, "num_attention_heads"), shape.global_head_dim
    if heads is None or head_dim is None:
        return None
    dtype = gguf_dtype(config) or stated_dtype(config)
    return FullAttention(heads, head_dim, 4 if dtype == "float32" else 2, kv_bits is not None)
