"""Derives expected results of the GPU benchmarks on an H100 SXM from bytes and operations. Nothing is measured.

    python3 benchmarks/cuda/expected.py > benchmarks/results/expected-h100.md
"""
from dataclasses import dataclass

from rows import CHOICES, LINEARS, MEMORY, SEQUENCES

PEAK = 989.4e12  # dense bf16, by NVIDIA's data sheet for the SXM module
BANDWIDTH = 3.35e12  # HBM3, by the same data sheet
COPY = 0.90 * BANDWIDTH  # the typical rate of a copy
KERNEL = 0.88 * COPY  # assumed rate of memory-bound kernels: a little above the target
LAUNCH = 1.5e-6  # seconds between two kernels of a graph


@dataclass
class Shape:
    """SmolLM-1.7B, the tokens of a microbatch, and a step's microbatches."""
    tokens: int = 16384
    microbatches: int = 8
    hidden: int = 2048
    layers: int = 24
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 64
    ffn: int = 8192
    vocab: int = 49152
    optimizer_layers: int = 6
    table_rows: int = 2048  # of the rotary table

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    def layer_parameters(self) -> int:
        return self.hidden * (2 * self.q + 2 * self.kv + 3 * self.ffn + 2)

    def parameters(self) -> int:
        return self.vocab * self.hidden + self.layers * self.layer_parameters() + self.hidden  # embeddings are tied


def memory_bytes(name: str, s: Shape, distinct: int) -> float:
    """Returns the bytes that a call must move: each input is read once, each output written once. `distinct`: token ids."""
    x = s.tokens * s.hidden
    act = s.tokens * s.ffn
    return {
        "rms_norm_forward": 4 * x + 4 * s.tokens + 2 * s.hidden,
        "rms_norm_backward": 8 * x + 4 * s.tokens + 10 * s.hidden,
        "layer_norm_forward": 4 * x + 8 * s.tokens + 4 * s.hidden,
        "layer_norm_backward": 6 * x + 8 * s.tokens + 18 * s.hidden,
        "swiglu_forward": 6 * act,
        "swiglu_backward": 10 * act,
        "rope_forward": 4 * s.tokens * (s.q + s.kv) + 4 * s.table_rows * s.head_dim,
        "rope_backward": 4 * s.tokens * (s.q + s.kv) + 4 * s.table_rows * s.head_dim,
        "residual_add": 6 * x,
        "dropout": 4 * x,
        "cast": 6 * s.ffn * s.hidden,
        "embedding_forward": 8 * s.tokens + 2 * s.hidden * (distinct + s.tokens),
        "embedding_backward": 8 * s.tokens + s.hidden * (2 * s.tokens + 8 * distinct),
        "embedding_backward_common_id": 8 * s.tokens + s.hidden * (2 * s.tokens + 8 * distinct),
        "cross_entropy_forward": 2 * s.tokens * s.vocab + 12 * s.tokens,
        "cross_entropy_backward": 4 * s.tokens * s.vocab + 20 * s.tokens,
        "adamw": 30 * s.optimizer_layers * s.layer_parameters(),
        "gradient_norm": 4 * s.optimizer_layers * s.layer_parameters(),
        "merge_lse": 10 * s.tokens * s.q + 12 * s.tokens * s.heads,
        "attention_delta": 4 * s.tokens * s.q + 4 * s.tokens * s.heads,
    }[name]


def linear_operations(name: str, s: Shape) -> float:
    """Returns the operations of each of the three products."""
    inner, outer = {"qkv": (s.hidden, s.q + 2 * s.kv), "attention_output": (s.q, s.hidden),
                    "gate_up": (s.hidden, 2 * s.ffn), "down": (s.ffn, s.hidden), "head": (s.hidden, s.vocab)}[name]
    return 2 * s.tokens * inner * outer


def attention_operations(direction: str, s: Shape, seq: int) -> float:
    """Returns the operations for the half of the square that the mask leaves: 2 products forward, 5 backward."""
    return {"forward": 2, "backward": 5}[direction] * 2 * s.tokens * seq / 2 * s.q


