"""The one table of drafter families. mlx_spec/DESIGN.md says how to add a family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mlx_spec.checkpoint.config import integer
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.headers import Tensors
from mlx_spec.checkpoint.owners import owner_of
from mlx_spec.checkpoint.targets import Config, TargetShape
from mlx_spec.checkpoint.weights import target_shape
from mlx_spec.errors import BadCheckpoint

Recognizer = Callable[[str, Config, Collection[str]], bool]


@dataclass(frozen=True)
class DrafterFamily:
    """One family of drafters. Code is named "file:name", and imported when it is used."""

    kind: str  # name for users
    model_types: tuple[str, ...]  # in config.json of converted checkpoints
    # in drafters/: has `open(checkpoint, config.json, the target's) -> DrafterSource`, which raises
    # BadCheckpoint, and Mismatch if the drafter is made for another target
    opener: str
    converter: str  # in convert/families/: (tensors, config.json, the target's) -> Converted
    # (words of model_type and architectures, config.json, names of tensors) -> True for a published drafter
    recognizes: Recognizer
    needs: Callable[[Config, Tensors], TargetShape]  # the target that a published checkpoint needs
    inside: str | None = (
        None  # in convert/families/: (config.json, names) -> True for a target that holds one
    )
    is_ours: bool = False  # True if published drafters need no conversion
    made_for: Mapping[str, str] = field(default_factory=dict)  # published repository -> its target

    def open(self, *arguments: Any) -> Any:
        """Open a converted checkpoint."""
        return _named("drafters", self.opener).open(*arguments)

    def convert(self, *arguments: Any) -> Any:
        """Call the converter. Raises BadCheckpoint, also for values and tensors that it does not expect."""
        try:
            return _named("convert.families", self.converter)(*arguments)
        except LOADING_ERRORS as error:  # a value or a tensor of another form than its family has
            raise BadCheckpoint(
                f"this is not a drafter of the kind {self.kind} ({one_line(error)}): its config.json or its "
                "weights have another form; take a complete checkpoint"
            ) from error

    def is_inside(self, config: Config, tensors: Collection[str]) -> bool:
        """Return True if a target's checkpoint holds a drafter of this family."""
        return self.inside is not None and bool(_named("convert.families", self.inside)(config, tensors))

    def needed_shape(self, config: Config, tensors: Tensors) -> TargetShape:
        """Return the target that a drafter needs, as the converter recorded it, else by its own sizes."""
        converted = config.get("target")
        if not isinstance(converted, Mapping):
            return self.needs(config, tensors)
        return TargetShape(
            *(integer(converted, k) for k in ("hidden_size", "vocab_size", "num_hidden_layers"))
        )


def drafter_family(config: Config, tensors: Collection[str]) -> DrafterFamily | None:
    """Return the family of a drafter by config and tensor names; None for a target."""
    words = _words(config)
    return next((family for family in FAMILIES if family.recognizes(words, config, tensors)), None)


def refuse_unsupported(config: Config, tensors: Collection[str]) -> None:
    """Raise BadCheckpoint for a drafter of a kind in `UNSUPPORTED`."""
    words = _words(config)
    for kind, recognizes, reason in UNSUPPORTED:
        if recognizes(words, config, tensors):
            raise BadCheckpoint(
                f"drafters of the kind {kind} are not supported: {reason}. Use another drafter for this "
                "target, or lookup"
            )


def _words(config: Config) -> str:
    said = [config.get(key) for key in ("model_type", "speculators_model_type", "architectures")]
    return re.sub(r"[^a-z0-9 ]", "", " ".join(map(str, said)).lower())


def marks(words: str, keys: Collection[str] = (), tensor: str = r"\A\Z") -> Recognizer:
    """Return a recognizer: a pattern matches the words or a tensor name, or config.json has one of `keys`."""
    return lambda said, config, tensors: (
        bool(re.search(words, said))
        or not config.keys().isdisjoint(keys)
        or any(re.search(tensor, name) for name in tensors)
    )


# --- heads inside a target

MEDUSA_TENSOR = re.compile(r"^(medusa_head\.|heads\.)?\d+\.(0\.linear|res\.0)\.weight$")


def is_head(name: str) -> bool:
    """Return True if a tensor of this name belongs to a head that drafts inside a target."""
    return owner_of(name) == "mtp" or MEDUSA_TENSOR.match(name) is not None


def _is_mtp(words: str, config: Config, tensors: Collection[str]) -> bool:
    """Return True if the words name an MTP head, or the checkpoint holds only multi-token heads."""
    heads = [name for name in tensors if owner_of(name) == "mtp"]
    layers = tuple({match[0] for name in heads if (match := re.match(r"(.*\.)?layers\.\d+\.", name))})
    alone = bool(heads) and all(owner_of(name) == "mtp" or name.startswith(layers) for name in tensors)
    return alone or any(word.endswith("mtp") for word in words.split())


