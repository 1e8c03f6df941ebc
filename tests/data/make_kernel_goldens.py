"""make_kernel_goldens.py [FOLDER]: small golden values of PyTorch and of transformers, computed in float64, as JSON.

    adamw.json            torch.optim.AdamW, five steps, with and without clipping by global norm
    cross_entropy.json    torch cross_entropy with label smoothing and ignored tokens, and its gradient
    norms.json            RMSNorm and LayerNorm: outputs and gradients
    rope_frequencies.json inverse frequencies and rotations of Llama-3's scaled rotary embedding, and of the plain one
    attention.json        causal grouped-query attention: output and gradients
    router_losses.json    losses of routers: balance (Mixtral's) and z-loss (Switch's), with the gradients of scores

Arrays are flat, in row-major order, with their shape beside them. Made with torch 2.15.0 and transformers 5.23.0.
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from make_llama_goldens import AllDouble


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # Few digits keep the files short, and the inputs exact in float32 as well.
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 256).round() / 256


def flat(tensor: torch.Tensor) -> dict:
    return {"shape": list(tensor.shape), "values": tensor.detach().reshape(-1).tolist()}


def adamw(generator: torch.Generator) -> dict:
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    start = {"matrix": random(generator, 5, 3), "vector": random(generator, 7)}
    gradients = [{name: random(generator, *value.shape) * scale for name, value in start.items()}
                 for scale in (1.0, 4.0, 0.25, 0.001953125, 2.0)]

    def run(max_norm: float | None) -> list:
        # Vectors are spared weight decay, as is usual for norms and biases.
        values = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
        groups = [{"params": [values["matrix"]], "weight_decay": settings["weight_decay"]},
                  {"params": [values["vector"]], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]),
                                      eps=settings["eps"])
        steps = []
        for gradient in gradients:
            for name, value in values.items():
                value.grad = gradient[name].clone()
            limit = float("inf") if max_norm is None else max_norm
            norm = torch.nn.utils.clip_grad_norm_(values.values(), limit)
            optimizer.step()
            steps.append({"grad_norm": norm.item(),
                          **{name: {**flat(value), "m": optimizer.state[value]["exp_avg"].reshape(-1).tolist(),
                                    "v": optimizer.state[value]["exp_avg_sq"].reshape(-1).tolist()}
                             for name, value in values.items()}})
        return steps

    return {"settings": settings, "decayed": ["matrix"], "start": {name: flat(value) for name, value in start.items()},
            "gradients": [{name: flat(value) for name, value in gradient.items()} for gradient in gradients],
            "unclipped": run(None),
            # gradients are scaled by min(1, max_norm / (norm + clip_eps))
            "max_norm": 1.0, "clip_eps": 1e-6, "clipped": run(1.0)}


def cross_entropy(generator: torch.Generator) -> dict:
    ignore = -100
    logits = (3 * random(generator, 6, 11)).requires_grad_()
    labels = torch.tensor([3, 10, ignore, 0, 7, ignore])
    cases = []
    for smoothing in (0.0, 0.1):
        for z_loss in (0.0, 0.01):
            logits.grad = None
            loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=ignore)
            # The z-loss is z times the mean over counted tokens of the squared logarithm of the softmax's denominator.
            counted = labels != ignore
            total = loss + z_loss * torch.logsumexp(logits, dim=-1)[counted].square().mean()
            total.backward()
            cases.append({"label_smoothing": smoothing, "z_loss": z_loss, "loss": total.item(),
                          "dlogits": flat(logits.grad)})
    return {"ignore_index": ignore, "logits": flat(logits), "labels": labels.tolist(), "cases": cases}


def norms(generator: torch.Generator) -> dict:
    eps, rows, hidden = 1e-5, 4, 12
    x, dy = random(generator, rows, hidden), random(generator, rows, hidden)
    weight, bias = 1 + random(generator, hidden) / 4, random(generator, hidden) / 4

    def run(function, *inputs: torch.Tensor) -> dict:
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = function(*leaves)
        y.backward(dy)
        names = ("dx", "dweight", "dbias")
        return {"y": flat(y), **{name: flat(leaf.grad) for name, leaf in zip(names, leaves)}}

    return {"eps": eps, "x": flat(x), "weight": flat(weight), "bias": flat(bias), "dy": flat(dy),
            "rms_norm": run(lambda x, w: functional.rms_norm(x, (hidden,), w, eps), x, weight),
            "layer_norm": run(lambda x, w, b: functional.layer_norm(x, (hidden,), w, b, eps), x, weight, bias)}


def rope(generator: torch.Generator) -> dict:
    published = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}
    cases = []
    # Llama-3.1-8B, Llama-3.2-1B, Llama-2-7B
    for name, head_dim, theta, scaling in (("llama-3.1-8b", 128, 500000.0, published),
                                           ("llama-3.2-1b", 64, 500000.0, {**published, "factor": 32.0}),
                                           ("llama-2-7b", 128, 10000.0, None)):
        config = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, num_key_value_heads=2, vocab_size=8,
                             max_position_embeddings=131072,
                             rope_parameters={"rope_theta": theta, **(scaling or {"rope_type": "default"})})
        with AllDouble():
            rotary = LlamaRotaryEmbedding(config)
            assert rotary.inv_freq.dtype == torch.float64
            positions = torch.tensor([[0, 1, 100, 8191]])
            x = random(generator, 1, 1, positions.shape[1], head_dim)
            cos, sin = rotary(x, positions)
            y, _ = apply_rotary_pos_emb(x, x, cos, sin)
        case = {"name": name, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling,
                "inv_freq": rotary.inv_freq.tolist(), "attention_factor": float(rotary.attention_scaling)}
        if head_dim == 64:
            # Rotated by halves: element i goes with i + head_dim / 2.
            case |= {"positions": positions[0].tolist(), "x": flat(x[0, 0]), "y": flat(y[0, 0])}
        cases.append(case)
    assert "llama3" in ROPE_INIT_FUNCTIONS
    return {"cases": cases}


def attention(generator: torch.Generator) -> dict:
    batch, heads, kv_heads, seq, head_dim = 2, 4, 2, 9, 4
    q, k, v = (random(generator, batch, count, seq, head_dim).requires_grad_() for count in (heads, kv_heads, kv_heads))
    dout = random(generator, batch, heads, seq, head_dim)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(dout)
    return {"order": "batch, heads, seq, head_dim", "q": flat(q), "k": flat(k), "v": flat(v), "out": flat(out),
            "dout": flat(dout), "dq": flat(q.grad), "dk": flat(k.grad), "dv": flat(v.grad)}


def router_losses(generator: torch.Generator) -> dict:
    tokens, experts = 8, 6
    scores = (2 * random(generator, tokens, experts)).requires_grad_()
    cases = []
    with AllDouble():
        for chosen in (1, 3):
            for balance, z_loss in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.25)):
                scores.grad = None
                loss = (balance * load_balancing_loss_func((scores,), experts, chosen)
                        + z_loss * router_z_loss_func(scores[None]))
                assert loss.dtype == torch.float64
                loss.backward()
                cases.append({"chosen": chosen, "balance": balance, "z_loss": z_loss, "loss": loss.item(),
                              "dscores": flat(scores.grad)})
    return {"scores": flat(scores), "cases": cases}


def main() -> None:
    torch.set_num_threads(1)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    made = {"adamw": adamw, "cross_entropy": cross_entropy, "norms": norms, "rope_frequencies": rope,
            "attention": attention, "router_losses": router_losses}
    for seed, (name, make) in enumerate(made.items(), start=77):
        golden = make(torch.Generator().manual_seed(seed))
        (root / f"{name}.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
