"""Load a pair: find both checkpoints, check them and that they fit, load them.

`import mlx_spec` imports this file. It must be quick and work without MLX, so functions import the modules
that need MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mlx_spec.checkpoint.config import TOKENIZERS, Checkpoint, critical_lengths, vocab_size
from mlx_spec.checkpoint.drafter_families import OPENED_AS, drafter_family, refuse_unsupported
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.memory import ContextMemory, context_memory
from mlx_spec.checkpoint.weights import gguf_dtype, is_dequantized, sizes_of
from mlx_spec.device import bound_freed_buffers, keep_attention_order, resident, use_device
from mlx_spec.device.blas import use_blas
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, NotFound, NoVision
from mlx_spec.hub import find
from mlx_spec.hub.catalog import LOOKUP, NONE, Exact, PairSpec
from mlx_spec.hub.names import WITHOUT, Located, locate

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mlx_spec.distributed.ranks import Ranks
    from mlx_spec.drafters import DrafterSource
    from mlx_spec.pair import Pair, PairInfo
    from mlx_spec.policy import AdaptivePolicies, FixedPolicy, Key
    from mlx_spec.tokenizer import Tokenizer
    from mlx_spec.vision.vision import Vision


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
    located = locate(spec)
    checkpoint = _open_target(located.target, ranks)
    import mlx.core as mx

    from mlx_spec.model.caches import Caches
    from mlx_spec.model.probe import arrays_of
    from mlx_spec.pair import Pair

    bound_freed_buffers(_weights(checkpoint))
    model = _unpacked(checkpoint, exact) if ranks is None else None
    opened = _open(located, checkpoint, ranks)
    if draft_ranks is not None:
        _check_same_drafter(draft_ranks, opened.located, opened.drafter)
    offered = _offered(opened.drafter, spec, draft_ranks)
    policies = _policies(opened, offered, spec)
    model = _load_target(checkpoint, exact, ranks) if model is None else model
    info = opened.info
    if exact == "float32":
        info = replace(info, target_bytes=sum(array.nbytes for array in arrays_of(model)))
        for network in (offer.network for offer in offered if offer.network is not None):
            network.set_dtype(mx.float32)
    memory = opened.memory(info, kv_bits)
    pair = Pair(info, opened.tokenizer, model, offered, policies, kv_bits, ranks, opened.vision, memory)
    _prepare(pair, opened, spec)
    if kv_bits is not None and (why := Caches.of_model(model, kv_bits).quantization_obstacle) is not None:
        print(f"{_short(pair)}: kv_bits {kv_bits} changes nothing: {why}", file=sys.stderr)
    return pair


# --- both checkpoints


@dataclass(frozen=True)
class Opened:
    """A pair whose checkpoints are open: all of it but the weights of the target."""

    located: Located
    target: Checkpoint
    tokenizer: Tokenizer
    drafter: DrafterSource | None  # None if nothing drafts
    vision: Vision | NoVision
    ranks: Ranks | None  # among which the target is split

    @property
    def info(self) -> PairInfo:
        from mlx_spec.pair import PairInfo

        drafter = self.drafter and self.drafter.checkpoint
        return PairInfo(
            self.located.target_name,
            None if self.located.drafter_name == NONE else self.located.drafter_name,
            _vocab_size(self.target.config, self.tokenizer),
            self.target.context,
            target_bytes=_weights(self.target) // (1 if self.ranks is None else self.ranks.size),
            drafter_bytes=_weights(drafter) if drafter else 0,
            vision_bytes=0 if isinstance(self.vision, NoVision) else self.vision.nbytes,
        )

    def memory(self, info: PairInfo, kv_bits: int | None) -> ContextMemory:
        """Return what conversations of the pair take, beside its weights."""
        drafter = self.drafter and self.drafter.checkpoint
        checkpoints = [self.target, drafter] if drafter else [self.target]
        memory = context_memory(checkpoints, kv_bits, 1 if self.ranks is None else self.ranks.size)
        return replace(memory, weights=info.target_bytes + info.drafter_bytes + info.vision_bytes)

    def quantization(self, exact: Exact) -> str:
        """Return in words how the target computes: costs are measured for each way."""
        words = _quantization(self.target.config) + (", in float32" if exact == "float32" else "")
        return words + ("" if self.ranks is None else f", over {self.ranks.size} ranks")


def _open(located: Located, target: Checkpoint, ranks: Ranks | None) -> Opened:
    from mlx_spec.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(target)
    if unread := tokenizer.generation.without_effect:
        print(f"generation_config.json: {', '.join(unread)}: without effect here", file=sys.stderr)
    drafter = _open_drafter(located, target, tokenizer)
    if ranks is not None and drafter is not None and drafter.needs.shared_kv:
        located = _without_shared_kv(located)
        drafter = _open_drafter(located, target, tokenizer)
    return Opened(located, target, tokenizer, drafter, _vision(target, tokenizer, ranks), ranks)


def _weights(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weights in memory."""
    return int(sizes_of(checkpoint, 0).held)


def _without_shared_kv(located: Located) -> Located:
    """Return lookup in place of a drafter that reads the target's K/V. Raises Mismatch if it was named."""
    why = f"the drafter {located.drafter_name} reads the target's K/V, of which every rank has a part"
    if located.is_named:
        raise Mismatch(f'{why}: use another one, or the drafter "{LOOKUP}"')
    print(f"{why}: {LOOKUP} drafts in its place", file=sys.stderr)
    return replace(located, drafter_name=LOOKUP, drafter=LOOKUP)


