"""make_model_goldens.py [FOLDER]: tiny models of Hugging Face: variants of Llama, its adapters, and others.

FOLDER/gpt2_tiny, llama_qwen2, llama_qwen3 and llama_mistral hold the files that make_llama_goldens.py describes, with
16 positions instead of 24, computed in float64 and rounded to float32 as there. The matrices of GPT-2's attn.c_attn,
attn.c_proj, mlp.c_fc and mlp.c_proj, and so their gradients, are [in, out].

FOLDER/llama_lora: config.json and model.safetensors of the frozen base; adapter_config.json and
adapter_model.safetensors as peft writes them; golden.safetensors as above, where the logits, the loss and the only
gradients are those of the adapted model, and NAME in grad.NAME is as in adapter_model.safetensors.

FOLDER/encoder_decoder_layer: one layer of BART's encoder, and one of its decoder which looks at the encoder's output,
without embeddings. model.safetensors holds encoder.NAME and decoder.NAME; golden.safetensors:

    encoder_input         [2, 12, hidden]  seen by all its positions
    decoder_input         [2, 8, hidden]   each position sees itself and those before
    encoder_output        like encoder_input
    decoder_output        like decoder_input
    grad.decoder_output   like decoder_input, where the backward pass begins; the encoder gets its gradient only
                          through the decoder
    grad.encoder_output, grad.encoder_input, grad.decoder_input, grad.NAME: the resulting gradients

A bias of the keys adds the same to all scores of a query, so its gradient is zero except for rounding (1e-16 here):
compare grad.*.k_proj.bias by its distance, not relative to its size.

Made with torch 2.15.0, transformers 5.23.0 and peft 0.21.2; needs them, and safetensors.
"""
import json
import pathlib
import sys

import torch
from make_llama_goldens import (AllDouble, gradients, make_folder, make_golden, make_text, randomise, read_model, save,
                                score)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, BartConfig
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer

SEQ, SCALE, WINDOW = 16, 0.15, 5

COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
          "intermediate_size": 40, "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
          "use_cache": True, "vocab_size": 131}
# The keys in config.json of the published models of each kind.
QWEN = {"bos_token_id": 1, "eos_token_id": 2, "max_window_layers": 2, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "use_sliding_window": False}
CONFIGS = {
    "gpt2_tiny": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
                  "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
                  "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_embd": 32, "n_head": 4, "n_inner": 64,
                  "n_layer": 2, "n_positions": 20, "scale_attn_by_inverse_layer_idx": False,
                  "scale_attn_weights": True, "torch_dtype": "float32", "vocab_size": 113},
    "llama_qwen2": {**COMMON, **QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
                    "hidden_size": 56, "intermediate_size": 39, "num_attention_heads": 14, "sliding_window": 3},
    "llama_qwen3": {**COMMON, **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                    "attention_bias": False, "head_dim": 8, "hidden_size": 24, "rope_scaling": None,
                    "sliding_window": None},
    "llama_mistral": {**COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1,
                      "eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": WINDOW,
                      "vocab_size": 67},
    "llama_lora": {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
                   "bos_token_id": 1, "eos_token_id": 2, "mlp_bias": False, "rope_theta": 10000.0},
    "encoder_decoder_layer": {"model_type": "bart", "activation_dropout": 0.0, "activation_function": "gelu",
                              "attention_dropout": 0.0, "d_model": 32, "decoder_attention_heads": 4,
                              "decoder_ffn_dim": 48, "decoder_layers": 1, "dropout": 0.0,
                              "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_layers": 1,
                              "torch_dtype": "float32"},
}


def biases(model: torch.nn.Module) -> set:
    """The modules with a bias, by the last part of their name."""
    return {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith(".bias")}


def check_gpt2(model: torch.nn.Module) -> None:
    block = model.transformer.h[0]
    assert block.attn.c_attn.weight.shape == (32, 96) and block.mlp.c_fc.weight.shape == (32, 64)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert biases(model) == {"ln_1", "c_attn", "c_proj", "ln_2", "c_fc", "ln_f"}


def check_qwen2(model: torch.nn.Module) -> None:
    assert biases(model) == {"q_proj", "k_proj", "v_proj"}
    check_visible(model, None)


def check_qwen3(model: torch.nn.Module) -> None:
    assert not biases(model) and model.model.layers[0].self_attn.q_norm.weight.shape == (8,)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 24)
    check_visible(model, None)


def check_mistral(model: torch.nn.Module) -> None:
    assert not biases(model)
    check_visible(model, WINDOW)


def check_visible(model: torch.nn.Module, window: int | None) -> None:
    """Checks that position i sees j exactly if i - window < j <= i, or j <= i without a window, in every layer and head."""
    with AllDouble(), torch.no_grad():
        looks = model(torch.arange(SEQ)[None], output_attentions=True).attentions
    i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
    seen = (j <= i) & (j > i - (window or SEQ))
    assert len(looks) == 2
    for layer in looks:
        assert layer.dtype == torch.float64 and torch.equal(layer > 0, seen.expand_as(layer))


def make_language_model(root: pathlib.Path, name: str, check, seed: int) -> None:
    folder = make_folder(root, name, CONFIGS[name])
    generator = torch.Generator().manual_seed(seed)
    model = read_model(folder)
    randomise(model, generator, SCALE)
    check(model)
    make_golden(folder, model, SEQ, generator)


