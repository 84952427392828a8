"""The steps that the conversions of all drafter families share.

`read` renames the tensors of a checkpoint to our names. A family then merges or drops some of them. `finish`
compares them to the network that will run them: no tensor is missing or left over, and all shapes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import shortened
from mlx_spec.checkpoint.quantizers import dequantized_fp8
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import KEY, Conventions, Count, required
from mlx_spec.drafters.layers import LayerConfig
from mlx_spec.errors import BadCheckpoint, Mismatch

Tensors = Mapping[str, mx.array]  # lazy, by the names of the checkpoint
Prefixes = Sequence[tuple[str, str]]  # beginnings of names: theirs, ours


def all_but(*kept: str) -> Callable[[str], bool]:
    """Return a function: name -> True for weights to quantize. Not for norms and names that end in `kept`."""

    def quantizable(name: str) -> bool:
        parts = name.split(".")
        return parts[-1] == "weight" and not any("norm" in part for part in parts) and not name.endswith(kept)

    return quantizable


any_weight = all_but()


@dataclass(frozen=True)
class Converted:
    """A drafter in our form, or a target in mlx-lm's. Nothing is computed yet.

    Every tensor of the source is in `used`, in `dropped` or in `unused`.
    """

    config: dict[str, Any]  # config.json to write; of a drafter its model_type is the name of the family
    tensors: dict[str, mx.array]  # by our names, or mlx-lm's
    used: frozenset[str]  # source tensors behind `tensors`
    dropped: Mapping[str, str] = field(default_factory=dict)  # source tensor -> why it is not needed
    quantizable: Callable[[str], bool] = any_weight  # by our names
    notes: tuple[str, ...] = ()  # conventions found, for pair.json
    unused: frozenset[str] = frozenset()  # source tensors that nothing uses, without a known reason yet
    unquantized: tuple[str, ...] = ()  # tables and matrices that a quantization leaves out
    dense_size: int = 0  # bytes of the tensors of a drafter before they are quantized


def total_bytes(tensors: Tensors) -> int:
    """Return the bytes of all tensors."""
    return sum(array.nbytes for array in tensors.values())


@dataclass(frozen=True)
class PublishedTensors:
    """The tensors of a drafter by our names. A family merges, splits and drops some of them."""

    title: str  # for errors, such as "the EAGLE-3 drafter"
    renames: Prefixes  # of the drafter's names
    tensors: dict[str, mx.array] = field(default_factory=dict)  # lazy
    names: dict[str, str] = field(default_factory=dict)  # our name -> name in the checkpoint
    dropped: dict[str, str] = field(default_factory=dict)  # name in the checkpoint -> why

    def drop(self, name: str, why: str) -> None:
        """Leave a tensor out, if it is there."""
        if name in self.tensors:
            del self.tensors[name]
            self.dropped[self.names[name]] = why

    def refuse_missing(self, missing: Collection[str], count: int) -> None:
        """Raise BadCheckpoint if some of `count` tensors, by our names, are missing."""
        if missing:
            names = sorted(map(self._as_published, missing))
            raise BadCheckpoint(
                f"{self.title} lacks {len(missing)} of {count} tensors ({shortened(names)}): "
                "download it again, or take a complete checkpoint"
            )

    def _as_published(self, name: str) -> str:
        names = (theirs + name.removeprefix(ours) for theirs, ours in self.renames if name.startswith(ours))
        return next(names, name)


def read(
    title: str,
    tensors: Tensors,
    config: Config,
    spellings: Prefixes = (),
    renames: Prefixes = (),
    *,
    in_target: bool = False,
) -> PublishedTensors:
    """Return the tensors of a checkpoint by our names. FP8 tensors with scales become bfloat16.

    In each name all `spellings` are replaced, then the first prefix of `renames` that it has. With
    `in_target`, names without such a prefix belong to the target. Raises BadCheckpoint if two tensors get
    one name, and for tensors that are quantized already, except by MLX.
    """
    source = PublishedTensors(title, renames)
    for name, tensor in tensors.items():
        common = spelled(name, spellings)
        pair = next((pair for pair in renames if common.startswith(pair[0])), None)
        if pair is None and in_target:
            source.dropped[name] = "part of the target, not of its head"
            continue
        new = common if pair is None else spelled(common, [pair])
        if new in source.names:
            raise BadCheckpoint(f"{title} holds {new} twice, as {source.names[new]} and as {name}")
        source.names[new], source.tensors[new] = name, tensor
    for name in [name for name in source.names if "rotary_emb.inv_freq" in name]:
        source.drop(name, "computed from config.json")
    _unpack(source, config)
    dense = dequantized_fp8(source.tensors, mx.bfloat16)
    source.tensors.clear()
    source.tensors.update(dense)
    _refuse_quantized(source)
    return source


def spelled(name: str, prefixes: Prefixes) -> str:
    """Return a name with all of `prefixes` replaced, in their order."""
    for theirs, ours in prefixes:
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def finish(
    source: PublishedTensors,
    network: nn.Module,
    config: dict[str, Any],
    quantizable: Callable[[str], bool] = any_weight,
    notes: tuple[str, ...] = (),
) -> Converted:
    """Return a drafter whose tensors are the parameters of `network`, which `config` describes.

    Raises BadCheckpoint for tensors that are missing, have another shape, or are left over.
    """
    tensors, expected = source.tensors, dict(tree_flatten(network.parameters()))
    source.refuse_missing(expected.keys() - tensors.keys(), len(expected))
    wrong = [name for name, array in expected.items() if array.shape != tensors[name].shape]
    if wrong:
        shape, said = list(tensors[wrong[0]].shape), list(expected[wrong[0]].shape)
        turned = ", as if transposed" if shape == said[::-1] else ""
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        name = source.names.get(wrong[0], wrong[0])
        raise BadCheckpoint(
            f"{source.title} has {name} of shape {shape}{turned}, by the configs it is {said}{more}: weights "
            "and config.json belong to different models"
        )
    left = sorted(source.names.get(name, name) for name in tensors.keys() - expected.keys())
    if left:
        raise BadCheckpoint(
            f"{source.title} has tensors that its family {config['model_type']} does not know, "
            f"{len(left)} of {len(source.names)} ({shortened(left)}): it is of another kind, or newer than "
            "this version"
        )
    used = frozenset(source.names.values()) - source.dropped.keys()
    return Converted(config, tensors, used, source.dropped, quantizable, notes)


def _unpack(source: PublishedTensors, config: Config) -> None:
    """Replace weights that MLX quantized by their values, in whatever bits each of them is."""
    settings = config.get("quantization")
    if not isinstance(settings, Mapping) or not settings.get("group_size"):
        return
    tensors = source.tensors
    for name in [name for name in tensors if name.endswith(".scales")]:
        stem = name.removesuffix(".scales")
        packed, theirs = tensors.get(f"{stem}.weight"), source.names[name].removesuffix(".scales")
        stated = settings.get(theirs)
        if packed is None or packed.dtype != mx.uint32:
            continue
        of_layer = {**settings, **(stated if isinstance(stated, Mapping) else {})}
        scales, biases = tensors.pop(name), tensors.pop(f"{stem}.biases", None)
        size, mode = int(of_layer["group_size"]), str(of_layer.get("mode", "affine"))
        bits = packed.shape[-1] * 32 // (scales.shape[-1] * size)
        tensors[f"{stem}.weight"] = mx.dequantize(packed, scales, biases, size, bits, mode=mode)


def _refuse_quantized(source: PublishedTensors) -> None:
    tensors = source.tensors
    # Packed weights are matrices: integers [V] are a table, such as one of token ids.
    matrices = {name for name, tensor in tensors.items() if tensor.ndim > 1 and name.endswith(".weight")}
    packed = {name for name in matrices if mx.issubdtype(tensors[name].dtype, mx.integer)}
    # Names of other quantizers. They are refused, because quantizing twice loses twice.
    ends = (".scales", ".qweight", ".weight_packed", ".weight_scale")
    marks = [source.names[name] for name in tensors if name.endswith(ends) or name in packed]
    if marks:
        raise BadCheckpoint(
            f"{source.title} is quantized already ({shortened(sorted(marks))}): "
            "convert it from the original repository, in full precision"
        )


# --- configs

STORAGE_KEYS = ("quantization", "quantization_config", "vision_config", "audio_config", "auto_map")
OTHER_DRAFTER = "use the drafter made for this target"


def config_of(model_type: str, conventions: Conventions, target: Config, **fields: Any) -> dict[str, Any]:
    """Return a config.json: family, conventions, the facts of its target, and `fields`."""
    text = text_config(target)
    fits = {key: text.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    if "model_type" in target:
        fits["model_type"] = target["model_type"]
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleave")
    rope = {key: text[key] for key in keys if text.get(key) is not None}
    return {"model_type": model_type, KEY: asdict(conventions), "target": {**fits, "rope": rope}, **fields}


def own_config(config: Config) -> dict[str, Any]:
    """Return the config of a drafter's layers, without the keys of its storage."""
    return {key: value for key, value in text_config(config).items() if key not in STORAGE_KEYS}


