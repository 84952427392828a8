"""Prompts, checkpoints and the decoders of mlx_spec that benchmarks compare.

A decoder calls `read` when the prompt has been read without its last token, if it can tell. The pass of the
last token is the first one that decodes.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import dequantize_model, save

from mlx_spec import demo, hub, load
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.decode.loop import generate
from mlx_spec.decode.running import prefill
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.hub.catalog import SMOLLM2
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer.chat_template import special_tokens

Step = tuple[list[int], int]  # tokens, and the number of draft tokens that were verified
Read = Callable[[], None]  # called when the prompt has been read
Decoder = Callable[["Prompt", Read], Iterator[Step]]  # yields steps
Arms = dict[str, Callable[[], Decoder]]  # name -> function that loads a decoder
COMPRESSION = ("quantization", "quantization_config", "gguf")  # keys of config.json
PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Prompt:
    kind: str
    tokens: list[int]
    count: int  # tokens to generate
    banned: frozenset[int] = frozenset()  # tokens that must not be generated

    @property
    def bias(self) -> dict[int, float] | None:
        """Return the logit bias that bans these tokens."""
        return dict.fromkeys(sorted(self.banned), float("-inf")) or None


@dataclass
class Folders:
    """The checkpoints of a pair, the same bytes for every arm."""

    target: Path
    drafter: Path | None
    draft_model: Path | None = None  # a small model with the target's vocabulary

    @classmethod
    def find(cls, target: str, drafter: str | None, draft_model: str | None = None) -> Folders:
        small = Path(draft_model).expanduser() if draft_model else None
        if target == "demo":
            return cls(demo.TARGET, demo.DRAFTER, small)
        if target == SMOLLM2:
            return cls(hub.find(target).folder, demo.SMOLLM2_DRAFTER, small)
        return cls(Path(target).expanduser(), Path(drafter).expanduser() if drafter else None, small)

    def cast(self, dtype: str) -> Folders:
        """Return copies whose floating-point weights have another type."""
        wanted = getattr(mx, dtype)

        def change(array: mx.array) -> mx.array:
            return array.astype(wanted) if mx.issubdtype(array.dtype, mx.floating) else array

        result = Folders(self.target, self.drafter, self.draft_model)
        result.target = result.copy(self.target, change)
        result.drafter = result.copy(self.drafter, change) if self.drafter else None
        result.draft_model = result.copy(self.draft_model, change) if self.draft_model else None
        return result

    def dequantized(self) -> Folders:
        """Return the target with dense float32 weights, which a CPU multiplies fastest."""
        model, tokenizer, config = cast(Any, mlx_lm.load(str(self.target), return_config=True))
        model.set_dtype(mx.float32)
        config = {key: value for key, value in config.items() if key not in COMPRESSION}
        new = temporary_folder()
        save(new, self.target, dequantize_model(model), tokenizer, config)
        return replace(self, target=new)

    def shuffled(self, folder: Path, seed: int) -> Path:
        """Return a copy whose weights are shuffled within each tensor: as large, and useless."""
        keys = iter(mx.random.split(mx.random.key(seed), 10_000))

        def change(array: mx.array) -> mx.array:
            weights = mx.issubdtype(array.dtype, mx.floating) or array.dtype == mx.uint32
            if array.ndim < 2 or not weights:
                return array
            return mx.random.permutation(array.flatten(), key=next(keys)).reshape(array.shape)

        return self.copy(folder, change)

    def copy(self, folder: Path, change: Callable[[mx.array], mx.array] | None, **config: Any) -> Path:
        """Copy a checkpoint with keys of config.json set, or left out if None; link unchanged weights."""
        new = temporary_folder()
        for file in folder.iterdir():
            if file.suffix != ".safetensors" or change is None:
                (new / file.name).symlink_to(file.resolve())
                continue
            tensors = {name: change(array) for name, array in read(file).items()}
            mx.save_safetensors(str(new / file.name), tensors, {"format": "mlx"})
        old = json.loads((folder / "config.json").read_text())
        (new / "config.json").unlink()
        changed = {k: v for k, v in {**old, **config}.items() if v is not None or k not in config}
        (new / "config.json").write_text(json.dumps(changed))
        return new


def temporary_folder() -> Path:
    """Return a folder that is removed when the program ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder


def read(file: Path) -> dict[str, mx.array]:
    """Return the tensors of a safetensors file."""
    return cast(dict[str, mx.array], mx.load(str(file)))


def prompts(settings: argparse.Namespace, pair: Pair) -> list[list[int]]:
    """Return the prompts of a text file, one a line, as tokens, with the chat template if there is one."""
    file = settings.prompts or PROMPTS / ("demo.txt" if settings.target == "demo" else "chat.txt")
    lines = file.read_text().splitlines()[: 1 if settings.quick else None]
    if not pair.tokenizer.chats:
        return [pair.tokenizer.encode(line) for line in lines]
    return [pair.tokenizer.prompt([{"role": "user", "content": line}]) for line in lines]


