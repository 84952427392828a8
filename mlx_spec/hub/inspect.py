"""Describe a checkpoint and find the drafters that fit it, without loading it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint.config import TOKENIZERS, Checkpoint, integer, text_config
from mlx_spec.checkpoint.drafter_families import drafter_family, is_head
from mlx_spec.checkpoint.files import AGAIN, one_line, read_object, shortened
from mlx_spec.checkpoint.headers import (
    INDEX,
    WEIGHTS,
    Headers,
    TensorInfo,
    choose_files,
    indexed_tensors,
)
from mlx_spec.checkpoint.memory import (
    MemoryNeed,
    context_memory,
    context_sizes,
    memory_need,
    total_need,
)
from mlx_spec.checkpoint.owners import missing_tower, tower_bytes
from mlx_spec.checkpoint.quantizers import count_parameters, precision
from mlx_spec.checkpoint.targets import MANIFEST, Config, TargetShape
from mlx_spec.checkpoint.weights import BITS, sizes_of, target_shape
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError
from mlx_spec.hub.catalog import DEMO, DRAFTERS, MADE_FOR, SHAPES, made_for
from mlx_spec.hub.download import explain, on_disk, plan
from mlx_spec.hub.names import resolve


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(TargetShape):
    """One target or drafter, with its shape as a target. Values are None if config.json lacks them."""

    name: str
    family: str  # model_type
    kind: str | None  # of a drafter, None for a target
    parameters: int
    size: int  # bytes of the weights
    memory: MemoryNeed  # once it is loaded
    contexts: Mapping[int, int]  # bytes by the tokens of a conversation, empty without MLX
    read: int  # bytes of weights for a token, once it is loaded
    gguf_read: int | None  # the same for the GGUF file that the checkpoint comes from
    precision: str
    layer_types: Mapping[str, int]  # attention type -> layers, empty if all are the same
    heads: int | None
    context: int | None  # tokens
    has_tokenizer: bool
    has_template: bool
    prediction_layers: int  # draft layers inside a target, by config.json
    prediction_tensors: int  # tensors of these layers that exist
    needs: TargetShape | None  # the target that a drafter needs; None for a target
    goes_with: tuple[str, ...]  # published targets of a drafter, published drafters of a target
    vision: int  # bytes of the vision tower, 0 if none is known here
    no_vision: str | None  # why no pictures are read
    problem: str | None

    @property
    def speculative_heads(self) -> str:
        """Return the state of a target's own prediction layers: "present", "stripped" or "none"."""
        if self.prediction_tensors:
            return "present"
        return "stripped" if self.prediction_layers else "none"


@dataclass(frozen=True)
class ConvertedPair:
    """A folder with a pair.json."""

    name: str
    target: CheckpointInfo | None  # None if it cannot be read, see `problem`
    drafter: CheckpointInfo | None
    self_test: Mapping[str, Any]
    problem: str | None
    retokenized: bool = False  # True if the drafter has another tokenizer, so its text is encoded again

    @property
    def size(self) -> int:
        """Return the bytes of the weights of both."""
        return sum(half.size for half in (self.target, self.drafter) if half)

    @property
    def memory(self) -> MemoryNeed:
        """Return the memory of both once they are loaded."""
        return total_need(half.memory for half in (self.target, self.drafter) if half)


def inspect(name: str) -> CheckpointInfo | ConvertedPair:
    """Describe a folder, a converted pair, "demo", or a repository.

    If a repository is not in the cache, only its config.json and headers are fetched. Raises NotFound or
    BadCheckpoint.
    """
    name = resolve(name).target
    if name == DEMO:
        from mlx_spec import demo

        folders = (demo.TARGET, demo.DRAFTER)
        target, drafter = (inspect_checkpoint(Checkpoint(folder, DEMO)) for folder in folders)
        return ConvertedPair(DEMO, target, drafter, {}, target.problem or drafter.problem)
    checkpoint = on_disk(name)
    return _inspect_remote(name) if checkpoint is None else inspect_stored(checkpoint)


def inspect_stored(checkpoint: Checkpoint) -> CheckpointInfo | ConvertedPair:
    """Describe a checkpoint, or the converted pair in its folder. Raises NotFound or BadCheckpoint."""
    file = checkpoint.folder / MANIFEST
    return _inspect_pair(file, checkpoint.name) if file.is_file() else inspect_checkpoint(checkpoint)


