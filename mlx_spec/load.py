"""Load a pair: find both checkpoints, check them and that they fit, load them.

`import mlx_spec` imports this file. It must be quick and work without MLX, so functions import the modules
that need MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mlx_spec import demo
from mlx_spec.checkpoint.config import TOKENIZERS, Checkpoint, critical_lengths, vocab_size
from mlx_spec.checkpoint.drafter_families import OPENED_AS, drafter_family, refuse_unsupported
from mlx_spec.checkpoint.families import MANIFEST
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line, read_object, typed_path
from mlx_spec.checkpoint.memory import ContextMemory, context_memory
from mlx_spec.checkpoint.weights import gguf_dtype, is_dequantized, sizes_of
from mlx_spec.device import bound_freed_buffers, keep_attention_order, resident, use_device
from mlx_spec.device.blas import use_blas
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, NotFound, NoVision
from mlx_spec.hub import find
from mlx_spec.hub.catalog import DEMO, LOOKUP, NONE, SMOLLM2, Exact, PairSpec, made_for
from mlx_spec.hub.names import resolve

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mlx_spec.distributed.ranks import Ranks
    from mlx_spec.drafters import DrafterSource
    from mlx_spec.pair import Pair, PairInfo
    from mlx_spec.policy import AdaptivePolicies, FixedPolicy, Key
    from mlx_spec.tokenizer import Tokenizer
    from mlx_spec.vision.vision import Vision

WITHOUT = 'drafter="none" decodes without one'


def load(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    num_draft_tokens: int | None = None,
    kv_bits: int | None = None,
    ahead: bool = False,
    exact: Exact = "auto",
    ranks: Ranks | None = None,
    draft_ranks: Ranks | None = None,
) -> Pair:
    """Load a target and a drafter, ready to generate.

    `target` is a folder, a repository on Hugging Face or "demo", the bundled pair. `drafter` is a folder, a
    repository, "lookup" (copies from the text so far, needs no weights) or "none". By default it is the
    target's own: the drafter in the folder's pair.json, or the one published for the repository, else lookup.
    `num_draft_tokens`, 0 to 16, fixes the draft length; a few plain tokens are decoded to measure the gain.
    By default the policy adapts the length, and the first load on a device takes a second to measure costs.
    `kv_bits`, 4 or 8, quantizes the K/V of full attention. With `ahead`, the drafter also drafts for likely
    outcomes while the target verifies, as long as that is measured to pay; with `num_draft_tokens`, always.
    Where MLX uses a GPU it is refused. `exact` is for activations in half precision, where a pass of several
    rows may round otherwise than a pass of one row. "auto" and "on" decode with passes that agree bit by bit;
    the first load on a device measures which do. "auto" does not if plain decoding would be more than 5 %
    slower. "off" never does, and "float32" computes in float32. With `draft_ranks`, rank 1 of the two drafts
    ahead, on any device; run `draft_for` there. With `ranks`, this is rank 0 and has a part of the target;
    run `follow` on the others.

    Raises NotFound, BadCheckpoint, Mismatch, NotRewindable or InvalidValue: one line each, with the way out.
    """
    use_blas()
    use_device()
    keep_attention_order()
    drafter_name = None if drafter is None else str(drafter)
    spec = PairSpec(str(target), drafter_name, num_draft_tokens, kv_bits, ahead, exact)
    _check_values(spec)
    if exact == "float32" and ranks is not None:
        raise InvalidValue("--exact float32 needs the whole target on this machine: leave one of them out")
    shown, target_path, drafter_path = _located(spec)
    checkpoint = _open_target(target_path, ranks)
    config = checkpoint.config
    import mlx.core as mx

    from mlx_spec.model.probe import arrays_of
    from mlx_spec.pair import Pair
    from mlx_spec.tokenizer import read_tokenizer

    bound_freed_buffers(_weights(checkpoint))
    model = None
    if is_dequantized(config) and ranks is None:
        model = _load_target(checkpoint, exact)
        mx.async_eval(model.parameters())  # a thread of MLX unpacks them while the tokenizer is read
    tokenizer = read_tokenizer(checkpoint)
    if unread := tokenizer.generation.without_effect:
        print(f"generation_config.json: {', '.join(unread)}: without effect here", file=sys.stderr)
    source = _open_drafter(shown, drafter_path, checkpoint, tokenizer)
    if ranks is not None and source is not None and source.needs.shared_kv:
        shown, source = _without_shared_kv(shown, checkpoint, tokenizer, is_named=drafter is not None)
    vision = _vision(checkpoint, tokenizer, ranks)
    info = _info(shown, checkpoint, source, vision, _vocab_size(config, tokenizer), ranks)
    if draft_ranks is not None:
        _check_same_drafter(draft_ranks, shown, source)
    offered = _offered(source, spec, draft_ranks)
    quantization = _quantization(config) + (", in float32" if exact == "float32" else "")
    quantization += "" if ranks is None else f", over {ranks.size} ranks"
    policies = _policies(checkpoint, offered, quantization, spec)
    model = _load_target(checkpoint, exact, ranks) if model is None else model
    if exact == "float32":
        info = replace(info, target_bytes=sum(array.nbytes for array in arrays_of(model)))
        for network in (offer.network for offer in offered if offer.network is not None):
            network.set_dtype(mx.float32)
    memory = _memory(checkpoint, source, spec, ranks, info)
    pair = Pair(info, tokenizer, model, offered, policies, kv_bits, ranks, vision, memory)
    _prepare(pair, checkpoint, quantization, spec, is_whole=ranks is None)
    return pair


def _info(
    shown: PairSpec,
    target: Checkpoint,
    source: DrafterSource | None,
    vision: Vision | NoVision,
    vocab_size: int,
    ranks: Ranks | None,
) -> PairInfo:
    from mlx_spec.pair import PairInfo

    return PairInfo(
        shown.target,
        None if shown.drafter == NONE else shown.drafter,
        vocab_size,
        target.context,
        target_bytes=_weights(target) // (1 if ranks is None else ranks.size),
        drafter_bytes=_weights(source.checkpoint) if source and source.checkpoint else 0,
        vision_bytes=0 if isinstance(vision, NoVision) else vision.nbytes,
    )


def _weights(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weights in memory."""
    return int(sizes_of(checkpoint, 0).held)


