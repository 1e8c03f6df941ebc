"""Makes the table of GPU benchmarks from lines of JSON that the programs print: plait's result, the best known result, and
the share of a step that its calls take.

    python3 benchmarks/cuda/table.py FILE.jsonl ... [--only PREFIX] [--title TEXT] [--failed STEP]

An expected row without a result counts as missing. Ratios to PyTorch are computed here. A line that is not a row is an
error. The exit code does not depend on targets.
"""
import argparse
import json
import pathlib
import re
import sys

from rows import SEQUENCES, Row, rows

SHORT = 11_000  # characters

DETAILS = {"terabytes_per_second": "{:.2f} TB/s", "teraflops": "{:.0f} TFLOP/s", "causal": "{:.3f} by half of attention",
           "held_gib": "{:.1f} GiB held", "launches": "{:.0f} launches", "attention": "{} attention", "method": "by {}"}

# The parts of a step, in the order in which they are tried for a kernel's name.
PARTS = {"attention": r"attention|flash|fmha|sdpa|merge_heads",
         "products": r"gemm|cutlass|nvjet|cublas|xmma|splitK|matmul",
         "norms": r"norm_(forward|backward)|rms|layer_",
         "SwiGLU": r"swiglu",
         "rotary positions": r"rope|rotate",
         "embedding and loss": r"cross_entropy|softmax|embedding|rows_of_tokens|RadixSort|bounds_of_rows|add_pieces|add_partials|lookup",
         "optimizer and gradients' norm": r"adamw|squares|clip",
         "copies, casts and fills": r"map_kernel|copy|memset|memcpy|cast|fill"}


def read(paths: list[str]) -> list[dict]:
    found = []
    for path in paths:
        for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
                float(entry["value"])
                entry["id"] + ""
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path}:{number}: no result: {line[:200]}")
            found.append(entry)
    return found


def with_ratios(found: dict[str, dict]) -> dict[str, dict]:
    """Adds plait's tokens per second, and rates of attention, over PyTorch's. plait's fastest setting counts, because
    PyTorch's attention has no fixed order either."""
    for seq in SEQUENCES:
        theirs = found.get(f"pytorch.{seq}.tokens_per_second")
        ours = [entry["value"] for key, entry in found.items()
                if key.startswith(f"step.{seq}.") and key.endswith(".tokens_per_second")]
        if theirs and ours and theirs["value"] > 0:
            found[f"pytorch.{seq}.ratio"] = {"value": max(ours) / theirs["value"],
                                             "known": f"{shown(theirs['value'])} tokens/s"}
        for key in ("forward", "backward"):
            theirs = found.get(f"pytorch.attention.{seq}.{key}")
            own = max((found[name] for whose in ("own", "cudnn", "any_order")
                       if (name := f"attention.{whose}.{seq}.{key}") in found), key=lambda e: e["value"], default=None)
            if theirs and own and theirs["value"] > 0:
                found[f"attention.{seq}.{key}.ratio"] = {**own, "teraflops": own["value"],
                                                         "value": own["value"] / theirs["value"],
                                                         "known": f"{shown(theirs['value'])} TFLOP/s"}
    return found


def with_shares(found: dict[str, dict]) -> dict[str, dict]:
    """Adds the share of a step that a row's calls take, for the step at the row's length."""
    for row_id, entry in found.items():
        length = next((seq for seq in SEQUENCES if f".{seq}." in row_id), SEQUENCES[0])
        step = found.get(f"step.{length}.tokens_per_second", {})
        if "step_calls" in entry and "seconds" in entry and step.get("seconds", 0) > 0:
            entry["share"] = entry["step_calls"] * entry["seconds"] / step["seconds"]
    return found


def shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:.2f}"


def measured(row: Row, entry: dict) -> str:
    details = [text.format(entry[key]) for key, text in DETAILS.items() if key in entry and not text.endswith(row.unit or "?")]
    if "other_seconds" in entry:
        details.append(f"{1e6 * entry['seconds']:.3g} us")
    return f"{shown(entry['value'])} {row.unit}".strip() + (f" ({', '.join(details)})" if details else "")


def known(entry: dict) -> str:
    if "other_seconds" in entry:
        return f"{1e6 * entry['other_seconds']:.3g} us, {entry['other']}"
    return entry.get("known", "")


def share(entry: dict) -> str:
    if "share" not in entry:
        return ""
    return f"{100 * entry['share']:.1f} %" if entry["step_calls"] else "not in it"