def _inspect_pair(file: Path, name: str) -> ConvertedPair:
    """Describe the pair of a pair.json. The first half that cannot be used is its problem."""
    manifest, problem = read_object(file), None
    paths = {"target": manifest.get("target", ".")}
    if manifest.get("drafter") is not None:
        paths["drafter"] = manifest["drafter"]
    stored = {role: Checkpoint(file.parent / path) for role, path in paths.items() if isinstance(path, str)}
    halves: dict[str, CheckpointInfo] = {}
    for role in paths:
        try:
            if role not in stored:
                raise BadCheckpoint(f"{file}: {role} must be a path relative to it")
            halves[role] = inspect_checkpoint(stored[role])
            problem = problem or halves[role].problem
        except (SpecError, OSError) as error:  # also a name that no disk can hold
            problem = problem or one_line(error)
    target, drafter = halves.get("target"), halves.get("drafter")
    if not problem and target and drafter and drafter.needs:
        unfit = misfits(drafter.needs, target)
        problem = f"the drafter expects {', '.join(unfit)} of the target" if unfit else None
    is_model = not problem and drafter is not None and drafter.kind is None
    retokenized = is_model and _tokens_differ(stored["target"], stored["drafter"])
    test = manifest.get("self_test")
    return ConvertedPair(name, target, drafter, test if isinstance(test, dict) else {}, problem, retokenized)


def inspect_checkpoint(checkpoint: Checkpoint) -> CheckpointInfo:
    """Describe one checkpoint on this machine. Raises NotFound or BadCheckpoint."""
    _ = checkpoint.config
    folder, problem = checkpoint.folder, checkpoint.headers.problem or _inconsistency(checkpoint)
    try:
        return _describe(checkpoint, {file.name for file in folder.iterdir()}, problem)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{folder / 'config.json'} is malformed ({one_line(error)}): {AGAIN}") from error


def misfits(needs: TargetShape, has: TargetShape) -> list[str]:
    """Return in which sizes a target differs from a drafter's needs; empty if it fits."""
    named = {
        "hidden_size": "hidden size",
        "vocab_size": "vocabulary",
        "layers": "layers",
        "window": "sliding window",
        "kv_heads": "K/V heads",
        "head_dim": "head dimension",
        "global_kv_heads": "K/V heads of full attention",
        "global_head_dim": "head dimension of full attention",
    }
    return [
        f"{words} {need} instead of {vars(has)[key]}"
        for key, words in named.items()
        if (need := vars(needs)[key]) not in (None, vars(has)[key])
    ]


def _inspect_remote(name: str) -> CheckpointInfo:
    """Describe a repository by its config.json and headers; keep nothing."""
    from huggingface_hub import HfApi

    download = plan(name)
    weights = [file for file in download.sizes if fnmatch(file, WEIGHTS)]
    api = HfApi()

    def tensors_of(file: str) -> dict[str, TensorInfo]:
        stored = api.parse_safetensors_file_metadata(name, file, revision=download.commit).tensors
        return {key: TensorInfo(t.dtype, tuple(t.shape), *t.data_offsets) for key, t in stored.items()}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            for wanted in {"config.json", "tokenizer_config.json", INDEX} & download.sizes.keys():
                api.hf_hub_download(name, wanted, revision=download.commit, local_dir=temporary)
            max_requests = 8  # headers requested from the Hub at the same time
            with ThreadPoolExecutor(max_requests) as pool:
                parts = dict(zip(weights, pool.map(tensors_of, weights), strict=True))
        except Exception as error:  # the errors of the Hub and of its HTTP library
            raise NotFound(explain(name, error)) from error
        chosen, missing, problem = choose_files(name, parts, indexed_tensors(folder))
        if problem is None and (missing or not chosen):
            problem = (
                f"{name} lacks {shortened(missing)}" if missing else f"{name} holds no weights ({WEIGHTS})"
            )
        tensors = {key: tensor for file in chosen for key, tensor in parts[file].items()}
        headers = Headers(tensors, sum(download.sizes[file] for file in chosen), problem)
        return _describe(Checkpoint(folder, name, lambda _: headers), set(download.sizes), problem)