def ours(folders: Folders, seed: int) -> tuple[Pair, Arms]:
    """Return the pair, and arms of mlx_spec with every draft length and drafter."""

    @cache
    def open_pair(drafter: Path | str) -> Pair:
        return load(folders.target, drafter)

    def pinned(drafter: Path | str, k: int) -> Decoder:
        return fixed(open_pair(drafter), k)

    def free(drafter: Path | str) -> Decoder:
        return conversation(open_pair(drafter))

    own, small = folders.drafter or "none", folders.draft_model
    arms: Arms = {
        "no drafter": lambda: cold(open_pair("none")),
        "plain": partial(pinned, own, 0),
        "plain, again": partial(pinned, own, 0),
        "lookup": partial(free, "lookup"),
    }
    if folders.drafter is not None:
        useless = cache(partial(folders.shuffled, folders.drafter, seed))
        arms |= {f"K={k}": partial(pinned, own, k) for k in range(1, 9)}
        arms["adaptive"] = partial(free, own)
        arms["adaptive, cold"] = lambda: cold(open_pair(own))
        arms["random drafter, adaptive"] = lambda: free(useless())
        arms["random drafter, K=4"] = lambda: pinned(useless(), 4)
    if small is not None:
        arms |= {f"draft model, K={k}": partial(pinned, small, k) for k in range(1, 9)}
        arms["draft model, adaptive"] = partial(free, small)
    return open_pair(own), arms


def fixed(pair: Pair, k: int, ahead: bool = False) -> Decoder:
    """Draft k tokens in every round with the pair's own drafter, and ahead of each draft if wanted."""

    def run(prompt: Prompt, read: Read) -> Iterator[Step]:
        opened = pair.open()
        names = pair.fixed_names
        policy = FixedPolicy(k, names=names, ahead=ahead)
        decoding = CachedSequence(opened.target, opened.drafters[: len(names)], policy)
        return rounds(pair, decoding, prompt, read)

    return run


def cold(pair: Pair) -> Decoder:
    """Decode with the policy of a new process: costs are known, earlier answers are not."""

    def run(prompt: Prompt, read: Read) -> Iterator[Step]:
        decoding, known = pair.open(), pair.policies
        if isinstance(known, AdaptivePolicies):
            copying = [name for i, name in enumerate(known.names) if i in known.copying]
            new = type(known)(known.names, copying, key=known.key, folder=known.folder)
            decoding.policy = new.policy()
        return rounds(pair, decoding, prompt, read)

    return run


def conversation(pair: Pair, sampling: Sampling | None = None) -> Decoder:
    """Decode with one policy for all answers, as in a conversation."""
    decoding = pair.open()

    def run(prompt: Prompt, read: Read) -> Iterator[Step]:
        decoding.target.rewind(0)
        return rounds(pair, decoding, prompt, read, sampling)

    return run


def rounds(
    pair: Pair, decoding: CachedSequence, prompt: Prompt, read: Read, sampling: Sampling | None = None
) -> Iterator[Step]:
    """Decode a fixed number of tokens, past end-of-text tokens; greedily if no sampling is given."""
    target, drafters, policy = decoding.target, decoding.drafters, decoding.policy
    wanted = replace(sampling or Sampling(), logit_bias=prompt.bias)
    sampler = wanted.sampler(len(prompt.tokens), pair.info.vocab_size)
    for _ in prefill(target, drafters, text_prompt(prompt.tokens)):
        pass
    read()
    for done in generate(target, drafters, policy, sampler, prompt.tokens, max_tokens=prompt.count):
        yield done.tokens, done.drafted


def size(folders: Folders) -> dict[str, int]:
    """Return the number of parameters of target and drafters."""
    found = {"target": folders.target, "drafter": folders.drafter, "draft model": folders.draft_model}
    return {
        name: sum(array.size for file in folder.glob("*.safetensors") for array in read(file).values())
        for name, folder in found.items()
        if folder is not None
    }


def read_prompts(settings: argparse.Namespace, pair: Pair, target: Path) -> list[Prompt]:
    """Return the prompts that fit the context, each with the number of tokens to generate.

    A folder of prompts has a file for each kind. Each line is JSON: a message, a conversation as a list of
    messages that the user begins and ends, or {"text": ...}, which is continued. An answer has as many tokens
    as the plain greedy one, at most `--tokens`; a text that is continued gets `--tokens`.
    """
    folder = settings.prompts or PROMPTS / ("demo" if settings.target == "demo" else "general")
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    wanted = settings.kinds or [file.stem for file in files]
    begin = special_tokens(read_checkpoint(target)).get("bos_token", "")
    found = []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines() if file.stem in wanted else []
        for line in lines[: settings.per_kind]:
            prompt = _prompt(file.stem, *_tokens(json.loads(line), pair, begin), pair, settings)
            found += [prompt] if prompt else []
    return found


def _prompt(
    kind: str, tokens: list[int], ends: bool, pair: Pair, settings: argparse.Namespace
) -> Prompt | None:
    length = pair.info.context_length
    most = min(settings.tokens, length - len(tokens)) if length else settings.tokens
    if most < min(settings.least, settings.tokens):
        print(f"a prompt of kind {kind} has {len(tokens)} tokens, too many for this target: left out")
        return None
    if not ends:
        return Prompt(kind, tokens, most, pair.tokenizer.eos)
    steps = fixed(pair, 0)(Prompt(kind, tokens, most), lambda: None)
    answer = [token for step, _ in steps for token in step]
    stops = [i + 1 for i, token in enumerate(answer) if token in pair.tokenizer.eos]
    return Prompt(kind, tokens, min(most, max(stops[0] if stops else most, settings.least)))


def _tokens(written: object, pair: Pair, begin: str) -> tuple[list[int], bool]:
    """Return the tokens of a prompt, and True if the answer has an end."""
    match written:
        case {"text": str(text)}:
            return pair.tokenizer.encode(begin + text), False
        case str():
            turns = [written]
        case list():
            turns = [str(turn) for turn in written]
        case _:
            sys.exit(f"a prompt is a message, a list of messages or a text, not {written!r}")
    if not pair.tokenizer.chats:
        return pair.tokenizer.encode(begin + "\n\n".join(turns)), False
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return pair.tokenizer.prompt(messages), True