# ---- the step --------------------------------------------------------------------------------------------------------

RATES = {"product": 680e12, "weight gradient": 650e12}
# Rates forward and backward, by the size of a head. cuDNN's backward pass in a fixed order writes and reads a gradient
# of every score; it is expected to reach 110 to 150 TFLOP/s with heads of 64.
ATTENTION = {64: {"own": (200e12, 100e12), "cuDNN's": (350e12, 130e12), "cuDNN's, any order": (350e12, 230e12)},
             128: {"own": (230e12, 110e12), "cuDNN's": (450e12, 190e12), "cuDNN's, any order": (450e12, 340e12)}}
WHOSE = ("own", "cuDNN's", "cuDNN's, any order")

# Bytes for each token of a layer, as multiples of the hidden size and of the size between the MLP's products. Residual
# sums are fused into products and norms, which read one more array.
LAYER_BYTES = {
    "two RMS norms, forward": (8, 0),
    "rotary positions, forward": (8, 0),
    "SwiGLU, forward": (0, 6),
    "two residual sums, read by the products": (4, 0),
    "SwiGLU, backward": (0, 10),
    "two RMS norms with the residual's gradient, backward": (16, 0),
    "rotary positions, backward": (8, 0),
    "row products of attention, backward": (4, 0),
}
LAUNCHES_OF_A_LAYER = 26  # in a microbatch; the next line counts the embedding, the last norm and the loss
LAUNCHES_OF_A_MICROBATCH = 19
# The heuristic's first choice is within 0.95 to 1.00 of the best algorithm. Each line is a row of the measured table.
SETTINGS = (("own attention (`--attention own`)", "own", RATES["product"]),
            ("cuDNN's attention: the default", "cuDNN's", RATES["product"]),
            ("its gradients summed in any order (`--attention-sums any`)", "cuDNN's, any order", RATES["product"]),
            ("products chosen by measuring (`--products measured`)", "cuDNN's", 1.025 * RATES["product"]),
            ("both: the setting for speed", "cuDNN's, any order", 1.025 * RATES["product"]))
MODELS = {"SmolLM-1.7B": Shape(),
          "1.3B, heads of 128": Shape(layers=24, heads=16, kv_heads=16, head_dim=128, ffn=5504, vocab=32000),
          "3B, heads of 128": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, vocab=128256),
          "8 layers of 8B": Shape(hidden=4096, layers=8, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)}


def launches(s: Shape) -> int:
    """Returns the launches of a step with plait's own attention. A sort counts as one. cuBLASLt adds some if it splits sums."""
    return (s.microbatches * (LAUNCHES_OF_A_LAYER * s.layers + LAUNCHES_OF_A_MICROBATCH)
            + 3 * s.layers + 15)  # weights, norm and optimizer


def step(s: Shape, seq: int, attention: str, product: float = RATES["product"]) -> dict[str, float]:
    """Returns the seconds of a step's parts. The first microbatch writes the weights' gradients, and the others add."""
    products = s.layers * sum(linear_operations(n, s) for n in LINEARS if n != "head") + linear_operations("head", s)
    gradient = product * RATES["weight gradient"] / RATES["product"]
    forward, backward = ATTENTION[s.head_dim][attention]
    per_token = sum(h * s.hidden + f * s.ffn for h, f in LAYER_BYTES.values())
    n, m = s.parameters(), s.microbatches
    return {
        "products": (2 * m + 1) * products / product + (m - 1) * products / gradient,
        "attention": m * s.layers * (attention_operations("forward", s, seq) / forward
                                 + attention_operations("backward", s, seq) / backward),
        "memory-bound kernels of the layers": m * s.layers * s.tokens * per_token / KERNEL,
        "embedding, last norm, loss": m * (s.tokens * (6 * s.vocab + 20 * s.hidden)) / KERNEL,
        "the gradients' norm, AdamW": (4 + 30) * n / KERNEL,
        "launches": LAUNCH * launches(s),
    }


