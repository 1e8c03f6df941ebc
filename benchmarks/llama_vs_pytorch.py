"""Compares tokens per second of plait's trainer and of PyTorch on the same model, in turn, on this machine's processor.

    python3 benchmarks/llama_vs_pytorch.py --python /path/to/python/with/torch [--binary build/bin/train_llama]

The models are the presets bench-512, bench-128 and bench-experts (4 layers, vocabulary 4096), in float, with one thread per
rank and the same sequences per data-parallel rank. The rate of each side is that of its fastest step over all rounds.
Replicated parameters are compared with DistributedDataParallel, and --data-parallel zero3 with FSDP2. If tensor-parallel
ranks may shard the vocabulary, PyTorch runs with and without it, and the better result counts. In bench-experts (512 wide, 2
of 8 experts for each token) plait shards experts over data-parallel ranks; in PyTorch each rank has them all. The script
needs only the standard library. PyTorch's side is pytorch_llama.py.
"""
import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SHAPES = {"512": {"hidden": 512, "layers": 4, "heads": 8, "ffn": 1536, "vocab": 4096, "experts": 0},
          "128": {"hidden": 128, "layers": 4, "heads": 4, "ffn": 384, "vocab": 4096, "experts": 0},
          "experts": {"hidden": 512, "layers": 4, "heads": 8, "ffn": 768, "vocab": 4096, "experts": 8}}
MESHES = {"512": [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)], "128": [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)],
          "experts": [(1, 1), (4, 1)]}
TARGETS = {"512": 1.0, "128": 1.5}
EXPERTS_TARGET = 2.0
DATA_PARALLEL_TARGET = 2.0


def target_of(model: str, dp: int, tp: int):
    if model == "experts":
        return EXPERTS_TARGET
    if dp > 1 and tp == 1:
        return DATA_PARALLEL_TARGET
    return TARGETS[model] if dp * tp > 1 or model == "512" else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(HERE.parent / "build/bin/train_llama"), help="plait's trainer")
    parser.add_argument("--python", default="python3", help="an interpreter that has torch and transformers")
    parser.add_argument("--data", default=str(HERE.parent / "examples/data/kjv.txt"), help="text for plait's trainer")
    parser.add_argument("--model", choices=sorted(SHAPES), action="append", help="one model only; may be repeated")
    parser.add_argument("--mesh", action="append", help="one mesh only, as DPxTP; may be repeated")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences per data-parallel rank")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run, after 3 that are not")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--markdown", help="also write the table to this file")
    options = parser.parse_args()
    try:
        options.meshes = [tuple(map(int, text.split("x"))) for text in options.mesh or []]
    except ValueError:
        options.meshes = [()]
    if any(len(mesh) != 2 or min(mesh) < 1 for mesh in options.meshes):
        parser.error(f"--mesh is {options.mesh}, must be two positive numbers, such as 2x1")
    return options


def checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def run_plait(options: argparse.Namespace, model: str, dp: int, tp: int, policy: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.jsonl")
        data = "ep" if SHAPES[model]["experts"] else "dp"
        checked([options.binary, "--mesh", f"{data}={dp},tp={tp}", "--model", f"bench-{model}", "--data", options.data, "--seq",
                 str(options.seq), "--micro-batch", str(options.micro_batch), "--steps", str(options.steps + 3), "--threads",
                 "1", "--sample", "0", "--precision", "float", "--data-parallel", policy, "--log", str(log)])
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    rates = [row["tokens_per_second"] for row in rows if "step" in row][3:]
    return {"best": max(rates), "median": statistics.median(rates)}


def run_torch(options: argparse.Namespace, model: str, dp: int, tp: int, policy: str, sharded: bool) -> dict:
    shape = SHAPES[model]
    out = checked([options.python, str(HERE / "pytorch_llama.py"), "--hidden", str(shape["hidden"]), "--layers", str(shape["layers"]),
                   "--heads", str(shape["heads"]), "--kv-heads", str(shape["heads"]), "--ffn", str(shape["ffn"]), "--vocab",
                   str(shape["vocab"]), "--experts", str(shape["experts"]), "--seq", str(options.seq), "--micro-batch", str(options.micro_batch), "--dp", str(dp),
                   "--tp", str(tp), "--steps", str(options.steps), *(["--sharded-vocab"] if sharded else []),
                   *(["--fsdp"] if policy == "zero3" else [])])
    row = json.loads(out.strip().splitlines()[-1])
    return {"best": row["tokens_per_second"], "median": row["tokens_per_second_median"], "framework": row["framework"]}


def compare(options: argparse.Namespace, model: str, dp: int, tp: int, policy: str) -> dict:
    plait, torch = [], []
    for _ in range(options.rounds):
        plait.append(run_plait(options, model, dp, tp, policy))
        torch.extend(run_torch(options, model, dp, tp, policy, sharded) for sharded in ([False, True] if tp > 1 else [False]))
    best = {name: max(run["best"] for run in runs) for name, runs in (("plait", plait), ("torch", torch))}
    median = {name: max(run["median"] for run in runs) for name, runs in (("plait", plait), ("torch", torch))}
    return {"model": model, "dp": dp, "tp": tp, "data_parallel": policy, "seq": options.seq, "micro_batch": options.micro_batch,
            "framework": torch[0]["framework"], "plait": best["plait"], "torch": best["torch"],
            "ratio": best["plait"] / best["torch"], "ratio_of_medians": median["plait"] / median["torch"],
            "target": target_of(model, dp, tp)}


def main() -> None:
    options = parse()
    rows = []
    lines = ["| model | ranks | dp x tp | data parallel | plait tokens/s | PyTorch tokens/s | ratio | of medians | target |",
             "|---|---:|---|---|---:|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    for model in options.model or list(SHAPES):
        for dp, tp in options.meshes or MESHES[model]:
            for policy in ["replicated", "zero3"] if dp > 1 and tp == 1 and model != "experts" else ["replicated"]:
                row = compare(options, model, dp, tp, policy)
                rows.append(row)
                target = "" if row["target"] is None else f"{row['target']:.1f}"
                lines.append(f"| bench-{model} | {dp * tp} | {dp} x {tp} | {policy if dp > 1 else ''} | {row['plait']:.0f} | "
                             f"{row['torch']:.0f} | {row['ratio']:.2f} | {row['ratio_of_medians']:.2f} | {target} |")
                print(lines[-1], flush=True)
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"\n{rows[0]['framework']}; seq {options.seq}, micro-batch {options.micro_batch}; geometric mean of the ratios {mean:.2f}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        pathlib.Path(options.markdown).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
