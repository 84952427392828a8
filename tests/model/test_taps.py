"""What stands in the place of a model's layers: shared by its targets, and no change to what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from mlx_spec.model import hooks
from mlx_spec.model.hooks import Capture, EagerLayer
from mlx_spec.model.target import LMTarget
from mlx_spec.types import FeatureSpec

KINDS = ["full", "qwen", "sliding", "shared", "recurrent", "recurrent_moe"]


class Counted:
    """Counts what is begun early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(hooks.mx, "async_eval", self._begin)

    def _begin(self, *arrays: mx.array) -> None:
        self.count += 1


def logits(target: LMTarget, prompt: list[int], blocks: Sequence[list[int]]) -> mx.array:
    """Of blocks that are verified one after the other, all of which but their last token is kept."""
    target.prefill(prompt)
    seen = []
    for block in blocks:
        seen.append(target.verify(mx.array(block, dtype=mx.int32)))
        target.commit(max(len(block) - 1, 1))
    return mx.concatenate(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_begun_early_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, blocks = (
        getattr(tiny, kind)(),
        tiny.prompt(40),
        [[5], [6, 7, 8], [9], [3, 4, 5, 6, 7], [2]],
    )
    early = logits(LMTarget(model), prompt, blocks)
    mx.eval(early)
    monkeypatch.setattr(hooks.EagerSwitch, "opened", lambda gate: nullcontext())
    assert mx.array_equal(early, logits(LMTarget(model), prompt, blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_a_verification_is_begun_layer_by_layer_and_a_prefill_is_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers behind the last K/V are not computed in a prefill at all."""
    model = getattr(tiny, kind)()
    target, begun = LMTarget(model), Counted(monkeypatch)
    target.prefill(tiny.prompt(20))
    assert not begun.count
    target.verify(mx.array([5], dtype=mx.int32))
    assert begun.count == len(model.layers) - 1
    target.commit(1)
    target.prefill([6, 7, 8])
    assert begun.count == len(model.layers) - 1


def test_on_a_gpu_several_layers_are_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [tiny.full().layers[0] for _ in range(20)]
    monkeypatch.setattr(hooks.mx, "default_device", lambda: mx.Device(mx.gpu))
    hooks.start_layers_early(layers)
    assert [i for i, layer in enumerate(layers) if isinstance(layer, EagerLayer)] == [7, 15]


def test_targets_of_one_model_share_what_begins_and_weights_keep_their_names() -> None:
    """A model is saved, and loaded into, under the names of its own, also after it was a target's."""
    model = tiny.full()
    names = [name for name, _ in tree_flatten(model.parameters())]
    kinds = [type(layer).__name__ for layer in model.layers]
    for _ in range(2):
        LMTarget(model)
    assert len({layer.gate for layer in model.layers[:-1]}) == 1
    assert [type(layer).__mro__.count(EagerLayer) for layer in model.layers] == [*[1] * (len(kinds) - 1), 0]
    assert [type(layer).__name__ for layer in model.layers] == kinds
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    tapped = LMTarget(model, FeatureSpec(hidden_layers=(0,)))
    LMTarget(model)
    assert isinstance(model.layers[0], Capture) and type(model.layers[0].layer).__mro__.count(EagerLayer) == 1
    assert mx.array_equal(logits(tapped, [1, 2, 3], [[4]]), logits(LMTarget(tiny.full()), [1, 2, 3], [[4]]))


def test_an_interrupted_pass_closes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.full()
    target = LMTarget(model)
    target.prefill([1, 2, 3])
    with monkeypatch.context() as patch:

        def interrupt(*arrays: mx.array) -> None:
            raise KeyboardInterrupt

        patch.setattr(hooks.mx, "async_eval", interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.verify(mx.array([5], dtype=mx.int32))
    target.commit(0)
    begun = Counted(monkeypatch)
    target.prefill([4, 5, 6])
    assert not begun.count