def verdict(row: Row, entry: dict | None) -> str:
    if entry is None:
        return "MISSING"
    if row.target is None:
        return ""
    value = entry["value"]
    return "yes" if (value <= row.target if row.at_most else value >= row.target) else "NO"


def target(row: Row) -> str:
    return "" if row.target is None else f"{'at most' if row.at_most else 'at least'} {row.target:g}"


def table(found: list[dict], only: str = "") -> list[str]:
    by_id = with_shares(with_ratios({entry["id"]: entry for entry in found}))
    lines = ["| what | measured | best known | target | met | of the step |", "|---|---:|---:|---|---|---:|"]
    counts = {"yes": 0, "NO": 0, "MISSING": 0, "": 0}
    for row in rows():
        entry = by_id.get(row.id)
        if not row.id.startswith(only) or (entry is None and row.optional):
            continue
        met = verdict(row, entry)
        counts[met] += 1
        cells = (measured(row, entry), known(entry), share(entry)) if entry else ("", "", "")
        lines.append(f"| {row.what} | {cells[0]} | {cells[1]} | {target(row)} | {met} | {cells[2]} |")
    lines += ["", f"{counts['yes']} targets met, {counts['NO']} not met, {counts['MISSING']} rows missing."]
    return lines


def short_table(found: list[dict]) -> list[str]:
    """Returns the results in three columns. Missing rows are counted by the first part of their ids."""
    by_id = with_ratios({entry["id"]: entry for entry in found})
    lines, missing, counts = ["| what | measured | target |", "|---|---:|---|"], {}, {"yes": 0, "NO": 0}
    for row in rows():
        entry = by_id.get(row.id)
        if entry is None:
            if not row.optional:
                group = row.id.split(".")[0]
                missing[group] = missing.get(group, 0) + 1
            continue
        met = verdict(row, entry)
        counts[met] = counts.get(met, 0) + 1
        aim = f"{'<=' if row.at_most else '>='} {row.target:g} {met}" if row.target is not None else ""
        lines.append(f"| {row.what} | {shown(entry['value'])} {row.unit} | {aim} |")
    missed = ", ".join(f"{n} of {group}" for group, n in missing.items())
    end = [f"{counts['yes']} targets met, {counts['NO']} not met; missing: {missed or 'nothing'}."]
    while sum(len(line) + 1 for line in lines + end) > SHORT - 80:
        lines = lines[:-1]
        end[-1:] = [end[-1]] if end[0].startswith("(") else ["(the rest is in the archive)", end[-1]]
    return lines + end


def parts(found: list[dict]) -> list[str]:
    """Returns the times of the steps' parts; a kernel's name determines its part."""
    lines = []
    for step in dict.fromkeys(entry["id"] for entry in found if entry["id"].endswith(".one_kernel")):
        shares = dict.fromkeys([*PARTS, "the rest"], 0.0)
        for entry in found:
            if entry["id"] == step:
                name = next((p for p, pattern in PARTS.items() if re.search(pattern, entry["name"])), "the rest")
                shares[name] += entry["share"]
        shares["the rest"] += max(0.0, 1 - sum(shares.values()))  # of short kernels that are not listed
        lines += ["", f"Parts of {step.removesuffix('.one_kernel')}:", "", "| part | share |", "|---|---:|"]
        lines += [f"| {name} | {share:.3f} |" for name, share in shares.items()]
    return lines


def kernels(found: list[dict]) -> list[str]:
    """Returns the times of the steps' kernels."""
    lines = []
    for step in dict.fromkeys(entry["id"] for entry in found if entry["id"].endswith(".one_kernel")):
        lines += ["", f"Kernels of {step.removesuffix('.one_kernel')}:", "", "| kernel | ms in a step | calls | share |",
                  "|---|---:|---:|---:|"]
        lines += [f"| `{e['name'][:90]}` | {1e3 * e['value']:.2f} | {e['count']:.0f} | {e['share']:.3f} |"
                  for e in found if e["id"] == step]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--only", default="", help="the rows whose ids begin so")
    parser.add_argument("--title")
    parser.add_argument("--short", action="store_true", help=f"what was measured, in at most {SHORT} characters")
    parser.add_argument("--failed", action="append", default=[], help="a step that failed; may be repeated")
    options = parser.parse_args()
    found = read(options.files)
    if options.short:
        print("\n".join(short_table(found)))
        return
    lines = [f"# {options.title}", ""] if options.title else []
    lines += [f"FAILED: {step}" for step in options.failed] + ([""] if options.failed else [])
    print("\n".join(lines + table(found, options.only) + parts(found) + kernels(found)))


if __name__ == "__main__":
    sys.exit(main())
