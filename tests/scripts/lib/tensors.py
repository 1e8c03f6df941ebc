"""tensors.py DIRECTORY...: exits with an error unless all model directories have the same tensors, bit for bit."""
import json
import pathlib
import struct
import sys


def read(folder: str) -> dict:
    tensors = {}
    files = sorted(pathlib.Path(folder).glob("model*.safetensors"))
    if not files:
        sys.exit(f"{folder} has no model.safetensors and no shards")
    for file in files:
        data = file.read_bytes()
        size, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


first, *others = sys.argv[1:]
expected = read(first)
for other in others:
    got = read(other)
    wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if wrong:
        sys.exit(f"{other} differs from {first}: {', '.join(wrong)}")