def layer_config(config: Config) -> dict[str, Any]:
    """Return the config of a drafter's layers, which speculators nests in config.json."""
    nested = config.get("transformer_layer_config")
    return dict(nested) if isinstance(nested, Mapping) else own_config(config)


# Keys of published configs, of all versions of transformers, that change no number of a draft.
INERT = frozenset(
    "architectures model_type auto_map dtype torch_dtype transformers_version _name_or_path name_or_path "
    "base_model_name_or_path verifier_name_or_path use_cache initializer_range _commit_hash "
    "attention_dropout max_window_layers tie_word_embeddings pretraining_tp is_encoder_decoder id2label "
    "label2id return_dict _attn_implementation attn_implementation _attn_implementation_autoset "
    "max_length top_k top_p temperature num_beams num_beam_groups num_return_sequences length_penalty "
    "repetition_penalty typical_p chunk_size_feed_forward quantization_config speculators_config "
    "speculators_model_type speculators_version has_no_defaults_at_init num_anchors max_anchors "
    "max_position_embeddings embed_requires_grad spd_type do_sample early_stopping min_length "
    "confidence_head_alpha".split()
)
# Keys of the layers of EAGLE-3 and DFlash. `sliding_window` only has an effect in layers of that type.
LAYER_KEYS = frozenset(
    "hidden_size vocab_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps num_hidden_layers hidden_act attention_bias rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor layer_types sliding_window".split()
)


