"""make_llama_goldens.py [FOLDER]: tiny Llamas of Hugging Face transformers, with logits, loss and gradients.

Each FOLDER/llama_NAME/ has the files of Hugging Face (config.json, model.safetensors in float32) and
golden.safetensors, computed in float64 from the float32 weights and then rounded to float32:

    input_ids     [2, 24] int64
    labels        [2, 24] int64   already shifted: position s predicts labels[b, s]; -100 does not count
    logits        [2, 24, vocab]
    loss          []              mean over the labels that count
    grad.NAME     like NAME       gradient of the loss, NAME as in model.safetensors

Made with torch 2.15.0 and transformers 5.23.0; needs both, and safetensors.
"""
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

BASE = dict(hidden_size=64, intermediate_size=144, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=131, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0,
            tie_word_embeddings=False)
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 64}
CASES = {
    "mha": {},
    "gqa_tied": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "rope_scaling": dict(num_key_value_heads=2, rope_theta=500000.0, rope_scaling=LLAMA3_SCALING),
    "smollm": dict(hidden_size=48, intermediate_size=128, num_attention_heads=3, num_key_value_heads=1,
                   rms_norm_eps=1e-6, tie_word_embeddings=True),
    "padding": dict(hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, vocab_size=29,
                    pad_token_id=7, tie_word_embeddings=True),
}
BATCH, SEQ, IGNORE = 2, 24, -100


class AllDouble(TorchFunctionMode):
    """Makes float32 mean float64: Hugging Face's code is unchanged, but its casts to float32 (norms, softmax, rotary) widen."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        widen = lambda value: torch.float64 if value is torch.float32 else value
        args = tuple(widen(value) for value in args)
        kwargs = {key: widen(value) for key, value in (kwargs or {}).items()}
        return torch.Tensor.double(*args, **kwargs) if function is torch.Tensor.float else function(*args, **kwargs)


def written_config(case: dict) -> dict:
    """A config.json in the form of the published Llama models: rope_theta and rope_scaling at the top level."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "initializer_range": 0.02, "torch_dtype": "float32", "use_cache": True, "rope_scaling": None,
            **BASE, **case}


def randomise(model: torch.nn.Module, generator: torch.Generator, scale: float = 0.08) -> None:
    """Weights around 0, those of norms around 1: float32 numbers held in float64."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            if name.endswith("weight") and ("norm" in name or ".ln_" in name):
                values = 1.0 + 0.24 / scale * values
            parameter.copy_(torch.from_numpy(values.numpy().astype("float32")))


def read_model(folder: pathlib.Path) -> torch.nn.Module:
    # Read from the file, so the golden values belong to the configuration as written.
    config = AutoConfig.from_pretrained(folder)
    with AllDouble():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float64).eval()


def make_folder(root: pathlib.Path, name: str, config: dict) -> pathlib.Path:
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


def save(values: dict, file: pathlib.Path) -> None:
    """Converts numbers to float32, except integers."""
    save_file({key: (value if value.dtype is torch.int64 else value.detach().float()).contiguous()
               for key, value in values.items()}, file, metadata={"format": "pt"} if "model" in file.name else None)
    file.chmod(0o644)


def make_text(vocab: int, seq: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and labels."""
    text = torch.randint(0, vocab, (BATCH, seq + 1), generator=generator)
    text[0, 3] = vocab - 1  # the last row of a vocabulary whose size no number of ranks divides
    input_ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    labels[0, :5] = IGNORE
    labels[1, 7] = IGNORE
    labels[1, -2:] = IGNORE
    return input_ids, labels


def score(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits and loss."""
    with AllDouble():
        logits = model(input_ids).logits
    flat = logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(flat, labels.view(-1), ignore_index=IGNORE)
    # transformers shifts its labels itself; this is the same loss from unshifted labels.
    nothing = torch.full((BATCH, 1), IGNORE)
    unshifted = torch.cat([nothing, labels[:, :-1]], dim=1)
    shifted_labels = torch.cat([unshifted[:, 1:], nothing], dim=1)
    with AllDouble():
        own = model(input_ids, labels=unshifted).loss
    same = torch.nn.functional.cross_entropy(flat, shifted_labels.view(-1), ignore_index=IGNORE)
    assert logits.dtype == torch.float64 and torch.allclose(own, same, rtol=1e-12), (own, same)
    return logits, loss


def gradients(model: torch.nn.Module) -> dict:
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    for key, gradient in found.items():
        assert gradient.dtype == torch.float64 and gradient.isfinite().all() and gradient.abs().max() > 0, key
    return found


def make_golden(folder: pathlib.Path, model: torch.nn.Module, seq: int, generator: torch.Generator) -> dict:
    """Writes the files of a language model with its current weights."""
    input_ids, labels = make_text(model.config.vocab_size, seq, generator)
    logits, loss = score(model, input_ids, labels)
    loss.backward()
    golden = {"input_ids": input_ids, "labels": labels, "logits": logits, "loss": loss}
    golden.update({f"grad.{key}": value for key, value in gradients(model).items()})
    weights = dict(model.named_parameters())
    save(weights, folder / "model.safetensors")
    save(golden, folder / "golden.safetensors")

    # The error of Hugging Face's float32, which a float32 implementation cannot be expected to beat.
    single = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    distance = (single(input_ids).logits - logits).abs().max() / logits.abs().max()
    assert distance < 5e-6, distance
    print(f"{folder.name}: loss {loss.item():.6f}, {sum(w.numel() for w in weights.values())} weights, "
          f"gradient norm {sum(g.square().sum() for g in gradients(model).values()).sqrt():.4f}, "
          f"logits up to {logits.abs().max():.2f}, float32 is {distance:.1e} away")
    return golden


def check_scaling(model: LlamaForCausalLM, case: dict) -> None:
    inv_freq = model.model.rotary_emb.inv_freq
    width = {**BASE, **case}["hidden_size"] // {**BASE, **case}["num_attention_heads"]
    plain = 1.0 / case.get("rope_theta", BASE["rope_theta"]) ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaled = not torch.allclose(inv_freq, plain, rtol=1e-12)
    assert inv_freq.dtype == torch.float64
    assert scaled == ("rope_scaling" in case), "the configuration's rope scaling did not reach the model"


def make_case(root: pathlib.Path, name: str, case: dict, seed: int) -> None:
    folder = make_folder(root, f"llama_{name}", written_config(case))
    generator = torch.Generator().manual_seed(seed)
    model = read_model(folder)
    randomise(model, generator)
    check_scaling(model, case)
    golden = make_golden(folder, model, SEQ, generator)
    if "pad_token_id" in case:
        assert (golden["input_ids"] == case["pad_token_id"]).any(), "no token is padding"
        assert model.model.embed_tokens.padding_idx == case["pad_token_id"]


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    for seed, (name, case) in enumerate(CASES.items(), start=2024):
        make_case(root, name, case, seed)


if __name__ == "__main__":
    main()