def _describe(checkpoint: Checkpoint, files: set[str], problem: str | None) -> CheckpointInfo:
    """Describe a checkpoint. `files` are all its files, perhaps remote. Raises NotFound and BadCheckpoint."""
    name, config, headers = checkpoint.name, checkpoint.config, checkpoint.headers
    text, tensors = text_config(config), headers.tensors
    family, shape = drafter_family(config, tensors), target_shape(config)
    if family is None and "model_type" not in config:
        raise BadCheckpoint(f"config.json of {name} has no model_type: download it again")
    types = text.get("layer_types")
    types = types if isinstance(types, list) else []
    counts = Counter(str(each).removesuffix("_attention") for each in types)
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    promised = max(integer(text, *keys) or 0, integer(config, *keys) or 0)
    needs = family.needed_shape(config, tensors) if family else None
    has_tokenizer = not files.isdisjoint(TOKENIZERS)
    return CheckpointInfo(
        name=name,
        family=str(config.get("model_type", "unnamed")),
        kind=family.kind if family else None,
        parameters=count_parameters(tensors, config),
        size=headers.size,
        memory=memory_need([checkpoint]),
        contexts=_contexts(checkpoint),
        read=int(sizes_of(checkpoint, 0).read),
        gguf_read=integer(config, "gguf_read"),
        precision=precision(tensors, config),
        layer_types=dict(counts) if len(counts) > 1 else {},
        heads=integer(text, "num_attention_heads"),
        context=checkpoint.context,
        has_tokenizer=has_tokenizer,
        has_template=_holds_template(checkpoint)
        or any(fnmatch(file, "*.jinja") or file == "chat_template.json" for file in files),
        prediction_layers=0 if family else promised,
        prediction_tensors=0 if family else sum(map(is_head, tensors)),
        needs=needs,
        goes_with=_targets_of(name, config, needs) if needs else _drafters_of(name, shape),
        vision=tower_bytes(config, tensors),
        no_vision=missing_tower(config, tensors),
        problem=problem or (None if family or has_tokenizer else f"{name} has no tokenizer: {AGAIN}"),
        **vars(shape),
    )


def _contexts(checkpoint: Checkpoint) -> dict[int, int]:
    try:
        return context_sizes(context_memory([checkpoint]), checkpoint.context)
    except ImportError:
        return {}


def _tokens_differ(target: Checkpoint, drafter: Checkpoint) -> bool:
    """Return True if the tokenizers of a pair differ, False if one of them cannot be read."""
    from mlx_spec.tokenizer import differing_token, read_tokenizer

    try:
        return differing_token(drafter, target, read_tokenizer(target)) is not None
    except SpecError:
        return False


def _inconsistency(checkpoint: Checkpoint) -> str | None:
    """Return a problem of complete files: wrong sizes or missing tensors; None if there is none."""
    folder, tensors = checkpoint.folder, checkpoint.headers.tensors
    odd = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype in BITS and tensor.nbytes * 8 != tensor.size * BITS[tensor.dtype]
    ]
    if odd:
        return f"{folder} has tensors of another size than their shape: {shortened(odd)}"
    absent = sorted(set(checkpoint.headers.indexed) - tensors.keys())
    return f"{folder / INDEX} lists {shortened(absent)}, which no file holds" if absent else None


def _holds_template(checkpoint: Checkpoint) -> bool:
    try:
        return bool(checkpoint.json("tokenizer_config.json").get("chat_template"))
    except SpecError:
        return False


def _targets_of(name: str, config: Config, needs: TargetShape) -> tuple[str, ...]:
    targets = [MADE_FOR[name]] if name in MADE_FOR else []
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    named = named or config.get("base_model_name_or_path")
    if isinstance(named, str) and named:
        targets.append(named)
    if needs.hidden_size and needs.vocab_size:
        fitting = [base for base, shape in SHAPES.items() if not misfits(needs, shape)]
        targets += [MADE_FOR[DRAFTERS[base]] for base in fitting]
    return tuple(dict.fromkeys(targets))


def _drafters_of(name: str, shape: TargetShape) -> tuple[str, ...]:
    published = made_for(name)
    made = [drafter for drafter, target in MADE_FOR.items() if target == name]
    same = [DRAFTERS[base] for base, known in SHAPES.items() if known == shape]
    return tuple(dict.fromkeys([*([published] if published else []), *made, *same]))
