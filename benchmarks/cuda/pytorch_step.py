"""Training steps of transformers' Llama in PyTorch on a GPU, for comparison with plait's step.

    python3 benchmarks/cuda/pytorch_step.py --seq 2048 [--tokens 16384] [--microbatches 8] [--quick]

Model (SmolLM-1.7B's shape), tokens in a microbatch and work are the same as plait's: forward, loss, backward, clipping by
the global norm, AdamW. Weights, gradients and averages are float and products bf16 (autocast), as plait's masters and
products. It uses scaled-dot-product attention, the fused AdamW, and torch.compile for the whole model. A microbatch that
does not fit into memory is halved, and the largest that fits counts. Steps are timed from tokens on the host to the loss
on the host, and the median counts. First it times only scaled-dot-product attention, forward and backward, with the fastest
of its backends, counting the operations of the unmasked half. Prints lines of JSON.
"""
import argparse
import json
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a size for a processor")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> LlamaConfig:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=4, vocab_size=96) if options.tiny else dict(
                     hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
                     num_key_value_heads=32, vocab_size=49152)
    return LlamaConfig(**sizes, max_position_embeddings=options.seq, tie_word_embeddings=True, use_cache=False,
                       attention_bias=False, mlp_bias=False, attn_implementation="sdpa")


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        self.options, self.device = options, torch.device(options.device)
        with self.device:
            self.model = LlamaForCausalLM(configuration(options)).train()
        self.run = self.model if options.no_compile else torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=True)
        self.random = torch.Generator().manual_seed(1)

    def step(self, parts: int) -> float:
        """Returns the seconds of one step of some microbatches."""
        begun = time.perf_counter()
        sequences = self.options.tokens // self.options.seq * self.options.microbatches
        ids = torch.randint(0, self.model.config.vocab_size, (sequences, self.options.seq), generator=self.random)
        ids = ids.to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in ids.chunk(parts):
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.run(input_ids=part, labels=part).loss / parts
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        value = float(total)  # waits for the device
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if not 0 < value < 100:
            raise SystemExit(f"the loss is {value}")
        return time.perf_counter() - begun


def attention(options: argparse.Namespace) -> None:
    """Prints the rates of causal attention in bf16, forward and backward."""
    heads, width = (4, 16) if options.tiny else (32, 64)
    device = torch.device(options.device)
    shape = (options.tokens // options.seq, heads, options.seq, width)
    q, k, v, upstream = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    backends = torch.nn.attention.SDPBackend
    square = 2 * options.tokens * options.seq / 2 * heads * width
    best: dict[str, tuple[float, str]] = {}
    for backend in (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION):
        def forward() -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        try:
            out = forward()
            out.backward(upstream, retain_graph=True)
        except RuntimeError as refusal:
            print(f"{backend.name}: {str(refusal).splitlines()[0]}", file=sys.stderr)
            continue
        times = {"forward": seconds_of(forward, device, options.tiny),
                 "backward": seconds_of(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), device,
                                        options.tiny)}
        for key, seconds in times.items():
            best[key] = min(best.get(key, (seconds, backend.name)), (seconds, backend.name))
    for key, (seconds, name) in best.items():
        print(json.dumps({"id": f"pytorch.attention.{options.seq}.{key}",
                          "value": {"forward": 2, "backward": 5}[key] * square / seconds / 1e12, "seconds": seconds,
                          "backend": name}), flush=True)


def seconds_of(call, device: torch.device, once: bool) -> float:
    """Returns the median of a call's times, measured on the device if it is a GPU."""
    times = []
    for _ in range(2 if once else 20):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    options = parse()
    sequences = options.tokens // options.seq
    if sequences < 1 or options.tokens % options.seq != 0:
        raise SystemExit(f"--tokens is {options.tokens}, must be a multiple of --seq {options.seq}")
    if options.microbatches < 1:
        raise SystemExit(f"--microbatches is {options.microbatches}, must be at least 1")
    attention(options)
    trainer = Trainer(options)
    parts = options.microbatches
    while True:
        try:
            for _ in range(2):
                trainer.step(parts)
            break
        except torch.cuda.OutOfMemoryError:
            if parts * 2 > sequences * options.microbatches:
                raise
        trainer.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        parts *= 2
        print(f"out of memory: {parts} microbatches", file=sys.stderr)
    times = [trainer.step(parts) for _ in range(2 if options.tiny else 3 if options.quick else 5)]
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
    print(json.dumps({"id": f"pytorch.{options.seq}.tokens_per_second", "value": options.tokens * options.microbatches / seconds,
                      "seconds": seconds, "peak_gib": peak, "microbatches": parts, "torch": torch.__version__,
                      "compiled": not options.no_compile}))


if __name__ == "__main__":
    main()
