"""Training steps of transformers' Llama or Mixtral in PyTorch on the CPU, for comparison with plait's trainer.

    python benchmarks/pytorch_llama.py --hidden 512 --layers 4 --heads 8 --kv-heads 8 --ffn 1408 --vocab 256 \\
        --seq 256 --micro-batch 2 --dp 2 --tp 2

Float32; forward, backward, clipping by global norm and AdamW (fused); one thread per rank; data parallel by
DistributedDataParallel over Gloo (with --fsdp by FSDP2's fully_shard, of each layer and of the rest), tensor parallel by
DTensor. Prints one line of JSON. The rate is that of the fastest step, with tokens of all data-parallel ranks. A step is
one micro-batch of each rank, the same in each step. --export FOLDER writes the initial weights and these tokens, as a
Hugging Face directory and as FOLDER/tokens.bin, from which plait's trainer computes the same losses. With
--join ADDRESS:PORT --rank R it is one rank of several hosts.
"""
import argparse
import contextlib
import json
import os
import pathlib
import socket
import statistics
import struct
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("hidden", 512), ("layers", 4), ("heads", 8), ("kv-heads", 8), ("ffn", 1408), ("vocab", 256),
                          ("seq", 256), ("micro-batch", 2), ("dp", 1), ("tp", 1), ("steps", 8), ("warm-up", 3),
                          ("threads", 1), ("seed", 1), ("experts", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--experts-implementation", default="grouped_mm", help="transformers' name of it")
    parser.add_argument("--export", type=pathlib.Path, help="a folder, to which weights and tokens are written")
    parser.add_argument("--sharded-vocab", action="store_true",
                        help="shard embedding, output and loss over tp; slower at small vocabularies")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--fsdp", action="store_true", help="data parallel by FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--join", help="ADDRESS:PORT of rank 0's host; this process is one rank, and starts no others")
    parser.add_argument("--rank", type=int, default=0, help="with --join, which one")
    return parser.parse_args()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parallelise(model: LlamaForCausalLM, mesh, sharded_vocab: bool) -> None:
    """Megatron's placements: columns for q, k, v, gate and up, rows for o and down."""
    plan = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    if sharded_vocab:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, plan)


def average(parameters: list, group, size: int) -> None:
    """Averages gradients over data-parallel ranks in one flat bucket: DistributedDataParallel refuses DTensors."""
    grads = [local(parameter.grad) for parameter in parameters]
    bucket = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(bucket, group=group)
    bucket /= size
    pieces = bucket.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads)])


def clip(parameters: list, tensor_group, max_norm: float) -> None:
    """Clipping by global norm over mixed DTensors and plain tensors: local sums, one all-reduce over tp."""
    squares = lambda grads: torch.stack(torch._foreach_norm(grads)).square().sum() if grads else torch.zeros(())
    sharded = squares([local(p.grad) for p in parameters if isinstance(p.grad, DTensor)])
    if tensor_group is not None:
        dist.all_reduce(sharded, group=tensor_group)
    total = (sharded + squares([p.grad for p in parameters if not isinstance(p.grad, DTensor)])).sqrt()
    torch._foreach_mul_([local(p.grad) for p in parameters], torch.clamp(max_norm / (total + 1e-6), max=1.0))


def export(model: torch.nn.Module, text: torch.Tensor, folder: pathlib.Path) -> None:
    """Writes the weights, and the tokens in the format of nanoGPT's .bin files."""
    model.save_pretrained(folder)
    (folder / "tokens.bin").write_bytes(struct.pack(f"<{text.numel()}H", *text.tolist()))


