"""Write what transformers computes for the tiny checkpoints with a vision tower (float32, CPU).

python tests/golden/vision/golden.py [--variants e2b,gemma3]

The names and shapes are explained in ../README.md. Greedy tokens come from a full pass over the whole text
for each token, without a cache, so that no cache and no prefill of transformers is in play.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

HERE = Path(__file__).parent
VARIANTS = ("e2b", "e4b", "12b", "26b", "31b", "gemma3", "qwen")
WORDS = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>"}
CLASSES = {
    "gemma3": transformers.Gemma3ForConditionalGeneration,
    "gemma4": transformers.Gemma4ForConditionalGeneration,
    "gemma4_unified": transformers.Gemma4UnifiedForConditionalGeneration,
    "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
}
NEW = 24  # greedy tokens of an answer
PICTURES = {
    "a": (100, 100, 1),
    "b": (150, 60, 2),
    "c": (40, 150, 3),
    "d": (100, 100, 4),
}  # width, height, seed
COMPARED = "bc"  # whose pixels and rows are kept


def shown(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# Each case is the user's turns; between them stand the model's own greedy answers.
CASES = {
    "one": [[shown("a"), said("What is the capital of Italy?")]],
    "other": [[shown("d"), said("What is the capital of Italy?")]],
    "two": [
        [said("The cat sat on"), shown("b"), said("and the dog sat on"), shown("c"), said("one two three")]
    ],
    "later": [
        [said("What is the capital of Spain?")],
        [shown("a"), said("Monday Tuesday Wednesday")],
        [said("one two three")],
    ],
    "again": [[shown("a"), said("one two three")], [shown("a"), said("A B C D")]],
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A smooth coloured picture."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        np.sin(x * rng.uniform(0.02, 0.3) + y * rng.uniform(0.02, 0.3) + rng.uniform(0, 6)) for _ in range(3)
    ]
    return Image.fromarray(((np.stack(waves, -1) * 0.5 + 0.5) * 255).astype(np.uint8))


def tower_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the tower under the names of transformers' class."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: t
        for name, t in tensors.items()
        if any(part in name for part in ("vision", "visual", "multi_modal_projector"))
        and not name.endswith(("inv_freq", "position_ids"))
    }


def published(name: str) -> str:
    """Return a name as checkpoints have it."""
    if "embed_vision." not in name or ".embedding_projection" in name:
        return name.replace("embed_vision.multimodal_embedder.", "embed_vision.")
    return name.replace("embed_vision.", "vision_embedder.")


def load(folder: Path) -> tuple[str, nn.Module]:
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    options = dict(dtype=torch.float32, attn_implementation="eager")
    model = CLASSES[kind].from_pretrained(folder, **options).eval()
    tower = {name: t.float() for name, t in load_file(folder / "model-vision.safetensors").items()}
    for name, t in tower_of(model).items():
        t.copy_(tower.pop(published(name)))
    assert not tower, tower.keys()
    return kind, model


def processor(kind: str, folder: Path) -> Any:
    """transformers' processor of pictures without torch. That of 12B differs in the size of its patches."""
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(**settings, size={"height": 56, "width": 56})
    if kind == "qwen3_5":
        return Qwen2VLImageProcessorPil(**settings)
    if kind == "gemma4_unified":
        settings |= {
            "patch_size": settings["patch_size"] * settings["pooling_kernel_size"],
            "pooling_kernel_size": 1,
        }
    return Gemma4ImageProcessorPil(**settings)


def expand(kind: str, text: str, counts: list[int]) -> str:
    """Write placeholders as transformers' processors do."""
    boi, eoi, image = WORDS["boi"], WORDS["eoi"], WORDS["image"]
    if kind == "gemma3":
        parts = text.split(boi)
        sequences = [f"\n\n{boi}{image * count}{eoi}\n\n" for count in counts]  # Gemma3Processor.__init__
        own = [SimpleNamespace(full_image_sequence=each) for each in sequences]
        found = [Gemma3Processor.replace_image_token(each, {"num_crops": [0]}, 0) for each in own]
    elif kind == "qwen3_5":
        parts = text.split(image)
        own = SimpleNamespace(image_token=image, image_processor=SimpleNamespace(merge_size=1))
        found = [
            Qwen3VLProcessor.replace_image_token(own, {"image_grid_thw": np.array([[1, 1, count]])}, 0)
            for count in counts
        ]
    else:
        parts = text.split(image)
        own = SimpleNamespace(boi_token=boi, eoi_token=eoi, image_token=image)
        found = [
            Gemma4Processor.replace_image_token(own, {"num_soft_tokens_per_image": [count]}, 0)
            for count in counts
        ]
    return parts[0] + "".join(f + p for f, p in zip(found, parts[1:], strict=True))


