#!/usr/bin/env python3
"""Makes token files from text, for --data of train_llama and for Megatron. PREFIX.bin has the tokens of all documents,
and PREFIX.idx their places (examples/train_llama/data/tokens.hpp describes the formats).

    tokenize_text.py --tokenizer MODEL_DIRECTORY --output corpus documents.jsonl more.txt
    tokenize_text.py --tokenizer bytes --output corpus *.txt          # needs no package

A line of a .jsonl file is a document, with its text in --field. Any other file is one document; --split-on splits it
into several. The tokenizer is Hugging Face's (the package `tokenizers`), without its special tokens. --end-of-document
is added after each document; the default is the tokenizer's eos_token.
"""

import argparse
import array
import collections
import concurrent.futures
import itertools
import json
import os
import struct
import sys
import time

MAGIC = b"MMIDIDX\x00\x00"
LONGEST = 2**31 - 1  # tokens of a document, whose length has 32 bits
NO_TEXT = {b"\x1f\x8b": "compressed by gzip; unpack it first", b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it first",
           b"BZh": "compressed by bzip2; unpack it first", b"\xfd7zXZ": "compressed by xz; unpack it first",
           b"PK\x03\x04": "a zip archive; unpack it first", b"PAR1": "a table in Parquet; write its texts as .jsonl",
           b"\x93NUMPY": "an array of NumPy's, not text",
           b"version https://git-lfs": "a pointer of Git LFS; fetch the file itself with `git lfs pull`"}


class Refused(Exception):
    pass


class Bytes:
    """A token for each byte."""

    vocab = 256

    def encode(self, texts):
        return [list(text.encode("utf-8", "surrogateescape")) for text in texts]

    def token(self, _):
        return None

    default_end = None