# --- needed shapes


def _axis(tensors: Tensors, name: str, axis: int) -> int | None:
    """Return the length of an axis of a vector or matrix, None if there is none."""
    tensor = tensors.get(name)
    return tensor.shape[axis] if tensor and axis < len(tensor.shape) <= 2 else None


def _same_size(config: Config, tensors: Tensors, layers: str = "") -> TargetShape:
    """Return a target as wide as the drafter, with the drafter's vocabulary before its reduction."""
    own = target_shape(config)
    return TargetShape(own.hidden_size, _axis(tensors, "t2d", 0) or own.vocab_size, integer(config, layers))


def _block(config: Config, tensors: Tensors) -> TargetShape:
    return _same_size(config, tensors, "num_target_layers")


def _fused(config: Config, tensors: Tensors) -> TargetShape:
    width = (_axis(tensors, "fc.weight", 1) or 0) // 3  # [D, 3 D of the target]
    same = _same_size(config, tensors)
    return TargetShape(integer(config, "target_hidden_size") or width or same.hidden_size, same.vocab_size)


def _backbone(config: Config, tensors: Tensors) -> TargetShape:
    hidden = integer(config, "backbone_hidden_size")
    return dataclasses.replace(target_shape(config), hidden_size=hidden, layers=None)


def _medusa(config: Config, tensors: Tensors) -> TargetShape:
    head, own = next(filter(MEDUSA_TENSOR.match, tensors), ""), target_shape(config)
    return TargetShape(_axis(tensors, head, 1) or own.hidden_size, own.vocab_size)


def _first(sizes: object) -> int | None:
    """Return the first of sizes such as "4096.4096"."""
    match = re.match(r"\d+", str(sizes))
    return int(match[0]) if match else None


def _projector(config: Config) -> str:
    """Return the projector that the config of a DFlash names, in lower case; "" for none."""
    nested = config.get("dflash_config")
    return str(nested.get("projector_type")).lower() if isinstance(nested, Mapping) else ""


# --- the table. Order matters: a P-EAGLE also looks like an EAGLE-3

