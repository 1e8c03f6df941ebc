"""make_kernel_goldens.py [FOLDER]: small golden values of PyTorch and of transformers, computed in float64, as JSON.

    adamw.json            torch.optim.AdamW, five steps, with and without clipping by global norm
    cross_entropy.json    torch cross_entropy with label smoothing and ignored tokens, and its gradient
    norms.json            RMSNorm and LayerNorm: outputs and gradients
    rope_frequencies.json inverse frequencies and rotations of Llama-3's scaled rotary embedding, and of the plain one
    attention.json        grouped-query attention by FlexAttention, under masks, with documents, a cap of scores, ALiBi
                          and sinks: outputs, lse and gradients. Caps are checked against Gemma 2's attention, and
                          sinks against gpt-oss's, both of transformers
    router_losses.json    losses of routers: balance (Mixtral's) and z-loss (Switch's), with the gradients of scores

Arrays are flat, in row-major order, next to their shapes. Made with torch 2.15.0 and transformers 5.23.0.
"""
import json
import math
import pathlib
import sys
import types

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as functional
from transformers import LlamaConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from make_llama_goldens import AllDouble


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # Few digits keep the files short, and the inputs exact in float32 too.
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 256).round() / 256


def flat(tensor: torch.Tensor) -> dict:
    return {"shape": list(tensor.shape), "values": tensor.detach().reshape(-1).tolist()}


def adamw(generator: torch.Generator) -> dict:
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    start = {"matrix": random(generator, 5, 3), "vector": random(generator, 7)}
    gradients = [{name: random(generator, *value.shape) * scale for name, value in start.items()}
                 for scale in (1.0, 4.0, 0.25, 0.001953125, 2.0)]

    def run(max_norm: float | None) -> list:
        # Vectors have no weight decay, as is usual for norms and biases.
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
            # Rotated by halves: element i is paired with element i + head_dim / 2.
            case |= {"positions": positions[0].tolist(), "x": flat(x[0, 0]), "y": flat(y[0, 0])}
        cases.append(case)
    assert "llama3" in ROPE_INIT_FUNCTIONS
    return {"cases": cases}


# The numbers of positions before and after its own that a query sees (None: all), and of first ones that all see.
MASKS = {"causal": (None, 0, 0), "full": (None, None, 0), "window": (3, 0, 0), "local": (2, 3, 0),
         "all before, two after": (None, 2, 0), "prefix": (None, 0, 5)}
DOCUMENTS = [0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8]
SCORES = [("causal", {}), ("full", {}), ("window", {}), ("local", {}), ("all before, two after", {}), ("prefix", {}),
          ("causal", {"cap": 0.5}), ("causal", {"alibi": True}), ("causal", {"sinks": True}),
          ("causal", {"documents": True}), ("full", {"alibi": True}), ("local", {"cap": 2.0, "sinks": True}),
          ("prefix", {"alibi": True, "sinks": True}), ("window", {"cap": 0.5, "alibi": True, "documents": True}),
          ("full", {"cap": 2.0, "alibi": True, "sinks": True}),
          ("window", {"cap": 2.0, "alibi": True, "sinks": True, "documents": True})]


def alibi_slopes(heads: int) -> list[float]:
    """As in the paper's code (github.com/ofirpress/attention_with_linear_biases, get_slopes)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-2 ** -(math.log2(heads) - 3))
        return [start * start ** i for i in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(fewer) + alibi_slopes(2 * fewer)[0::2][:heads - fewer]


def check_with_transformers(how: dict, seen: torch.Tensor, q, k, v, sinks, out: torch.Tensor) -> None:
    module = types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, sinks=sinks)
    hidden = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)[None, None]
    scaling = q.shape[-1] ** -0.5
    if how.get("alibi") or (how.get("cap") and how.get("sinks")):
        return
    if how.get("sinks"):
        other, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, hidden, scaling)
    else:
        other, _ = modeling_gemma2.eager_attention_forward(module, q, k, v, hidden, scaling=scaling,
                                                           softcap=how.get("cap"))
    assert (other.transpose(1, 2) - out).abs().max() < 1e-6  # their softmax is in float32


def attention(generator: torch.Generator) -> dict:
    heads, kv_heads, seq, head_dim = 3, 1, 11, 2
    shapes = {"q": (heads, seq, head_dim), "k": (kv_heads, seq, head_dim), "v": (kv_heads, seq, head_dim),
              "dout": (heads, seq, head_dim), "sinks": (heads,)}
    inputs = {name: random(generator, *shape) for name, shape in shapes.items()}
    slopes, starts = torch.tensor(alibi_slopes(heads), dtype=torch.float64), torch.tensor(DOCUMENTS)
    flex._validate_device = lambda *_: None  # it refuses gradients on a processor; its plain formula has them
    cases = []
    for mask, how in SCORES:
        q, k, v, sinks = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks"))
        before, after, prefix = MASKS[mask]
        cap = torch.tensor(how.get("cap", 0.0), dtype=torch.float64)
        torch._dynamo.reset()  # otherwise numbers that differ between cases become variables of one program

        def sees(batch, head, i, j):
            seen = j >= (starts[i] if how.get("documents") else 0)
            if before is not None:
                seen = seen & (j >= i - before)
            return seen & ((j <= i + after) | (j < prefix)) if after is not None else seen

        def change(score, batch, head, i, j):
            score = cap * torch.tanh(score / cap) if how.get("cap") else score
            return score - slopes[head] * (i - j).abs() if how.get("alibi") else score

        block_mask = flex.create_block_mask(sees, None, None, seq, seq, device="cpu")
        out, aux = flex.flex_attention(q[None], k[None], v[None], score_mod=change, block_mask=block_mask,
                                       enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
        lse = aux.lse
        if how.get("sinks"):
            out = out * torch.sigmoid(lse - sinks[None, :, None])[..., None]
            lse = torch.logaddexp(lse, sinks[None, :, None])
        assert out.dtype == torch.float64
        i, j = torch.meshgrid(torch.arange(seq), torch.arange(seq), indexing="ij")
        with torch.no_grad():
            check_with_transformers(how, sees(0, 0, i, j), q[None], k[None], v[None], sinks, out)
        out.backward(inputs["dout"][None])
        case = {"before": before, "after": after, "prefix": prefix, **how, "lse": flat(lse[0]),
                "dsinks": flat(sinks.grad if how.get("sinks") else torch.zeros(heads))}
        by_token = {"out": out[0], "dq": q.grad, "dk": k.grad, "dv": v.grad}
        cases.append(case | {name: flat(value.transpose(0, 1)) for name, value in by_token.items()})
    by_token = {name: flat(value if name == "sinks" else value.transpose(0, 1)) for name, value in inputs.items()}
    return {"order": "seq, heads, head_dim", **by_token, "documents": DOCUMENTS, "cases": cases}


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