def model_operations(s: Shape, seq: int) -> float:
    """Returns the operations of a microbatch."""
    return s.tokens * (6 * s.parameters() + 12 * s.layers * s.q * seq)


def utilisation(s: Shape, seq: int, attention: str, product: float = RATES["product"]) -> float:
    return s.microbatches * model_operations(s, seq) / sum(step(s, seq, attention, product).values()) / PEAK


def choice(name: str, s: Shape) -> float:
    """Returns the factor by which plait's way is faster, by bytes and operations."""
    inner, outer = s.hidden, 2 * s.ffn
    ops = 2 * s.tokens * inner * outer
    product, adding = ops / RATES["product"], ops / RATES["weight gradient"]
    return {
        "rope_into_copy": 4 / 2,  # passes over the keys: copied, read and written again; or read and written
        "residual_norm": 5 / 4,  # arrays: the sum reads two and writes one, the norm reads and writes one
        "first_gradient": (4 * inner * outer / KERNEL + adding) / product,
        "bias_gradient": (adding + 2 * s.tokens * outer / KERNEL) / adding,
        "narrow_gradient": adding / product,
        "narrow_adamw": 30 / 20,  # bytes of an element: master and weight 10, gradient 4 or 2, moments 16 or 8
    }.get(name, 1.0)


def ring(s: Shape, attention: str = "cuDNN's") -> float:
    """Returns the time of one call for all keys of a sequence over that of a ring of four, whose partial results are merged,
    for the last rank's queries."""
    queries = s.tokens / 4
    ops = 4 * queries * s.tokens * (3 / 4 + 1 / 8) * s.q
    merging = 4 * queries * (10 * s.q + 12 * s.heads) / KERNEL
    once = ops / ATTENTION[s.head_dim][attention][0]
    return once / (once + merging)


def memory(s: Shape) -> dict[str, float]:
    """Returns the bytes of the parts of a step's memory."""
    kept = 16 * s.hidden + 6 * s.ffn + 4 * s.heads + 8  # bytes of a token in a layer: inputs, q k v, gate, up, ...
    return {"weights, masters, gradients, two averages (18 bytes each)": 18 * s.parameters(),
            "kept activations of the layers": s.layers * s.tokens * kept,
            "logits": 2 * s.tokens * s.vocab,
            "what a layer's backward pass needs for itself": s.tokens * (6 * s.ffn + 6 * s.hidden)}


def fixed_order_bytes(s: Shape, seq: int) -> int:
    """Returns the scratch bytes of cuDNN's gradients in a fixed order: a bf16 number for each score."""
    return 2 * s.tokens * seq * s.heads


# ---- the page --------------------------------------------------------------------------------------------------------