def _without_shared_kv(
    shown: PairSpec, target: Checkpoint, tokenizer: Tokenizer, *, is_named: bool
) -> tuple[PairSpec, DrafterSource | None]:
    """Return lookup in place of a drafter that reads the target's K/V. Raises Mismatch if it was named."""
    why = f"the drafter {shown.drafter} reads the target's K/V, of which every rank has a part"
    if is_named:
        raise Mismatch(f'{why}: use another one, or the drafter "{LOOKUP}"')
    print(f"{why}: {LOOKUP} drafts in its place", file=sys.stderr)
    return replace(shown, drafter=LOOKUP), _open_drafter(shown, LOOKUP, target, tokenizer)


def _prepare(pair: Pair, target: Checkpoint, quantization: str, spec: PairSpec, *, is_whole: bool) -> None:
    """Check and measure a pair. Targets without exact rollback are refused now, not in an answer."""
    import mlx.core as mx

    from mlx_spec.policy import saved_costs

    try:
        with resident(pair.info.target_bytes):
            lengths = critical_lengths(target.config) if is_whole else []
            activations = _check(pair, target, lengths, spec.kv_bits)
            if activations != mx.float32 and spec.exact == "off":
                pair.use_rows(pair.rows.under(spec.exact))
            elif activations != mx.float32:
                key = _key(target, (), f"{quantization}, activations in {activations}", spec)
                pair.use_rows(saved_costs.row_class(key, _short(pair), pair.measured_rows).under(spec.exact))
            _measure(pair)
    except LOADING_ERRORS as error:
        architecture = target.model_type + ("" if spec.kv_bits is None else f" with kv_bits {spec.kv_bits}")
        raise BadCheckpoint(
            f"{target.folder} fails in its first pass as {architecture}: {one_line(error)}"
        ) from error


def _memory(
    target: Checkpoint, source: DrafterSource | None, spec: PairSpec, ranks: Ranks | None, info: PairInfo
) -> ContextMemory:
    checkpoints = [target, source.checkpoint] if source and source.checkpoint else [target]
    memory = context_memory(checkpoints, spec.kv_bits, 1 if ranks is None else ranks.size)
    return replace(memory, weights=info.target_bytes + info.drafter_bytes + info.vision_bytes)


def _check(pair: Pair, target: Checkpoint, lengths: list[int], kv_bits: int | None) -> mx.Dtype:
    """Check a pair, also where its texts reach these lengths, unless that was done before on this machine.

    Returns the type of the activations.
    """
    from mlx_spec.device import device_name
    from mlx_spec.policy import saved_costs

    versions = [version(name) for name in ("mlx", "mlx-lm", "mlx-spec")]
    key = [target.fingerprint, device_name(), *versions, kv_bits, lengths, pair.drafter_names]
    checked = saved_costs.folder() / f"checked-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    was_checked = checked.exists()
    activations = pair.check([] if was_checked else lengths)
    if lengths and not was_checked:
        with contextlib.suppress(OSError):  # the next load checks again
            checked.parent.mkdir(parents=True, exist_ok=True)
            checked.touch()
    return activations


