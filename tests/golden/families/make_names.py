"""Make names.json: the tensors of tiny checkpoints with MTP heads, as the reference names them.

python tests/golden/families/make_names.py    # seconds; versions as in tests/golden/README.md

transformers has no class for a checkpoint with its head. A model of one layer more gives the names that it
saves the head's decoder layer under; its `MtpModel`, loaded from the result, proves those of the rest.
"""

import json
import re
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

OUT = Path(__file__).parent / "names.json"
LAYERS = 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
DELTA = {
    "head_dim": 10,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
MODELS = {
    "deepseek_v3": {**MOE, **LATENT, **GROUPS},
    "glm4_moe": {**MOE, **GROUPS, "head_dim": 10, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {**MOE, **LATENT, **GROUPS},
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
}
# What transformers wants to be told before it builds the head, and no published config says.
SPARSE, FULL = {"mtp_mlp_layer_types": ["sparse"]}, {"mtp_layer_types": ["full_attention"]}
AMBIGUOUS = {"glm4_moe_lite": SPARSE, "qwen3_next": FULL, "qwen3_5_text": FULL, "qwen3_5_moe_text": FULL}
NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
HEAD_FORMS = ([32], [32], [32, 64], [32])


def config_of(model_type: str, layers: int) -> object:
    changes = dict(MODELS[model_type])
    if model_type.startswith("qwen"):
        changes["layer_types"] = ["linear_attention", *["full_attention"] * (layers - 1)]
        changes["mtp_num_hidden_layers"] = 1
    return AutoConfig.for_model(model_type, num_hidden_layers=layers, **SIZES, **changes)


def checkpoint(model_type: str) -> dict[str, torch.Tensor]:
    """Tensors of a target of LAYERS layers and its head."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config_of(model_type, LAYERS + 1)).save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    deep = f"model.layers.{LAYERS}."
    if not model_type.startswith("qwen"):
        tensors |= {f"{deep}{n}.weight": torch.randn(f) for n, f in zip(NEXTN, HEAD_FORMS, strict=True)}
        tensors[f"{deep}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{deep}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        return tensors
    tensors = {name.replace(deep, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    return tensors | {f"mtp.{n}.weight": torch.randn(f) for n, f in zip(QWEN, HEAD_FORMS, strict=True)}


def check(model_type: str, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """transformers finds every parameter of the head in the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        main = AutoModelForCausalLM.from_pretrained(folder)
        if not model_type.startswith("qwen"):  # the class names the layers of the published models
            main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
        main.config.num_mtp_layers = 1
        head = MtpModel.from_pretrained(main)
    own = {name: p for name, p in head.named_parameters() if re.match(r"layers\.", name)}
    loaded = [
        name
        for name, parameter in own.items()
        if any(t.shape == parameter.shape and torch.equal(t, parameter) for t in tensors.values())
        or "experts" in name
    ]
    assert sorted(loaded) == sorted(own), sorted(set(own) - set(loaded))


def main() -> None:
    made = {}
    for model_type in MODELS:
        config = config_of(model_type, LAYERS).to_dict()
        if not model_type.startswith("qwen"):
            config["num_nextn_predict_layers"] = 1
        tensors = checkpoint(model_type)
        check(model_type, tensors, {**config, **AMBIGUOUS.get(model_type, {})})
        forms = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}
        made[model_type] = {"config": config, "tensors": forms}
    OUT.write_text(json.dumps(made, indent=1, sort_keys=True, default=str) + "\n")


if __name__ == "__main__":
    main()
