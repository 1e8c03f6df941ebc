"""fit.py TABLES PLAN_LLAMA [--fit] [--out FILE] [--hardware DIR]: compares the planner with published step times.

TABLES is a folder of CSV files with published measurements; PLAN_LLAMA is the program. It prices the rows of each GPU model
in one call. For each source it prints the median, the 90th percentile and the largest relative error.

With --fit, it first finds the constants of each GPU model, on the sources in FITTED only. A coordinate search minimises the
mean of the absolute logarithms of predicted over published. Each is capped at 0.3, so that rows with effects outside the
model do not dominate; each source has the same weight. Constants of links are never changed.

--out writes the table of residuals. Every published configuration ran, so all must fit in memory. For each source the number
of predictions that do not fit is printed.
"""
import argparse
import csv
import io
import json
import math
import pathlib
import statistics
import subprocess
import tempfile

import published

FITTED = {"a100": ("sc21",), "h100": ("dgxc",)}
# Sources with other software, unknown networks, models of experts, or a limit by the host. The README has the reasons.
APART = ("sc21_zero3", "sc21_2020", "llm_foundry_a100", "llm_foundry_h100", "internevo", "hf_ultrascale",
         "torchtitan_a100", "torchtitan_h100", "megatron_core", "experts")
SHARES = {"a100": ("product_share.bf16", "memory_share"),
          "h100": ("product_share.bf16", "product_share.fp8", "attention_share", "memory_share", "tensor_hidden",
                   "data_hidden")}
# Bounds by micro-benchmarks. The best products of matmul_mamf.csv reach 0.87 (A100) and 0.80 (H100) of the peak in bf16
# and 0.71 in fp8; here their ends are counted separately. Elementwise kernels reach 0.6 to 0.95 of the memory's rate.
BOUNDS = {"product_share.bf16": (0.5, 0.92), "product_share.fp8": (0.4, 0.85), "attention_share": (0.2, 0.8),
          "memory_share": (0.6, 0.95), "tensor_hidden": (0.0, 0.95), "data_hidden": (0.0, 0.95)}
# The sizes that identify the model of a sweep. MHA and GQA are different models.
SHAPE = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
ASIDE = ("source", "published", "convention", "gpu", "name", "reserved_gb", "out_of_memory", "peak_gb", "part", "fits", "setting",
         "left_out")


def of_part(machine, part):
    """Returns the description of a machine, changed by a table's data on its parts and network."""
    levels = [{**level, **part.get("levels", {}).get(i, {})} for i, level in enumerate(machine["levels"])]
    return {**machine, **part, "levels": levels}


def price(program, rows, machine, folder):
    """Returns the rows with plan_llama's columns added, on the hardware that `machine` describes."""
    paths = {}
    for row in rows:
        key = json.dumps(row.get("part", {}))
        if key not in paths:
            paths[key] = folder / f"machine_{len(paths)}.json"
            paths[key].write_text(json.dumps(of_part(machine, row.get("part", {}))))
    columns = sorted({key for row in rows for key in row if key not in ASIDE})
    layouts = folder / "layouts.csv"
    with open(layouts, "w", newline="") as file:
        writer = csv.DictWriter(file, ["note", "cluster", *columns], extrasaction="ignore", restval="")
        writer.writeheader()
        for i, row in enumerate(rows):
            ranks = math.prod(int(row.get(axis, 1) or 1) for axis in ("tp", "cp", "pp", "dp"))
            writer.writerow({**row, "note": i, "cluster": f"{paths[json.dumps(row.get('part', {}))]}:{ranks}"})
    out = subprocess.run([program, "--layouts", str(layouts)], check=True, capture_output=True, text=True).stdout
    return list(csv.DictReader(io.StringIO(out)))


def errors(rows, priced):
    """Returns (row, predicted seconds, logarithm of predicted over published) for each legal row."""
    return [(row, float(p["step_seconds"]), math.log(float(p["step_seconds"]) / row["published"]))
            for row, p in zip(rows, priced) if p["step_seconds"]]


def loss(found):
    by_source = {}
    for row, _, e in found:
        by_source.setdefault(row["source"], []).append(min(abs(e), 0.3))
    return sum(sum(all_) / len(all_) for all_ in by_source.values()) / len(by_source)


def get(machine, key):
    name, _, kind = key.partition(".")
    return machine[name][kind] if kind else machine[name]


def changed(machine, key, value):
    copy = json.loads(json.dumps(machine))
    name, _, kind = key.partition(".")
    if kind:
        copy[name][kind] = value
    else:
        copy[name] = value
    return copy


