"""saved_models.py save FOLDER | compare FOLDER OTHER | losses FOLDER TEXT LOGS: small models of transformers, each in its
own directory.

`save` makes them with random weights. `losses` checks that the first loss in LOGS/NAME.jsonl is that of all windows of 32
bytes of the file TEXT, each byte a token, to 1e-5. `compare` checks that the directories of the same names in OTHER open as
the same classes without warnings, with the same bits, and generate the same tokens greedily.
"""
import json
import pathlib
import sys

import torch
import transformers

SHAPE = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32, rope_theta=50000.0)
CASES = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama_biases": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
    "llama_padding": transformers.LlamaConfig(**SHAPE, head_dim=16, pad_token_id=3),
    "llama_shards": transformers.LlamaConfig(**SHAPE),
    "llama_tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=8),
}


def save(folder: pathlib.Path) -> None:
    torch.manual_seed(0)
    for name, config in CASES.items():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            # Large enough that the most likely tokens differ.
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 0.5, 0.2)
        model.save_pretrained(folder / name, max_shard_size="40KB" if name == "llama_shards" else "5GB")


def load(folder: pathlib.Path) -> transformers.PreTrainedModel:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                    output_loading_info=True)
    if any(said.values()):
        sys.exit(f"{folder}: {said}")
    return model.eval()


def compare(folder: pathlib.Path, other: pathlib.Path) -> None:
    torch.manual_seed(1)
    prompt = torch.randint(4, SHAPE["vocab_size"], (2, 20))
    for name in CASES:
        old, new = load(folder / name), load(other / name)
        if type(old) is not type(new):
            sys.exit(f"{name}: a {type(old).__name__} came back as {type(new).__name__}")
        before, after = old.state_dict(), new.state_dict()
        wrong = [key for key in before.keys() | after.keys()
                 if key not in before or key not in after or not torch.equal(before[key], after[key])]
        if wrong:
            sys.exit(f"{name}: other tensors came back: {', '.join(sorted(wrong))}")
        how = dict(max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt))
        if not torch.equal(old.generate(prompt, **how), new.generate(prompt, **how)):
            sys.exit(f"{name}: other tokens are generated")


def losses(folder: pathlib.Path, text: pathlib.Path, logs: pathlib.Path) -> None:
    data = torch.tensor(list(text.read_bytes()))
    windows = torch.stack([data[at:at + 33] for at in range(0, len(data) - 32, 32)])
    for name in CASES:
        model = load(folder / name)
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), windows[:, 1:].flatten()).item()
        lines = map(json.loads, (logs / f"{name}.jsonl").read_text().splitlines())
        found = next(line["loss"] for line in lines if "loss" in line)
        if abs(found - expected) > 1e-5 * expected:
            sys.exit(f"{name}: the loss is {found}, and transformers' {expected}")


{"save": save, "compare": compare, "losses": losses}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
