"""make_mixture_goldens.py [FOLDER]: tiny mixtures of experts of Hugging Face transformers.

FOLDER/llama_mixtral, llama_qwen2_moe, llama_qwen3_moe, llama_dots1 and llama_olmoe hold the files that make_llama_goldens.py
describes, with 16 positions instead of 24. model.safetensors has the published names, one tensor for each expert. In
golden.safetensors the gradients of experts have transformers' own names and shapes:

    grad.model.layers.N.mlp.experts.gate_up_proj   [experts, 2 width, hidden]   gates above ups
    grad.model.layers.N.mlp.experts.down_proj      [experts, hidden, width]

FOLDER/llama_qwen3_moe/stacked.safetensors has the weights in these shapes too.

Made with torch 2.15.0 and transformers 5.24.0; needs both, and safetensors.
"""
import pathlib
import sys
import tempfile

import torch
from make_llama_goldens import (IGNORE, AllDouble, gradients, make_folder, make_text, randomise, read_model, save, score)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SEQ, SCALE = 16, 0.2
COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 24, "initializer_range": 0.02,
          "intermediate_size": 16, "max_position_embeddings": 64, "num_attention_heads": 4, "num_experts_per_tok": 2,
          "num_hidden_layers": 2, "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-6,
          "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
          "vocab_size": 131}
# The keys in config.json of the published models of each kind.
QWEN = {"bos_token_id": 1, "decoder_sparse_step": 1, "eos_token_id": 2, "max_window_layers": 2, "mlp_only_layers": [],
        "moe_intermediate_size": 16, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False}
CONFIGS = {
    "llama_mixtral": {**COMMON, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "bos_token_id": 1,
                      "eos_token_id": 2, "num_local_experts": 4, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
                      "sliding_window": None},
    "llama_qwen2_moe": {**COMMON, **QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
                        "intermediate_size": 44, "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 3,
                        "shared_expert_intermediate_size": 20},
    "llama_qwen3_moe": {**COMMON, **QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                        "attention_bias": False, "head_dim": 8, "intermediate_size": 44, "norm_topk_prob": True,
                        "num_experts": 8, "rope_scaling": None},
    "llama_dots1": {**COMMON, "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "bos_token_id": 1,
                    "eos_token_id": 2, "first_k_dense_replace": 1, "head_dim": 8, "intermediate_size": 44,
                    "model_type": "dots1", "moe_intermediate_size": 16, "n_group": 4, "n_routed_experts": 8,
                    "n_shared_experts": 2, "norm_topk_prob": True, "num_experts_per_tok": 3, "rope_scaling": None,
                    "rope_theta": 1000000.0, "routed_scaling_factor": 2.5, "sliding_window": None, "topk_group": 2},
    "llama_olmoe": {**COMMON, "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None,
                    "eos_token_id": 2, "model_type": "olmoe", "norm_topk_prob": False, "num_experts": 8,
                    "num_experts_per_tok": 3, "pad_token_id": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
                    "rope_theta": 10000.0},
}


def check_best(values: torch.Tensor, chosen: int) -> torch.Tensor:
    """The indices of the best scores; they must not be near a tie in float32."""
    best = values.sort(-1, descending=True)
    assert values.dtype == torch.float64 and (best.values[:, chosen - 1] - best.values[:, chosen]).min() > 1e-5
    return best.indices[:, :chosen]


def check_choices(model: torch.nn.Module, input_ids: torch.Tensor, config: dict) -> None:
    """Checks that no choice is near a tie in float32."""
    with AllDouble(), torch.no_grad():
        scores = model(input_ids, output_router_logits=True).router_logits
    assert len(scores) == config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    for layer, biases in zip(scores, list(model.buffers_of_routers) or [None] * len(scores)):
        values = layer.softmax(-1) if biases is None else layer.sigmoid() + biases
        if biases is not None:
            of_groups = values.unflatten(-1, (config["n_group"], -1))
            kept = check_best(of_groups.topk(2).values.sum(-1), config["topk_group"])
            lost = torch.ones(of_groups.shape[:2], dtype=torch.bool).scatter(1, kept, False)
            values = of_groups.masked_fill(lost[..., None], -1e9).flatten(1)
        best = check_best(values, config["num_experts_per_tok"])
        print(f"  {best.flatten().bincount(minlength=layer.shape[-1]).tolist()} tokens of experts")


def make_case(root: pathlib.Path, name: str, config: dict, seed: int) -> None:
    folder = make_folder(root, name, config)
    generator = torch.Generator().manual_seed(seed)
    model = read_model(folder)
    model.set_experts_implementation("eager")
    randomise(model, generator, SCALE)
    input_ids, labels = make_text(config["vocab_size"], SEQ, generator)
    model.buffers_of_routers = [b for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")]
    for biases in model.buffers_of_routers:
        biases.copy_((torch.randn(biases.shape, generator=generator) * 0.3).float())
    check_choices(model, input_ids, config)
    logits, loss = score(model, input_ids, labels)
    loss.backward()
    golden = {"input_ids": input_ids, "labels": labels, "logits": logits, "loss": loss}
    golden.update({f"grad.{key}": value for key, value in gradients(model).items()})
    save(golden, folder / "golden.safetensors")

    weights = dict(model.named_parameters())
    with tempfile.TemporaryDirectory() as published:
        model.float().save_pretrained(published)
        save(load_file(pathlib.Path(published) / "model.safetensors"), folder / "model.safetensors")
    if name == "llama_qwen3_moe":
        save(weights, folder / "stacked.safetensors")
    # The error of Hugging Face's float32, which a float32 implementation cannot be expected to beat.
    single = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    distance = lambda value, exact: ((value - exact).abs().max() / exact.abs().max()).item()
    of_logits = single(input_ids).logits
    torch.nn.functional.cross_entropy(of_logits.flatten(0, 1), labels.view(-1), ignore_index=IGNORE).backward()
    apart = distance(of_logits, logits)
    apart_gradients = max(distance(w.grad, golden[f"grad.{key}"]) for key, w in single.named_parameters())
    assert apart < 2e-6 and apart_gradients < 3e-6, (apart, apart_gradients)
    print(f"{name}: loss {loss.item():.6f}, {sum(w.numel() for w in weights.values())} weights, logits up to "
          f"{logits.abs().max():.2f}, float32 is {apart:.1e} away, and its gradients {apart_gradients:.1e}")


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    for seed, (name, config) in enumerate(CONFIGS.items(), start=6060):
        make_case(root, name, config, seed)


if __name__ == "__main__":
    main()