def train(rank: int, options: argparse.Namespace, address: str, port: int) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    world = options.dp * options.tp
    mesh = None
    if world > 1:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=rank, world_size=world)
        mesh = dist.device_mesh.init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))

    # A token chooses 2 of 8 experts, each of the width --ffn.
    kind = {"num_local_experts": options.experts, "num_experts_per_tok": 2} if options.experts else {}
    config = (MixtralConfig if kind else LlamaConfig)(**kind, hidden_size=options.hidden, intermediate_size=options.ffn, num_hidden_layers=options.layers,
                         num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
                         vocab_size=options.vocab, max_position_embeddings=options.seq, use_cache=False,
                         tie_word_embeddings=False,
                         attn_implementation=options.attention)
    model = AutoModelForCausalLM.from_config(config).train()
    if options.experts:
        model.set_experts_implementation(options.experts_implementation)
    # Each sequence begins with the last token of the one before.
    sequences = options.micro_batch * options.dp
    text = torch.randint(0, options.vocab, (sequences * options.seq + 1,))
    if options.export and rank == 0:
        export(model, text, options.export)
    if options.tp > 1 and not options.experts:
        parallelise(model, mesh["tp"], options.sharded_vocab)
    if options.fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    wrapped = model
    if options.dp > 1 and options.tp == 1 and not options.fsdp:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group(),
                                                            gradient_as_bucket_view=True)

    # Fused AdamW refuses a mixture of DTensors and plain tensors in one group. Only matrices decay.
    kinds = {}
    for parameter in parameters:
        kinds.setdefault((type(parameter.data).__name__, parameter.dim() > 1), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * decays} for (_, decays), group in kinds.items()],
                                  lr=1e-4, betas=(0.9, 0.95), fused=True)

    own = slice(rank // options.tp * options.micro_batch, (rank // options.tp + 1) * options.micro_batch)
    tokens = text[:-1].view(sequences, options.seq)[own].contiguous()
    targets = text[1:].view(sequences, options.seq)[own].flatten()
    times, processor_times, losses = [], [], []
    for step in range(options.warm_up + options.steps):
        if world > 1:
            dist.barrier()
        started, began = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel() if options.sharded_vocab and options.tp > 1 else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(wrapped(tokens).logits.flatten(0, 1), targets)
            loss.backward()
        if options.dp > 1 and options.tp > 1:
            average(parameters, mesh["dp"].get_group(), options.dp)
        if options.fsdp and not options.no_clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        elif not options.no_clip:
            clip(parameters, mesh["tp"].get_group() if options.tp > 1 else None, 1.0)
        optimizer.step()
        elapsed, used = time.perf_counter() - started, time.process_time() - began
        if world > 1:  # a step takes the time of its slowest rank, and the processor time of all
            slowest, of_all = torch.tensor([elapsed]), torch.tensor([used])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(of_all)
            elapsed, used = slowest.item(), of_all.item()
        mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if step >= options.warm_up:
            times.append(elapsed)
            processor_times.append(used)

    if rank == 0:
        tokens_per_step = options.micro_batch * options.seq * options.dp
        shape = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab",
                                                           "seq", "micro_batch", "dp", "tp", "threads", "fsdp")}
        print(json.dumps({"framework": f"torch {torch.__version__}, transformers {transformers.__version__}", **shape,
                          "tokens_per_second": round(tokens_per_step / min(times), 1),
                          "tokens_per_second_median": round(tokens_per_step / statistics.median(times), 1),
                          "tokens_per_processor_second": round(tokens_per_step / min(processor_times), 1),
                          "tokens_per_processor_second_median": round(tokens_per_step / statistics.median(processor_times), 1),
                          "step_seconds": round(min(times), 6), "losses": losses}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    options = parse()
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(options, name) % options.tp != 0:
            flag = name.replace("_", "-")
            raise SystemExit(f"--{flag} {getattr(options, name)} does not divide by --tp {options.tp}")
    world = options.dp * options.tp
    if options.experts and options.tp > 1:
        raise SystemExit("--experts needs --tp 1")
    if options.fsdp and (options.tp > 1 or options.dp == 1):
        raise SystemExit("--fsdp needs --dp of 2 or more and --tp 1")
    if options.join:
        address, port = options.join.rsplit(":", 1)
        train(options.rank, options, address, int(port))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if world == 1:
        train(0, options, "127.0.0.1", port)
    else:
        multiprocessing.spawn(train, args=(options, "127.0.0.1", port), nprocs=world)


if __name__ == "__main__":
    main()