# --- the pair


def _prepare(pair: Pair, opened: Opened, spec: PairSpec) -> None:
    """Check and measure a pair. Targets without exact rollback are refused now, not in an answer."""
    import mlx.core as mx

    from mlx_spec.policy import saved_costs

    target, quantization = opened.target, opened.quantization(spec.exact)
    try:
        with resident(pair.info.target_bytes):
            lengths = critical_lengths(target.config) if opened.ranks is None else []
            activations = _check(pair, target, lengths, spec.kv_bits)
            if activations != mx.float32 and spec.exact == "off":
                pair.use_rows(pair.rows.under(spec.exact))
            elif activations != mx.float32:
                key = _key(target, (), f"{quantization}, activations in {activations}", spec)
                key = replace(key, code=saved_costs.computing_code())
                pair.use_rows(saved_costs.row_class(key, _short(pair), pair.measured_rows).under(spec.exact))
            _measure(pair)
    except LOADING_ERRORS as error:
        architecture = target.model_type + ("" if spec.kv_bits is None else f" with kv_bits {spec.kv_bits}")
        raise BadCheckpoint(
            f"{target.folder} fails in its first pass as {architecture}: {one_line(error)}"
        ) from error


def _check(pair: Pair, target: Checkpoint, lengths: list[int], kv_bits: int | None) -> mx.Dtype:
    """Check a pair, also where its texts reach these lengths, unless that was done before on this machine.

    Returns the type of the activations.
    """
    from mlx_spec.device import device_name
    from mlx_spec.policy import saved_costs

    code = version("mlx"), version("mlx-spec"), saved_costs.computing_code()
    key = [target.fingerprint, device_name(), *code, kv_bits, lengths, pair.drafter_names]
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
    checkpoint = _open_target(locate(PairSpec(target, NONE)).target, ranks)
    bound_freed_buffers(_weights(checkpoint) // ranks.size)
    _load_target(checkpoint, "auto", ranks)
    return ranks.follow()


def draft_for(spec: PairSpec, ranks: Ranks) -> int:
    """Load a drafter on rank 1 and draft ahead for rank 0, which has the target. Return its exit status."""
    from mlx_spec.ahead import draft_for_rank_0
    from mlx_spec.tokenizer import read_tokenizer

    use_device()
    located = locate(spec)
    target = find(located.target)
    tokenizer = read_tokenizer(target)
    source = _check_same_drafter(ranks, located, _open_drafter(located, target, tokenizer))
    return draft_for_rank_0(ranks, source, _vocab_size(target.config, tokenizer))


def _check_same_drafter(ranks: Ranks, located: Located, source: DrafterSource | None) -> DrafterSource:
    """Return the drafter. Raises InvalidValue without weights; ends all ranks if rank 1 has another one."""
    if source is None or source.checkpoint is None:
        raise InvalidValue(
            f"{located.target_name} has no drafter with weights that another rank could run: "
            "give a draft model"
        )
    ranks.compare(_identity(source.checkpoint))
    return source


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


def _open_drafter(located: Located, target: Checkpoint, tokenizer: Tokenizer) -> DrafterSource | None:
    """Return the drafter of a pair; None if there is to be none."""
    import mlx.core as mx

    from mlx_spec.drafters.lookup import lookup_source

    if located.drafter in (NONE, LOOKUP):
        return lookup_source() if located.drafter == LOOKUP else None
    try:
        checkpoint = find(located.drafter)
    except NotFound as error:
        raise NotFound(f"drafter: {error}; {WITHOUT}") from error
    _refuse_unconverted(located, checkpoint)
    source = _source(checkpoint, target, tokenizer)
    if source.network is not None and gguf_dtype(target.config) == "float32":
        source.network.set_dtype(mx.float32)
    return replace(source, checkpoint=checkpoint)


def _refuse_unconverted(located: Located, checkpoint: Checkpoint) -> None:
    """Raise BadCheckpoint for a published drafter that has to be converted first."""
    from mlx_spec.drafters.checkpoint import KEY

    checkpoint.check_weights()
    config, names_of_tensors = checkpoint.config, checkpoint.headers.tensors
    refuse_unsupported(config, names_of_tensors)
    family = drafter_family(config, names_of_tensors)
    if family is not None and not family.is_ours and KEY not in config:
        raise BadCheckpoint(
            f"{located.drafter_name} is a drafter of the kind {family.kind} as published: run "
            f"`mlx-spec convert {located.target_name} --drafter {located.drafter_name} -o OUT` first, then "
            "give OUT as the target"
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


def _policies(opened: Opened, offered: list[DrafterSource], spec: PairSpec) -> AdaptivePolicies | FixedPolicy:
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
    key = _key(opened.target, prints, opened.quantization(spec.exact), spec)
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


def _unpacked(checkpoint: Checkpoint, exact: Exact) -> nn.Module | None:
    """Return a model that is dequantized: a thread of MLX unpacks it. None for others, which load later."""
    import mlx.core as mx

    if not is_dequantized(checkpoint.config):
        return None
    model = _load_target(checkpoint, exact)
    mx.async_eval(model.parameters())
    return model


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