def page(s: Shape) -> list[str]:
    distinct = round(s.vocab * (1 - (1 - 1 / s.vocab) ** s.tokens))
    common = round(s.vocab * (1 - (1 - 1 / s.vocab) ** (s.tokens / 2)))
    out = [
        "# H100 SXM: what to expect (derived, not measured)", "",
        "No figure on this page was measured. `benchmarks/cuda/expected.py` makes it from bytes, operations and the rates",
        "named here; measured results have files of their own. The model is SmolLM-1.7B in bf16 with float masters and",
        f"gradients: hidden {s.hidden}, {s.layers} layers, {s.heads} heads of {s.head_dim}, ffn {s.ffn}, vocabulary "
        f"{s.vocab}, {s.parameters() / 1e9:.3f} billion", f"parameters; {s.tokens} tokens in a microbatch, {s.microbatches} microbatches in a step.", "",
        "Assumed: "
        f"{PEAK / 1e12:.0f} TFLOP/s and {BANDWIDTH / 1e12:.2f} TB/s (data sheet), copies at 90 % of that "
        f"({COPY / 1e12:.2f} TB/s), memory-bound", f"kernels at 88 % of a copy ({KERNEL / 1e12:.2f} TB/s), products at "
        f"{RATES['product'] / 1e12:.0f} TFLOP/s and {RATES['weight gradient'] / 1e12:.0f} where a float gradient is added to",
        "(the GPU lowers its clock under such load).", "",
        "## Memory-bound kernels", "",
        "Expected of each: 0.85 to 0.95 of a copy, so about these times.", "",
        "| kernel | bytes | microseconds |", "|---|---:|---:|"]
    for name, what in MEMORY.items():
        size = memory_bytes(name, s, common if name.endswith("common_id") else distinct)
        out.append(f"| {what} | {size / 1e6:.0f} MB | {1e6 * size / KERNEL:.0f} |")
    out += ["",
            "Below that may fall: dropout, whose random numbers cost about as many integer operations as its bytes leave",
            "time for (0.7 to 0.9); the embedding's gradient, eight launches of which six sort token ids (0.6 to 0.8), and",
            "less where one id is frequent; short kernels (below 50 microseconds), which pay 1 to 2 for their launch.", "",
            "## Linears", "", "| linear | operations | forward, ms | weight gradient, ms |", "|---|---:|---:|---:|"]
    for name, what in LINEARS.items():
        ops = linear_operations(name, s)
        out.append(f"| {what} | {ops / 1e12:.2f} T | {1e3 * ops / RATES['product']:.2f} | "
                   f"{1e3 * ops / RATES['weight gradient']:.2f} |")
    out += ["", "The heuristic's first choice is expected within 0.95 to 1.00 of the best algorithm for these sizes.", "",
            "## Attention", "",
            "Causal, counting half of the square. Own kernels use `mma.sync`, not the `wgmma` that alone reaches more than",
            "about 60 % of the tensor cores, and make the gradients in two kernels with 7 products instead of 5. cuDNN's",
            "gradients in a fixed order write and read one of every score (110 to 150 TFLOP/s with heads of 64).", "",
            "| whose | heads of | forward, TFLOP/s | backward, TFLOP/s |", "|---|---:|---:|---:|"]
    for size, rates in ATTENTION.items():
        for name, (forward, backward) in rates.items():
            out.append(f"| {name} | {size} | about {forward / 1e12:.0f} | about {backward / 1e12:.0f} |")
    out += ["", "That fixed order takes memory for itself, which grows with the square of the sequence:", "",
            "| sequence | " + " | ".join(str(seq) for seq in (2048, 4096, 16384, 32768)) + " |", "|---|" + "---:|" * 4,
            "| GiB | " + " | ".join(f"{fixed_order_bytes(Shape(tokens=max(s.tokens, seq)), seq) / 2**30:.1f}"
                                    for seq in (2048, 4096, 16384, 32768)) + " |"]
    out += ["", "A ring of four ranks that share one sequence, whose partial results are merged in float, is expected to reach",
            f"{ring(s):.2f} of one call on the last rank (forward, cuDNN's).", "", "## Choices", "", "What plait does beside what that replaces, by bytes and operations; 1.00 where both are alike.", "",
            "| choice | times as fast | target |", "|---|---:|---:|"]
    for name, (what, least) in CHOICES.items():
        out.append(f"| {what} | {choice(name, s):.2f} | {'' if least is None else f'{least:g}'} |")
    out += ["", "## A training step", "", "Milliseconds:", "",
            "| part | " + " | ".join(f"{seq}, {name} attention" for seq in SEQUENCES for name in WHOSE) + " |",
            "|---|" + "---:|" * (len(SEQUENCES) * len(WHOSE))]
    columns = [(seq, name) for seq in SEQUENCES for name in WHOSE]
    for part in step(s, SEQUENCES[0], "own"):
        out.append(f"| {part} | " + " | ".join(f"{1e3 * step(s, *c)[part]:.1f}" for c in columns) + " |")
    out.append("| sum | " + " | ".join(f"{1e3 * sum(step(s, *c).values()):.0f}" for c in columns) + " |")
    out.append("| tokens per second | " + " | ".join(f"{s.microbatches * s.tokens / sum(step(s, *c).values()):.0f}" for c in columns) + " |")
    out.append("| utilisation (6 N + 12 L h s) | " + " | ".join(f"**{utilisation(s, *c):.3f}**" for c in columns) + " |")
    out += ["", "Bytes of a layer's memory-bound kernels for each token, h being the hidden size and f ffn:", "",
            "| kernels | bytes |", "|---|---|"]
    for name, (h, f) in LAYER_BYTES.items():
        out.append(f"| {name} | {' + '.join(f'{n} {letter}' for n, letter in ((h, 'h'), (f, 'f')) if n)} |")
    out += ["", "Settings that a run has, and the utilisation of each (at 4096 in the last column):", "",
            "| setting | " + " | ".join(MODELS) + f" | {next(iter(MODELS))}, 4096 |", "|---|" + "---:|" * (len(MODELS) + 1)]
    for setting, attention, product in SETTINGS:
        out.append(f"| {setting} | " + " | ".join(f"{utilisation(m, 2048, attention, product):.3f}" for m in MODELS.values())
                   + f" | {utilisation(s, 4096, attention, product):.3f} |")
    rates = (600e12, 650e12, 680e12, 700e12, 750e12)
    out += ["", "Utilisation if the products ran at other rates:", "",
            "| | " + " | ".join(f"{rate / 1e12:.0f} TFLOP/s" for rate in rates) + " |", "|---|" + "---:|" * len(rates)]
    for seq, name in columns:
        out.append(f"| {seq}, {name} attention | " + " | ".join(f"{utilisation(s, seq, name, r):.3f}" for r in rates) + " |")
    out += ["", "Memory, in GiB:", "", "| what | |", "|---|---:|"]
    for name, size in memory(s).items():
        out.append(f"| {name} | {size / 2**30:.1f} |")
    out.append(f"| sum | {sum(memory(s).values()) / 2**30:.1f} |")
    return out + [""] + conclusions(s)


