"""Train a drafter for a target on the target's own answers: the stages of a run, in order.

Intermediate files are in OUT.training, so that the same command goes on where the last one ended. The result
is a Gemma 4 assistant with two layers, whose head is a part of the target's head.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec import __version__
from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import (
    check_new,
    check_space,
    human_bytes,
    locked,
    new_folder,
    read_object,
    sha256,
    typed_path,
    write_atomically,
    write_json,
)
from mlx_spec.checkpoint.writer import write_safetensors
from mlx_spec.cli.progress import StageProgress
from mlx_spec.device import memory_for_models
from mlx_spec.drafters.checkpoint import KEY
from mlx_spec.drafters.gemma4 import (
    AssistantConfig,
    AssistantNetwork,
    assistant_source,
    check_fit,
    load_assistant,
)
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, SpecError
from mlx_spec.hub import find
from mlx_spec.hub.catalog import NONE, PairSpec
from mlx_spec.hub.names import locate
from mlx_spec.load import load
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import FULL

from ..options import TrainingOptions
from .answers import AnswerPlan, recording
from .fit import DEPTH, Fit, flat, frequent_tokens, start_linear, tokens_a_round
from .prompts import TrainingPrompt, encode, own_prompts

WORK = ".training"  # after the name of OUT: the folder of an unfinished run
TEST_TOKENS = 96  # of each answer in the test with the real engine


def train(options: TrainingOptions, progress: StageProgress) -> dict[str, Any]:
    """Train a drafter and write it to `options.out`. Return its report.

    Raises SpecError, in one line, for a problem of the input, and OSError for a problem of the disk.
    """
    out = typed_path(options.out).absolute()
    check_new(out)
    work = out.with_name(out.name + WORK)
    prompts = own_prompts(options.prompts or ())
    pair = load(options.target, NONE)
    plan = AnswerPlan(
        work / "answers", options.answers, options.answer_tokens, options.seed, _fitting(prompts, pair)
    )
    network, config = _network(pair, options)
    work.mkdir(exist_ok=True)
    with locked(work):
        _check_settings(work / "run.json", _settings(options))
        check_space(out.name, _announce(pair, plan, options), work, "give another OUT")
        _record(pair, plan, options, progress)
        files = plan.answers(held_out=False), plan.answers(held_out=True)
        ids = _begin(network, pair, files[0], options)
        network.freeze(recurse=False, keys=["draft_ids"])
        fit = Fit(
            network,
            pair.parts,
            ids,
            files,
            work,
            window=config["text_config"]["sliding_window"],
            epochs=options.epochs,
            fine_tunes=options.source is not None,
            seed=options.seed,
        )
        for done in fit.run():
            last = done.curve[-1]
            loss = f"loss {done.losses[-1]:.2f}, " if done.losses else ""
            progress.show("training", done.step, fit.steps, loss + tokens_a_round(*last[2:]))
        fit.take_best()
        tests = _test(pair, plan, network, config, progress)
        report = _report(options, plan, fit, tests)
        if options.source is not None and fit.best_step == 0:
            raise InvalidValue(
                f"{options.source} was not improved on held-out answers and stays as it is: remove {work} "
                "and give more --answers"
            )
        with new_folder(out) as folder:
            _write(folder, network, config, report)
        shutil.rmtree(work)
    return report


# --- before the run


def _settings(options: TrainingOptions) -> dict[str, Any]:
    """Return the settings that must be the same when an interrupted run goes on."""
    files = {str(file): sha256(typed_path(file)) for file in options.prompts or ()}
    settings = asdict(options) | {"prompts": files, "version": __version__}
    return {key: value for key, value in settings.items() if key not in ("out", "parallel")}


def _check_settings(file: Path, wanted: Mapping[str, Any]) -> None:
    """Write the settings of a new run. Raises InvalidValue if an unfinished run has other settings."""
    if not file.exists():
        write_atomically(file, json.dumps(wanted, indent=2) + "\n")
        return
    stored = read_object(file)
    for key in wanted:
        if stored.get(key) != wanted[key]:
            raise InvalidValue(
                f"{file.parent} holds a run with {key} {stored.get(key)}, this one has {wanted[key]}: give "
                "the same options to go on, or remove that folder, or give another OUT"
            )


def _fitting(prompts: Sequence[TrainingPrompt], pair: Pair) -> tuple[TrainingPrompt, ...]:
    """Return the prompts that fit the target's context. Raises InvalidValue if only one fits."""
    limit = pair.info.context_length
    fitting = tuple(each for each in prompts if limit is None or len(encode(pair.tokenizer, each)) < limit)
    if len(fitting) < len(prompts):
        print(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts do not fit the context of {limit} "
            "tokens and are left out",
            file=sys.stderr,
        )
    if prompts and len(fitting) < 2:
        raise InvalidValue("one prompt is held out to test with, so at least two are needed: give more")
    return fitting