def refuse_switches(title: str, config: Config, known: Collection[str]) -> None:
    """Raise BadCheckpoint for a key that is set, and is neither in `known` nor in the lists above."""
    absent: dict[str, object] = {  # switches -> the value that a checkpoint without them has
        "attention_mode": "gqa",
        **dict.fromkeys(("rope_is_neox_style", "use_aux_hidden_state", "next_layer_regular"), True),
        **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
        **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
        **dict.fromkeys(("parallel_draft_step", "parallel_draft_heads_num_layers"), 1),
    }
    for key, value in config.items():
        if (
            key in {*known, *INERT, *STORAGE_KEYS}
            or key.endswith(("_token_id", "_token_index"))
            or value is None
        ):
            continue
        if value == absent[key] if key in absent else not value:
            continue
        raise BadCheckpoint(
            f"config.json of {title} has {key} = {value!s:.60}, which this version does not know: its drafts "
            "could be wrong. Use another drafter, or remove the key if it changes no number"
        )


def size(config: Config, key: str, title: str, annotation: Any = int) -> int:
    """Return `config[key]`. Raises BadCheckpoint unless it is an integer, such as a `Size` or a `Count`."""
    number: int = required(config, key, annotation, f"config.json of {title}")
    return number


def target_size(target: Config, key: str) -> int:
    """Return a size of the target. Raises BadCheckpoint if its config.json lacks it."""
    return size(text_config(target), key, "the target")


def check_fit(title: str, ours: Mapping[str, int], target: Config) -> None:
    """Raise Mismatch if a size is not the one in the target's config.json."""
    for key, value in ours.items():
        theirs = target_size(target, key)
        if value != theirs:
            what = key.replace("_", " ")
            raise Mismatch(
                f"{title} is made for a target of {what} {value}, this one has {theirs}: {OTHER_DRAFTER}"
            )


