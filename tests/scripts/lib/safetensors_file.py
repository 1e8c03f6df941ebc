"""Reads and writes safetensors files by the format's rules, independent of plait."""
import json
import math
import pathlib
import struct
import sys

SIZES = {"F32": 4, "BF16": 2, "F64": 8}


def read(path) -> tuple[dict, dict]:
    """The metadata, and each tensor's dtype, shape and bytes by its name."""
    data = pathlib.Path(path).read_bytes()
    at = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:at])
    metadata, tensors, first = header.pop("__metadata__", {}), {}, at
    for name, entry in header.items():
        begin, end = (first + offset for offset in entry["data_offsets"])
        if begin != at or end - begin != SIZES[entry["dtype"]] * math.prod(entry["shape"]):
            sys.exit(f"{path}: a gap before {name}, or another length")
        tensors[name] = entry["dtype"], entry["shape"], data[begin:end]
        at = end
    if at != len(data):
        sys.exit(f"{path}: bytes behind the last tensor")
    return metadata, tensors


def write(path, tensors: dict) -> None:
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)
