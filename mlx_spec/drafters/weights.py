"""A drafter's checkpoint into its modules, tensor by tensor: nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import infer_quant_config

from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.checkpoint import WEIGHTS, check_weights
from mlx_spec.hub.files import AGAIN, shortened

Value = TypeVar("Value")
QUANTIZABLE = nn.Linear, nn.Embedding, SwitchLinear, MultiLinear


def required(config: Mapping[str, Any], key: str, kind: type[Value], where: str) -> Value:
    """`config[key]`, which must be there and of type `kind`; `where` names the config in the error."""
    value = config.get(key)
    if value is None:
        raise BadCheckpoint(f"{where} has no {key!r}: {AGAIN}")
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadCheckpoint(f"{where} has {key!r} = {value!r}, which is no {kind.__name__}")
    return value


def load_weights(module: nn.Module, folder: Path, skip: Collection[str] = ()) -> None:
    """Fill the parameters of `module` from the safetensors of `folder`, quantized where they have scales.

    Lazy: the files are read when the parameters are first used. Tensors named in `skip` are ignored.
    """
    tensors = {name: array for name, array in read_tensors(folder).items() if name not in skip}
    _quantize(module, tensors, folder)
    expected = dict(tree_flatten(module.parameters()))
    _refuse(folder, "lacks the tensors", expected.keys() - tensors.keys())
    _refuse(folder, "has tensors that this drafter has no use for:", tensors.keys() - expected.keys())
    forms = {name: (_form(array), _form(expected[name])) for name, array in tensors.items()}
    wrong = [f"{name} {ours} instead of {theirs}" for name, (ours, theirs) in forms.items() if ours != theirs]
    _refuse(folder, "has tensors of another form than its config.json says:", wrong)
    module.update(tree_unflatten(list(tensors.items())))
    module.eval()


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the safetensors in `folder`, unread. Raises BadCheckpoint for missing and cut files."""
    check_weights(folder)
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob(WEIGHTS)):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        tensors |= loaded
    return tensors


def _quantize(module: nn.Module, tensors: dict[str, mx.array], folder: Path) -> None:
    """Turn the layers whose weight has scales into quantized ones of the same bits and group size."""

    def settings(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        if not isinstance(layer, QUANTIZABLE) or f"{path}.scales" not in tensors:
            return False
        return dict(infer_quant_config(path, layer, tensors))

    if any(name.endswith(".scales") for name in tensors):
        try:
            nn.quantize(module, class_predicate=settings)
        except ValueError as error:
            raise BadCheckpoint(f"{folder}: {error}") from error


def _form(array: mx.array) -> str:
    kind = "integers" if mx.issubdtype(array.dtype, mx.integer) else "floats"
    return f"{kind} {list(array.shape)}"


def _refuse(folder: Path, problem: str, names: Collection[str]) -> None:
    if names:
        raise BadCheckpoint(f"{folder} {problem} {shortened(sorted(names))}: {AGAIN}")