def check_captured(title: str, config: Config, capture: Sequence[int], target: Config) -> dict[str, int]:
    """Return the sizes in the config.json of a drafter that reads the outputs of the layers `capture`.

    Here -1 stands for the input of layer 0, which cannot be captured: it is refused. Raises BadCheckpoint,
    and Mismatch for another target.
    """
    layer, layers = layer_config(config), target_size(target, "num_hidden_layers")
    width, vocab = (size(layer, key, title) for key in ("hidden_size", "vocab_size"))
    sizes = {
        "target_hidden_size": int(config.get("target_hidden_size") or width),
        "draft_vocab_size": int(config.get("draft_vocab_size") or vocab),
    }
    check_fit(title, {"hidden_size": sizes["target_hidden_size"], "vocab_size": vocab}, target)
    for index in capture:
        if index == -1:
            raise BadCheckpoint(
                f"{title} reads the embedding of its target (the input of layer 0), and only outputs of "
                "layers can be captured: use a drafter that reads those"
            )
        if not 0 <= index < layers:
            raise Mismatch(
                f"{title} reads layer {index} of its target, this one has {layers} layers: {OTHER_DRAFTER}"
            )
    return sizes


# --- reduced vocabularies


def draft_ids(title: str, d2t: mx.array, t2d: mx.array | None, vocab_size: int) -> tuple[mx.array, str]:
    """Return the target's token id for each draft id, int32 [draft vocabulary], and a note.

    Most checkpoints store offsets (id + d2t[id], as in the reference), few store ids. Raises BadCheckpoint if
    neither reading gives distinct ids that t2d marks, Mismatch for ids outside the target's vocabulary.
    """
    stored = np.array(d2t, dtype=np.int64)
    marked = None if t2d is None else np.flatnonzero(np.array(t2d))
    for ids, note in ((stored + np.arange(stored.size), "d2t holds offsets"), (stored, "d2t holds ids")):
        distinct = np.unique(ids)
        if distinct.size != ids.size or (marked is not None and not np.array_equal(distinct, marked)):
            continue
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise Mismatch(
                f"{title} drafts the tokens {lowest} to {highest}, the target knows {vocab_size}: "
                f"{OTHER_DRAFTER}"
            )
        return mx.array(ids.astype(np.int32)), note
    theirs = "" if marked is None else f", or not the {marked.size} that t2d marks"
    raise BadCheckpoint(
        f"{title} has a d2t of {stored.size} entries that names some token twice{theirs}: "
        "download it again, or take another checkpoint"
    )


def resolve_map(source: PublishedTensors, vocab_size: int, draft_vocab_size: int) -> list[str]:
    """Replace d2t and t2d by draft_ids, and drop copies of the target's tensors. Return notes."""
    tensors = source.tensors
    if draft_vocab_size != vocab_size:
        source.refuse_missing({"lm_head.weight", "d2t"} - tensors.keys(), len(source.names))
    notes = []
    if "d2t" in tensors:
        ids, note = draft_ids(source.title, tensors.pop("d2t"), tensors.get("t2d"), vocab_size)
        tensors["draft_ids"], notes = ids, [note]
    source.drop("t2d", "the inverse of d2t, checked against it")
    for name in ("verifier_norm.weight", "verifier_lm_head.weight"):
        source.drop(name, "the target's own")
    return notes


def finish_layers(
    source: PublishedTensors,
    network: Callable[[LayerConfig], nn.Module],
    config: dict[str, Any],
    target: Config,
    notes: tuple[str, ...],
    kept: tuple[str, ...] = (),
) -> Converted:
    """Return a drafter as `finish` does. Its layers have the biases that their config names.

    `kept` are endings of names that are never quantized; the weight of fc always is one.
    """
    layer = config["layer_config"]
    parts = ("q_proj", "k_proj", "v_proj") if layer.get("attention_bias") else ()
    layers = range(size({"num_hidden_layers": 1, **layer}, "num_hidden_layers", source.title, Count))
    names = {*source.tensors, *(f"layers.{i}.self_attn.{part}.bias" for i in layers for part in parts)}
    shape = LayerConfig.from_dict(config, names, target)
    return finish(source, network(shape), config, all_but("fc.weight", *kept), notes)
