"""The rows of the table of GPU benchmarks: id, text, unit, target, and whether less is better."""
from typing import NamedTuple

SEQUENCES = (2048, 4096)


class Row(NamedTuple):
    id: str
    what: str
    unit: str
    target: float | None = None
    at_most: bool = False
    optional: bool = False  # not missing if it was not built


MEMORY = {
    "rms_norm_forward": "RMS norm, forward",
    "rms_norm_backward": "RMS norm with the residual's gradient, backward",
    "layer_norm_forward": "layer norm, forward",
    "layer_norm_backward": "layer norm, backward",
    "swiglu_forward": "SwiGLU, forward",
    "swiglu_backward": "SwiGLU, backward",
    "rope_forward": "rotary positions, forward",
    "rope_backward": "rotary positions, backward",
    "residual_add": "residual sum",
    "dropout": "dropout",
    "cast": "cast, float to bf16",
    "embedding_forward": "embedding, forward",
    "embedding_backward": "embedding, backward",
    "embedding_backward_common_id": "embedding, backward, half of the tokens alike",
    "cross_entropy_forward": "cross entropy, forward",
    "cross_entropy_backward": "cross entropy, backward",
    "adamw": "AdamW over 54 tensors",
    "gradient_norm": "norm of 54 gradients",
    "merge_lse": "merging two attentions",
    "attention_delta": "row products of attention's gradients",
}
# No target if half of all tokens have one id: one row of the embedding's table then has half of the sums.
NO_TARGET = {"embedding_backward_common_id"}
LINEARS = {"qkv": "q, k, v", "attention_output": "attention output", "gate_up": "gate and up", "down": "down",
           "head": "output projection"}
PASSES = {"forward": "forward", "input_gradient": "gradient of the input", "weight_gradient": "gradient of the weight"}
# plait's choices, with the targets of their factors; None: no target.
CHOICES = {
    "rope_into_copy": ("keys rotated as they are copied", 1.2),
    "residual_norm": ("a residual sum within the next norm", 1.1),
    "first_gradient": ("the first gradient of a weight, written", 1.0),
    "bias_gradient": ("a bias' gradient beside its weight's", 1.0),
    "narrow_gradient": ("a weight's gradient, added in bf16", None),
    "narrow_adamw": ("AdamW with gradients and moments in bf16", 1.3),
    "sum_squares": ("a sum of squares, beside CUB's", 0.95),
    "sum": ("a sum, beside CUB's", 0.95),
    "cast": ("a map, beside CUB's", 0.95),
    "sort": ("the sort of tokens, beside CUB's call alone", 0.9),
}


def rows() -> list[Row]:
    all_rows = [Row("copy.kernel", "copy by a kernel", "TB/s"), Row("copy.memcpy", "copy by cudaMemcpy", "TB/s")]
    for name, what in MEMORY.items():
        all_rows.append(Row(f"memory.{name}", what, "of a copy", None if name in NO_TARGET else 0.85))
    for name, what in LINEARS.items():
        for key, which in PASSES.items():
            all_rows.append(Row(f"linears.{name}.{key}", f"{what}, {which}", "of the best cuBLASLt", 0.95))
            all_rows.append(Row(f"linears.{name}.{key}.measured", f"{what}, {which}, chosen by measuring",
                                "of the best cuBLASLt", 0.98))
    for seq in SEQUENCES:
        for whose, text in (("own", "own attention"), ("cudnn", "cuDNN's attention"),
                            ("any_order", "cuDNN's attention, sums in any order")):
            for key in ("forward", "backward"):
                all_rows.append(Row(f"attention.{whose}.{seq}.{key}", f"{text}, {key}, {seq}", "TFLOP/s",
                                    optional=whose != "own"))
        for key in ("forward", "backward"):
            all_rows.append(Row(f"attention.{seq}.{key}.ratio", f"attention, {key}, {seq}, against PyTorch's", "times",
                                1.0))
    all_rows.append(Row("attention.ring.forward", "attention in a ring of four, merged", "of one call", 0.85))
    for name, (what, least) in CHOICES.items():
        all_rows.append(Row(f"choice.{name}", what, "times as fast", least))
    for seq in SEQUENCES:
        for suffix, text in (("", ""), (".own", ", own attention"), (".any", ", sums of attention in any order"),
                             (".measured", ", products measured"),
                             (".measured.any", ", products measured, sums of attention in any order")):
            step, optional = f"step.{seq}{suffix}", suffix != ""
            all_rows += [
                Row(f"{step}.mfu", f"step at {seq}{text}: utilisation", "of 989 TFLOP/s",
                    0.60 if suffix == ".measured.any" else None, optional=optional),
                Row(f"{step}.launched.mfu", f"step at {seq}{text}: utilisation without a graph", "of 989 TFLOP/s",
                    optional=optional),
                Row(f"{step}.tokens_per_second", f"step at {seq}{text}", "tokens/s", optional=optional),
                Row(f"{step}.launched.tokens_per_second", f"step at {seq}{text}, without a graph", "tokens/s",
                    optional=optional),
                Row(f"{step}.over_kernels", f"step at {seq}{text}: time over its kernels'", "",
                    None if optional else 1.05, at_most=True, optional=optional),
                Row(f"{step}.launched.over_kernels", f"step at {seq}{text}: the same without a graph", "",
                    at_most=True, optional=optional),
                Row(f"{step}.peak_memory", f"step at {seq}{text}: most memory", "GiB", optional=optional),
            ]
        all_rows.append(Row(f"pytorch.{seq}.tokens_per_second", f"PyTorch's step at {seq}", "tokens/s"))
        for key in ("forward", "backward"):
            all_rows.append(Row(f"pytorch.attention.{seq}.{key}", f"PyTorch's attention, {key}, {seq}", "TFLOP/s"))
        all_rows.append(Row(f"pytorch.{seq}.ratio", f"step at {seq} against PyTorch's", "times", 1.2))
    all_rows += [
        Row("collective.raw", "NCCL's call, on the host", "ns"),
        Row("collective.typed", "typed call, on the host", "ns"),
        Row("collective.types", "of that, for the types", "ns"),
        Row("collective.overhead", "typed call over NCCL's", "ns"),
    ]
    return all_rows
