"""Write what transformers computes for the rotary parameters of a config.json: `ropes.json`.

oracle/bin/pip install torch==2.13.0 transformers==5.24.0
oracle/bin/python tests/golden/ropes/make.py
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1 + i / 8 for i in range(16)], "long_factor": [2 + i for i in range(16)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn, attention_factor 1": {**YARN, "attention_factor": 1.0},
    "yarn, attention_factor 1.5": {**YARN, "attention_factor": 1.5},
    "yarn, mscale as mscale_all_dim": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, mscale alone": {**YARN, "mscale": 0.707},
    "yarn, truncate false": {**YARN, "truncate": False},
    "yarn, beta": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "longrope": LONG,
    "longrope, attention_factor": {**LONG, "attention_factor": 1.1},
    "longrope, no factor": {key: value for key, value in LONG.items() if key != "factor"},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
found = {}
for name, rope in ROPES.items():
    for theta in (1e4, 5e6):
        config = LlamaConfig(**SIZES, rope_parameters={**rope, "rope_theta": theta})
        angles, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        entry = {
            "config": {**SIZES, "rope_theta": theta, "rope_scaling": rope},
            "short": angles.tolist(),
            "factor": factor,
        }
        if rope["rope_type"] == "longrope":
            entry["long"] = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=33)[0].tolist()
        found[f"{name}, base {theta:g}"] = entry
Path(__file__).with_name("ropes.json").write_text(json.dumps(found) + "\n")