class Reader:
    """A model with the rows of its pictures."""

    def __init__(self, name: str) -> None:
        folder = HERE / name
        self.kind, self.model = load(folder)
        # AutoTokenizer would cut the text as Qwen does, by the model type: the tokenizer is another one.
        reader = PreTrainedTokenizerFast if self.kind == "qwen3_5" else AutoTokenizer
        self.tok = reader.from_pretrained(folder)
        self.image = self.tok.convert_tokens_to_ids(WORDS["image"])
        process = processor(self.kind, folder)
        self.pixels: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.grids: dict[str, Tensor] = {}  # of patches, for positions in the plane
        for each in PICTURES:
            batch = process([Image.open(HERE / f"{each}.png")], return_tensors="np")
            values = torch.as_tensor(batch["pixel_values"])
            if self.kind == "gemma3":
                out = self.model.model.get_image_features(values, return_dict=True)
                self.pixels[each] = values[0].permute(1, 2, 0)
            elif self.kind == "qwen3_5":
                self.grids[each] = torch.as_tensor(batch["image_grid_thw"])
                out = self.model.model.get_image_features(values, self.grids[each], return_dict=True)
                frames = values.reshape(len(values), 3, 2, -1)
                assert torch.equal(frames[:, :, 0], frames[:, :, 1])
                self.pixels[each] = frames[:, :, 0].permute(0, 2, 1).flatten(1)
            else:
                places = torch.as_tensor(batch["image_position_ids"])
                out = self.model.model.get_image_features(values, places, return_dict=True)
                self.pixels[each] = values[0][(places[0] >= 0).all(-1)]
            rows = out.pooler_output
            rows = rows if torch.is_tensor(rows) else rows[0]
            self.rows[each] = rows.reshape(-1, rows.shape[-1])
            if self.kind == "gemma4_unified":  # padding stays at the end
                self.rows[each] = self.rows[each][: self.pixels[each].shape[0]]

    def forward(self, ids: list[int], names: list[str]) -> Tensor:
        """Logits [S, V] of a whole text, with the rows of its pictures in their places."""
        tokens = torch.tensor([ids])
        types = (tokens == self.image).long()
        rows = [self.rows[name] for name in names]
        extra: dict[str, Any] = {"token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids": types}
        if names:
            pooled = torch.stack(rows) if self.kind == "gemma3" else rows
            extra["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=pooled)}
        if self.kind == "qwen3_5":
            self.model.model.rope_deltas = None
            extra["image_grid_thw"] = torch.cat([self.grids[name] for name in names]) if names else None
        if self.kind == "gemma4_unified":
            # Its forward() has the masks of Gemma 3. The documented ones, those of `gemma4`, are made here.
            extra["attention_mask"] = self.model.create_masks_for_generate(
                config=self.model.config,
                inputs_embeds=torch.zeros(1, len(ids), self.model.config.get_text_config().hidden_size),
                attention_mask=None,
                cache=None,
                position_ids=torch.arange(len(ids))[None],
                mm_token_type_ids=types,
            )
        return self.model(input_ids=tokens, use_cache=False, **extra).logits[0].float()

    def drafted(self, ids: list[int], names: list[str], token: int) -> Tensor:
        """Logits [V] that the MTP head has for what follows `token`, the first one after a text.

        Its row i reads the hidden state of position i and the token after it, at the place of position i, as
        in vLLM. transformers leaves the head out, so its layer is that of the target.
        """
        model, text = self.model.model, self.model.config.text_config
        tensors = load_file(HERE / "qwen" / "model.safetensors")
        head = {n.removeprefix("mtp."): t.float() for n, t in tensors.items() if n.startswith("mtp.")}
        layer = Qwen3_5DecoderLayer(text, text.layer_types.index("full_attention")).eval()
        layer.load_state_dict({n.removeprefix("layers.0."): t for n, t in head.items() if "layers.0." in n})

        def norm(x: Tensor, name: str) -> Tensor:
            return torch.rms_norm(x, x.shape[-1:], 1 + head[f"{name}.weight"], text.rms_norm_eps)

        captured: list[Tensor] = []
        hook = model.language_model.norm.register_forward_hook(lambda *args: captured.append(args[2]))
        self.forward(ids, names)
        hook.remove()
        tokens = torch.tensor([ids])
        grids = torch.cat([self.grids[name] for name in names])
        places, _ = model.get_rope_index(tokens, (tokens == self.image).int(), grids)
        embedded = model.language_model.embed_tokens(torch.tensor([[*ids[1:], token]]))
        both = [norm(embedded, "pre_fc_norm_embedding"), norm(captured[0], "pre_fc_norm_hidden")]
        x = torch.cat(both, dim=-1) @ head["fc.weight"].T
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        out = layer(x, model.language_model.rotary_emb(x, places), attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        return self.model.lm_head(norm(out[0, -1:], "norm"))[0]

    def answer(self, messages: list[dict], names: list[str]) -> tuple[dict[str, Any], Tensor]:
        text = self.tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = expand(self.kind, text, [len(self.rows[name]) for name in names])
        ids = self.tok.encode(text, add_special_tokens=False)
        stops, out, margins = {1, self.tok.convert_tokens_to_ids("<turn|>")}, list[int](), list[float]()
        first = self.forward(ids, names)[-1]
        while len(out) < NEW and not (out and out[-1] in stops):
            row = self.forward(ids + out, names)[-1] if out else first
            best = row.topk(2).values
            margins.append((best[0] - best[1]).item())
            out.append(int(row.argmax()))
        said = self.tok.decode([token for token in out if token not in stops], skip_special_tokens=True)
        return {
            "ids": ids,
            "pictures": names,
            "greedy": out,
            "min_margin": min(margins),
            "answer": said,
        }, first


def run(name: str) -> None:
    reader = Reader(name)
    tensors = {f"rows.{key}": reader.rows[key] for key in COMPARED}
    for key in COMPARED:
        pixels = reader.pixels[key]
        whole = (pixels * 0.5 + 0.5 if reader.kind in ("gemma3", "qwen3_5") else pixels) * 255
        assert (whole - whole.round()).abs().max() < 1e-3, "pixels are whole numbers of 1/255"
        tensors[f"pixels.{key}"] = whole.round().to(torch.uint8)
    facts: dict[str, Any] = {}
    for case, turns in CASES.items():
        messages, facts[case] = list[dict](), []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            parts = [part for m in messages if m["role"] == "user" for part in m["content"]]
            found, logits = reader.answer(
                messages, [part["image"] for part in parts if part["type"] == "image"]
            )
            facts[case].append(found)
            tensors[f"logits.{case}.{number}"] = logits
            if reader.kind == "qwen3_5" and found["pictures"]:
                given = found["ids"], found["pictures"], found["greedy"][0]
                tensors[f"drafted.{case}.{number}"] = reader.drafted(*given)
            print(f"{name:7s} {case:6s} {len(found['ids']):4d} margin {found['min_margin']:.4f}", flush=True)
            messages.append({"role": "assistant", "content": found["answer"].strip()})
    worst = min(turn["min_margin"] for turns in facts.values() for turn in turns)
    assert worst > 1e-3, f"a margin of {worst} leaves no room for float32 noise: try another seed"
    save_file({key: t.contiguous().clone() for key, t in tensors.items()}, HERE / name / "golden.safetensors")
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    lines = [f' "{case}": {json.dumps(turns, ensure_ascii=False)}' for case, turns in facts.items()]
    lines.insert(0, f' "versions": {json.dumps(versions)}')
    (HERE / name / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", default=",".join(VARIANTS))
    torch.set_num_threads(1)
    for name, size in PICTURES.items():
        picture(*size).save(HERE / f"{name}.png")
    for name in parser.parse_args().variants.split(","):
        run(name)


if __name__ == "__main__":
    main()
