"""Write tiny published MLP and LSTM speculators, and what their authors' torch computes with them.

    python tests/golden/mlp_speculator/make.py FMS_EXTRAS ARCTIC_INFERENCE

needs torch, ibm-fms, and clones of foundation-model-stack/fms-extras and snowflakedb/ArcticInference, whose
imports of vLLM are replaced: the code that runs needs none of them.

    CASE.safetensors      tensors of a checkpoint; golden.json has its config.json
    golden.safetensors    CASE.state [3, D], CASE.token [3]: states after the final norm, and pending tokens
                          CASE.chain [3, n], CASE.logits [n, 3, V]: greedy drafts, and the logits along them
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
ABSENT = ("vllm", "arctic_inference", "fms.models", "fms.utils")
EMB, INNER, V = 24, 16, 50


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of vLLM."""

    def find_spec(self, name, path, target=None):
        found = name.startswith(ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        made = MagicMock(__path__=[], __spec__=spec, __name__=spec.name)
        made.SpeculatorTPInit = type("SpeculatorTPInit", (), {})
        return made

    def exec_module(self, module):
        pass


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def fill(module):
    for name, tensor in module.named_parameters():
        with torch.no_grad():
            noise = torch.randn_like(tensor)
            centre = float(name.endswith("weight"))
            tensor.copy_(centre + 0.3 * noise if tensor.ndim == 1 else noise / math.sqrt(tensor.shape[-1]))
    return module.eval()


def fms(kind, **config):
    """Return tensors, and what it computes for a state and a token."""
    model = fill(kind(**config))
    state, token = torch.randn(3, 1, config["emb_dim"]) * 4, torch.randint(0, V, (3, 1))
    steps = config["n_predict"]
    chain = model.generate_suffixes(state, token, topk=[1] * steps, n=1)[:, 0].long()
    logits = model(state, torch.cat([token, chain], dim=1))[:, :, 0]
    tensors = {f"speculator.{name}": tensor for name, tensor in model.state_dict().items()}
    return tensors, (state[:, 0], token[:, 0], chain, logits)


def arctic(module, method, steps):
    """Return the same. Only what `generate_states` reads is built."""
    norm = module.MLPSpeculatorLayerNorm
    model = module.ArcticLSTMSpeculator.__new__(module.ArcticLSTMSpeculator)
    nn.Module.__init__(model)
    model.method, model.tie_weights, model.tie_lstm_embs, model.scale_input = method, True, True, True
    model.inner_dim, model.emb_dim, model.proj_dim = [INNER], [INNER], [INNER]
    model.activation, model.ln0 = nn.GELU(), norm(EMB, elementwise_scale_and_shift=False)
    model.state_weight = 0.5 ** (0.5 / steps)
    model.emb_weight = math.sqrt((1 - model.state_weight**2) * (INNER / 2))
    wide = 4 * INNER if method == "sum_lstm" else INNER
    projections = [nn.Linear(size, wide, bias=False) for size in (EMB, INNER)]
    if method == "sum_lstm":
        model.forget_emb, model.projs = nn.ModuleList([nn.Embedding(V, INNER)]), nn.ModuleList(projections)
        model.cell_ln, model.state_ln = nn.ModuleList([norm(INNER)]), nn.ModuleList([norm(INNER)])
    else:
        model.emb = nn.ModuleList([nn.Sequential(nn.Embedding(V, INNER))])
        model.proj = nn.ModuleList([nn.Sequential(linear) for linear in projections])
        model.ln = nn.ModuleList([nn.Sequential(norm(INNER))])
    fill(model)
    head = fill(nn.Linear(INNER, V, bias=False))
    state, token = torch.randn(3, 1, EMB) * 4, torch.randint(0, V, (3, 1))
    now, newest, cell, chain, logits = state, token, torch.zeros(3, 1, INNER), [], []
    for step in range(steps):
        found = model.generate_states(newest, now, step, cell)
        now, cell = found if method == "sum_lstm" else (found, cell)
        logits.append(head(now)[:, 0])
        newest = logits[-1].argmax(-1, keepdim=True)
        chain.append(newest)
    return named(model, head), (state[:, 0], token[:, 0], torch.cat(chain, 1), torch.stack(logits))


def named(model, head):
    """Return tensors by the published names, which keep the gates apart and repeat embeddings."""
    tensors = {**model.state_dict(), "head.0.weight": head.weight}
    gates = ("forget", "input", "output", "cell")
    for index in (0, 1):
        if f"projs.{index}.weight" in tensors:
            parts = tensors.pop(f"projs.{index}.weight").chunk(4)
            tensors |= {f"{gate}_proj.{index}.weight": part for gate, part in zip(gates, parts, strict=True)}
    if "forget_emb.0.weight" in tensors:
        tensors |= {f"{gate}_emb.0.weight": tensors["forget_emb.0.weight"] for gate in gates}
    return tensors


@torch.no_grad()
def main(fms_extras, arctic_inference):
    sys.meta_path.insert(0, Stand())
    speculator = load(Path(fms_extras) / "fms_extras/models/speculator.py").MLPSpeculator
    lstm = load(Path(arctic_inference) / "arctic_inference/vllm/spec_dec/arctic_speculator.py")
    lstm.USE_CUSTOM_OP = False
    torch.manual_seed(0)
    sizes, tied = {"emb_dim": EMB, "inner_dim": INNER, "vocab_size": V}, {"tie_weights": True}
    plain = {
        "mlp": {**sizes, "n_predict": 4},
        "mlp_inner_0": {**sizes, "inner_dim": 0, "n_predict": 3},
        "mlp_tied_scaled": {**sizes, **tied, "scale_input": True, "n_predict": 4},
    }
    made = {case: (config, fms(speculator, **config)) for case, config in plain.items()}
    words = {"emb_dim": "16", "inner_dim": "16", "proj_dim": "16", "input_hidden_dim": EMB, "vocab_size": V}
    for case, method in (("rnn", "sum_rnn"), ("lstm", "sum_lstm")):
        config = {
            **words,
            **tied,
            "method": method,
            "tie_lstm_embs": True,
            "scale_input": True,
            "n_predict": 3,
        }
        made[case] = config, arctic(lstm, method, 3)
    golden, configs = {}, {}
    for case, (config, (tensors, found)) in made.items():
        configs[case] = {"model_type": "mlp_speculator", **config}
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, HERE / f"{case}.safetensors")
        for part, tensor in zip(("state", "token", "chain", "logits"), found, strict=True):
            golden[f"{case}.{part}"] = tensor if tensor.is_floating_point() else tensor.to(torch.int32)
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, HERE / "golden.safetensors")
    (HERE / "golden.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