def fit(program, rows, machine, keys, folder):
    best = loss(errors(rows, price(program, rows, machine, folder)))
    step = 0.08
    while step > 0.004:
        better = False
        for key in keys:
            for sign in (1, -1):
                value = round(min(max(get(machine, key) + sign * step, BOUNDS[key][0]), BOUNDS[key][1]), 4)
                trial = changed(machine, key, value)
                here = loss(errors(rows, price(program, rows, trial, folder)))
                if here < best - 1e-6:
                    machine, best, better = trial, here, True
                    break
        if not better:
            step /= 2
    return machine, best


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def fitting(rows):
    """Prints how many configurations that ran do not fit by the planner, for each source and in all: each is wrong."""
    by_source = {}
    for row in rows:
        if "fits" in row:
            by_source.setdefault(row["source"], []).append(row["fits"])
    refused = {source: all_.count("0") for source, all_ in sorted(by_source.items())}
    ran = sum(len(all_) for all_ in by_source.values())
    for source, wrong in refused.items():
        if wrong:
            print(f"memory of {source}: {wrong} of {len(by_source[source])} that ran are said not to fit")
    wrong = sum(refused.values())
    print(f"of {ran} published configurations that ran, {wrong} are said not to fit: {100 * wrong / max(ran, 1):.1f} %")


def leave_one_out(program, rows, machines, folder):
    """Fits without each source, one after the other, and reports the errors on the source left out. Its rows keep these
    predictions. At last reports on all of them together."""
    print(f"{'left out':18} {'rows':>5} {'median %':>9} {'p90 %':>7} {'worst %':>8}")

    def report(name, found):
        relative = [abs(math.expm1(e)) * 100 for _, _, e in found]
        print(f"{name:18} {len(relative):5} {quantile(relative, 0.5):9.1f} {quantile(relative, 0.9):7.1f} {max(relative):8.1f}")

    everything = []
    for gpu, machine in machines.items():
        within = {r["source"] for r in rows if r["gpu"] == gpu and (r["source"] not in APART or r["source"] in FITTED[gpu])}
        for source in sorted(within):
            others = [r for r in rows if r["gpu"] == gpu and r["source"] in within - {source}]
            found, _ = fit(program, others, machine, SHARES[gpu], folder)
            mine = [r for r in rows if r["source"] == source]
            here = errors(mine, price(program, mine, found, folder))
            for row, seconds, _ in here:
                row["left_out"] = seconds
            report(source, here)
            everything += here
    report("all, left out", everything)


def ranks(results):
    """Prints Spearman's correlation of published and predicted time of a token on a GPU, within each sweep. A sweep has one
    model, one version of a program, one kind of GPU and network, five layouts or more, and times that differ by more than a
    tenth. If a layout was measured several times, its median counts, because the differences are noise that no prediction can
    rank. Names sweeps below 0.9."""
    sweeps = {}
    for row, seconds, _ in results:
        gpus = math.prod(int(row.get(axis, 1) or 1) for axis in ("tp", "cp", "pp", "dp"))
        scale = gpus / (int(row["batch"]) * int(row["seq"]))
        part = {k: v for k, v in row.get("part", {}).items() if k != "levels"}
        key = (row["source"], row.get("precision", "bf16"), json.dumps(part), row.get("setting", ""), *(row[k] for k in SHAPE))
        layout = tuple(sorted((k, str(v)) for k, v in row.items() if k not in ASIDE))
        sweeps.setdefault(key, {}).setdefault(layout, []).append((row["published"] * scale, seconds * scale))
    by_source, below = {}, []
    for (source, _, part, setting, hidden, layers, *_), layouts in sweeps.items():
        pairs = [tuple(map(statistics.median, zip(*repeated))) for repeated in layouts.values()]
        published_times = [a for a, _ in pairs]
        if len(pairs) >= 5 and max(published_times) > 1.1 * min(published_times):
            orders = [[sorted(values).index(v) + (values.count(v) - 1) / 2 for v in values] for values in zip(*pairs)]
            mean = (len(pairs) - 1) / 2
            a, b = ([x - mean for x in order] for order in orders)
            norm = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
            found = sum(x * y for x, y in zip(a, b)) / norm if norm else 0
            by_source.setdefault(source, []).append(found)
            if found < 0.9:
                below.append(f"  {source}, hidden {hidden}, layers {layers}{', ' + setting if setting else ''}"
                             f"{', ' + part if part != '{}' else ''}: {found:.2f} of {len(pairs)} layouts, whose slowest "
                             f"takes {max(published_times) / min(published_times):.1f} times the fastest")
    for source, all_ in sorted(by_source.items()):
        print(f"{source:18} {len(all_):3} sweeps, Spearman median {quantile(all_, 0.5):.2f}, least {min(all_):.2f}")
    print("\n".join(sorted(below)))


