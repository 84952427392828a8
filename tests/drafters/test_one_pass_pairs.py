"""From published checkpoints to text: `convert`, `load` and generate, for all that draft in one pass."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import drafting
import mlx.core as mx
import pytest
import test_dflash
import test_medusa
import test_peagle
import tiny
from fitted import Checkpoint, nn
from fitted import pard as pard_checkpoint
from mlx.utils import tree_flatten

import mlx_spec
from mlx_spec.convert.convert import Request, convert
from mlx_spec.errors import Mismatch
from mlx_spec.hub.progress import StageProgress
from mlx_spec.sampling import Sampling

GOLDEN = Path(__file__).parents[1] / "golden"
FITTED = {"medusa": test_medusa.fit, "dflash": test_dflash.fit, "peagle": test_peagle.fit}


def write_target(folder: Path, model: nn.Module) -> Path:
    """`model` as a checkpoint with a tokenizer."""
    kept = shutil.ignore_patterns("*.safetensors", "generation_config.json")
    shutil.copytree(GOLDEN / "12b" / "target", folder, ignore=kept)
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    weights = {
        name.replace(".layer.", "."): w for name, w in tree_flatten(model.parameters())
    }  # of tapped layers
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def made(family: str) -> tuple[nn.Module, list[int], list[int], Checkpoint]:
    model, prompt, truth, published = FITTED.get(family, test_medusa.fit)("full")
    if family == "pard":
        published = pard_checkpoint(tiny.full(), 3, 0.02)
        published.config["max_position_embeddings"] = 512
    return model, prompt, truth, published


@pytest.mark.parametrize("bits", ["none", "8"])
@pytest.mark.parametrize("family", ["medusa", "pard", "dflash", "peagle"])
def test_quantized_pairs_generate_the_target_s_text(family, bits, tmp_path):
    model, prompt, truth, published = made(family)
    source = write_target(tmp_path / "target", model)
    drafter, out = published.write(tmp_path / "drafter"), tmp_path / "out"
    asked = Request(str(source), str(drafter), out, bits, 32, "8", None, False)
    part = convert(asked, StageProgress(io.StringIO()))["parts"]["drafter"]
    assert (part["family"], part["runnable"]) == (family, True)
    assert "quantization" in part
    pair = mlx_spec.load(out, num_draft_tokens=4)
    assert pair.drafter_names == (family,)
    rounds = list(pair.generate(prompt, max_tokens=len(truth)))
    emitted = [token for round in rounds for token in round.tokens]
    plain = mlx_spec.load(out, "none").generate(prompt, max_tokens=len(truth))
    assert emitted == [token for round in plain for token in round.tokens]
    assert bits == "8" or emitted == truth[: len(emitted)]
    assert rounds[-1].finish_reason in ("stop", "length") and len(emitted) > 10
    assert bits == "8" or sum(round.accepted for round in rounds) > 0


@pytest.mark.parametrize("family", ["medusa", "dflash", "peagle"])
def test_conversation_goes_on(family, tmp_path):
    """The prefix of a second prompt is in the target's cache; the drafter keeps or forgets what it must."""
    model, prompt, truth, published = made(family)
    source = write_target(tmp_path / "target", model)
    drafter, out = published.write(tmp_path / "drafter"), tmp_path / "out"
    convert(
        Request(str(source), str(drafter), out, "none", 32, "none", None, False), StageProgress(io.StringIO())
    )
    pair = mlx_spec.load(out, num_draft_tokens=4)
    decoding = pair.open()
    for asked in (prompt, [*prompt, *truth[:6], 3, 4], [*prompt[:20], 9, 8, 7], prompt):
        decoding.target.rewind(min(decoding.target.size, shared(asked, prompt, truth)))
        texts = []
        for parts in (decoding, mlx_spec.load(out, "none").open()):
            rounds = list(pair.run(parts, asked, max_tokens=20))
            texts.append([token for round in rounds for token in round.tokens])
        assert texts[0] == texts[1]


def shared(asked: list[int], prompt: list[int], truth: list[int]) -> int:
    """Tokens of `asked` that any earlier text began with: those of the prompt's first 20 at least."""
    return 20 if asked[:20] == prompt[:20] else 0


@pytest.mark.parametrize("family", ["medusa", "pard", "dflash", "peagle"])
def test_trained_pairs_accept_in_full_and_in_part_and_reject(family, tmp_path):
    """All texts run past the target's window of 16: greedy ones, and with a seed."""
    trained, out = str(GOLDEN / "trained" / family), tmp_path / "out"
    manifest = drafting.prove(GOLDEN / "12b-trained" / "target", trained, out)
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == family and part["runnable"] and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 2
    drafting.check_acceptance(drafting.generate_with(out))
    sampling = Sampling(0.8, top_p=0.95, seed=6)
    seeded = drafting.generate_with(out, sampling=sampling, questions=drafting.QUESTIONS[:3])
    assert len({round.accepted for round in seeded if round.drafted == 3}) > 2


def test_another_target_is_refused(tmp_path):
    model, _, _, published = made("medusa")
    drafter, out = published.write(tmp_path / "drafter"), tmp_path / "out"
    source = write_target(tmp_path / "target", model)
    convert(
        Request(str(source), str(drafter), out, "none", 32, "none", None, False), StageProgress(io.StringIO())
    )
    other = write_target(tmp_path / "other", tiny.qwen())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    with pytest.raises(Mismatch, match="64, target has 48"):
        mlx_spec.load(other, out / "drafter")
