"""Open published checkpoints of drafters that read features, and record their drafts."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_spec
from mlx_spec.apps.selftest import Effort
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.cli.progress import StageProgress
from mlx_spec.cli.texts import PROMPTS
from mlx_spec.convert.convert import convert
from mlx_spec.convert.families import family_of
from mlx_spec.convert.options import ConversionOptions
from mlx_spec.convert.selftest import SelfTestEffort
from mlx_spec.decode.loop import decode
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Features, Round
from support.checkpoints import read, stored
from support.fitted import MADE, Recorder
from support.lossless import GREEDY, emitted
from support.synthetic import Checkpoint

K = 4


def write_converted(published: Path, target: Path, folder: Path, **conventions: Any) -> Path:
    """Convert the drafter in `published` for `target` into `folder`, with other conventions if given."""
    tensors = stored(published / "model.safetensors")
    config = read(published)
    made = family_of(config, tensors.keys()).convert(tensors, config, read(target))
    written = {**made.config, "mlx_spec": {**made.config["mlx_spec"], **conventions}}
    return Checkpoint(made.tensors, written, {}).write(folder)


def open_converted(published: Path, target: Path, folder: Path, **conventions: Any) -> Any:
    """Convert and open it, in float32."""
    write_converted(published, target, folder, **conventions)
    source: Any = open_drafter(read_checkpoint(folder), read(folder), read(target))
    source.network.set_dtype(mx.float32)
    return source


def quantize(network: nn.Module, bits: int, group: int, kept: str) -> None:
    """Quantize all layers that allow it, but the one named `kept`."""

    def chosen(path: str, layer: nn.Module) -> bool:
        return path != kept and hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group == 0

    nn.quantize(network, group, bits, class_predicate=chosen)


@dataclass(frozen=True)
class Seen:
    """A draft and the logits [K, V] it was drawn from."""

    tokens: list[int]
    logits: mx.array


def drafted(drafter: Drafter, history: Sequence[int], limit: int = K) -> Seen:
    """Return a greedy draft."""
    recorder = Recorder()
    draft = drafter.draft(history, limit, recorder)
    return Seen([int(token) for token in draft.tokens.tolist()], mx.concatenate(recorder.logits))


def rows(features: Features, low: int, high: int) -> Features:
    """Return some of the rows."""
    final = None if features.final_hidden is None else features.final_hidden[low:high]
    return Features(tuple(hidden[low:high] for hidden in features.hidden), final)


def fresh(source: DrafterSource, target: LMTarget, history: Sequence[int], features: Features) -> Drafter:
    """Return a new drafter that sees all rows of `history` at once."""
    drafter = source.make(target.parts)
    drafter.observe(history, rows(features, 0, len(history) - 1))
    return drafter


def in_rounds(
    model: nn.Module, source: DrafterSource, facts: dict[str, Any], chunks: Sequence[int] = ()
) -> Iterator[Seen]:
    """Yield the drafts of the golden rounds, K tokens each, of which some are kept, others not."""
    history, end, kept = facts["history"], facts["prompt"], facts["kept"]
    target = LMTarget(model, source.needs)
    drafter, start = source.make(target.parts), 0
    for chunk in chunks or (end - 1,):
        features = target.prefill(history[start : start + chunk])
        start += chunk
        drafter.observe(history[: start + 1], features)
    yield drafted(drafter, history[:end])
    for count in kept:
        block = [*history[end - 1 : end - 1 + count], *[5] * (K + 1 - count)]
        target.verify(mx.array(block))
        end += count
        drafter.observe(history[:end], target.commit(count))
        yield drafted(drafter, history[:end])


GOLDEN = Path(__file__).parents[1] / "golden"
# Targets and drafters of each family that were trained for each other. A Qwen holds its own.
TRAINED: dict[str, tuple[Path, Path | str]] = {
    **{
        name: (GOLDEN / "12b-trained" / "target", GOLDEN / "trained" / name)
        for name in MADE
        if (GOLDEN / "trained" / name).is_dir()
    },
    "eagle3": (GOLDEN / "trained" / "llama", GOLDEN / "trained" / "eagle3"),
    "qwen_mtp": (GOLDEN / "trained" / "qwen", "auto"),
}
QUESTIONS = ("What is the capital of", "The cat sat on", "def fib(n):")
OTHER = ("What is the capital of Spain?", "Once upon a time")  # what follows the first questions


# Short texts, and few and short continuations: enough to tell a trained drafter from a broken one.
SHORT = SelfTestEffort(16, PROMPTS[1:3], (), 10, Effort(2.0, 1, 4))
# The same, without time to compare texts with drafts to plain ones.
UNCOMPARED = replace(SHORT, comparison=Effort(0.0, 1, 4))


def converted(
    target: Path,
    drafter: Path | str,
    out: Path,
    shown: io.StringIO | None = None,
    effort: SelfTestEffort = SHORT,
    **changes: Any,
) -> dict[str, Any]:
    """Convert a pair, unquantized, in float32 and untested unless changed. Return its manifest."""
    asked = ConversionOptions(str(target), out, str(drafter), "none", None, "none", "float32", True)
    return convert(replace(asked, **changes), StageProgress(shown or io.StringIO()), effort)


def prove(target: Path, drafter: Path | str, out: Path) -> dict[str, Any]:
    """Convert a trained pair in float32 and measure it on few short texts. Return its manifest.

    `generate_with` compares more texts than the self-test does, so the self-test has no time for them.
    """
    effort = replace(UNCOMPARED, prompts=PROMPTS[1:4:2], generated=8)
    return converted(target, drafter, out, effort=effort, skip_test=False)


@cache
def original(target: Path) -> Pair:
    """Return a pair that decodes a published target plainly, in float32."""
    pair = mlx_spec.load(target, "none", exact="off")  # in float32 all rows are of one class
    pair._model.set_dtype(mx.float32)
    return pair


@cache
def plain_text(target: Path, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    """Return what a published target says, once for all its drafters."""
    return emitted(list(original(target).generate(prompt, sampling=sampling, max_tokens=24)))


def generate_with(
    pair: Pair, target: Path, conversations: Sequence[int], sampling: Sampling = GREEDY
) -> list[Round]:
    """Return rounds of a pair, with prefixes kept and cut; check them against its target's plain decoding."""
    done: list[Round] = []
    for first, second in ((QUESTIONS[i], OTHER[i]) for i in conversations):
        cached, prompt = pair.open(), [2, *pair.tokenizer.encode(first)]
        for text in (first, second):
            cached.rewind_to_prefix(text_prompt(prompt))
            found = list(decode(pair.prepare(cached, prompt, sampling=sampling, max_tokens=24)))
            assert emitted(found) == plain_text(target, tuple(prompt), sampling), text
            cached.append(emitted(found))
            done += found
            prompt = [*prompt, *emitted(found)[:7], *pair.tokenizer.encode(second)]
    return done


def check_acceptance(done: list[Round], limit: int = 3) -> None:
    """Check that none, some and all draft tokens were accepted, more than one on average."""
    drafted = [round for round in done if round.drafted == limit]
    assert {0, limit} <= {round.accepted for round in drafted}
    assert {round.accepted for round in drafted} & set(range(1, limit))
    assert sum(round.accepted for round in drafted) > len(drafted)