def memory(program, folder_of_tables, machine, folder):
    """Prints for how many layouts of a sweep the planner is wrong about fitting in memory. Also compares predicted memory with
    the allocator's peak."""
    rows = list(published.ultrascale(folder_of_tables, ran=False))
    priced = price(program, rows, machine, folder)
    counts = {(out, fits): 0 for out in (0, 1) for fits in ("0", "1")}
    ratios = []
    for row, p in zip(rows, priced):
        if not p["step_seconds"]:
            continue
        counts[row["out_of_memory"], p["fits"]] += 1
        if row["reserved_gb"] and not row["out_of_memory"]:
            ratios.append(math.log(float(p["memory_bytes"]) / 1e9 / float(row["reserved_gb"])))
    print(f"hf_ultrascale: of {counts[0, '0'] + counts[0, '1']} layouts that ran, {counts[0, '0']} are said not to fit; of "
          f"{counts[1, '0'] + counts[1, '1']} out of memory, {counts[1, '1']} are said to fit")
    relative = [abs(math.expm1(r)) * 100 for r in ratios]
    print(f"memory of {len(ratios)} that ran: median error {quantile(relative, 0.5):.1f} %, p90 {quantile(relative, 0.9):.1f} %, "
          f"bias {100 * math.expm1(quantile(ratios, 0.5)):.1f} %")


def experts(program, folder_of_tables):
    """Checks layouts that engineers recommend for Llamas: they must fit, and the search must not find a slower one."""
    for r in published.read(folder_of_tables, "nemo_recommended_layouts"):
        names = {"8b": "llama-3-8b", "70b": "llama-3-70b", "405b": "llama-3-405b"}
        if r["task"] != "pre_train" or r["model"] not in ("llama3", "llama31") or r["dtype"] not in ("bf16", "fp8"):
            continue
        tp, pp, cp, gpus = (int(r[k]) for k in ("tp_size", "pp_size", "cp_size", "num_gpus"))
        dp, batch = gpus // (tp * pp * cp), int(r["gbs"])
        options = [program, "--model", names[r["size"]], "--cluster", f"{r['system']}:{gpus}", "--seq", r["seq_len"],
                   "--batch", str(batch), "--program", "nemo", "--precision", r["dtype"], "--json"]
        layout = (f"tp={tp},pp={pp},cp={cp},dp={dp},microbatch={r['mbs']},zero={3 if r['use_mcore_fsdp'] == '1' else 1},"
                  f"schedule={published.schedule(pp, published.whole(r['vp_size']))}")
        layers = published.whole(r["recompute_layers"], 0)
        if layers:
            layout += ",recompute=full"
        runs = [subprocess.run(options + more, capture_output=True, text=True) for more in (["--layout", layout], [])]
        if any(run.returncode for run in runs):
            print(f"{r['system']} {r['size']} {r['dtype']}: {next(run.stderr for run in runs if run.returncode).strip()[:100]}")
            continue
        theirs, ours = (json.loads(run.stdout)["layouts"][0] for run in runs)
        print(f"{r['system']} {r['size']} {r['dtype']}: {layout} {'fits' if theirs['fits'] else 'DOES NOT FIT'} in "
              f"{theirs['memory_bytes'] / 1e9:.0f} GB, {theirs['step_seconds']:.2f} s; the search's takes "
              f"{100 * (ours['step_seconds'] / theirs['step_seconds'] - 1):+.1f} %: {ours['layout']}")


def blackwell(program):
    """Compares steps on machines without a fit, and with one share of fp8 products fitted for each machine."""
    everything = {"as described": [], "one share fitted": []}
    with tempfile.TemporaryDirectory() as folder:
        for system in ("B200", "GB200"):
            rows = list(published.blackwell(system))
            machine = json.loads(subprocess.run([program, "--print-hardware", system.lower()], check=True,
                                                capture_output=True, text=True).stdout)
            scaled, _ = fit(program, rows, machine, ("product_share.fp8",), pathlib.Path(folder))
            for how, of in zip(everything, (machine, scaled)):
                found = errors(rows, price(program, rows, of, pathlib.Path(folder)))
                everything[how] += found
                for row, seconds, e in found:
                    print(f"{system:6} {how:16} {row['name']:36} {row['published']:8.3f} {seconds:8.3f} "
                          f"{100 * math.expm1(e):6.1f} %")
                print(f"{system} {how}: product_share.fp8 {of['product_share']['fp8']}")
    for how, found in everything.items():
        relative = [abs(math.expm1(e)) * 100 for _, _, e in found]
        print(f"Blackwell, {how}: {len(relative)} rows, median {quantile(relative, 0.5):.1f} %, "
              f"p90 {quantile(relative, 0.9):.1f} %, worst {max(relative):.1f} %")


