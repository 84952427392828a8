"""Module wrappers: the targets of a model share them, and they do not change its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support import tiny

from mlx_spec.model import hooks
from mlx_spec.model.hooks import Capture, EagerLayer
from mlx_spec.model.probe import check_rows
from mlx_spec.model.target import LMTarget
from mlx_spec.types import FeatureSpec

KINDS = ["full", "qwen", "sliding", "shared", "recurrent", "recurrent_moe"]


def count_starts(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., None] = lambda *arrays: None
) -> list[int]:
    """Return a list to which every layer that starts early is added."""
    started: list[int] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (started.append(len(arrays)), start(*arrays)))
    return started


def logits(
    target: LMTarget, prompt: list[int], blocks: Sequence[list[int]], *, early: bool = True
) -> mx.array:
    """Logits of blocks verified one after the other; of each all but its last token is kept."""
    target.prefill(prompt)
    seen = []
    for block in blocks:
        seen.append(target.verify(mx.array(block, dtype=mx.int32), early=early))
        target.commit(max(len(block) - 1, 1))
    return mx.concatenate(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_an_early_start_changes_no_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))  # a CPU starts them always
    layers = {"num_hidden_layers": 3} if kind == "recurrent_moe" else {}  # a GPU starts the second of three
    model, prompt = getattr(tiny, kind)(**layers), tiny.prompt(40)
    blocks = [[5], [6, 7, 8], [9], [3, 4, 5, 6, 7], [2]]
    started = count_starts(monkeypatch, mx.async_eval)
    early = logits(LMTarget(model), prompt, blocks)
    count = len(started)
    assert count == len(blocks) * len(model.layers[1:-1:8])
    assert mx.array_equal(early, logits(LMTarget(model), prompt, blocks, early=False))
    assert len(started) == count


@pytest.mark.usefixtures("rules_of_a_cpu")
@pytest.mark.parametrize("kind", ["full", "shared", "recurrent"])
def test_only_a_verification_starts_layers_early(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill must not: it never computes the layers after the last K/V."""
    model = getattr(tiny, kind)()
    target, started = LMTarget(model), count_starts(monkeypatch)
    target.prefill(tiny.prompt(20))
    assert not started
    target.verify(mx.array([5], dtype=mx.int32))
    assert len(started) == len(model.layers) - 1
    target.commit(1)
    target.prefill([6, 7, 8])
    assert len(started) == len(model.layers) - 1


@pytest.mark.parametrize(("device", "count"), [(mx.gpu, 0), (mx.cpu, 2)])
def test_a_gpu_that_is_busy_starts_no_layer_early(
    device: mx.DeviceType, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU does: it reuses the buffers of a layer."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    target, started = LMTarget(tiny.full()), count_starts(monkeypatch)
    target.prefill([6, 7, 8])
    target.verify(mx.array([5], dtype=mx.int32), early=False)  # another pass runs
    assert len(started) == count


def test_a_gpu_starts_two_layers_and_then_eight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first ones start it has nothing to do; each start costs a command buffer."""
    model = tiny.full(num_hidden_layers=20)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    hooks.start_layers_early(model.layers)
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer, EagerLayer)] == [1, 9, 17]


@pytest.mark.usefixtures("rules_of_a_cpu")
def test_targets_of_one_model_share_hooks_and_weights_keep_their_names() -> None:
    """A model that was a target's can still be saved, and loaded into, under its own names."""
    model = tiny.full()
    names = [name for name, _ in tree_flatten(model.parameters())]
    kinds = [type(layer).__name__ for layer in model.layers]
    for _ in range(2):
        LMTarget(model)
    assert len({layer.switch for layer in model.layers[:-1]}) == 1
    assert [type(layer).__mro__.count(EagerLayer) for layer in model.layers] == [*[1] * (len(kinds) - 1), 0]
    assert [type(layer).__name__ for layer in model.layers] == kinds
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    captured = LMTarget(model, FeatureSpec(hidden_layers=(0,)))
    LMTarget(model)
    first = model.layers[0]
    assert isinstance(first, Capture) and type(first).__mro__.count(EagerLayer) == 1
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert mx.array_equal(logits(captured, [1, 2, 3], [[4]]), logits(LMTarget(tiny.full()), [1, 2, 3], [[4]]))


def test_an_interrupted_pass_turns_the_early_start_off(monkeypatch: pytest.MonkeyPatch) -> None:
    target = LMTarget(tiny.full())
    target.prefill([1, 2, 3])

    def interrupt(*arrays: mx.array) -> None:
        raise KeyboardInterrupt

    count_starts(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.verify(mx.array([5], dtype=mx.int32))
    target.commit(0)
    started = count_starts(monkeypatch)
    target.prefill([4, 5, 6])
    assert not started


def test_a_drafter_may_read_one_layer_twice() -> None:
    """Published heads name any layers; two reads of one layer ended in an IndexError."""
    model, prompt = tiny.full(), tiny.prompt(20)
    target = LMTarget(model, FeatureSpec(hidden_layers=(1, 0, 1)))
    first = target.prefill(prompt).hidden
    target.verify(mx.array([5, 6, 7], dtype=mx.int32))
    second = target.commit(2).hidden
    for hidden, count in ((first, 20), (second, 2)):
        assert [each.shape[0] for each in hidden] == [count] * 3
        assert mx.array_equal(hidden[0], hidden[2]) and not mx.array_equal(hidden[0], hidden[1])


@pytest.mark.parametrize(("kind", "layers"), [("olmo_hybrid", (0, 1, 3)), ("afm7", (0, 2, 3))])
def test_a_capture_leaves_the_class_and_the_list_of_a_layer(kind: str, layers: tuple[int, ...]) -> None:
    """OLMo Hybrid asks for the class of a layer, and AFM keeps its layers in two lists."""
    model = tiny.make(kind)
    right = logits(LMTarget(model), tiny.prompt(20), [[5, 6, 7, 8]])
    target = LMTarget(model, FeatureSpec(hidden_layers=layers))
    assert mx.allclose(logits(target, tiny.prompt(20), [[5, 6, 7, 8]]), right, atol=1e-5)
    check_rows(model, lambda: LMTarget(model, FeatureSpec(hidden_layers=layers)))
