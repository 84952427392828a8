"""What mlx-vlm computes with the EAGLE-3 drafters that `make.py` made, in the same rounds.

python tests/golden/eagle3/mlx_vlm_drafts.py        needs mlx-vlm (0.7.10 wrote what is here)

    mlx_vlm.safetensors    {official,speculators}.{i} [K, W]: logits of round i, float32

mlx-vlm reads rotary parameters from the drafter's own config.json and knows no scaling: it is given those of
the target. Its rows begin at position 1, ours at 0: angles are relative.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

HERE = Path(__file__).parent
FACTS = json.loads((HERE / "golden.json").read_text())
K, HISTORY, PROMPT = len(FACTS["drafts"]["official"][0]), FACTS["history"], FACTS["prompt"]


class Recording(Eagle3DraftModel):
    """Keeps the logits of each draft token."""

    def _logits(self, hidden: mx.array) -> mx.array:
        self.seen.append(super()._logits(hidden[:, -1:])[0, 0])
        return self.seen[-1][None, None]


def opened(name: str, table: nn.Embedding, rope: nn.Module) -> Recording:
    config = json.loads((HERE / name / "config.json").read_text())
    config.setdefault("transformer_layer_config", {k: v for k, v in config.items() if k != "rope_theta"})
    config.setdefault("target_hidden_size", table.weight.shape[1])
    model = Recording(ModelConfig.from_dict(config))
    tensors = mx.load(str(HERE / name / "model.safetensors"))
    renamed = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    if "embed_tokens.weight" not in renamed:
        renamed["embed_tokens.weight"] = table.weight
    kept = model.sanitize(renamed)
    model.load_weights([(key, w if key == "d2t" else w.astype(mx.float32)) for key, w in kept.items()])
    model.layers[0].self_attn.rope = rope
    model.seen = []
    return model


def rounds(model: Recording, features: mx.array) -> list[mx.array]:
    """Logits [K, W] of each round."""
    found, end = [], PROMPT
    model.reset(None)
    ids = mx.array([HISTORY[: end - 1]])
    model.prefill_from_target_hidden(ids, features[None, : end - 1], HISTORY[end - 1], None, greedy=True)
    for kept in (*FACTS["kept"], None):
        model.draft_block(HISTORY[end - 1], None, None, K + 1, None, greedy=True)
        found.append(mx.stack(model.seen))
        model.seen.clear()
        if kept is not None:
            committed = mx.array([HISTORY[end : end + kept]])
            rows = features[None, end - 1 : end - 1 + kept]
            last = [HISTORY[end + kept - 1]]
            model.accept_verified_tokens(rows, committed[:, :-1], kept - 1, last, None, greedy=True)
            end += kept
    return found


def main() -> None:
    target = json.loads((HERE / "llama" / "config.json").read_text())
    weight = mx.load(str(HERE / "llama" / "model.safetensors"))["model.embed_tokens.weight"]
    table = nn.Embedding(*weight.shape)
    table.weight = weight.astype(mx.float32)
    rope = initialize_rope(target["head_dim"], target["rope_theta"], False, target["rope_scaling"])
    features = mx.load(str(HERE / "golden.safetensors"))["features"]
    found = {
        f"{name}.{i}": logits
        for name in ("official", "speculators")
        for i, logits in enumerate(rounds(opened(name, table, rope), features))
    }
    mx.save_safetensors(str(HERE / "mlx_vlm.safetensors"), found)


if __name__ == "__main__":
    main()