def conclusions(s: Shape) -> list[str]:
    target = 0.60
    out = ["## Can the step reach 60 %?", ""]
    for seq in SEQUENCES:
        for name in WHOSE:
            parts = step(s, seq, name)
            rest = sum(parts.values()) - parts["products"]
            allowed = s.microbatches * model_operations(s, seq) / (target * PEAK) - rest
            needed = parts["products"] * RATES["product"] / allowed / 1e12 if allowed > 0 else float("inf")
            out.append(f"* {seq}, {name} attention: {utilisation(s, seq, name):.3f} expected; products would have to run at "
                       f"{needed:.0f} TFLOP/s for {target:.2f}.")
    fast = SETTINGS[-1][1:]
    seq = SEQUENCES[0]
    parts = step(s, seq, *fast)
    whole, operations = sum(parts.values()), s.microbatches * model_operations(s, seq) / PEAK

    def saved(seconds: float) -> str:
        return f"{operations / (whole - seconds) - operations / whole:+.3f}"

    passes = s.microbatches * s.layers * s.tokens / KERNEL
    attention = s.microbatches * s.layers * (attention_operations("forward", s, seq) / 420e12
                                             + attention_operations("backward", s, seq) / 300e12)
    alone = utilisation(Shape(microbatches=1), seq, *fast)
    return out + [
        "", f"The setting for speed is expected at {operations / whole:.3f}. What would add to it:", "",
        "| change | utilisation |", "|---|---:|",
        f"| attention on `wgmma`, in a fixed order, at 420 and 300 TFLOP/s | {saved(parts['attention'] - attention)} |",
        f"| products at 750 TFLOP/s | {saved(parts['products'] * (1 - fast[1] / 750e12))} |",
        f"| SwiGLU inside the products (8 of 16 f bytes) | {saved(passes * 8 * s.ffn)} |",
        f"| rotary positions inside attention (16 of 48 h bytes) | {saved(passes * 16 * s.hidden)} |",
        "", f"The optimizer's time is spread over the microbatches: with a single one it would be {alone:.3f}."]


if __name__ == "__main__":
    print("\n".join(page(Shape())))
