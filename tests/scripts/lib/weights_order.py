"""weights_order.py DIRECTORY ORDER OUT: converts a model directory of Hugging Face to the names and order of Megatron or Meta.

Independent of plait, and copies rows of bytes. Megatron has the queries of each kv head, its key and its value in one
tensor, and gate above up. In Meta's order the rows i and i + head_dim / 2 of a head are neighbours.
"""
import json
import pathlib
import sys

import safetensors_file

MEGATRON = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight", "mlp.down_proj.weight": "mlp.linear_fc2.weight"}
META = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.v_proj.weight": "attention.wv.weight", "self_attn.o_proj.weight": "attention.wo.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight", "mlp.down_proj.weight": "feed_forward.w2.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight"}
TOP = {"megatron": {"model.embed_tokens.weight": "embedding.word_embeddings.weight",
                    "model.norm.weight": "decoder.final_layernorm.weight", "lm_head.weight": "output_layer.weight"},
       "meta": {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
                "lm_head.weight": "output.weight"}}


def rows_of(tensor: tuple) -> tuple:
    """The dtype, the shape of a row, and the bytes of each row."""
    dtype, (rows, *rest), data = tensor
    width = len(data) // rows
    return dtype, rest, [data[i * width:(i + 1) * width] for i in range(rows)]


source, order, out = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
config = json.loads((source / "config.json").read_text())
heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
d = config.get("head_dim") or config["hidden_size"] // heads
theirs = {name: rows_of(tensor) for name, tensor in safetensors_file.read(source / "model.safetensors")[1].items()}
tensors = {TOP[order][name]: theirs[name] for name in TOP[order] if name in theirs}
for i in range(config["num_hidden_layers"]):
    def of(name: str) -> tuple:
        return theirs[f"model.layers.{i}.{name}"]

    q, k, v = (of(f"self_attn.{x}_proj.weight") for x in "qkv")
    if order == "megatron":
        prefix, table, group = f"decoder.layers.{i}.", MEGATRON, heads // kv_heads
        fused = [row for h in range(kv_heads) for part, n in ((q, group), (k, 1), (v, 1))
                 for row in part[2][h * n * d:(h + 1) * n * d]]
        tensors[prefix + "self_attention.linear_qkv.weight"] = (q[0], q[1], fused)
        gate, up = of("mlp.gate_proj.weight"), of("mlp.up_proj.weight")
        tensors[prefix + "mlp.linear_fc1.weight"] = (gate[0], gate[1], gate[2] + up[2])
    else:
        prefix, table = f"layers.{i}.", META
        for name, part, n in (("wq", q, heads), ("wk", k, kv_heads)):
            rows = [part[2][h * d + j + half * d // 2] for h in range(n) for j in range(d // 2) for half in (0, 1)]
            tensors[prefix + f"attention.{name}.weight"] = (part[0], part[1], rows)
    for name, other in table.items():
        tensors[prefix + other] = of(name)
out.mkdir()
(out / "config.json").write_text((source / "config.json").read_text())
safetensors_file.write(out / "model.safetensors", {name: (dtype, [len(rows), *rest], b"".join(rows))
                                                   for name, (dtype, rest, rows) in tensors.items()})
