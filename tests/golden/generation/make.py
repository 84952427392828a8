"""Write what transformers generates with keys of generation_config.json: `generation.json`.

oracle/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors
oracle/bin/python tests/golden/generation/make.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import seeded_llama

COUNT = 40


def text(generation: dict[str, object]) -> list[int]:
    with tempfile.TemporaryDirectory() as place:
        model = AutoModelForCausalLM.from_pretrained(seeded_llama.save(Path(place), generation))
        prompt = torch.tensor([seeded_llama.PROMPT])
        more = {} if "max_new_tokens" in generation else {"max_new_tokens": COUNT}
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=1, **more)
    return found[0, prompt.shape[1] :].tolist()


free = text({})
CASES: dict[str, dict[str, object]] = {
    "none": {},
    "suppress_tokens": {"suppress_tokens": [free[3], free[7]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [free[0]]},
    "bad_words_ids": {"bad_words_ids": [[free[2]], [2]]},
    "bad_words_ids of two tokens": {"bad_words_ids": [free[4:6]]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 40},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "sequence_bias": {"sequence_bias": [[[free[3]], -10.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [5, 2.0]},
    "stop_strings": {"stop_strings": ["x"]},
    "max_new_tokens": {"max_new_tokens": 5},
}
found = {"none": {"config": {}, "tokens": free}}
for name, generation in CASES.items():
    needs_tokenizer = name == "stop_strings"
    found[name] = {"config": generation, "tokens": None if needs_tokenizer else text(generation)}
Path(__file__).with_name("generation.json").write_text(json.dumps(found) + "\n")
