"""Reads and changes saved steps with Python's standard library only.

    steps.py exported STEP FILE [weights]    FILE is plain safetensors with every tensor of STEP (or only the weights),
                                             whole, as STEP's boxes have it
    steps.py flip STEP TENSOR                flips the last bit of a box of TENSOR, and prints the box, as in [0:2, 4:8]
    steps.py set STEP PLACE JSON             sets a member of STEP's manifest, as layout or scalars/seed, and commits it
    steps.py unset STEP PLACE                takes a member out of it, and commits it
    steps.py blob STEP NAME TEXT             adds a blob, in a new file
    steps.py inspected STEP JSON             checks the output of checkpoint_tool inspect --json for STEP
"""

import itertools
import json
import math
import os
import struct
import sys

import safetensors_file


def require(condition, text):
    if not condition:
        sys.exit(text)


def manifest(step):
    with open(f"{step}/manifest.json", encoding="utf-8") as file:
        return json.load(file)


def boxes(tensor):
    """Yields offset, extent, file, position, bytes of each box."""
    n = len(tensor["shape"])
    numbers = tensor["boxes"]
    for at in range(0, len(numbers), 2 * n + 4):
        some = numbers[at:at + 2 * n + 4]
        yield some[:n], some[n:2 * n], some[2 * n], some[2 * n + 1], some[2 * n + 2]


def gathered(step, saved, tensor):
    """The bytes of a whole tensor, joined row by row."""
    size, shape = safetensors_file.SIZES[tensor["dtype"]], tensor["shape"]
    out = bytearray(size * math.prod(shape))
    for offset, extent, file, position, length in boxes(tensor):
        with open(f"{step}/{saved['files'][file][0]}", "rb") as data:
            data.seek(position)
            part = data.read(length)
        row = size * (extent[-1] if extent else 1)
        for i, place in enumerate(itertools.product(*(range(n) for n in extent[:-1]))):
            to = 0
            for at, begin, whole in zip([*place, 0], offset, shape):
                to = to * whole + begin + at
            out[size * to:size * to + row] = part[i * row:(i + 1) * row]
    return bytes(out)


def exported(step, path, what=""):
    saved, (metadata, found) = manifest(step), safetensors_file.read(path)
    require(metadata.get("format") == "pt", f"{path}: it does not say how its tensors lie")
    expected = {n: t for n, t in saved["tensors"].items() if not what or not n.startswith("optim.")}
    require(len(expected) > 10 and found.keys() == expected.keys(), f"{path}: it has {sorted(found)}")
    require(any(len(list(boxes(t))) > 1 for t in expected.values()), f"{step}: all its tensors are single boxes")
    for name, tensor in expected.items():
        dtype, shape, data = found[name]
        require([dtype, shape] == [tensor["dtype"], tensor["shape"]], f"{path}: {name} is {dtype} {shape}")
        require(data == gathered(step, saved, tensor), f"{path}: {name} has other elements")


def flip(step, name):
    saved = manifest(step)
    offset, extent, file, position, length = list(boxes(saved["tensors"][name]))[-1]
    with open(f"{step}/{saved['files'][file][0]}", "r+b") as data:
        data.seek(position + length - 1)
        last = data.read(1)[0]
        data.seek(position + length - 1)
        data.write(bytes([last ^ 1]))
    print("[" + ", ".join(f"{o}:{o + e}" for o, e in zip(offset, extent)) + "]")


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def commit(step, saved):
    text = json.dumps(saved).encode()
    with open(f"{step}/manifest.json", "wb") as file:
        file.write(text)
    with open(f"{step}/COMMIT", encoding="utf-8") as file:
        lines = file.read().split("\n")
    lines[2] = f"manifest.json {len(text)} bytes, CRC-32C {crc32c(text):08x}"
    with open(f"{step}/COMMIT", "w", encoding="utf-8") as file:
        file.write("\n".join(lines))


def set_member(step, place, value):
    saved = manifest(step)
    *outer, last = place.split("/")
    at = saved
    for key in outer:
        at = at[key]
    at[last] = json.loads(value)
    commit(step, saved)


def unset_member(step, place):
    saved = manifest(step)
    *outer, last = place.split("/")
    at = saved
    for key in outer:
        at = at[key]
    del at[last]
    commit(step, saved)


def blob(step, name, text):
    saved, data, path = manifest(step), text.encode(), f"data/{name}.safetensors"
    entry = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    header = struct.pack("<Q", len(entry)) + entry
    with open(f"{step}/{path}", "wb") as file:
        file.write(header + data)
    saved["blobs"][name] = [len(saved["files"]), len(header), len(data), crc32c(data)]
    saved["files"].append([path, len(header) + len(data), len(header), crc32c(header)])
    commit(step, saved)


def inspected(step, path):
    saved = manifest(step)
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    require([found[k] for k in ("step", "layout", "scalars", "blobs", "whole")] ==
            [saved["step"], saved["layout"], saved["scalars"], {}, True], f"{path}: {found}")
    require(found["bytes"] == sum(os.path.getsize(f"{step}/{f[0]}") for f in saved["files"]), f"{path}: bytes")
    listed = {t["name"]: t for t in found["tensor_list"]}
    require(len(listed) == found["tensors"] and listed.keys() == saved["tensors"].keys(), f"{path}: {sorted(listed)}")
    totals = {}
    for name, tensor in saved["tensors"].items():
        n, size = len(list(boxes(tensor))), sum(b[4] for b in boxes(tensor))
        of = listed[name]
        require([of["dtype"], of["shape"], of["boxes"], of["bytes"]] == [tensor["dtype"], tensor["shape"], n, size],
                f"{path}: {of}")
        kind = name.split(".")[-1] if name.startswith("optim.") else "weights"
        require(of["kind"] == kind, f"{path}: {of}")
        sums = totals.setdefault((kind, tensor["dtype"]), [0, 0, 0, 0])
        for i, more in enumerate([1, n, math.prod(tensor["shape"]), size]):
            sums[i] += more
    require({(t["kind"], t["dtype"]): [t[k] for k in ("tensors", "boxes", "elements", "bytes")]
             for t in found["totals"]} == totals, f"{path}: {found['totals']}")
    writers = [[f["path"], f["bytes"], f["header"], f["data"]] for f in found["file_list"]]
    require(writers == [[f[0], f[1], f[2], f[1] - f[2]] for f in saved["files"]], f"{path}: {writers}")
    data = [w[3] for w in writers]
    require(abs(found["max_over_mean"] - max(data) * len(data) / sum(data)) < 1e-12, f"{path}: max_over_mean")
    require(sum(f["boxes"] for f in found["file_list"]) == sum(s[1] for s in totals.values()), f"{path}: boxes")


if __name__ == "__main__":
    commands = {"exported": exported, "flip": flip, "set": set_member, "unset": unset_member, "blob": blob,
                "inspected": inspected}
    commands[sys.argv[1]](*sys.argv[2:])