def make_lora(root: pathlib.Path, seed: int) -> None:
    name = "llama_lora"
    folder = make_folder(root, name, CONFIGS[name])
    generator = torch.Generator().manual_seed(seed)
    base = read_model(folder)
    randomise(base, generator, SCALE)
    weights = {key: value.detach().clone() for key, value in base.named_parameters()}
    save(weights, folder / "model.safetensors")

    adapters = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"],
                          bias="none", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters).to(torch.float64).eval()
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            assert parameter.requires_grad == ("lora_" in key)
            if parameter.requires_grad:  # peft initializes B with zeros
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).float() * 0.25)
    adapters.base_model_name_or_path = None
    adapters.save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["target_modules"].sort()  # a set, whose order varies
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    save(get_peft_model_state_dict(model), folder / "adapter_model.safetensors")

    input_ids, labels = make_text(CONFIGS[name]["vocab_size"], SEQ, generator)
    logits, loss = score(model, input_ids, labels)
    loss.backward()
    golden = {"input_ids": input_ids, "labels": labels, "logits": logits, "loss": loss}
    found = {key.replace(".default", ""): value for key, value in gradients(model).items()}
    assert set(found) == set(get_peft_model_state_dict(model)) and len(found) == 2 * 2 * 3
    golden.update({f"grad.{key}": value for key, value in found.items()})
    save(golden, folder / "golden.safetensors")

    # Without peft: a model whose weights are W + alpha / r B A. And Hugging Face's float32, from the files.
    plain = read_model(folder)
    pairs = get_peft_model_state_dict(model)
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(weights[key])
        unadapted = score(plain, input_ids, labels)[0]
        for key, a in pairs.items():
            if key.endswith("lora_A.weight"):
                b = pairs[key.replace("lora_A", "lora_B")]
                plain.get_parameter(key.removeprefix("base_model.model.").replace("lora_A.", "")).add_(2.0 * b @ a)
        assert torch.allclose(score(plain, input_ids, labels)[0], logits, rtol=1e-11, atol=1e-12)
    single = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert sum("lora_" in key for key, _ in single.named_parameters()) == len(pairs)  # it loads adapters itself
    distance = (single.eval()(input_ids).logits - logits).abs().max() / logits.abs().max()
    assert distance < 5e-6, distance
    print(f"{name}: loss {loss.item():.6f}, {sum(v.numel() for v in pairs.values())} adapter weights, "
          f"the adapters move logits by up to {(logits - unadapted).abs().max():.2f} of {logits.abs().max():.2f}, "
          f"float32 is {distance:.1e} away")


def run_layers(layers: torch.nn.ModuleDict, encoder_input: torch.Tensor, decoder_input: torch.Tensor) -> tuple:
    length = decoder_input.shape[1]
    mask = torch.full((length, length), float("-inf"), dtype=decoder_input.dtype).triu(1)[None, None]
    encoder_output = layers["encoder"](encoder_input, attention_mask=None)
    return encoder_output, layers["decoder"](decoder_input, attention_mask=mask, encoder_hidden_states=encoder_output)


def make_encoder_decoder_layer(root: pathlib.Path, seed: int) -> None:
    name = "encoder_decoder_layer"
    folder = make_folder(root, name, CONFIGS[name])
    generator = torch.Generator().manual_seed(seed)
    config = BartConfig.from_pretrained(folder, attn_implementation="eager")
    layers = torch.nn.ModuleDict({"encoder": BartEncoderLayer(config, layer_idx=0),
                                  "decoder": BartDecoderLayer(config, layer_idx=0)}).to(torch.float64).eval()
    randomise(layers, generator, SCALE)

    def random(length: int) -> torch.Tensor:
        return torch.randn(2, length, 32, generator=generator, dtype=torch.float64).float().double()

    inputs = [random(12).requires_grad_(), random(8).requires_grad_()]
    seed_gradient = random(8)
    encoder_output, decoder_output = run_layers(layers, *inputs)
    # The output of the decoder at a position depends on that position, all earlier ones, no later one, and all of the
    # encoder's positions.
    for place in range(8):
        target = decoder_output[0, place].square().sum()
        by_encoder, by_decoder = torch.autograd.grad(target, inputs, retain_graph=True)
        reached = [by_decoder[0].abs().sum(-1) > 0, by_encoder[0].abs().sum(-1) > 0]
        assert torch.equal(reached[0], torch.arange(8) <= place) and reached[1].all()

    encoder_output.retain_grad()
    decoder_output.backward(seed_gradient)
    golden = {"encoder_input": inputs[0], "decoder_input": inputs[1], "encoder_output": encoder_output,
              "decoder_output": decoder_output, "grad.decoder_output": seed_gradient,
              "grad.encoder_output": encoder_output.grad, "grad.encoder_input": inputs[0].grad,
              "grad.decoder_input": inputs[1].grad}
    found = gradients(layers)
    assert all((value.abs().max() < 1e-14) == key.endswith("k_proj.bias") for key, value in found.items())
    golden.update({f"grad.{key}": value for key, value in found.items()})
    weights = {key: value.detach().clone() for key, value in layers.named_parameters()}
    save(weights, folder / "model.safetensors")
    save(golden, folder / "golden.safetensors")

    single = run_layers(layers.float(), inputs[0].float(), inputs[1].float())[1]
    distance = (single - decoder_output).abs().max() / decoder_output.abs().max()
    assert distance < 5e-6, distance
    print(f"{name}: {sum(w.numel() for w in weights.values())} weights, outputs up to "
          f"{decoder_output.abs().max():.2f}, float32 is {distance:.1e} away")


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    checks = {"gpt2_tiny": check_gpt2, "llama_qwen2": check_qwen2, "llama_qwen3": check_qwen3,
              "llama_mistral": check_mistral}
    for seed, (name, check) in enumerate(checks.items(), start=4048):
        make_language_model(root, name, check, seed)
    make_lora(root, 4052)
    make_encoder_decoder_layer(root, 4053)


if __name__ == "__main__":
    main()