def peaks(results_with_memory):
    """Compares predicted with published peak memory, by source, without memory that a process cannot allocate."""
    by_source = {}
    for row, p in results_with_memory:
        if row.get("peak_gb") and p["memory_bytes"]:
            held = sum(float(p[key]) for key in ("weights_bytes", "gradients_bytes", "optimizer_bytes_held",
                                                 "activations_bytes", "logits_bytes", "working_bytes", "buffers_bytes"))
            by_source.setdefault(row["source"], []).append(math.log(held / 1e9 / float(row["peak_gb"])))
    for source, all_ in by_source.items():
        print(f"peak memory of {source}: {len(all_)} rows, median error "
              f"{quantile([abs(math.expm1(e)) * 100 for e in all_], 0.5):.1f} %, from {100 * math.expm1(min(all_)):.0f} to "
              f"{100 * math.expm1(max(all_)):.0f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=pathlib.Path)
    parser.add_argument("program")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--blackwell", action="store_true")
    parser.add_argument("--show", nargs="*", default=[], help="print every row of these sources")
    args = parser.parse_args()
    if args.experts:
        experts(args.program, args.tables)
        return
    if args.blackwell:
        blackwell(args.program)
        return
    rows = published.all_rows(args.tables)
    results, machines = [], {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for gpu in FITTED:
            if not any(r["gpu"] == gpu for r in rows):
                continue
            machine = json.loads(subprocess.run([args.program, "--print-hardware", gpu], check=True,
                                                capture_output=True, text=True).stdout)
            if args.fit:
                mine = [r for r in rows if r["gpu"] == gpu and r["source"] in FITTED[gpu]]
                if not mine:
                    parser.error(f"nothing to fit {gpu} on: of {', '.join(FITTED[gpu])} there are no rows")
                machine, best = fit(args.program, mine, machine, SHARES[gpu], folder)
                print(gpu, {key: get(machine, key) for key in SHARES[gpu]}, f"loss {best:.4f}")
            machines[gpu] = machine
            mine = [r for r in rows if r["gpu"] == gpu]
            priced = price(args.program, mine, machine, folder)
            for row, p in zip(mine, priced):
                if p["step_seconds"]:
                    row["fits"] = p["fits"]
            found = errors(mine, priced)
            results += found
            if len(found) < len(mine):
                print(f"{gpu}: {len(mine) - len(found)} rows are no legal layouts")
        if args.leave_one_out:
            leave_one_out(args.program, rows, machines, folder)
        if args.memory:
            memory(args.program, args.tables, machines["h100"], folder)
            for gpu, machine in machines.items():
                mine = [r for r in rows if r["gpu"] == gpu]
                peaks(list(zip(mine, price(args.program, mine, machine, folder))))
    print(f"{'source':18} {'rows':>5} {'median %':>9} {'p90 %':>7} {'worst %':>8} {'bias %':>7}")

    def report(name, chosen):
        if chosen:
            relative = [abs(math.expm1(e)) * 100 for _, _, e in chosen]
            bias = 100 * math.expm1(quantile([e for _, _, e in chosen], 0.5))
            print(f"{name:18} {len(chosen):5} {quantile(relative, 0.5):9.1f} {quantile(relative, 0.9):7.1f} "
                  f"{max(relative):8.1f} {bias:7.1f}")

    sources = sorted({row["source"] for row, _, _ in results})
    fitted = {s for all_ in FITTED.values() for s in all_}
    for source in sources:
        report(source + (" *" if source in fitted else ""), [x for x in results if x[0]["source"] == source])
    report("not fitted", [x for x in results if x[0]["source"] not in fitted and x[0]["source"] not in APART])
    ranks(results)
    fitting(rows)
    if args.show:
        for row, seconds, e in results:
            if row["source"] in args.show:
                print(f"{row['name']:60} {row['published']:9.3f} {seconds:9.3f} {100 * math.expm1(e):7.1f} %")
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["source", "configuration", "published_s", "predicted_s", "error_percent",
                             "left_out_error_percent", "fitted", "fits", "convention"])
            for row, seconds, e in results:
                writer.writerow([row["source"], row["name"], f"{row['published']:.4g}", f"{seconds:.4g}",
                                 f"{100 * math.expm1(e):.1f}",
                                 f"{100 * (row['left_out'] / row['published'] - 1):.1f}" if "left_out" in row else "",
                                 "yes" if row["source"] in fitted else "no",
                                 "yes" if row["fits"] == "1" else "no", row["convention"]])


if __name__ == "__main__":
    main()
