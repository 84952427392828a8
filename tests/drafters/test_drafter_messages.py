"""What a drafter's checkpoint is refused with: one line about what is wrong in it, or beside its target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support import drafting, fitted, tiny
from support.checkpoints import Config, read, stored
from support.drafting import GOLDEN
from support.fitted import MADE
from support.pairs import save
from support.synthetic import Checkpoint

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.drafter_families import OPENED_AS
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.checkpoint import load_weights
from mlx_spec.drafters.mtp import LAYERS
from mlx_spec.errors import BadCheckpoint, Mismatch

ASSISTANTS = ("e2b", "e4b", "26b", "31b", "12b")
SLIDING, FULL = "sliding_attention", "full_attention"
# The Llama that the bundled drafter is for: all its layers are full attention, which its config does not say.
LLAMA = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
LLAMA |= {"num_hidden_layers": 30, "rope_parameters": {"rope_theta": 1e5}}
Published = Callable[[str], tuple[Path, Config, Config]]
Edit = Callable[[Config, Config], object]  # of config.json, and that of the target


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Return a converted drafter, its config and that of its target, by a name."""
    root = tmp_path_factory.mktemp("drafters")

    @cache
    def of(name: str) -> tuple[Path, Config, Config]:
        if name in ASSISTANTS:
            return (
                GOLDEN / name / "assistant",
                read(GOLDEN / name / "assistant"),
                read(GOLDEN / name / "target"),
            )
        if name == "bundled":
            folder = Path(mlx_spec.__file__).parent / "demo" / "smollm2"
            return folder, read(folder), LLAMA
        if name == "draft model":
            return root / name, read(save(tiny.model_of("full"), root / name)), {"vocab_size": 260}
        if name in MADE:
            made = MADE[name]()
            fitted.opened(made, root / name)
            return root / name / "converted", read(root / name / "converted"), made.target
        drafter, target = GOLDEN / "mtp" / name, GOLDEN / "mtp" / name
        if name == "official":
            drafter, target = GOLDEN / "eagle3" / name, GOLDEN / "eagle3" / "llama"
        folder = drafting.write_converted(drafter, target, root / name)
        return folder, read(folder), read(target)

    return of


def part(config: Config, section: str) -> Config:
    found: Config = config[section] if section else config
    return found


def put(section: str = "", **values: Any) -> Edit:
    return lambda config, _: part(config, section).update(values)


def drop(key: str, section: str = "") -> Edit:
    return lambda config, _: part(config, section).pop(key)


def target(section: str = "", **values: Any) -> Edit:
    return lambda _, target: part(target, section).update(values)


def of_type(model_type: str | None) -> Edit:
    return lambda config, _: (config.clear(), config.update(model_type=model_type))


def for_target_of(name: str) -> Edit:
    return lambda _, target: target.update(read(GOLDEN / name / "target"))