def _short(pair: Pair) -> str:
    return pair.info.target.rstrip("/").rpartition("/")[2]


def _measure(pair: Pair) -> None:
    """Measure the costs of a pair. The first time on a machine, say so, with the share that is done."""
    from mlx_spec.policy import AdaptivePolicies

    policies = pair.policies
    is_first = isinstance(policies, AdaptivePolicies) and bool(policies.names) and policies.costs is None
    text = f"measuring what {_short(pair)} takes on this machine, once"  # short: the line is rewritten
    is_terminal = sys.stderr.isatty()
    if is_first and not is_terminal:
        print(text, file=sys.stderr, flush=True)
    for share, _ in pair.calibrate():
        if is_first and is_terminal:
            print(f"\r{text}: {share:.0%}", end="", file=sys.stderr, flush=True)
    if is_first and is_terminal:
        print(f"\r{text}: 100%", file=sys.stderr, flush=True)


def follow(target: str, ranks: Ranks) -> int:
    """Load this rank's part of a target and do what rank 0 does with it. Return its exit status."""
    use_device()
    checkpoint = _open_target(_located(PairSpec(target, NONE))[1], ranks)
    bound_freed_buffers(_weights(checkpoint) // ranks.size)
    _load_target(checkpoint, "auto", ranks)
    return ranks.follow()


def draft_for(spec: PairSpec, ranks: Ranks) -> int:
    """Load a drafter on rank 1 and draft ahead for rank 0, which has the target. Return its exit status."""
    from mlx_spec.ahead import draft_for_rank_0
    from mlx_spec.tokenizer import read_tokenizer

    use_device()
    shown, path, drafter = _located(spec)
    target = find(path)
    tokenizer = read_tokenizer(target)
    source = _check_same_drafter(ranks, shown, _open_drafter(shown, drafter, target, tokenizer))
    return draft_for_rank_0(ranks, source, _vocab_size(target.config, tokenizer))


def _check_same_drafter(ranks: Ranks, shown: PairSpec, source: DrafterSource | None) -> DrafterSource:
    """Return the drafter. Raises InvalidValue without weights; ends all ranks if rank 1 has another one."""
    if source is None or source.checkpoint is None:
        raise InvalidValue(
            f"{shown.target} has no drafter with weights that another rank could run: give a draft model"
        )
    ranks.compare(_identity(source.checkpoint))
    return source


def folders(spec: PairSpec) -> tuple[str, str | None]:
    """Return the folders or repositories of target and drafter. Nothing is downloaded.

    The drafter is None if there is none, or if it has no checkpoint. Raises BadCheckpoint for a damaged
    pair.json.
    """
    _, target, drafter = _located(spec)
    return target, None if drafter in (LOOKUP, NONE) else drafter


def _located(spec: PairSpec) -> tuple[PairSpec, str, str]:
    """Return a pair with the names to show, and the folders, files or repositories of target and drafter.

    If no drafter is named, it is the target's own. One without a checkpoint is "lookup" or "none".
    """
    resolved, drafter = resolve(spec.target), spec.drafter
    target = resolved.target
    published = made_for(target) or (None if "/" in spec.target else resolved.drafter)
    if drafter is not None and drafter.lower() in (LOOKUP, NONE):
        drafter = drafter.lower()
    elif drafter is not None:
        try:
            drafter = resolve(drafter).target
        except NotFound as error:
            raise NotFound(f"drafter: {error}; {WITHOUT}") from error
    if target == DEMO:
        default: str | None = str(demo.DRAFTER)
        path = str(demo.TARGET)
    else:
        path, default = _from_manifest(target)
        default = default or (str(demo.SMOLLM2_DRAFTER) if target == SMOLLM2 else published)
    chosen = default or LOOKUP if drafter is None else drafter
    is_bundled = target in (DEMO, SMOLLM2) and drafter is None
    shown = replace(spec, target=target, drafter=target if is_bundled else chosen)
    return shown, path, chosen


def _from_manifest(target: str) -> tuple[str, str | None]:
    """Return target and drafter as paths, from `target`/pair.json; `target` and None without that file."""
    folder = typed_path(target)
    if not (folder / MANIFEST).is_file():
        return target, None
    manifest = read_object(folder / MANIFEST)
    paths = manifest.get("target", "."), manifest.get("drafter")
    if not isinstance(paths[0], str) or not isinstance(paths[1], str | None):
        raise BadCheckpoint(f"{folder / MANIFEST}: target and drafter must be paths relative to it")
    return str(folder / paths[0]), None if paths[1] is None else str(folder / paths[1])


def _open_target(path: str, ranks: Ranks | None) -> Checkpoint:
    """Open a target, and check that it is complete. Ends all ranks if theirs differ."""
    checkpoint = find(path)
    checkpoint.check_weights()
    checkpoint.check_model_type()
    if ranks is not None:
        ranks.compare(_identity(checkpoint))
    return checkpoint


def _identity(checkpoint: Checkpoint) -> dict[str, str]:
    """Return by name what must be equal on all ranks: package versions, and digests of the checkpoint."""
    samples, sample_bytes = 64, 4096  # of each weight file: a fine-tune differs in most of them
    identity = {name: version(name) for name in ("mlx", "mlx-lm", "mlx-spec")}
    files = [checkpoint.folder / name for name in ("config.json", *TOKENIZERS)]
    for file in [*filter(Path.is_file, files), *checkpoint.headers.files]:
        size = file.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with file.open("rb") as stream:
            for at in range(0, size, max(size // samples, sample_bytes)):
                stream.seek(at)
                digest.update(stream.read(sample_bytes))
        identity[file.name] = digest.hexdigest()[:12]
    return identity


def _check_values(spec: PairSpec) -> None:
    if spec.exact not in get_args(Exact):
        raise InvalidValue(f"exact is {spec.exact!r}, it must be one of {', '.join(get_args(Exact))}")
    if spec.kv_bits not in (None, 4, 8):
        raise InvalidValue(f"kv_bits is {spec.kv_bits}, it must be 4 or 8, or left out for K/V as computed")
    if spec.num_draft_tokens is not None:
        from mlx_spec.policy import FixedPolicy

        FixedPolicy(spec.num_draft_tokens)


def _open_drafter(
    shown: PairSpec, path: str, target: Checkpoint, tokenizer: Tokenizer
) -> DrafterSource | None:
    """Return the drafter at a path for a target; None if there is to be none."""
    import mlx.core as mx

    from mlx_spec.drafters.lookup import lookup_source

    if path in (NONE, LOOKUP):
        return lookup_source() if path == LOOKUP else None
    try:
        checkpoint = find(path)
    except NotFound as error:
        raise NotFound(f"drafter: {error}; {WITHOUT}") from error
    _refuse_unconverted(shown, checkpoint)
    source = _source(checkpoint, target, tokenizer)
    if source.network is not None and gguf_dtype(target.config) == "float32":
        source.network.set_dtype(mx.float32)
    return replace(source, checkpoint=checkpoint)


def _refuse_unconverted(shown: PairSpec, checkpoint: Checkpoint) -> None:
    """Raise BadCheckpoint for a published drafter that has to be converted first."""
    from mlx_spec.drafters.checkpoint import KEY

    checkpoint.check_weights()
    config, names_of_tensors = checkpoint.config, checkpoint.headers.tensors
    refuse_unsupported(config, names_of_tensors)
    family = drafter_family(config, names_of_tensors)
    if family is not None and not family.is_ours and KEY not in config:
        raise BadCheckpoint(
            f"{shown.drafter} is a drafter of the kind {family.kind} as published: run `mlx-spec convert "
            f"{shown.target} --drafter {shown.drafter} -o OUT` first, then give OUT as the target"
        )


def _source(drafter: Checkpoint, target: Checkpoint, tokenizer: Tokenizer) -> DrafterSource:
    """Return a drafter. With another tokenizer it drafts by text."""
    from mlx_spec.drafters import open_drafter, open_retokenized
    from mlx_spec.tokenizer import differing_token, read_tokenizer

    if drafter.model_type not in OPENED_AS and not drafter.has_tokenizer:
        sizes = [_vocab_size(checkpoint.config, tokenizer) for checkpoint in (drafter, target)]
        if sizes[0] != sizes[1]:
            raise Mismatch(
                f"the draft model {drafter.folder} knows {sizes[0]} tokens, the target {sizes[1]}, and "
                f"without its tokenizer it is unknown which are the same: add its tokenizer.json; {WITHOUT}"
            )
    difference = differing_token(drafter, target, tokenizer)
    if difference is None:
        return open_drafter(drafter, drafter.config, target.config)
    if drafter.model_type in OPENED_AS:
        raise Mismatch(f"{difference}: use a drafter with the target's vocabulary; {WITHOUT}")
    return open_retokenized(drafter, drafter.config, read_tokenizer(drafter), tokenizer)


def _offered(source: DrafterSource | None, spec: PairSpec, draft_ranks: Ranks | None) -> list[DrafterSource]:
    """Return the drafters among which the policy chooses. Lookup is one of them unless a length is fixed."""
    from mlx_spec.ahead import drafting_ahead
    from mlx_spec.drafters.lookup import lookup_source

    if source is None:
        return []
    offered = [drafting_ahead(source, draft_ranks) if spec.ahead or draft_ranks else source]
    if spec.num_draft_tokens is None and source.checkpoint is not None:
        if source.trees is not None:
            offered.append(replace(source.trees, checkpoint=source.checkpoint))
        offered.append(lookup_source())
    return offered


def _policies(
    target: Checkpoint, offered: list[DrafterSource], quantization: str, spec: PairSpec
) -> AdaptivePolicies | FixedPolicy:
    """Return the maker of policies: adaptive, or with the draft length that the user fixed."""
    from mlx_spec.policy import FixedPolicy, saved_costs
    from mlx_spec.policy.batch import BatchPolicies
    from mlx_spec.policy.ratios import Ratios
    from mlx_spec.types import Reason

    if not offered or spec.num_draft_tokens == 0:
        return FixedPolicy(0, Reason.DISABLED)
    if spec.num_draft_tokens is not None:
        first = offered[0]
        ahead = first.ahead_costs is not None
        return FixedPolicy(spec.num_draft_tokens, names=first.names, ahead=ahead, ratios=Ratios())
    checkpoints = {name: source.checkpoint for source in offered for name in source.names}
    prints = tuple(name if stored is None else stored.fingerprint for name, stored in checkpoints.items())
    key = _key(target, prints, quantization, spec)
    copying = [name for name, stored in checkpoints.items() if stored is None]
    ahead_costs = {source.name: source.ahead_costs for source in offered if source.ahead_costs is not None}
    together = [source.name for source in offered if source.drafts_together]
    names, folder = list(checkpoints), saved_costs.folder()
    return BatchPolicies(names, copying, ahead_costs=ahead_costs, together=together, key=key, folder=folder)


def _key(target: Checkpoint, drafters: tuple[str, ...], quantization: str, spec: PairSpec) -> Key:
    from mlx_spec.device import device_name
    from mlx_spec.policy import Key

    return Key(device_name(), target.fingerprint, drafters, quantization, spec.kv_bits, version("mlx"))


def _quantization(config: Mapping[str, Any]) -> str:
    match config.get("quantization"):
        case {"bits": bits, "group_size": size}:
            return f"{bits}-bit, groups of {size}"
    return str(config.get("dtype") or config.get("torch_dtype") or "as saved")


def _load_target(checkpoint: Checkpoint, exact: Exact, ranks: Ranks | None = None) -> nn.Module:
    """Load the model with mlx-lm. With `ranks`, keep this rank's part. Raises BadCheckpoint."""
    import mlx.core as mx

    from mlx_spec.model.dense import dequantized
    from mlx_spec.model.read import read_model

    config = checkpoint.config
    is_dense = is_dequantized(config)
    model, _ = read_model(checkpoint, lazy=is_dense or ranks is not None)
    if gguf_dtype(config) == "float32":
        why = "a CPU is slow with other types" if is_dense else "dense weights exceed the memory"
        how = "in float32" if is_dense else "quantized, with scales in float32"
        print(f"{config['gguf']}: {how}, because {why}", file=sys.stderr)
    if is_dense:
        model = dequantized(model)
    if exact == "float32":
        model.set_dtype(mx.float32)
    if ranks is not None:
        ranks.shard(model, config)
    return model


def _vision(checkpoint: Checkpoint, tokenizer: Tokenizer, ranks: Ranks | None) -> Vision | NoVision:
    """Return the reader of pictures for a target, or the reason why there is none."""
    from mlx_spec.vision.vision import read_vision

    if ranks is not None:
        return NoVision(f"it is split over {ranks.size} machines; run it on one, or send text")
    try:
        return read_vision(checkpoint, tokenizer)
    except NoVision as reason:
        return reason


def _vocab_size(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return the number of columns of the logits, padding included."""
    return vocab_size(config) or max(tokenizer.vocabulary().values()) + 1