def _answer_bytes(target: LMTarget, options: TrainingOptions) -> int:
    """Return the bytes of one running answer; `target` must have caches already."""
    # K/V of the answer and of a prompt half as long, twice, because a batch is copied when it grows.
    return options.answer_tokens * 3 * target.row_bytes


def _parallel(pair: Pair, options: TrainingOptions) -> int:
    """Return how many answers run at a time: the user's number, or as many as fit half of the memory."""
    if options.parallel is not None:
        return options.parallel
    target = pair.open().target
    target.prefill([0, 0])
    # Half of the free memory stays for other programs. More than 256 rows do not make a pass more efficient.
    free = (memory_for_models() - pair.info.target_bytes) // 2
    return min(max(free // _answer_bytes(target, options), 1), 256)


def _announce(pair: Pair, plan: AnswerPlan, options: TrainingOptions) -> int:
    """Print how much memory and disk a run takes. Return the bytes that are not on the disk yet."""
    parts = pair.open()
    parts.target.prefill([0, 0])
    rows = options.answers * options.answer_tokens
    width = parts.target.parts.embed(mx.array([0])).shape[-1]
    shared = sum(each.keys.nbytes + each.values.nbytes for each in parts.target.shared_kv().values()) // 2
    disk = rows * (2 * width + shared)
    memory = pair.info.target_bytes + _parallel(pair, options) * _answer_bytes(parts.target, options)
    print(
        f"{options.answers} answers of up to {options.answer_tokens} tokens: at most {human_bytes(memory)} "
        f"of memory and {human_bytes(disk)} on the disk until it is done",
        file=sys.stderr,
    )
    return max(disk - sum(file.stat().st_size for file in plan.folder.glob("*")), 0)


# --- stages


def _record(pair: Pair, plan: AnswerPlan, options: TrainingOptions, progress: StageProgress) -> None:
    done = sum(file.exists() for held in (True, False) for file in plan.answers(held_out=held))
    tokens = 0
    for count in plan.record(pair, _parallel(pair, options)):
        done, tokens = done + 1, tokens + count
        progress.show("answers", min(done, options.answers), options.answers, f"{tokens} tokens")
    for held_out in (True, False):
        if not plan.answers(held_out=held_out):
            raise InvalidValue(
                f"{options.answers} answers are too few to train and to test: give more --answers, or "
                "prompts that the target answers at greater length"
            )


def _network(pair: Pair, options: TrainingOptions) -> tuple[AssistantNetwork, dict[str, Any]]:
    """Return the network to train, and its config.json. Raises Mismatch for a target that cannot have one."""
    target = find(locate(PairSpec(options.target, NONE)).target).config
    probe = recording(pair).open().target
    probe.prefill([0, 0])
    if FULL not in probe.shared_kv():
        raise Mismatch(
            f"{options.target} has no full attention, whose K/V a drafter reads: it cannot be trained for"
        )
    if options.source is not None:
        return _published(options.source, target)
    config = _new_config(target, probe, pair.info.vocab_size, options)
    assistant = AssistantConfig.from_dict(config)
    try:
        check_fit(assistant, target)
    except SpecError as error:  # such as for latent attention
        raise Mismatch(
            f"the K/V of {options.target} are not as its config.json describes them: it cannot be trained for"
        ) from error
    mx.random.seed(options.seed)
    return AssistantNetwork(assistant), config


def _begin(
    network: AssistantNetwork, pair: Pair, files: Sequence[Path], options: TrainingOptions
) -> mx.array:
    """Set the first weights of a new network. Return the tokens that the drafter is trained on."""
    size = pair.info.vocab_size
    ids = frequent_tokens(files, min(options.vocabulary, size), size)
    if options.source is None:
        network.draft_ids = ids
        start_linear(network, pair.parts.embed, files[:100])  # 100 answers are enough for the first weights
    elif "draft_ids" in network:
        ids = network.draft_ids
    else:  # the drafter has a table with a row for every token, which is not trained
        network.model.embed_tokens.freeze()
    return ids


def _published(source: str, target: Mapping[str, Any]) -> tuple[AssistantNetwork, dict[str, Any]]:
    """Load an assistant to improve. Raises BadCheckpoint for another family, or a quantized assistant."""
    checkpoint = find(source)
    config = checkpoint.config
    if not checkpoint.model_type.endswith("assistant"):
        raise BadCheckpoint(
            f"{source} is a {checkpoint.model_type}, only a Gemma 4 assistant or a drafter that `mlx-spec "
            "train` made can be improved: leave out --from to train a new one"
        )
    if "quantization" in config:
        raise BadCheckpoint(
            f"{source} is quantized and cannot be trained: convert it with --drafter-bits none"
        )
    assistant = AssistantConfig.from_dict(config)
    check_fit(assistant, target)
    network = load_assistant(checkpoint, assistant)
    network.set_dtype(mx.float32)
    return network, config


def _new_config(
    target: Mapping[str, Any], probe: LMTarget, vocab_size: int, options: TrainingOptions
) -> dict[str, Any]:
    """Return the config.json of a new drafter. `probe` is the target after it has read a prompt."""
    text, width = text_config(target), probe.parts.embed(mx.array([0])).shape[-1]
    _, heads, _, head_dim = probe.shared_kv()[FULL].keys.shape
    queries = int(text.get("num_attention_heads") or heads)
    hidden = options.width or min(width, 512)  # 512 makes 5 M weights, 10 MB
    rope = text.get("rope_parameters") or {}
    rope = rope.get(FULL) or {"rope_type": "default", **(text.get("rope_scaling") or {}), **rope}
    rope.setdefault("rope_theta", text.get("rope_theta") or 10000.0)
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": width,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        **({} if Path(options.target).exists() else {"base_model_name_or_path": options.target}),
        "draft_vocab_size": min(options.vocabulary, vocab_size),
        KEY: {"hidden": "post_norm", "chain": "post_norm", "rope": "target", "shift": 1, "capture": []},
        "text_config": {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_attention_heads": queries,
            "num_key_value_heads": heads,
            "head_dim": head_dim,
            "layer_types": [FULL]
            * 2,  # they take a few percent of a small target's time; a third gains little
            "sliding_window": int(text.get("sliding_window") or 0),
            "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-6),
            "rope_parameters": {FULL: rope},
        },
    }


def _test(
    pair: Pair,
    plan: AnswerPlan,
    network: AssistantNetwork,
    config: Mapping[str, Any],
    progress: StageProgress,
) -> dict[str, dict[str, float]]:
    """Decode held-out prompts with drafts. Return the mean tokens a round by temperature and kind of text."""
    source = assistant_source(network, config["text_config"]["sliding_window"])
    drafting = pair.with_drafters([source], FixedPolicy(DEPTH))
    prompts, limit = of_all_kinds(plan.tests(pair), 48), min(TEST_TOKENS, plan.max_tokens)
    results = {}
    # With a seed, drafter and target share their noise; without one, block verification accepts drafts.
    for name, temperature, seeded in (("0", 0.0, False), ("0.8", 0.8, False), ("0.8 with a seed", 0.8, True)):
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        batch, kinds, done = drafting.batch(len(prompts)), dict[int, str](), 0
        for i, (kind, tokens) in enumerate(prompts):
            sampling = Sampling(temperature=temperature, seed=i if seeded else None)
            sequence = drafting.prepare(drafting.open(), tokens, sampling=sampling, max_tokens=limit)
            kinds[batch.add(sequence)] = kind
        while done < len(prompts):
            for id, result in batch.step():
                if isinstance(result, Exception):
                    raise result
                if result.kind == "draft":
                    for key in (kinds[id], "all"):
                        counts[key][0] += len(result.tokens)
                        counts[key][1] += 1
                done += result.finish_reason is not None
            progress.show(f"test at temperature {name}", done, len(prompts))
        if counts:  # else no answer was long enough for a draft
            lengths = {kind: round(n / rounds, 3) for kind, (n, rounds) in counts.items()}
            results[name] = lengths
    return results


def of_all_kinds(prompts: Iterable[tuple[str, list[int]]], least: int) -> list[tuple[str, list[int]]]:
    """Return at least `least` prompts, or all if there are fewer, with an equal share of each kind."""
    by_kind = sorted(
        prompts, key=itemgetter(0)
    )  # unsorted, every second prompt would be of half of the kinds
    return by_kind[:: max(len(by_kind) // least, 1)]


# --- the result


def _report(
    options: TrainingOptions, plan: AnswerPlan, fit: Fit, tests: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    progress = fit.progress
    return {
        **_settings(options),
        "training_answers": len(plan.answers(held_out=False)),
        "held_out_answers": len(plan.answers(held_out=True)),
        "rows": fit.rows,
        "steps": fit.steps,
        "training_seconds": round(progress.seconds),
        "draft_tokens": DEPTH,
        "curve": [[step, *(round(value, 3) for value in values)] for step, *values in progress.curve],
        "tokens_a_round": tests,
    }


def _write(
    folder: Path, network: AssistantNetwork, config: Mapping[str, Any], report: Mapping[str, Any]
) -> None:
    network.sort_table(by_token=True)
    tensors = {
        name: array.astype(mx.bfloat16) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in flat(network.parameters()).items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", report)