OTHER = {"hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 256, "rope": {}}
CONVENTIONS = {"hidden": "layers", "chain": "none", "rope": "own", "shift": 0}
BAD: list[tuple[str, Edit, str]] = [
    *((family, put(mlx_spec=None), "mlx-spec convert") for family in MADE),
    *((family, put(mask_token_id=None), "mask_token_id") for family in ("pard", "peagle")),
    *(
        (family, put(mask_token_id=wrong), f"from {wrong} to {wrong}, the vocabulary 0 to 255")
        for family, wrong in (("pard", -1), ("peagle", 10**9), ("dflash", 256))
    ),
    ("medusa", put(num_heads=None), "num_heads"),
    *(
        (family, put(**{key: wrong}), f"has '{key}' = {wrong}, which must be from 1 to 1024")
        for family, key in (("mlp_speculator", "steps"), ("dflash", "block_size"), ("medusa", "num_layers"))
        for wrong in (-1, 10**9)  # to build so many would take all memory
    ),
    ("mlp_speculator", put(scaled=None), "has no 'scaled'"),
    *(
        ("pard", put(layer_config={"model_type": "llama", "vocab_size": size}), "cannot be loaded")
        for size in (256, -1)
    ),
    ("dflash", put(causal=[True]), "for 2 layers: convert it again"),
    ("dflash", put(causal=None), "has no 'causal'"),
    ("dflash", put(final_logit_softcapping=30.0), "30.0, the target None"),
    ("dflash", put(mlx_spec=CONVENTIONS | {"capture": ["1"]}), "cannot be loaded as dflash"),
    ("dflash2", put(selector_top_k=257), "selector_top_k 257 of 256 tokens"),
    ("dflash2", put(conv_group_size=5), "which the groups must divide"),
    ("dspark", put(markov_head_type="other"), "known are vanilla, gated, rnn"),
    *(
        ("peagle", put("layer_config", **{key: wrong}), f"has '{key}' = {shown}")
        for key, wrong, shown in (
            ("head_dim", -16, "-16, which must be from 1 to"),
            ("num_key_value_heads", "2", "'2', which is not of type int"),
            ("hidden_act", "relu", "'relu', known are silu, gelu_pytorch_tanh"),
            ("rms_norm_eps", True, "True, which is not of type float"),
        )
    ),
    *((name, put("mlx_spec", shift=0), "shift 0") for name in ("official", "glm4_moe")),
    *((name, drop("mlx_spec"), "has no 'mlx_spec'") for name in ("official", "glm4_moe")),
    ("official", put("layer_config", hidden_act="gelu"), "'gelu'"),
    ("glm4_moe", put(layer_type="glm_moe_dsa"), ", ".join(LAYERS)),
    (
        "glm4_moe",
        put("text_config", index_n_heads=4),
        "the MTP head of a glm4_moe attends through an indexer (index_n_heads 4), which",
    ),
    ("e2b", drop("num_centroids"), "has no 'num_centroids'"),
    ("e2b", drop("layer_types", "text_config"), "has no 'layer_types'"),
    ("e2b", put(backbone_hidden_size="64"), "backbone_hidden_size' = '64', which is not of type int"),
    ("e2b", put(num_centroids=31), "num_centroids 31 does not divide its vocab_size 512"),
    ("e2b", put(tie_word_embeddings=False), "its own LM head"),
    ("e2b", put("text_config", layer_types=[SLIDING, "chunked_attention"]), "chunked_attention"),
    ("e2b", put("text_config", rope_parameters={FULL: {"rope_theta": 1e6}}), "has no 'sliding_attention'"),
    ("draft model", lambda config, target: target.clear(), "target has no 'vocab_size'"),
    ("official", of_type(None), "has no 'model_type'"),
    *(
        ("official", of_type(model_type), words)
        for model_type in ("eagle1", "../llama", "no_such_model")
        for words in (repr(model_type), *OPENED_AS)
    ),
]
MISFITS: list[tuple[str, Edit, str]] = [
    *((family, put(target=OTHER), "5, target has 3") for family in ("medusa", "dflash", "peagle")),
    *(("official", put("mlx_spec", capture=c), str(c)) for c in ([1, 3, 8], [1, 3, 3], [-1, 3, 4])),
    *(
        (name, target(**{key: value}), words)
        for name, layers in (("official", 8), ("glm4_moe", 2))
        for key, value, words in (
            ("hidden_size", 48, "hidden size 32, target has 48"),
            ("num_hidden_layers", 99, f"num hidden layers {layers}"),
        )
    ),
    *(
        (
            name,
            for_target_of({"e2b": "e4b", "31b": "26b"}.get(name, "31b")),
            "use the assistant made for this",
        )
        for name in ASSISTANTS
    ),
    *(
        ("26b", target("text_config", **{key: value}), words)
        for key, value, words in (
            ("hidden_size", 128, "expects hidden size 64, target has 128"),
            ("vocab_size", 1024, "expects vocabulary size 512, target has 1024"),
            ("num_key_value_heads", 1, "expects sliding_attention K/V heads 2, target has 1"),
            ("head_dim", 64, "expects sliding_attention head dimension 16, target has 64"),
            ("sliding_window", 32, "expects sliding window 16, target has 32"),
            ("layer_types", [FULL] * 4, "reads sliding_attention K/V, the target has ['full_attention']"),
            (
                "rope_parameters",
                {FULL: {"partial_rotary_factor": 0.5}},
                "expects full_attention partial_rotary_factor 0.25, target has 0.5",
            ),
        )
    ),
    # In the last layers of E2B nothing is stored: of [s s s s f s | s s s f] it would read 4 and 5.
    ("e2b", target("text_config", num_kv_shared_layers=6), "reads full_attention K/V"),
    *(
        ("bundled", target(num_key_value_heads=9, **said), "expects full_attention K/V heads 3, target has 9")
        for said in ({}, {"layer_types": None})
    ),
]
CASES = [(*case, kind) for kind, cases in ((BadCheckpoint, BAD), (Mismatch, MISFITS)) for case in cases]


@pytest.mark.parametrize(("name", "edit", "words", "kind"), CASES)
def test_messages(name: str, edit: Edit, words: str, kind: type[Exception], published: Published) -> None:
    folder, *configs = published(name)
    config, target = copy.deepcopy(configs)
    edit(config, target)
    with pytest.raises(kind) as caught:
        open_drafter(read_checkpoint(folder), config, target)
    assert words in str(caught.value) and "\n" not in str(caught.value)


class Table(nn.Module):
    """The weights of a drafter that is no network: the token after each token, and their odds."""

    def __init__(self) -> None:
        super().__init__()
        self.odds, self.next = mx.zeros(8), nn.Module()
        self.next.weight = mx.zeros(8, dtype=mx.int32)


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32, mx.int8, mx.float32, mx.bool_])
def test_integers_of_another_type_are_refused(dtype: mx.Dtype, tmp_path: Path) -> None:
    """Floats of another type are not."""
    tensors = {"odds": mx.ones(8, mx.float16), "next.weight": mx.zeros(8, mx.int32)}
    made, table = Checkpoint(tensors, {"model_type": "toy"}, {}), Table()
    load_weights(table, read_checkpoint(made.write(tmp_path / "right")))
    assert table.odds.dtype == mx.float16 and table.next.weight.dtype == mx.int32
    wrong = read_checkpoint(made.changed(next__weight=mx.zeros(8, dtype)).write(tmp_path / "wrong"))
    with pytest.raises(BadCheckpoint) as caught:
        load_weights(Table(), wrong)
    name = str(dtype).removeprefix("mlx.core.").rstrip("_")
    assert f"next.weight is {name}, and must be int32" in str(caught.value)
    if mx.issubdtype(dtype, mx.integer):
        load_weights(Table(), wrong, any_integer=["next.weight"])


