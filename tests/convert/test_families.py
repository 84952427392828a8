"""Drafter families: every tensor accounted for, conventions found, and what is wrong named."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten
from support import refusals, synthetic
from support.checkpoints import read, stored
from support.drafting import GOLDEN
from support.synthetic import Checkpoint

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.drafter_families import FAMILIES, refuse_unsupported
from mlx_spec.cli.progress import StageProgress
from mlx_spec.convert.command import _report
from mlx_spec.convert.converted import convert_drafter
from mlx_spec.convert.families import family_of
from mlx_spec.convert.families.common import Converted, finish
from mlx_spec.convert.families.common import read as read_tensors
from mlx_spec.convert.plan import (
    DRAFTER,
    TARGET,
    Conversion,
    ConversionPlan,
    Quantization,
    family_or_model,
    open_source,
)
from mlx_spec.convert.selftest import _original_drafter
from mlx_spec.convert.write import write_pair
from mlx_spec.errors import BadCheckpoint, SpecError

D, V = 32, 64  # of native heads
SILENT = StageProgress(io.StringIO())
# What mlx-lm's configs ask for and no name depends on.
ROPE = {"rope_theta": 1e4, "max_position_embeddings": 64}
NATIVE = {
    "deepseek_v3": "deepseek_mtp",
    "glm4_moe": "glm_mtp",
    "glm4_moe_lite": "glm_mtp",
    "qwen3_next": "qwen_mtp",
    "qwen3_5_text": "qwen_mtp",
    "qwen3_5_moe_text": "qwen_mtp",
}
MADE: dict[str, tuple[str, Callable[[], Checkpoint]]] = {
    **{kind: (family, lambda kind=kind: synthetic.native(kind)) for kind, family in NATIVE.items()},
    "glm4_moe, fused": (
        "glm_mtp",
        lambda: synthetic.fused(synthetic.native("glm4_moe"), "model.layers.2.mlp.experts."),
    ),
    "qwen3_5_moe_text, fused": (
        "qwen_mtp",
        lambda: synthetic.fused(synthetic.native("qwen3_5_moe_text"), "mtp.layers.0.mlp.experts."),
    ),
    "eagle3": ("eagle3", synthetic.eagle3),
    "eagle3, SpecForge": ("eagle3", lambda: synthetic.eagle3("layers.0.", "model.")),
    "eagle3, speculators": ("eagle3", synthetic.speculators_eagle3),
    "peagle": (
        "peagle",
        lambda: synthetic.peagle().changed(
            d2t=mx.zeros(synthetic.V, dtype=mx.int64), t2d=mx.ones(synthetic.V, dtype=mx.bool_)
        ),
    ),
    "dflash": ("dflash", synthetic.dflash),
    "dflash2": ("dflash2", synthetic.dflash2),
    **{
        f"dspark, {kind}": ("dspark", lambda kind=kind: synthetic.dspark(kind=kind))
        for kind in ("vanilla", "gated", "rnn")
    },
    "gemma4_dspark": ("gemma4_dspark", synthetic.gemma4_dspark),
    "medusa": ("medusa", synthetic.medusa),
    "mlp_speculator": ("mlp_speculator", synthetic.mlp_speculator),
    "mlp_speculator, tied": ("mlp_speculator", lambda: synthetic.mlp_speculator(tied=True)),
    "lstm_speculator": ("lstm_speculator", synthetic.lstm_speculator),
    "medusa, inside": ("medusa", lambda: inside(synthetic.medusa())),
    "medusa, vLLM": ("medusa", synthetic.vllm_medusa),
    **{
        f"pard, {kind}": ("pard", lambda kind=kind: synthetic.pard(kind))
        for kind in ("llama", "qwen2", "qwen3")
    },
}


def inside(made: Checkpoint) -> Checkpoint:
    """Medusa as of v1.0: its heads beside the target."""
    below = {f"medusa_head.{name}": tensor for name, tensor in made.tensors.items()}
    return replace(made, tensors={**below, "model.embed_tokens.weight": mx.zeros((4, 4))})


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def converted(made: Checkpoint) -> Converted:
    return family_of(made.config, made.tensors).convert(made.tensors, made.config, made.target)


def with_config(made: Checkpoint, **config: object) -> Checkpoint:
    return replace(made, config={**made.config, **config})


def refusal(made: Checkpoint, kind: type[SpecError] = BadCheckpoint) -> str:
    return refusals.refusal(kind, converted, made)


# --- every family


@pytest.mark.parametrize("name", MADE)
def test_every_tensor_is_accounted_for(name):
    """One less, one more and another target are noticed; norms and routers are never quantized."""
    family, make = MADE[name]
    made = make()
    result = converted(made)
    assert result.config["model_type"] == family
    assert result.used | result.dropped.keys() == made.tensors.keys()
    assert not result.used & result.dropped.keys() and all(result.dropped.values())
    tables = {"embed_tokens.weight", *(("lm_head.weight",) if "draft_ids" not in result.tensors else ())}
    needed = sorted(result.used - {"d2t", "t2d"} - (set() if name.startswith("pard") else tables))
    for gone in needed[:: max(1, len(needed) // 6)]:
        left = {key: tensor for key, tensor in made.tensors.items() if key != gone}
        text = refusal(replace(made, tensors=left))
        assert " lacks 1 of " in text and ".".join(gone.split(".")[-2:]) in text
    inside = next(key for key in sorted(result.used) if key.endswith("weight"))
    extra = inside.rsplit(".", 2)[0] + ".surprise.weight"
    text = refusal(replace(made, tensors={**made.tensors, extra: mx.zeros(3)}))
    assert "does not know, 1 of " in text and extra in text
    key = "vocab_size" if name.startswith("pard") else "hidden_size"
    text = refusal(replace(made, target={**made.target, key: 48}), SpecError)
    assert "48" in text and str(made.target[key]) in text
    chosen = {key for key in result.tensors if result.quantizable(key)}
    assert chosen and all(result.tensors[key].ndim > 1 for key in chosen)
    assert not any("norm" in key or key in ("fc.weight", "draft_ids", "mask_hidden") for key in chosen)
    assert not any(key.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) for key in chosen)


# --- native heads


def test_fused_experts_are_stacked_in_order():
    made, prefix = synthetic.native("qwen3_5_moe_text"), "mtp.layers.0.mlp.experts."
    ours = converted(synthetic.fused(made, prefix)).tensors
    for part in ("gate_proj", "up_proj", "down_proj"):
        stack = ours[f"layers.0.mlp.switch_mlp.{part}.weight"]
        assert mx.array_equal(stack[3], made.tensors[f"{prefix}3.{part}.weight"])


def test_eight_bit_blocks_take_their_own_scales():
    made = synthetic.native("deepseek_v3")
    name = "model.layers.2.eh_proj.weight"
    scales = mx.arange(1, 9, dtype=mx.float32).reshape(2, 4)
    ones = mx.to_fp8(mx.ones((D, 2 * D)))
    made = with_config(made, quantization_config={"weight_block_size": [16, 16]})
    result = converted(made.changed(**{name: ones, f"{name}_scale_inv": scales}))
    wide = result.tensors["fc.weight"]
    assert wide.dtype == mx.bfloat16 and mx.array_equal(wide[::16, ::16].astype(mx.float32), scales)
    assert {name, f"{name}_scale_inv"} <= result.used
    assert "quantization_config" not in result.config["text_config"]


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_copies_of_the_table_are_left_out_and_others_kept(kind):
    made = synthetic.native(kind)
    result = converted(made)
    table = "model.layers.2.embed_tokens.weight"
    assert result.dropped[table] == "a copy of the target's model.embed_tokens.weight"
    assert result.dropped["model.layers.2.shared_head.head.weight"] == "a copy of the target's lm_head.weight"
    own = converted(made.changed(**{table: mx.random.normal((V, D))}))
    assert own.tensors["embed_tokens.weight"].shape == (V, D) and table in own.used
    assert own.notes == ("own embed_tokens.weight",)


@pytest.mark.parametrize(
    ("centre", "added", "note"), [(0.0, 1, "zero-centred, 1 folded in, in float32"), (1.0, 0, "plain, kept")]
)
def test_norms_are_told_by_value(centre, added, note):
    made = synthetic.native("qwen3_next", centre)
    result = converted(made)
    for ours, theirs in (
        ("norm.weight", "mtp.norm.weight"),
        ("norm_hidden.weight", "mtp.pre_fc_norm_hidden.weight"),
        ("layers.0.self_attn.q_norm.weight", "mtp.layers.0.self_attn.q_norm.weight"),
    ):
        assert mx.array_equal(result.tensors[ours], made.tensors[theirs] + added)
    assert len(result.notes) == 2 and all(text.endswith(note) for text in result.notes)


def test_folding_for_float32_loses_nothing(tmp_path):
    made = synthetic.native("qwen3_next", 0.0)
    halved = {name: tensor.astype(mx.bfloat16) for name, tensor in made.tensors.items()}
    source = open_source(str(replace(made, tensors=halved).write(tmp_path / "published")))
    family = family_or_model(source)
    tensors = {
        dtype: convert_drafter(Conversion(source, family, dtype=dtype), made.target).tensors
        for dtype in ("float32", None)
    }
    exact = 1 + halved["mtp.norm.weight"].astype(mx.float32)
    assert mx.array_equal(tensors["float32"]["norm.weight"], exact)
    assert not mx.array_equal(tensors[None]["norm.weight"].astype(mx.float32), exact)
    assert {tensor.dtype for tensor in tensors["float32"].values()} == {mx.float32}


@pytest.mark.parametrize("kind", ["qwen3_next", "glm4_moe"])
def test_a_head_that_mlx_quantized_in_bits_of_its_own(kind):
    """The target has 4 bits, its head 5, and one matrix 8 in other groups."""
    made = synthetic.native(kind, 1.0)
    prefix = "mtp." if kind == "qwen3_next" else "model.layers.2."
    mixed = f"{prefix}layers.0.self_attn.q_proj" if kind == "qwen3_next" else f"{prefix}self_attn.q_proj"
    own = {"bits": 8, "group_size": 32}
    packed, wide = dict(made.tensors), dict(made.tensors)
    for name, tensor in made.tensors.items():
        stem = name.removesuffix(".weight")
        if name.startswith(prefix) and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            form = own if stem == mixed else {"bits": 5, "group_size": 32}
            parts = mx.quantize(tensor, **form)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            wide[name] = mx.dequantize(*parts, **form)
    settings = {**made.config, "quantization": {"bits": 4, "group_size": 32, mixed: own}}
    found = converted(replace(made, tensors=packed, config=settings))
    expected = converted(replace(made, tensors=wide))
    assert len(packed) > len(wide) and found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert mx.array_equal(found.tensors[name], tensor), name
    assert found.used == {name for name in packed if name.startswith(prefix)} - found.dropped.keys()


def test_a_table_of_integers_is_not_packed_and_a_matrix_of_them_is():
    table = mx.arange(V, dtype=mx.int32)
    assert mx.array_equal(read_tensors("the toy", {"next.weight": table}, {}).tensors["next.weight"], table)
    with pytest.raises(BadCheckpoint, match=r"the toy is quantized already \(next\.weight\)"):
        read_tensors("the toy", {"next.weight": table[None]}, {})


class Toy:
    """A family whose drafters are a table of tokens, and perhaps a matrix."""

    def convert(self, tensors, config, target):
        network, source = nn.Module(), read_tensors("the toy", tensors, config)
        dict.update(network, tree_unflatten(list(tensors.items())))
        return finish(source, network, {**config, "quantization": "of the source"})


@pytest.mark.parametrize("width", [None, 24, 64])
def test_only_what_is_quantized_is_said_to_be(width, tmp_path):
    """A table has nothing to quantize, nor has a matrix whose rows the groups do not divide."""
    tensors = {"next.weight": mx.arange(V, dtype=mx.int32)}
    tensors |= {} if width is None else {"fc.weight": mx.ones((V, width))}
    source = open_source(str(Checkpoint(tensors, {"model_type": "toy"}, {}).write(tmp_path / "toy")))
    conversion = Conversion(source, Toy(), Quantization(4, 64))
    result = convert_drafter(conversion, {})
    is_quantized = width == 64
    assert ("quantization" in result.config) == is_quantized
    assert "quantization" not in convert_drafter(conversion.unquantized, {}).config
    assert result.unquantized == (("fc.weight",) if width == 24 else ())
    assert (result.dense_size > 0) == is_quantized
    (tmp_path / "out").mkdir()
    plan = ConversionPlan(tmp_path / "out", conversion, conversion)
    parts = write_pair(
        plan, {TARGET: convert_drafter(conversion, {}), DRAFTER: result}, SILENT, is_tested=True
    )
    manifest = {"drafter": "toy", "parts": parts, "self_test": {"result": "not run"}}
    weights = {None: "not quantized (int32)", 24: "not quantized (float32)", 64: "affine 4 bits"}[width]
    assert weights in _report(manifest, plan.folder)[1]
    written = read_checkpoint(plan.folder / DRAFTER)
    assert (_original_drafter(plan, written, SILENT) is written) == (not is_quantized)


def test_a_shift_of_half_the_norms_is_mended():
    made = synthetic.native("qwen3_next")
    shifted = {
        name: t + 1 for name, t in made.tensors.items() if name.startswith("mtp.layers") and "norm" in name
    }
    mended = converted(replace(made, tensors={**made.tensors, **shifted}))
    for name, tensor in converted(made).tensors.items():
        assert mx.array_equal(mended.tensors[name], tensor), name


def test_a_sidecar_without_prefix_and_a_multimodal_wrapper():
    made = synthetic.native("qwen3_5_moe_text", 1.0)
    bare = {name[4:]: tensor for name, tensor in made.tensors.items() if name.startswith("mtp.")}
    config = {"model_type": "qwen3_5_mtp", "text_config": made.config}
    result = converted(Checkpoint(bare, config, made.target))
    assert result.tensors.keys() == converted(made).tensors.keys() and result.used == bare.keys()
    made = synthetic.native("qwen3_5_text")
    names = {name.replace("model.", "model.language_model.", 1): t for name, t in made.tensors.items()}
    config = {"model_type": "qwen3_5", "text_config": made.config}
    vision = {"model.visual.patch_embed.weight": mx.zeros(3)}
    result = converted(Checkpoint({**names, **vision}, config, config))
    assert result.tensors.keys() == converted(made).tensors.keys()
    assert result.dropped["model.visual.patch_embed.weight"] == "part of the target, not of its head"


# --- EAGLE-3, P-EAGLE


def test_draft_ids_are_the_targets():
    """From offsets, or from ids in their place."""
    made = synthetic.eagle3()
    result = converted(made)
    ids = result.tensors["draft_ids"]
    assert ids.dtype == mx.int32 and "d2t" not in result.tensors
    assert ids.tolist() == synthetic.KEPT
    assert result.dropped["t2d"] == "the inverse of d2t, checked against it"
    assert "d2t holds offsets" in result.notes
    again = converted(made.changed(d2t=ids))
    assert mx.array_equal(again.tensors["draft_ids"], ids) and "d2t holds ids" in again.notes


@pytest.mark.parametrize(
    ("change", "capture"),
    [
        ({}, [1, 5, 8]),
        ({LAYER_IDS: [1, 5, 8]}, [1, 5, 8]),
        ({LAYER_IDS: [3, 7, 11]}, [2, 6, 10]),
        ({"eagle_config": {LAYER_IDS: [3, 7, 11]}}, [3, 7, 11]),
        ({"eagle_config": {LAYER_IDS: [2, 6, 9]}}, [1, 5, 8]),
        ({"eagle_config": {LAYER_IDS: [0, 6, 9]}}, [0, 6, 9]),
        ({"eagle_config": {LAYER_IDS: [8, 10, 12]}}, [7, 9, 11]),  # 12 is the output of the last layer
    ],
)
def test_captured_layers_are_outputs(change, capture):
    result = converted(with_config(synthetic.eagle3(), **change))
    assert list(result.config["mlx_spec"]["capture"]) == capture


@pytest.mark.parametrize("key", ["norm_before_fc", "norm_before_residual", "norm_output"])
def test_switches_of_eagle3_may_be_nested(key):
    more = {"input_norm__weight": mx.ones(3 * synthetic.D)} if key == "norm_before_fc" else {}
    made = synthetic.eagle3().changed(**more)
    saids = {key: True}, {"eagle_config": {key: True}}
    top, inside = (converted(with_config(made, **said)).config for said in saids)
    without = converted(synthetic.eagle3()).config
    for config in (top, inside, without):
        del config["layer_config"]
    assert top == inside != without


def test_normed_features_of_eagle_3_1_and_a_smaller_drafter_than_its_target():
    made = synthetic.eagle3()
    norms = {f"fc_norm.{index}.weight": mx.ones(synthetic.D) for index in range(3)}
    normed = with_config(made, fc_norm=True, norm_output=True)
    result = converted(normed.changed(**norms))
    assert norms.keys() <= result.tensors.keys() and result.config["mlx_spec"]["chain"] == "post_norm"
    assert "lacks 3 of" in refusal(normed)
    wide = with_config(made, target_hidden_size=40).changed(fc__weight=mx.zeros((synthetic.D, 120)))
    result = converted(replace(wide, target={**made.target, "hidden_size": 40}))
    assert result.config["target_hidden_size"] == 40


def test_mask_of_peagle():
    made = synthetic.peagle()
    result = converted(made)
    assert result.config["mask_token_id"] == 255 and result.tensors["mask_hidden"].shape == (192,)
    assert "no mask token below its 256 tokens" in refusal(with_config(made, mask_token_id=256))


# --- DFlash, Medusa, PARD


def test_layer_ids_of_dflash_and_a_block_whose_first_slot_drafts():
    made = synthetic.dflash()
    result = converted(made)
    found = result.config["mlx_spec"]
    assert list(found["capture"]) == [1, 3, 5, 7, 9] and found["shift"] == 0
    assert (result.config["block_size"], result.config["mask_token_id"]) == (5, 255)
    rest = {key: value for key, value in made.config.items() if key != "dflash_config"}
    nested = {"speculators_model_type": "dflash", "transformer_layer_config": rest, "block_size": 5}
    nested |= {"mask_token_id": 255, "aux_hidden_state_layer_ids": [2, 4, 6, 8, 10]}
    assert converted(replace(made, config=nested)).config["mlx_spec"] == found
    assert "no target_layer_ids" in refusal(with_config(made, dflash_config={"mask_token_id": 255}))
    result = converted(with_config(made, sample_from_anchor=True, final_logit_softcapping=30.0))
    assert result.config["mlx_spec"]["shift"] == 1 and result.config["final_logit_softcapping"] == 30.0


def test_heads_of_medusa_are_counted():
    result = converted(with_config(synthetic.medusa(), medusa_num_heads=2))
    assert (result.config["num_heads"], result.config["num_layers"]) == (4, 1)
    assert result.notes == ("config.json says 2 heads, the tensors are of 4",)
    assert converted(synthetic.vllm_medusa()).config["num_layers"] == 2
    whole = synthetic.medusa()
    gap = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith("1.")}
    assert refusal(replace(whole, tensors=gap)).startswith("the Medusa drafter has the heads [0, 2, 3], ")


# --- switches that a checkpoint sets and that are not known

# Keys of published configs, with the value that turns them on.
SWITCHES = {
    "use_swa": True,
    "swa_window_size": 512,
    "attention_sink_bias": True,
    "rope_is_neox_style": False,
    "input_embedding_scale": 2.0,
    "output_multiplier": 0.5,
    "mlp_bias": True,
    "use_mtp_layernorm": True,
    "parallel_draft_step": 4,
    "hc_mult": 4,
    "lattice_layers": 2,
}
NESTS = {
    "eagle3": ("eagle_config",),
    "eagle3, speculators": ("transformer_layer_config",),
    "peagle": ("eagle_config",),
    "dflash": ("dflash_config",),
    "dflash2": ("dflash_config",),
    "dspark, rnn": ("dflash_config", "dspark_config"),
    "gemma4_dspark": (),
    "gemma4_assistant": ("text_config",),
    "medusa": (),
    "mlp_speculator": (),
    "lstm_speculator": (),
    "pard, qwen3": (),
}
UNSUPPORTED = {
    "LiLiCorr": ({"architectures": ["LiLiCorrDraftModel"]}, ()),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, ("fc.weight",)),
    "DFly": ({"architectures": ["DFlyDraftModel"]}, ()),
    "XPress": ({"speculators_model_type": "xpress"}, ()),
    "EAGLE-4": ({"architectures": ["LlamaForCausalLMEagle4"]}, ()),
    "EAGLE": ({"architectures": ["EagleLlamaForCausalLM"]}, ()),
    "Qwen4 MTP": ({"model_type": "qwen4"}, ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight")),
}


def assistant() -> Checkpoint:
    folder, target = (GOLDEN / "12b" / part for part in ("assistant", "target"))
    return Checkpoint(stored(folder / "model.safetensors"), read(folder), read(target))


@pytest.mark.parametrize("name", NESTS)
def test_an_unknown_switch_is_refused_by_name(name):
    made = assistant() if name == "gemma4_assistant" else MADE[name][1]()
    for key, value in SWITCHES.items():
        for nest in (None, *NESTS[name]):
            inner = made.config.get(nest) if nest else None
            changed = {key: value} if nest is None else {nest: {**(inner or {}), key: value}}
            text = refusal(with_config(made, **changed))
            assert f"has {key} = {value}" in text and "which this version does not know" in text
    off = dict.fromkeys(SWITCHES, 0) | {"rope_is_neox_style": True, "input_embedding_scale": 1.0}
    off |= {
        "base_model_name_or_path": "owner/target",
        "image_token_id": 3,
        "output_multiplier": 1,
        "parallel_draft_step": 1,
        "hc_mult": None,
    }
    assert converted(with_config(made, **off)).tensors.keys() == converted(made).tensors.keys()


def test_an_unknown_switch_of_a_native_head_is_refused_by_name():
    made = with_config(synthetic.native("glm4_moe"), mtp_share_norm=True)
    assert "the MTP head has mtp_share_norm = True" in refusal(made)


# --- recognition


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_kinds_that_are_known_and_refused(kind):
    with pytest.raises(BadCheckpoint, match=f"^drafters of the kind {kind} are not supported: [^\n]*lookup$"):
        family_of(*UNSUPPORTED[kind])


def test_no_supported_kind_is_refused():
    """Neither as published nor in our form."""
    for _, make in MADE.values():
        made = make()
        refuse_unsupported(made.config, made.tensors)
        result = converted(made)
        refuse_unsupported(result.config, result.tensors)


def test_an_unknown_family_is_named():
    names = ["rnn.weight", "a.weight", "b.weight", "c.weight", "d.weight"]
    message = refusals.refusal(BadCheckpoint, family_of, {"model_type": "hydra"}, names)
    known = ", ".join(family.kind for family in FAMILIES)
    assert message == (
        "no drafter family has model_type 'hydra' and tensors such as a.weight, b.weight, c.weight "
        f"and 2 more: known are {known}"
    )


# --- what is refused


def stripped(kind: str, prefix: str) -> Checkpoint:
    made = synthetic.native(kind)
    trunk = {name: tensor for name, tensor in made.tensors.items() if not name.startswith(prefix)}
    return replace(made, tensors=trunk)


def indexed(kind: str, model_type: str) -> Checkpoint:
    made = synthetic.native(kind)
    config = {**made.config, "model_type": model_type, "index_n_heads": 4, "index_head_dim": 8}
    return Checkpoint(made.tensors, config, config)


EH = "model__layers__2__eh_proj__"
REFUSED: dict[str, tuple[Callable[[], Checkpoint], str]] = {
    "scales": (
        lambda: synthetic.native("glm4_moe").changed(**{EH + "scales": mx.ones((D, 1))}),
        "the GLM MTP head is quantized already (model.layers.2.eh_proj.scales): convert it from the original",
    ),
    "the 1 of norms twice": (
        lambda: synthetic.native("qwen3_next", 2.0),
        "the Qwen MTP head has norm weights around 2.0 (layers.0.input_layernorm.weight, ",
    ),
    "two layers": (
        lambda: synthetic.native("glm4_moe").changed(model__layers__3__eh_proj__weight=mx.zeros((D, 2 * D))),
        "the GLM MTP head has several MTP layers: this version converts heads of one layer",
    ),
    "stripped DeepSeek": (
        lambda: stripped("deepseek_v3", "model.layers.2."),
        "the DeepSeek MTP head was stripped, the checkpoint has no model.layers.2.* although its config.json "
        "promises them: take the original repository (deepseek-ai/...)",
    ),
    "an indexer of DeepSeek": (
        lambda: indexed("deepseek_v3", "deepseek_v32"),
        "the DeepSeek MTP head of a deepseek_v32 attends through an indexer (index_n_heads 4), which this "
        "version cannot run: convert its target with --drafter none, or with another drafter",
    ),
    "a transposed projection": (
        lambda: synthetic.dflash().changed(layers__0__mlp__gate_proj__weight=mx.zeros((64, 96))),
        "the DFlash drafter has layers.0.mlp.gate_proj.weight of shape [64, 96], as if transposed, by the "
        "configs it is [96, 64]: weights and config.json belong to different models",
    ),
    "maps that contradict each other": (
        lambda: synthetic.eagle3().changed(t2d=mx.arange(synthetic.V) < 97),
        "d2t of 96 entries that names some token twice, or not the 97 that t2d marks",
    ),
    "ids outside the vocabulary": (
        lambda: synthetic.eagle3().changed(t2d=None, d2t=synthetic.eagle3().tensors["d2t"] + 5),
        "drafts the tokens 6 to 258, the target knows 256",
    ),
    **{  # its number was -1, which is the last layer to the target's hooks
        f"the embedding among {ids}": (
            lambda ids=ids: with_config(synthetic.eagle3(), **{LAYER_IDS: ids}),
            "the EAGLE-3 drafter reads the embedding of its target (the input of layer 0)",
        )
        for ids in ([0, 6, 9], [3, 0, 9])
    },
    "a layer that the target lacks": (
        lambda: with_config(synthetic.eagle3(), **{LAYER_IDS: [2, 18, 33]}),
        "the EAGLE-3 drafter reads layer 17 of its target, this one has 12 layers",
    ),
    "a norm that no switch asks for": (
        lambda: synthetic.eagle3().changed(input_norm__weight=mx.ones(3 * synthetic.D)),
        "the EAGLE-3 drafter has tensors that its family eagle3 does not know, 1 of 16 (input_norm.weight)",
    ),
    "windows of EAGLE-3": (
        lambda: with_config(synthetic.eagle3(), layer_types=["sliding_attention"]),
        "the EAGLE-3 drafter has layer_types with a sliding window: only full attention is supported",
    ),
    "sizes of several layers": (
        lambda: with_config(synthetic.mlp_speculator(), inner_dim="32.32"),
        "config.json of the MLP speculator has inner_dim '32.32': only one size is supported",
    ),
    "a projector of another kind": (
        lambda: with_config(synthetic.dspark(), projector_type="linear"),
        "the DSpark drafter has projector_type 'linear', so it is of another kind",
    ),
    "steps of an LSTM that are not tied": (
        lambda: with_config(synthetic.lstm_speculator(), tie_lstm_embs=False),
        "the MLP speculator is an LSTM whose steps or embeddings are not tied",
    ),
    "steps that differ and are said to be tied": (
        lambda: with_config(synthetic.mlp_speculator(), tie_weights=True),
        "the MLP speculator has speculator.emb.1.weight, which config.json says is tied, and it differs",
    ),
    **{
        f"{key} of another type in {name}": (
            lambda make=make, changes={key: value}: with_config(make(), **changes),
            f"this is not a drafter of the kind {kind} (",
        )
        for name, kind, make, key, value in (
            ("eagle3", "EAGLE-3", synthetic.eagle3, LAYER_IDS, 7),
            ("eagle3", "EAGLE-3", synthetic.eagle3, "draft_vocab_size", "relu"),
            ("peagle", "P-EAGLE", synthetic.peagle, "eagle_config", 1),
            ("dflash", "DFlash", synthetic.dflash, "rope_theta", "relu"),
            ("dflash", "DFlash", synthetic.dflash, "dflash_config", [[1]]),
            ("dspark", "DSpark", synthetic.dspark, "dspark_config", 7),
        )
    },
    "heads that are a list": (
        lambda: with_config(synthetic.eagle3(), num_key_value_heads=[1]),
        "'num_key_value_heads' = [1], which is not of type int",
    ),
    "a scalar for a matrix of a gate": (
        lambda: synthetic.lstm_speculator().changed(output_proj__0__weight=mx.array(1.0)),
        "this is not a drafter of the kind MLP speculator (",
    ),
    **{  # to build them would take all memory
        f"{key} of {name} beyond all bounds": (
            lambda make=make, changes={key: 10**9}: with_config(make(), **changes),
            f"has '{key}' = 1000000000, which must be from 1 to 1024",
        )
        for name, make, key in (
            ("eagle3", synthetic.eagle3, "num_hidden_layers"),
            ("dflash", synthetic.dflash, "num_hidden_layers"),
            ("dflash", synthetic.dflash, "block_size"),
            ("pard", synthetic.pard, "num_hidden_layers"),
            ("mlp_speculator", synthetic.mlp_speculator, "n_predict"),
        )
    },
    "experts beyond all bounds": (
        lambda: with_config(synthetic.native("qwen3_next"), num_experts=10**9),
        "has other tensors than its config.json says (1000000000 experts)",
    ),
    "sliding layers of a Gemma 4 backbone": (
        lambda: with_config(synthetic.gemma4_dspark(), layer_types=["sliding_attention"] * 2),
        "the Gemma 4 DSpark drafter has sliding layers: only full attention is supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]
    assert message in refusal(make(), SpecError)
