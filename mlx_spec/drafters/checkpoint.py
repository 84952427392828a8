"""The checkpoint of a drafter: the conventions in its config.json, its weights and its own tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import infer_quant_config

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.files import AGAIN, one_line
from mlx_spec.checkpoint.targets import Config
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.types import TargetParts

KEY = "mlx_spec"  # key of the conventions in config.json
CONFIG = "config.json of the drafter"
POST_NORM, PRE_NORM, LAYERS = "post_norm", "pre_norm", "layers"

Fields = TypeVar("Fields")


# --- config.json


@dataclass(frozen=True)
class Conventions:
    """Facts that are needed to run a drafter and that its weights do not show.

    The converter writes them to config.json. Row i belongs to the target's input token x_i, whose logits
    predict x_{i+1}. A wrong convention lowers acceptance and raises no error.
    """

    hidden: str  # hidden states it reads: POST_NORM, PRE_NORM (of the target's final norm), LAYERS or "none"
    capture: tuple[int, ...] = ()  # with LAYERS: the layers, 0-based and never negative, in the order of fc
    chain: str = "none"  # its own output that its next step reads: POST_NORM, PRE_NORM or "none"
    shift: int = 1  # 1: row i predicts the token after its newest input; 0: a slot predicts its own token
    rope: str = "target"  # whose rotary parameters it uses: "target", "own" or "none"

    @classmethod
    def from_config(cls, config: Config) -> Conventions:
        """Read the conventions in config.json. Raises BadCheckpoint for a drafter that was not converted."""
        conventions = config.get(KEY)
        if not isinstance(conventions, Mapping):
            raise BadCheckpoint(
                f"{CONFIG} has no {KEY!r}, so its conventions are not known: run `mlx-spec convert` on it"
            )
        return read_fields(cls, conventions, f"{KEY!r} in {CONFIG}")


# Annotations of keys that `read_fields` and `required` know beside types, tuples, literals and `int | None`.
Size = Annotated[int, range(1, 2**31)]  # of an axis
Count = Annotated[int, range(1, 1025)]  # layers, heads or tokens: building more would take all memory


def read_fields(fields_class: type[Fields], config: Config, where: str, **others: Any) -> Fields:
    """Return a dataclass whose fields are the keys of `config`, and `others`. `where` names the config.

    Raises BadCheckpoint for a key that is missing, or is not what the annotation of its field says.
    """
    annotations = get_type_hints(fields_class, include_extras=True)
    keys = (key for key in annotations if key not in others)
    return fields_class(**{key: required(config, key, annotations[key], where) for key in keys}, **others)


def required(config: Config, key: str, annotation: Any, where: str) -> Any:
    """Return `config[key]`. Raises BadCheckpoint unless it is what an annotation says."""
    value, origin, arguments = config.get(key), get_origin(annotation), get_args(annotation)
    if value is None:
        if NoneType in arguments:
            return None
        raise BadCheckpoint(f"{where} has no {key!r}: {AGAIN}")
    if origin is Literal:
        if value not in arguments:
            raise BadCheckpoint(f"{where} has {key!r} = {value!r}, known are {', '.join(arguments)}")
        return value
    expected = arguments[0] if origin in (Annotated, UnionType) else origin or annotation
    if (expected, type(value)) in ((float, int), (tuple, list)):
        value = expected(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise BadCheckpoint(f"{where} has {key!r} = {value!r}, which is not of type {expected.__name__}")
    if origin is Annotated and value not in (bounds := arguments[1]):
        limits = f"from {bounds[0]} to {bounds[-1]}"
        raise BadCheckpoint(f"{where} has {key!r} = {value}, which must be {limits}: {AGAIN}")
    return value


def check_target(config: Config, target_config: Config) -> None:
    """Raise Mismatch unless the drafter was made for a target of these sizes."""
    made_for = required(config, "target", dict, CONFIG)
    target = text_config(target_config)
    target_sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    for key in target_sizes:
        if made_for.get(key) != target.get(key):
            raise Mismatch(
                f"drafter expects {key.replace('_', ' ')} {made_for.get(key)}, target has "
                f"{target.get(key)}: use the drafter made for this target"
            )


def mask_token(config: Config, vocab_size: int) -> int:
    """Return the mask token, which stands for tokens not drafted yet. Raises BadCheckpoint."""
    token: int = required(config, "mask_token_id", int, CONFIG)
    check_tokens("'mask_token_id'", mx.array([token]), vocab_size)
    return token


def check_tokens(name: str, ids: mx.array, vocab_size: int) -> None:
    """Raise BadCheckpoint for a token that is not in the vocabulary: MLX does not check indices."""
    low, high, last = int(ids.min()), int(ids.max()), vocab_size - 1
    if low < 0 or high > last:
        raise BadCheckpoint(f"{name} has tokens from {low} to {high}, the vocabulary 0 to {last}: {AGAIN}")


# --- weights


def load_weights(
    module: nn.Module, checkpoint: Checkpoint, skip: Collection[str] = (), any_integer: Collection[str] = ()
) -> None:
    """Fill the parameters of `module` from a checkpoint, quantized if they have scales.

    The files are read when the parameters are first used. Tensors named in `skip` are ignored. Floats may
    have any type, integers that of the parameter, or any if `any_integer` names them. Raises BadCheckpoint
    if a tensor is missing, unexpected or of another shape or type.
    """
    tensors = {name: array for name, array in checkpoint.tensors().items() if name not in skip}

    def settings(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        quantizable = nn.Linear | nn.Embedding | SwitchLinear | MultiLinear
        if not isinstance(layer, quantizable) or f"{path}.scales" not in tensors:
            return False
        return dict(infer_quant_config(path, layer, tensors))

    try:
        if any(name.endswith(".scales") for name in tensors):
            nn.quantize(module, class_predicate=settings)
        expected = dict(tree_flatten(module.parameters()))
        module.load_weights(list(tensors.items()))
        for name in sorted(expected):
            _check_type(name, tensors[name].dtype, expected[name].dtype, is_free=name in any_integer)
    except ValueError as error:
        raise BadCheckpoint(
            f"{checkpoint.folder} is not a drafter of this kind ({one_line(error)}): {AGAIN}"
        ) from error
    module.eval()


def _check_type(name: str, dtype: mx.Dtype, expected: mx.Dtype, *, is_free: bool) -> None:
    """Raise ValueError if a tensor holds other integers than expected; `is_free` if any will do."""
    are_integers = [mx.issubdtype(each, mx.integer) for each in (dtype, expected)]
    if any(are_integers) and dtype != expected and not (is_free and all(are_integers)):
        found, right = (str(each).removeprefix("mlx.core.") for each in (dtype, expected))
        raise ValueError(f"{name} is {found}, and must be {right if are_integers[1] else 'of floats'}")


# --- embedding and LM head


def own_parts(network: nn.Module, parts: TargetParts, vocab_size: int) -> TargetParts:
    """Return `parts` with the tables of `network`, if it has any: embed_tokens, lm_head, draft_ids [W].

    Tokens outside a reduced vocabulary have logits of -inf. Their probability is 0, so sampling stays exact.
    """
    embed, unembed = network.get("embed_tokens", parts.embed), network.get("lm_head", parts.unembed)
    if "draft_ids" not in network:
        return TargetParts(embed, unembed, parts.select)
    ids = network.draft_ids
    return TargetParts(embed, lambda normed: widened(unembed(normed), ids, vocab_size), parts.select)


def widened(logits: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """Return logits [T, V] of the vocabulary, from the logits [T, W] of the tokens `ids`; -inf elsewhere."""
    empty = mx.full((logits.shape[0], vocab_size), -mx.inf, dtype=logits.dtype)
    return mx.put_along_axis(empty, mx.broadcast_to(ids, logits.shape), logits, axis=-1)
