"""What transformers' own `generate(use_mtp=True)` drafts with the heads that `make.py` made.

python tests/golden/mtp/generate.py     needs torch 2.13.0 and transformers 5.23.0

    {glm4_moe,deepseek_v3}/generated.safetensors    logits [R, V] of each round's draft token, float32
    {glm4_moe,deepseek_v3}/generated.json           history, and how many tokens of it each round begins with

transformers drafts one token a round with one head, and refuses recurrent targets. The heads are random: the
prompt is the first of many with which a draft is accepted.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

HERE = Path(__file__).parent
PROMPT, TOKENS, LEAST = 9, 40, 1
drafted = MTPCandidateGenerator.get_candidates


def generate(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """The text, the length of the history at each draft, and the logits [V] of each."""
    begins, logits = [], []

    def watched(self, input_ids, *arguments, **options):
        candidates, scores = drafted(self, input_ids, *arguments, **options)
        if scores is not None:  # the first pass has no draft
            begins.append(input_ids.shape[1])
            logits.append(scores[0, 0].float().clone())
        return candidates, scores

    MTPCandidateGenerator.get_candidates = watched
    ids = torch.tensor([prompt])
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else it is guessed from tokens that are the padding's
        use_mtp=True,
        max_new_tokens=TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
    )[0].tolist()
    return text, begins, logits


def make(kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        HERE / kind, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]
    model.config.num_mtp_layers = 1
    for seed in range(200):
        torch.manual_seed(seed)
        text, begins, logits = generate(model, torch.randint(0, 64, (PROMPT,)).tolist())
        if begins[-1] - begins[0] - len(begins) + 1 >= LEAST:
            break
    save_file({"logits": torch.stack(logits)}, HERE / kind / "generated.safetensors")
    facts = {"history": text, "prompt": PROMPT, "begins": begins}
    (HERE / kind / "generated.json").write_text(json.dumps(facts) + "\n")
    print(kind, seed, [b - a - 1 for a, b in pairwise(begins)])


if __name__ == "__main__":
    for one in sys.argv[1:] or ("glm4_moe", "deepseek_v3"):
        make(one)