FAMILIES: tuple[DrafterFamily, ...] = (
    DrafterFamily(
        "Gemma 4 assistant",
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "gemma4:AssistantNetwork",
        "gemma4:convert",
        marks(r"gemma4(unified)?assistant"),
        _backbone,
        is_ours=True,
        made_for={
            f"google/gemma-4-{size}-it-assistant": f"google/gemma-4-{size}-it"
            for size in ("E2B", "E4B", "12B", "26B-A4B", "31B")
        },
    ),
    DrafterFamily(
        "P-EAGLE",
        ("peagle",),
        "eagle3:Eagle3Network",
        "eagle3:convert_peagle",
        marks("peagle", tensor="mask_hidden$"),
        _fused,
        made_for={
            "amazon/GPT-OSS-20B-P-EAGLE": "openai/gpt-oss-20b",
            "amazon/gpt-oss-120b-p-eagle": "openai/gpt-oss-120b",
        },
    ),
    DrafterFamily(
        "Gemma 4 DSpark",
        ("gemma4_dspark",),
        "dspark:Gemma4DSparkNetwork",
        "dflash:convert_gemma4_dspark",
        marks("gemma4dspark"),
        _block,
        made_for={"deepseek-ai/dspark_gemma4_12b_block7": "google/gemma-4-12B-it"},
    ),
    DrafterFamily(
        "DSpark",
        ("dspark",),
        "dspark:DSparkNetwork",
        "dflash:convert_dspark",
        marks("dspark", ("markov_rank", "dspark_markov_rank"), r"\bmarkov_head\."),
        _block,
        made_for={
            **{f"deepseek-ai/dspark_qwen3_{n}b_block7": f"Qwen/Qwen3-{n}B" for n in (4, 8, 14)},
            "RedHatAI/Qwen3.8-27B-speculator.dspark": "Qwen/Qwen3.8-27B",
            "makora-ai/gemma4-26b-a4b-dspark": "google/gemma-4-26B-A4B-it",
        },
    ),
    DrafterFamily(
        "DFlash2",
        ("dflash2",),
        "dflash2:DFlash2Network",
        "dflash:convert_dflash2",
        marks("dflash2", ("conv_kernel_size",), r"\bcandidate_selector\."),
        _block,
        made_for={f"{owner}/Qwen3.8-27B-DFlash2": "Qwen/Qwen3.8-27B" for owner in ("z-lab", "incoai")},
    ),
    DrafterFamily(
        "DFlash",
        ("dflash",),
        "dflash:DFlashNetwork",
        "dflash:convert",
        marks("dflash", ("dflash_config",)),
        _block,
        made_for={
            **{f"z-lab/Qwen3-{size}-DFlash-b16": f"Qwen/Qwen3-{size}" for size in ("4B", "8B")},
            **{
                f"z-lab/{name}-DFlash": f"Qwen/{name}"
                for name in (
                    "Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B Qwen3.5-35B-A3B Qwen3.5-122B-A10B Qwen3.6-27B "
                    "Qwen3.6-35B-A3B"
                ).split()
            },
            "z-lab/gpt-oss-20b-DFlash": "openai/gpt-oss-20b",
            "z-lab/gpt-oss-120b-DFlash": "openai/gpt-oss-120b",
            "RedHatAI/gemma-4-31B-it-speculator.dflash": "google/gemma-4-31B-it",
        },
    ),
    DrafterFamily(
        "EAGLE-3",
        ("eagle3",),
        "eagle3:Eagle3Network",
        "eagle3:convert",
        marks("eagle3", ("draft_vocab_size",), "d2t$"),
        _fused,
        made_for={
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
            "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "meta-llama/Llama-3.3-70B-Instruct",
            "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
        },
    ),
    DrafterFamily(
        "PARD",
        ("pard",),
        "draft_model:Pard",
        "pard:convert",
        marks(r"\bpard\b", ("pard_token",)),
        lambda config, tensors: TargetShape(),  # it needs the same tokenizer, which no shape tells
    ),
    DrafterFamily(
        "Medusa",
        ("medusa",),
        "medusa:MedusaNetwork",
        "medusa:convert",
        lambda words, config, tensors: (
            "medusa" in words or ("medusa_num_heads" in config and "num_hidden_layers" not in config)
        ),
        _medusa,
        inside="medusa:recognizes",
        made_for={"FasterDecoding/medusa-vicuna-7b-v1.3": "lmsys/vicuna-7b-v1.3"},
    ),
    DrafterFamily(
        "MLP speculator",
        ("mlp_speculator", "lstm_speculator"),
        "mlp_speculator:MLPSpeculatorNetwork",
        "mlp_speculator:convert",
        marks("(mlp|lstm)speculator"),
        lambda config, tensors: TargetShape(
            _first(config.get("input_hidden_dim") or config.get("emb_dim")), integer(config, "vocab_size")
        ),
        made_for={
            "ibm-ai-platform/llama3-8b-accelerator": "meta-llama/Meta-Llama-3-8B-Instruct",
            "Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
            "Snowflake/Arctic-LSTM-Speculator-Qwen2.5-32B-Instruct": "Qwen/Qwen2.5-32B-Instruct",
        },
    ),
    DrafterFamily(
        "MTP head",
        ("qwen_mtp", "deepseek_mtp", "glm_mtp"),
        "mtp:MTPNetwork",
        "mtp:convert",
        _is_mtp,
        _same_size,
        inside="mtp:recognizes",
    ),
)
FEW = "few checkpoints have its heads, which are not implemented here"
# Known kinds that are refused: name, recognizer, and the reason.
UNSUPPORTED: tuple[tuple[str, Recognizer, str], ...] = (
    ("LiLiCorr", marks("lilicorr"), "its transformer over the lattice of tokens is not implemented here"),
    (
        "Domino",
        lambda words, config, tensors: (
            "domino" in words + _projector(config) or any("prefix_gru." in name for name in tensors)
        ),
        FEW,
    ),
    ("DFly", marks("dfly"), FEW),
    ("XPress", marks("xpress"), FEW),
    ("D2SD", marks("d2sd"), FEW),
    ("FastMTP", marks("fastmtp"), FEW),
    ("EAGLE-4", marks("eagle4"), "its licence is not open"),
    (
        "EAGLE",
        lambda words, config, tensors: (
            bool(re.search("(?<!p)eagle(?!3)", words))
            and "draft_vocab_size" not in config
            and not any(name.endswith("d2t") for name in tensors)
        ),
        "it is older than EAGLE-3, which is read",
    ),
    (
        "Qwen4 MTP",
        marks(r"qwen4\w*mtp", tensor=r"\bmtp\.fc_(embedding|hidden)\b"),
        "its target has several residual streams, and no model of mlx-lm has them",
    ),
)
OPENED_AS = {model_type: family for family in FAMILIES for model_type in family.model_types}


def _named(package: str, path: str) -> Any:
    """Import the name of "file:name" from a package of mlx_spec."""
    file, _, name = path.partition(":")
    return vars(import_module(f"mlx_spec.{package}.{file}"))[name]
