"""make_config_goldens.py [FOLDER]: FOLDER/llama_configs.json, how Hugging Face transformers reads config.json.

    defaults   by model type, all keys of its configuration class with their default values (layers and labels cut
               to what a test needs)
    read       config.json files, as members to add to a small Llama's, and the results of transformers for each: the
               inverse rotary frequencies in float64 and the embedding's padding_idx

Made with torch 2.15.0 and transformers 5.24.0.
"""
import json
import logging
import pathlib
import sys
import tempfile

import torch
from make_llama_goldens import AllDouble
from transformers import (AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config,
                          Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig)

SMALL = dict(model_type="llama", vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, intermediate_size=24, max_position_embeddings=256)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LENGTH = dict(original_max_position_embeddings=64)
CASES = [
    {},
    dict(rope_theta=50.0),
    dict(rope_parameters=dict(rope_theta=77.0)),
    dict(rope_parameters={}),
    dict(rope_scaling={}),
    dict(rope_scaling={}, rope_parameters=dict(rope_theta=77.0)),
    dict(rope_theta=50.0, rope_scaling=dict(rope_theta=77.0, rope_type="default")),
    dict(rope_theta=50.0, rope_parameters=dict(rope_theta=77.0, rope_type="default")),
    dict(rope_theta=50.0, rope_scaling=dict(LLAMA3, **LENGTH)),
    dict(rope_theta=50.0, rope_scaling=dict(LLAMA3, rope_theta=77.0, **LENGTH)),
    dict(rope_scaling=LLAMA3),
    dict(rope_scaling=LLAMA3, original_max_position_embeddings=32),
    dict(rope_scaling=dict(LLAMA3, **LENGTH), original_max_position_embeddings=32),
    dict(rope_parameters=dict(LLAMA3, rope_theta=77.0, **LENGTH), original_max_position_embeddings=128),
    dict(rope_scaling=dict(LLAMA3, type="default", **LENGTH)),
    dict(original_max_position_embeddings=32),
    dict(head_dim=6),
    dict(pad_token_id=0),
    dict(pad_token_id=30),
    dict(pad_token_id=-1),
    dict(hidden_act="swish"),
]


def short(value):
    if isinstance(value, list):
        return value[:2]
    return value


def defaults(kind) -> dict:
    keys = {**kind().to_dict(), "num_hidden_layers": 2}
    return {key: short(value) for key, value in sorted(keys.items())}


def read(case: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps({**SMALL, **case}))
        config = AutoConfig.from_pretrained(folder)
    with AllDouble():
        model = AutoModelForCausalLM.from_config(config).model
    frequencies = model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float64
    return {"config": case, "inv_freq": frequencies.tolist(), "padding_idx": model.embed_tokens.padding_idx}


def main() -> None:
    logging.disable(logging.WARNING)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "mixtral": MixtralConfig, "qwen2": Qwen2Config,
             "qwen2_moe": Qwen2MoeConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
    found = {"defaults": {name: defaults(kind) for name, kind in kinds.items()}, "small": SMALL,
             "read": [read(case) for case in CASES]}
    lines = json.dumps(found, indent=1, sort_keys=True)
    (root / "llama_configs.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
