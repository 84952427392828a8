"""Decoders to compare: each takes prompt tokens and a count and yields the new tokens as they come."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec import load
from mlx_spec.drafters.lookup import LookupSource
from mlx_spec.engine import generate
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.tuning.policy import Adaptive, Fixed
from mlx_spec.types import DraftLengthPolicy, Round

Decoder = Callable[[list[int], int], Iterator[list[int]]]  # (prompt, count) -> tokens, as they come
PROMPTS = Path(__file__).parent / "prompts"
EXTRA_VISION = {  # an empty vision tower: mlx-vlm builds one although the checkpoint has none
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "position_embedding_size": 4,
}


@dataclass
class Folders:
    """The checkpoints of a pair, the same bytes for every arm."""

    target: Path
    drafter: Path | None
    _kept: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    @classmethod
    def find(cls, target: str, drafter: str | None) -> Folders:
        if target == "demo":
            from mlx_spec import demo

            return cls(demo.TARGET, demo.DRAFTER)
        return cls(Path(target).expanduser(), Path(drafter).expanduser() if drafter else None)

    def cast(self, dtype: str) -> Folders:
        """Copies with every floating-point weight in another type."""
        result = Folders(self.target, self.drafter)
        result.target = result.copy(self.target, getattr(mx, dtype))
        result.drafter = result.copy(self.drafter, getattr(mx, dtype)) if self.drafter else None
        return result

    def copy(self, folder: Path, dtype: mx.Dtype | None, **config: Any) -> Path:
        """A copy with keys of config.json set (None: left out); weights are linked unless they are cast."""
        self._kept.append(tempfile.TemporaryDirectory())
        new = Path(self._kept[-1].name)
        for file in folder.iterdir():
            if file.suffix != ".safetensors" or dtype is None:
                (new / file.name).symlink_to(file.resolve())
                continue
            tensors = mx.load(str(file))
            for name, array in tensors.items():
                if mx.issubdtype(array.dtype, mx.floating):
                    tensors[name] = array.astype(dtype)
            mx.save_safetensors(str(new / file.name), tensors, {"format": "mlx"})
        old = json.loads((folder / "config.json").read_text())
        (new / "config.json").unlink()
        changed = {k: v for k, v in {**old, **config}.items() if v is not None or k not in config}
        (new / "config.json").write_text(json.dumps(changed))
        return new


def prompts(settings: argparse.Namespace, pair: Pair) -> list[list[int]]:
    """The prompts of a benchmark as tokens: one a line, with the chat template where there is one."""
    file = settings.prompts or PROMPTS / ("demo.txt" if settings.target == "demo" else "chat.txt")
    lines = file.read_text().splitlines()[: 1 if settings.quick else None]
    if not pair.text.chats:
        return [pair.text.encode(line) for line in lines]
    return [pair.text.prompt([{"role": "user", "content": line}]) for line in lines]


def ours(folders: Folders) -> tuple[Pair, dict[str, Decoder]]:
    """The pair, and mlx_spec at every depth."""
    pair = load(folders.target, folders.drafter or "none")

    def decoder(make: Callable[[], DraftLengthPolicy], *, lookup: bool = False) -> Decoder:
        def run(prompt: list[int], count: int) -> Iterator[list[int]]:
            for done in rounds(pair, make(), prompt, count, lookup=lookup):
                yield done.tokens

        return run

    session = Adaptive()  # what a conversation does: the policy outlives an answer
    arms = {"plain": decoder(lambda: Fixed(0)), "lookup": decoder(Adaptive, lookup=True)}
    if folders.drafter is not None:
        arms |= {f"K={k}": decoder(lambda k=k: Fixed(k)) for k in range(1, 9)}
        arms |= {"adaptive": decoder(lambda: session), "adaptive, cold": decoder(Adaptive)}
    return pair, arms


def rounds(
    pair: Pair, policy: DraftLengthPolicy, prompt: list[int], count: int, *, lookup: bool = False
) -> Iterator[Round]:
    """Greedy rounds of a fixed number of tokens: nothing stops them."""
    decoding = pair.open()
    drafter = LookupSource().make(decoding.target.parts) if lookup else decoding.drafter
    sampler = Sampling().sampler(len(prompt), pair.facts.vocab_size)
    return generate(decoding.target, drafter, policy, sampler, prompt, max_tokens=count)


def of_mlx_lm(folders: Folders) -> dict[str, Decoder]:
    """mlx-lm's loop, and the same with text."""
    model, tokenizer = mlx_lm.load(str(folders.target))
    endless = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[-1])

    def tokens(prompt: list[int], count: int) -> Iterator[list[int]]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            yield [int(token)]

    def text(prompt: list[int], count: int) -> Iterator[list[int]]:
        for response in stream_generate(model, endless, mx.array(prompt), max_tokens=count):
            yield [int(response.token)]

    mx.eval(model.parameters())
    return {"mlx-lm": tokens, "mlx-lm, text": text}


def of_mlx_vlm(folders: Folders) -> dict[str, Decoder]:
    """mlx-vlm's loop, plain and with its own MTP rounds. Empty where it is not installed."""
    if importlib.util.find_spec("mlx_vlm") is None:
        print("mlx-vlm is not installed: its arms are left out\n")
        return {}
    from mlx_vlm.generate.ar import generate_step as vlm_step
    from mlx_vlm.speculative.drafters import load_drafter
    from mlx_vlm.utils import load_model

    config = json.loads((folders.target / "config.json").read_text())
    target = folders.target
    if config.get("vision_config", 0) is None:
        target = folders.copy(target, None, vision_config=EXTRA_VISION)
    model = load_model(target, strict=False)
    drafter, kind = load_drafter(str(folders.drafter)) if folders.drafter else (None, None)

    def decoder(K: int) -> Decoder:
        mtp = {"draft_model": drafter, "draft_kind": kind, "draft_block_size": K + 1} if K else {}

        def run(prompt: list[int], count: int) -> Iterator[list[int]]:
            ids = mx.array([prompt])
            for token, _ in vlm_step(ids, model, None, None, max_tokens=count, temperature=0.0, **mtp):
                yield [int(token)]

        return run

    mx.eval(model.parameters())
    depths = range(1, 9) if drafter is not None else ()
    return {"mlx-vlm": decoder(0), **{f"mlx-vlm K={k}": decoder(k) for k in depths}}


def size(folders: Folders) -> dict[str, int]:
    """Parameters of target and drafter."""
    found = {"target": folders.target, "drafter": folders.drafter}
    return {
        name: sum(v.size for f in folder.glob("*.safetensors") for _, v in tree_flatten(mx.load(str(f))))
        for name, folder in found.items()
        if folder is not None
    }