class HuggingFace:
    """A tokenizer.json, given by itself or in a model directory."""

    def __init__(self, path):
        try:
            import tokenizers
        except ImportError:
            raise Refused("--tokenizer needs the package tokenizers: pip install tokenizers; or say --tokenizer bytes")
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if not os.path.isfile(file):
            raise Refused(f"--tokenizer: there is no '{file}'; name a tokenizer.json, a directory with one, or bytes")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(file)
        except Exception as why:
            raise Refused(f"--tokenizer: '{file}' is not read: {why}")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        # Token numbers may have gaps, so the number of tokens is not a bound.
        self.vocab = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.default_end = None
        settings = os.path.join(os.path.dirname(file), "tokenizer_config.json")
        if os.path.isfile(settings):
            with open(settings, encoding="utf-8") as f:
                end = json.load(f).get("eos_token")
            self.default_end = end.get("content") if isinstance(end, dict) else end

    def encode(self, texts):
        return [one.ids for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def token(self, text):
        return self.tokenizer.token_to_id(text)


def tokenizer_of(name):
    return Bytes() if name == "bytes" else HuggingFace(name)


def end_token(tokenizer, asked):
    """Returns the token that ends a document; None: there is none."""
    if asked == "none":
        return None
    text = tokenizer.default_end if asked is None else asked
    if text is None:
        return None
    token = tokenizer.token(text)
    if token is None and asked is not None and asked.isdigit():
        token = int(asked)
    if token is None:
        raise Refused(f"--end-of-document: '{text}' is no token of the tokenizer; name one, its number, or none")
    if token >= tokenizer.vocab:
        raise Refused(f"--end-of-document: {token} is no token; the vocabulary has {tokenizer.vocab}")
    return token


def check_text(path, field):
    """Refuses a file that is not text, or that has a document on each line without a name that says so."""
    with open(path, "rb") as f:
        line = f.readline(1 << 20)
    for begin, what in NO_TEXT.items():
        if line.startswith(begin):
            raise Refused(f"'{path}' is {what}")
    try:
        lines = not path.endswith(".jsonl") and field in (found := json.loads(line)) and isinstance(found, dict)
    except (ValueError, TypeError):
        lines = False
    if lines:
        raise Refused(f"'{path}' has an object with '{field}' (--field) in its first line, and would be one document; "
                      "give it a name that ends in .jsonl, so that each line is one")


def documents_of(path, field, separator):
    """Yields the texts of a file."""
    # Bytes that are not UTF-8 are escaped, so that a byte tokenizer can restore them.
    with sys.stdin if path == "-" else open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        if path.endswith(".jsonl"):
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[field]
                except (ValueError, KeyError, TypeError) as why:
                    raise Refused(f"'{path}', line {number}: no object with a text '{field}' (--field): {why!r}")
                if not isinstance(text, str):
                    raise Refused(f"'{path}', line {number}: '{field}' (--field) is no text")
                try:
                    text.encode("utf-8", "surrogateescape")
                except UnicodeEncodeError as why:
                    raise Refused(f"'{path}', line {number}: '{field}' (--field) has {why.object[why.start]!a}, half of a "
                                  "surrogate pair, which no text in UTF-8 has")
                yield text
        else:
            text = f.read()
            yield from text.split(separator) if separator else [text]


worker_tokenizer = None


def start_worker(name):
    global worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker_tokenizer = tokenizer_of(name)


def encode(texts):
    return worker_tokenizer.encode(texts), sum(len(t) for t in texts)


def encoded_batches(texts, arguments):
    """Yields the results of `encode` for batches of texts, in order. Only a few batches are read in advance, because more
    would fill the memory."""
    with concurrent.futures.ProcessPoolExecutor(
            arguments.workers, initializer=start_worker, initargs=(arguments.tokenizer,)) as pool:
        waiting = collections.deque()
        try:
            while True:
                while len(waiting) < 4 * arguments.workers and (batch := list(itertools.islice(texts, 64))):
                    waiting.append(pool.submit(encode, batch))
                if not waiting:
                    return
                yield waiting.popleft().result()
        except concurrent.futures.BrokenExecutor:
            raise Refused(f"a process that encodes was killed, perhaps because memory is too small; try fewer than "
                          f"{arguments.workers} --workers")
        finally:
            pool.shutdown(cancel_futures=True)


class Writer:
    """Writes PREFIX.bin and PREFIX.idx, which get their names when they are whole."""

    def __init__(self, prefix, wide):
        self.names = [prefix + ".bin", prefix + ".idx"]
        self.code, self.kind = (4, "i") if wide else (8, "H")
        self.lengths = array.array("i")
        try:
            self.tokens = open(self.names[0] + ".tmp", "wb")
        except OSError as why:
            raise Refused(f"--output: {why}")

    def add(self, document):
        if len(document) > LONGEST:
            raise Refused(f"document {len(self.lengths) + 1} has {len(document)} tokens; at most {LONGEST} are legal")
        numbers = array.array(self.kind, document)
        if sys.byteorder == "big":
            numbers.byteswap()
        self.tokens.write(numbers.tobytes())
        self.lengths.append(len(document))

    def finish(self):
        count = len(self.lengths)
        with open(self.names[1] + ".tmp", "wb") as index:
            index.write(MAGIC + struct.pack("<QBQQ", 1, self.code, count, count + 1))
            size = array.array(self.kind).itemsize
            offsets = itertools.accumulate((n * size for n in self.lengths[:-1]), initial=0) if count else ()
            for numbers in (self.lengths, array.array("q", offsets), array.array("q", range(count + 1))):
                if sys.byteorder == "big":
                    numbers.byteswap()
                index.write(numbers.tobytes())
            index.flush()
            os.fsync(index.fileno())
        self.tokens.flush()
        os.fsync(self.tokens.fileno())
        self.tokens.close()
        for name in self.names:
            os.replace(name + ".tmp", name)

    def drop(self):
        self.tokens.close()
        for name in self.names:
            if os.path.exists(name + ".tmp"):
                os.remove(name + ".tmp")


def run(arguments):
    tokenizer = tokenizer_of(arguments.tokenizer)
    end = end_token(tokenizer, arguments.end_of_document)
    for path in arguments.files:
        if path != "-" and not os.path.isfile(path):
            raise Refused(f"there is no file '{path}'")
        if path in (arguments.output + ".bin", arguments.output + ".idx"):
            raise Refused(f"--output {arguments.output} would overwrite '{path}', which is read")
        if path != "-":
            check_text(path, arguments.field)
    texts = itertools.chain.from_iterable(
        documents_of(path, arguments.field, arguments.split_on) for path in arguments.files)
    began = time.monotonic()
    writer = Writer(arguments.output, tokenizer.vocab > 65536)
    empty = tokens = characters = 0
    try:
        for encoded, length in encoded_batches(texts, arguments):
            characters += length
            for document in encoded:
                if not document:
                    empty += 1
                    continue
                if end is not None:
                    document.append(end)
                writer.add(document)
                tokens += len(document)
        if tokens == 0:
            raise Refused("there is no text in the files")
        writer.finish()
    except BaseException:
        writer.drop()
        raise
    seconds = max(time.monotonic() - began, 1e-9)
    print(f"{arguments.output}.bin, {arguments.output}.idx: {tokens} tokens of {len(writer.lengths)} documents "
          f"({empty} without text left out), {characters / tokens:.2f} characters a token, "
          f"{tokens / seconds:,.0f} tokens/s")
    print(f"a model needs a vocab_size of at least {tokenizer.vocab}; "
          + ("documents do not end in a token" if end is None else f"documents end in token {end}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="texts, .jsonl files, or - for standard input")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, a directory with one, or bytes")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="of the two files that are written")
    parser.add_argument("--field", default="text", help="of the objects in .jsonl files (default: text)")
    parser.add_argument("--split-on", metavar="TEXT", help="what separates the documents of a file of text")
    parser.add_argument("--end-of-document", metavar="TOKEN",
                        help="a token's text or number, or none (default: the tokenizer's eos_token, if it has one)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    arguments = parser.parse_args()
    try:
        if arguments.workers < 1:
            raise Refused(f"--workers is {arguments.workers}; at least 1 is legal")
        run(arguments)
    except (Refused, OSError) as why:
        sys.exit(f"tokenize_text.py: {why}")


if __name__ == "__main__":
    main()
