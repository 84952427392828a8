"""The LM head of small Gemma 4 assistants, which scores a part of the vocabulary.

Source: transformers `models/gemma4_assistant`.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class Centroids(nn.Module):
    """Scores the tokens of the best clusters alone: 2048 + 4096 dot products stand for 262144.

    The rows of a cluster are neighbours in the sorted table, so that its scores are one gathered product,
    of a quantized table too.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_centroids: int, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), dtype=mx.int32)  # token ids, cluster by cluster

    def __call__(
        self, normed: mx.array, table: nn.Embedding | nn.QuantizedEmbedding
    ) -> tuple[mx.array, mx.array]:
        """Final norm [1, h] and the sorted table to token ids [1, C] and their scores [1, C]."""
        similar = self.centroids(normed)[0]
        best = mx.argpartition(similar, kth=-self._top_k)[-self._top_k :]
        clusters = {
            name: rows.reshape(similar.shape[0], -1, rows.shape[-1])
            for name, rows in table.parameters().items()
        }
        if isinstance(table, nn.QuantizedEmbedding):
            scores = mx.gather_qmm(
                normed[None],
                clusters["weight"],
                clusters["scales"],
                clusters.get("biases"),
                rhs_indices=best,
                transpose=True,
                group_size=table.group_size,
                bits=table.bits,
                mode=table.mode,
            )
        else:
            # Not gather_mm, which on the CPU has no bfloat16.
            scores = normed[None] @ clusters["weight"][best].swapaxes(-1, -2)
        tokens = self.token_ordering.reshape(similar.shape[0], -1)[best]
        return tokens.reshape(1, -1), scores.reshape(1, -1)
