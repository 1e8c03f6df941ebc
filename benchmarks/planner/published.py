"""Reads published step times as rows for plan_llama, with one reader for each table.

A row is a dict of plan_llama's columns, and of `source`, `published` (seconds of a step), `convention` (assumptions and
derived values) and `gpu`. Rows without a printed layout, batch or time, and models that are not dense transformers, are left
out.
"""
import csv
import pathlib

GPT = {"vocab": 51200, "gated": 0, "tied": 1, "biases": 1, "dropout": 1}


def gpt(layers, hidden, heads, seq, vocab=51200, dropout=1):
    """Returns GPT-3's shape: an MLP of four times the width, learned positions, tied embeddings."""
    return {"vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": heads,
            "head_dim": hidden // heads, "ffn": 4 * hidden, "gated": 0, "tied": 1, "biases": 1, "dropout": dropout,
            "positions": seq}


def nemotron(layers, hidden, heads, kv_heads, ffn):
    """Returns a shape with squared ReLU, rotary positions, and untied embeddings of 256000 words."""
    return {"vocab": 256000, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads,
            "head_dim": hidden // heads, "ffn": ffn, "gated": 0, "tied": 0, "biases": 0, "dropout": 0}


def llama(layers, hidden, heads, kv_heads, ffn, vocab, tied=0):
    return {"vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads,
            "head_dim": hidden // heads, "ffn": ffn, "gated": 1, "tied": tied, "biases": 0, "dropout": 0}


MODELS = {
    "LLAMA2-7B": llama(32, 4096, 32, 32, 11008, 32000), "LLAMA2-13B": llama(40, 5120, 40, 40, 13824, 32000),
    "LLAMA2-70B": llama(80, 8192, 64, 8, 28672, 32000), "LLAMA3-8B": llama(32, 4096, 32, 8, 14336, 128256),
    "LLAMA3-70B": llama(80, 8192, 64, 8, 28672, 128256), "LLAMA3-405B": llama(126, 16384, 128, 8, 53248, 128256),
    "Nemotron-8B": nemotron(32, 4096, 32, 32, 16384), "Nemotron-15B": nemotron(32, 6144, 48, 8, 24576),
    "Nemotron-22B": nemotron(40, 6144, 48, 48, 24576), "Nemotron-340B": nemotron(96, 18432, 96, 8, 73728),
    "GPT3-5B": gpt(24, 4096, 32, 2048), "GPT3-20B": gpt(44, 6144, 48, 2048),
    "GPT3-175B": gpt(96, 12288, 96, 2048),
}
SPELLINGS = {"Llama3.1-8B": "LLAMA3-8B", "Llama3.1-70B": "LLAMA3-70B", "Llama3.1-405B": "LLAMA3-405B",
             "LLAMA3_8B": "LLAMA3-8B", "LLAMA3_70B": "LLAMA3-70B", "LLAMA3.1_405B": "LLAMA3-405B",
             "Nemotron4-15B": "Nemotron-15B", "Nemotron4-340B": "Nemotron-340B", "Llama 3.1 8B": "LLAMA3-8B",
             "Llama 3 8B": "LLAMA3-8B", "Llama 3 70B": "LLAMA3-70B", "Llama 2 13B": "LLAMA2-13B",
             "Llama 2 70B": "LLAMA2-70B", "7B": "LLAMA2-7B", "30B": llama(60, 6656, 52, 52, 17920, 103168)}


# Models with experts. GPT OSS's biases and sinks in attention, and its windows in every second layer, are not priced.
EXPERTS = {
    "qwen3_30b_a3b": {**llama(48, 2048, 32, 4, 768, 151936), "head_dim": 128, "experts": 128, "chosen": 8},
    "qwen3_235b_a22b": {**llama(94, 4096, 64, 4, 1536, 151936), "head_dim": 128, "experts": 128, "chosen": 8},
    "gpt oss 120b": {**llama(36, 2880, 64, 8, 2880, 201088), "head_dim": 64, "experts": 128, "chosen": 4},
}


# Variants of a GPU model and of networks in tables, as differences from the planner's machine. fit.py changes the
# description of a row's machine by them. `levels` are numbered from the innermost.
GIBI, MEBI = 1024**3, 1024**2
A100_40GB = {"memory": 40960 * MEBI, "memory_bandwidth": 1.555e12}  # NVIDIA's data sheet
H100_HBM2E = {"memory": 96 * GIBI, "memory_bandwidth": 2.4e12}  # arXiv 2410.06511, section 4
# "4 * 100Gb RoCE" between machines of 8 (InternEvo, doc/en/train_performance.md), at the share of the rate that the
# 200 Gbit/s of the planner's A100 reach.
ROCE_4_100 = {"levels": {1: {"bandwidth": 23.5e9 / 2, "shared_by": 2}}}


def model(name):
    found = SPELLINGS.get(name, name)
    return dict(found) if isinstance(found, dict) else dict(MODELS[found]) if found in MODELS else None


def schedule(pp, chunks):
    return "1f1b" if pp == 1 or chunks <= 1 else f"interleaved:{chunks}"


def read(folder, name):
    path = pathlib.Path(folder) / f"{name}.csv"
    if not path.exists():
        print(f"{name}.csv is not in the folder of tables")
        return
    with open(path, newline="") as file:
        yield from csv.DictReader(file)


def whole(cell, default=1):
    return int(float(cell)) if cell not in ("", None, "n/a") else default


def megatron_sc21(folder):
    for r in read(folder, "megatron_sc21"):
        if "A100" not in r["hardware"] or "" in (r["tp"], r["microbatch"], r["global_batch"]):
            continue
        layers, hidden, seq, batch = (whole(r[k]) for k in ("layers", "hidden", "seq", "global_batch"))
        # The table's operations count recomputation (Narayanan et al. 2021, section 5.1).
        count = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + whole(r["vocab"]) / (16 * layers * hidden))
        seconds = float(r["iter_s"]) if r["iter_s"] else count / (whole(r["gpus"]) * float(r["tflops_per_gpu"]) * 1e12)
        sharded = r["zero"] == "3"
        old = r["table"].startswith("tables.tex")
        pp = whole(r["pp"])
        yield {**gpt(layers, hidden, whole(r["heads"]), seq), "gpu": "a100", "published": seconds,
               "source": "sc21_zero3" if sharded else "sc21_2020" if old else "sc21", "program": "megatron-2021",
               "seq": seq, "batch": batch, "tp": r["tp"], "pp": pp, "dp": r["dp"], "microbatch": r["microbatch"],
               "schedule": schedule(pp, 2 if layers % (2 * pp) == 0 else 1), "recompute": "full",
               "zero": 3 if sharded else 0, "sequence_parallel": 0,
               "convention": "time from TFLOP/s with recomputation counted; 2 chunks presumed where layers divide",
               "name": f"{r['params_b']}B gpus={r['gpus']}"}


def korthikanti(folder):
    for r in read(folder, "korthikanti_times"):
        pp = whole(r["pp"])
        yield {**gpt(whole(r["layers"]), whole(r["hidden"]), whole(r["heads"]), whole(r["seq"])), "gpu": "a100",
               "published": float(r["iter_s"]), "source": "korthikanti", "program": "megatron-2022", "seq": r["seq"],
               "batch": r["global_batch"], "tp": r["tp"], "pp": pp, "dp": r["dp"], "microbatch": r["microbatch"],
               "schedule": schedule(pp, whole(r["interleave_v"])), "recompute": r["act_recompute"], "zero": 0,
               "sequence_parallel": 1 if r["sp"] == "yes" else 0, "convention": "time printed",
               "name": f"{r['model']} {r['act_recompute']} dp={r['dp']}"}


def zero_bubble(folder):
    # The last two schedules are searched. With the memory of 1F1B the search gives ZB-H1 in all cases (table 5 of the
    # paper).
    names = {"1F1B": "1f1b", "ZB-1p": "zb_h1", "ZB-2p": "automatic"}
    for r in read(folder, "zb_throughput_memory"):
        pp, layers = whole(r["p"]), whole(r["layers"])
        chosen = names.get(r["schedule"]) or schedule(pp, (layers + 2) // pp)
        yield {**gpt(layers, whole(r["hidden"]), whole(r["heads"]), whole(r["seq"])), "gpu": "a100",
               "published": float(r["derived_iter_s"]), "source": "zero_bubble", "program": "megatron-2022",
               "seq": r["seq"], "batch": r["global_batch"], "tp": 1, "pp": pp, "dp": 1,
               "microbatch": r["microbatch"], "schedule": chosen, "recompute": "none", "zero": 0, "bare_ends": 1, "delayed_norm": 1,
               "convention": "time from samples per second; unfused attention presumed",
               "peak_gb": r["peak_mem_gb"], "name": f"{r['model']} {r['schedule']} m={r['m']}"}


def dgxc(folder):
    for r in read(folder, "dgxc_h100_gb200_step_times"):
        shape = model(r["model"])
        if not shape or not r["step_time_s"]:
            continue
        shape["layers"] = whole(r["layers_run"])
        pp = whole(r["pp"])
        yield {**shape, "gpu": "h100", "published": float(r["step_time_s"]), "source": "dgxc", "program": "nemo",
               "precision": r["precision"].lower(), "seq": r["seq"], "batch": r["gbs"], "tp": r["tp"], "pp": pp,
               "cp": r["cp"], "dp": r["dp"], "microbatch": r["mbs"], "schedule": schedule(pp, whole(r["vp"])),
               "recompute": "selective" if r["recompute"].startswith("selective") else "none", "zero": 1,
               "convention": "time printed", "name": f"{r['model']} {r['precision']} gpus={r['gpus']} {r['releases'][:6]}"}


def nemo_2407(folder):
    for r in read(folder, "nemo_2407_fp8_h100"):
        shape = model(r["model"])
        if not shape or r["task"] != "pretrain":
            continue
        pp = whole(r["pp"])
        yield {**shape, "gpu": "h100", "published": float(r["derived_iter_s"]), "source": "nemo_2407",
               "program": "nemo", "precision": "fp8", "seq": r["seq"], "batch": r["gbs"], "tp": r["tp"], "pp": pp,
               "cp": r["cp"], "dp": r["dp_derived"], "microbatch": r["mbs"], "schedule": schedule(pp, whole(r["vp"])),
               "recompute": "none", "zero": 1, "attention": "flash2",
               "convention": "time from tokens per second; FlashAttention 2 presumed",
               "name": f"{r['model']} gpus={r['gpus']} {r['measurement'][:10]}"}


def bridge(folder):
    for r in read(folder, "nemo_megatron_bridge_perf"):
        shape = model(r["model"])
        if not shape or "LoRA" in r["section"] or r["check"] != "ok":
            continue
        pp, sharded = whole(r["pp"]), whole(r["fsdp"], 0) > 1
        yield {**shape, "gpu": "h100", "published": float(r["derived_iter_s"]), "source": "bridge", "program": "nemo",
               "precision": "fp8", "seq": r["seq"], "batch": r["gbs"], "tp": r["tp"], "pp": pp, "cp": r["cp"],
               "dp": r["dp_derived"], "microbatch": r["mbs"], "schedule": schedule(pp, whole(r["vp"])),
               "recompute": "none", "zero": 3 if sharded else 1,
               "convention": "time from tokens per second; fp8 presumed where not printed",
               "name": f"{r['model']} gpus={r['gpus']} {r['release']} {r['section'][:4]}"}


def megatron_core(folder):
    for r in read(folder, "megatron_core_h100"):
        pp = whole(r["pp"])
        yield {**gpt(whole(r["layers"]), whole(r["hidden"]), whole(r["heads"]), whole(r["seq"]), whole(r["vocab"]), 0),
               "gpu": "h100", "published": float(r["derived_iter_s"]), "source": "megatron_core", "program": "megatron",
               "precision": "bf16", "seq": r["seq"], "batch": r["global_batch"], "tp": r["tp"], "pp": pp,
               "cp": r["cp"], "dp": r["dp"], "microbatch": 1, "schedule": "1f1b", "recompute": "none", "zero": 1,
               "attention": "flash3", "overlaps_tensor": 1,
               "convention": "time from TFLOP/s; microbatch 1, 1F1B, overlap and cuDNN's attention presumed",
               "name": f"{r['model']} gpus={r['gpus']}"}


def torchtitan(folder):
    for r in read(folder, "torchtitan"):
        shape = model(r["model"])
        if not shape or not r["tps_per_gpu"]:
            continue
        h100 = "H100" in r["hardware"]
        dp, cp = whole(r["fsdp"]), whole(r["cp"])
        batch, seq = whole(r["global_batch"]), whole(r["seq"])
        compiled = "compile" in r["techniques"]
        hbm2e = "96GB" in r["hardware"]
        yield {**shape, "gpu": "h100" if h100 else "a100", "source": "torchtitan_h100" if h100 else "torchtitan_a100",
               "published": batch * seq / (float(r["tps_per_gpu"]) * dp * cp * whole(r["tp"]) * whole(r["pp"])),
               "program": "fsdp", "reduced_bytes": 4, "part": H100_HBM2E if hbm2e else {}, "precision": "fp8" if "loat8" in r["precision"] else "bf16",
               "fused": 1 if compiled else 0, "seq": seq, "batch": batch, "tp": r["tp"], "pp": r["pp"], "cp": cp,
               "dp": dp, "microbatch": batch // dp, "schedule": "1f1b", "zero": 3, "context": "all_gather_kv" if cp > 1 else "ring",
               "recompute": {"no": "none", "full": "full"}.get(r["act_checkpoint"], "every:2"),
               "convention": "time from tokens per second; selective recomputation "
                             "priced as every second layer; reduced in float; 500 W parts of 2.4 TB/s"
                             if h100 else "time from tokens per second; reduced in float",
               "peak_gb": float(r["memory_gib"]) * 1.073741824 if r["memory_gib"] else "",
               "name": f"{r['model']} {r['techniques']} seq={seq} {r['act_checkpoint']}"}


MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
       "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}


def llm_foundry(folder):
    for r in read(folder, "llm_foundry_fsdp"):
        if r["model"] not in MPT or r["sharding_strategy"] != "FULL_SHARD":
            continue
        gpus, seq, batch = whole(r["num_gpus"]), whole(r["seqlen_(t)"]), whole(r["globalbatchsize"])
        gpu = "h100" if "h100" in r["gpu"] else "a100"
        layers, hidden, heads = MPT[r["model"]]
        small = "40gb" in r["gpu"]
        yield {**gpt(layers, hidden, heads, seq, 50368, 0), "biases": 0, "gpu": gpu, "published": float(r["derived_iter_s"]),
               "source": f"llm_foundry_{gpu}", "program": "llm-foundry", "part": A100_40GB if small else {},
               # Composer's DEFAULT reduces in float, and PURE in the type of the computation (mosaicml/composer#2047).
               "reduced_bytes": 2 if r["mp_mode"] == "PURE" else 4,
               "precision": "fp8" if "fp8" in r["precision"] else "bf16", "seq": seq, "batch": batch, "tp": 1, "pp": 1,
               "cp": 1, "dp": gpus, "microbatch": whole(r["microbatchsize"]), "schedule": "1f1b", "zero": 3,
               "recompute": "full" if r["activation_checkpointing"] == "True" else "none",
               "convention": "time from tokens per second; FlashAttention 1 (Triton) presumed"
                             + ("; parts of 40 GB and 1.56 TB/s" if small else "; network not printed" if gpu == "h100" else ""),
               "name": f"{r['model']} {r['gpu']} gpus={gpus} seq={seq}"}


def internevo(folder):
    for r in read(folder, "internevo_a100"):
        shape = model(r["model"])
        if not shape or not r["tokens_gpu_s"] or not r["global_batch_sequences_derived"]:
            continue
        tp, pp, gpus = whole(r["tp"]), whole(r["pp"]), whole(r["gpus"])
        batch, seq = whole(r["global_batch_sequences_derived"]), whole(r["seq"])
        dp, shared = gpus // (tp * pp), whole(r["zero1"])
        yield {**shape, "vocab": 103168, "gpu": "a100", "source": "internevo",
               "published": batch * seq / (float(r["tokens_gpu_s"]) * gpus), "program": "internevo", "seq": seq,
               "batch": batch, "tp": tp, "pp": pp, "dp": dp, "microbatch": r["micro_bsz"],
               "schedule": "1f1b", "zero": 1, "recompute": "none" if r["act_checkpoint"] == "no" else "full",
               # zero1 is the number of data ranks over which the optimizer's state is cut.
               "replicate": f"dp:{dp // shared}" if 0 < shared < dp else "none", "part": ROCE_4_100,
               "convention": "time from tokens per second; 4 ports of 100 Gbit/s for a machine",
               "name": f"{r['model']} gpus={gpus} tp={tp} pp={pp} seq={seq} zero1={r['zero1']}"}


def whole_rate(r):
    """Returns the rate of an all-reduce over all ranks that a job of nanotron's sweep measured, in GB/s."""
    return float(r["nccl_allreduce_gbs"] or 0)


def ultrascale(folder, ran=True):
    """Returns nanotron's sweep: with `ran`, the rows with times; otherwise also rows that ran out of memory."""
    table = list(read(folder, "hf_ultrascale_sweep"))
    # A network is sound if it reached half of the rate of the best tenth of jobs on the same number of machines.
    rates = {}
    for r in table:
        if r["status"] == "Success" and r["step_s_derived"]:
            rates.setdefault(r["nodes"], []).append(whole_rate(r))
    sound = {nodes: sorted(all_)[int(0.9 * (len(all_) - 1))] / 2 for nodes, all_ in rates.items()}
    for r in table:
        out_of_memory = r["status"] == "OOM"
        if (r["status"] != "Success" or not r["step_s_derived"]) and (ran or not out_of_memory):
            continue
        tp, pp, dp = whole(r["tp"]), whole(r["pp"]), whole(r["dp"])
        # The rates that each job measured within a machine. The rates over all ranks are not used: they fall in
        # proportion to the machines, which the rate of a link does not.
        gathers, sums = (float(r[f"nccl_{kind}_intra_gbs"] or 0) * 1e9 for kind in ("allgather", "allreduce"))
        levels = {0: {"bandwidth": gathers, "all_reduce_share": sums / gathers}} if gathers else {}
        yield {**llama(whole(r["layers"]), whole(r["hidden"]), whole(r["heads"]), whole(r["kv_heads"]), whole(r["ffn"]),
                       whole(r["vocab"]), 1 if r["tied_embeddings"] == "True" else 0),
               "gpu": "h100", "source": "hf_ultrascale",
               "published": 0 if out_of_memory else float(r["step_s_derived"]), "program": "nanotron", "seq": r["seq"],
               "batch": r["gbs_sequences"], "tp": tp, "pp": pp, "dp": dp, "microbatch": r["mbs"],
               "schedule": "gpipe" if r["schedule"] == "AFAB" else "1f1b", "recompute": "none",
               "zero": whole(r["zero_stage"], 0), "sequence_parallel": 1 if r["tp_mode"] == "REDUCE_SCATTER" else 0,
               "part": {"levels": levels},
               "convention": "time printed; NVLink as the job measured it; a floor of 4.4 ms for a microbatch and layer",
               # The sweep was measured with two versions of the program; only the second had a pipeline. One in three
               # networks had a fraction of the others' rate.
               "setting": f"version {2 if r['after_pp_fix'] == 'True' else 1}, "
                          f"{'sound' if whole_rate(r) >= sound.get(r['nodes'], 0) else 'slow'} network",
               "reserved_gb": r["mem_reserved_gb"], "out_of_memory": int(out_of_memory),
               "name": f"{r['model']} dp={dp} tp={tp} pp={pp} mbs={r['mbs']}"}


def experts(folder):
    """Returns models with experts on H100 with printed layouts: Qwen3 and GPT OSS. The planner does not have DeepSeek-V3's
    latent attention, nor the linear layers of Qwen3-Next and Nemotron 3."""
    for table in ("nemo_megatron_bridge_perf", "megatron_examples_moe"):
        for r in read(folder, table):
            shape = EXPERTS.get(r["model"].split(" (")[0].lower().replace("-", "_")
                                if "Qwen" in r["model"] else r["model"].lower())
            if not shape or "H100" not in r.get("system", r.get("hardware", "")):
                continue
            bridge_row = table.startswith("nemo")
            seconds = r["derived_iter_s"] if bridge_row else r["step_time_s"]
            tp, pp, cp, gpus = (whole(r[k]) for k in ("tp", "pp", "cp", "gpus"))
            if not seconds or (bridge_row and "LoRA" in r["section"]):
                continue
            recompute = "none" if bridge_row or not r["recompute"] else "full" if r["recompute"] == "full" else "selective"
            sharded = "fsdp yes" in r["note"] or (bridge_row and whole(r["fsdp"], 0) > 1)
            fp8 = not r["precision"].startswith("BF16")
            yield {**shape, "gpu": "h100", "published": float(seconds), "source": "experts", "program": "megatron",
                   "attention": "flash3", "precision": "fp8" if fp8 else "bf16", "seq": r["seq"], "batch": r["gbs"],
                   "tp": tp, "pp": pp, "cp": cp, "dp": gpus // (tp * pp * cp), "ep": whole(r["ep"]),
                   "microbatch": r["mbs"], "schedule": schedule(pp, whole(r["vp"])), "recompute": recompute,
                   "zero": 3 if sharded else 1, "sends_tokens_once": 1 if "DeepEP" in r["note"] else 0,
                   "bare_ends": 1, "selective_drops_scores_only": 0,  # "norm, act": these are made again
                   "convention": "experts chosen evenly; nothing of the exchange overlapped; DeepEP where it is printed",
                   "name": f"{r['model']} gpus={gpus} tp={tp} pp={pp} ep={r['ep']} mbs={r['mbs']} {r.get('release', '')}"}


def blackwell(system):
    """Returns Llamas on B200 and GB200 (blackwell.csv in this folder): NVIDIA-NeMo/Megatron-Bridge, docs/, at 0a25f911."""
    for r in read(pathlib.Path(__file__).parent, "blackwell"):
        if r["system"] != system:
            continue
        tp, pp, cp, gpus, batch = (whole(r[k]) for k in ("tp", "pp", "cp", "gpus", "gbs"))
        yield {**model(r["model"]), "source": system, "program": "nemo", "precision": "fp8", "seq": r["seq"],
               "published": batch * whole(r["seq"]) / (float(r["tokens_s_gpu"]) * gpus), "batch": batch, "tp": tp, "pp": pp,
               "cp": cp, "dp": gpus // (tp * pp * cp), "microbatch": r["mbs"], "schedule": schedule(pp, whole(r["vp"])),
               "recompute": "none", "zero": 3 if whole(r["fsdp"]) > 1 else 1,
               "convention": "time from tokens per second",
               "name": f"{r['model']} {r['precision']} gpus={gpus} {r['release']}"}


READERS = (megatron_sc21, korthikanti, zero_bubble, dgxc, nemo_2407, bridge, megatron_core, torchtitan, llm_foundry,
           internevo, ultrascale, experts)


def all_rows(folder):
    return [row for reader in READERS for row in reader(folder)]
