"""make_conversion_goldens.py [FOLDER]: one small Llama's weights in the formats of three tools, in FOLDER/llama_conversions.

    hugging_face.safetensors   as transformers names and orders them, config.json beside it
    megatron.safetensors       as Megatron-LM does: the rows of each kv head's queries, key and value in one tensor,
                               and those of gate and up (megatron/core, as its Llama loaders fuse them)
    meta.safetensors           as Meta's files do: rows of q and k for rotary pairs, by the inverse of `permute` in
                               transformers' convert_llama_weights_to_hf.py

Made with torch 2.15.0; needs safetensors.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 10, 6, 2, 4, 7, 5, 2
MEGATRON = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight"}
META = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.o_proj.weight": "attention.wo.weight", "self_attn.v_proj.weight": "attention.wv.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight", "mlp.down_proj.weight": "feed_forward.w2.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight"}


def layer_weights() -> dict:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"input_layernorm.weight": [HIDDEN], "post_attention_layernorm.weight": [HIDDEN],
              "self_attn.q_proj.weight": [q, HIDDEN], "self_attn.k_proj.weight": [kv, HIDDEN],
              "self_attn.v_proj.weight": [kv, HIDDEN], "self_attn.o_proj.weight": [HIDDEN, q],
              "mlp.gate_proj.weight": [FFN, HIDDEN], "mlp.up_proj.weight": [FFN, HIDDEN],
              "mlp.down_proj.weight": [HIDDEN, FFN]}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def fused_qkv(w: dict) -> torch.Tensor:
    groups = [w[f"self_attn.{x}_proj.weight"].view(KV_HEADS, -1, HIDDEN) for x in "qkv"]
    return torch.cat(groups, dim=1).reshape(-1, HIDDEN)


def permute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """As in convert_llama_weights_to_hf.py: from Meta's order to Hugging Face's."""
    rows, columns = w.shape
    return w.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = w.shape
    back = w.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    assert torch.equal(permute(back, heads), w) and not torch.equal(back, w)
    return back


def main() -> None:
    torch.manual_seed(5)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    folder = root / "llama_conversions"
    folder.mkdir(exist_ok=True)
    table, norm, head = torch.randn(VOCAB, HIDDEN), torch.randn(HIDDEN), torch.randn(VOCAB, HIDDEN)
    plain = {"model.embed_tokens.weight": table, "model.norm.weight": norm, "lm_head.weight": head}
    megatron = {"embedding.word_embeddings.weight": table, "decoder.final_layernorm.weight": norm,
                "output_layer.weight": head}
    meta = {"tok_embeddings.weight": table, "norm.weight": norm, "output.weight": head,
            "rope.freqs": torch.randn(HEAD_DIM // 2)}
    for i in range(LAYERS):
        w = layer_weights()
        plain.update({f"model.layers.{i}.{name}": value for name, value in w.items()})
        megatron.update({f"decoder.layers.{i}.{MEGATRON[name]}": w[name] for name in MEGATRON})
        megatron[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] = fused_qkv(w)
        megatron[f"decoder.layers.{i}.mlp.linear_fc1.weight"] = torch.cat([w["mlp.gate_proj.weight"],
                                                                          w["mlp.up_proj.weight"]])
        meta.update({f"layers.{i}.{META[name]}": w[name] for name in META})
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            meta[f"layers.{i}.attention.w{name}.weight"] = unpermute(w[f"self_attn.{name}_proj.weight"], heads)
    for name, tensors in (("hugging_face", plain), ("megatron", megatron), ("meta", meta)):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
        (folder / f"{name}.safetensors").chmod(0o644)
    config = dict(model_type="llama", hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                  head_dim=HEAD_DIM, intermediate_size=FFN, vocab_size=VOCAB, num_hidden_layers=LAYERS)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