ORDER = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.2.layer_scalar": None}, "Missing 1 parameters: model.layers.2.layer_scalar"),
        ({"spare": mx.zeros(1)}, "Received 1 parameters not in model: spare"),
        ({"pre_projection.weight": mx.zeros((64, 64))}, "(64, 64) for parameter pre_projection.weight"),
        ({ORDER: mx.zeros(512)}, f"{ORDER} is float32, and must be int32"),
        ({"pre_projection.weight": mx.zeros((64, 128), mx.int8)}, "is int8, and must be of floats"),
        ({ORDER: mx.arange(512) + 1}, "has tokens from 1 to 512"),
        ({"lm_head.weight": mx.zeros((512, 32))}, ""),  # a copy of the head is ignored
    ],
)
def test_messages_about_tensors(changes: dict[str, mx.array | None], words: str, tmp_path: Path) -> None:
    tensors = stored(GOLDEN / "e2b" / "assistant" / "model.safetensors")
    made = Checkpoint(tensors, read(GOLDEN / "e2b" / "assistant"), read(GOLDEN / "e2b" / "target"))
    checkpoint = read_checkpoint(made.changed(**changes).write(tmp_path))
    if not words:
        assert open_drafter(checkpoint, made.config, made.target).name == "gemma4_assistant"
        return
    with pytest.raises(BadCheckpoint) as caught:
        open_drafter(checkpoint, made.config, made.target)
    assert words in str(caught.value)
