"""make_tokenizer.py [FOLDER]: FOLDER/tokenizers, small tokenizers of Hugging Face's library, and the tokens of some texts.

    NAME.json   the tokenizer.json of a tokenizer trained by this script on examples/data/kjv.txt: byte-level BPE with
                the patterns of GPT-2, Llama 3 and Qwen2, and BPE of characters as in Llama 2 (blanks before words,
                bytes for unknown characters) and as in Mistral's newer ones (Metaspace)
    texts.json  by name, a list of [text, its tokens, their decoded text]: texts with likely errors, and random ones;
                under `prefix`, the special tokens before each

Made with tokenizers 0.23.3.
"""
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
TEXT = (HERE.parent.parent / "examples/data/kjv.txt").read_text()[:250_000]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
CHOSEN = [
    "", " ", "  ", "a", "In the beginning God created the heaven and the earth.", "two  blanks   and    more ",
    " begins with a blank", "lines\nand\n\nlines\r\nof others\r", "\ttabs\t\tand \t blanks\n \n  \n", "I'll DON'T we've it's 'S 'ſ",
    "12345 67 8, 3.14 and 1,000,000", "٣٤٥ Ⅷ ½ ²", "café naïve Ærøskøbing ﬁne", "cafe\u0301 a\u0323\u0307 \u1e9b\u0323 Å",
    "中文字符，没有空格。日本語テキスト", "한국어 \u1112\u1161\u11ab", "नमस्ते ไทย שלום العربية", "🙂 ❤️ 👩‍👩‍👧 🇩🇰",
    "<s>one</s> </s> <s> two </s>","</s>", "<|begin_of_text|>system<|end|><|end|>\n", "kingdom kingdoms kingdo", "<|a|><|b|><|a|>x<|a|",
    "\x00\x01\x1b[31m\x7f", "\u0085\u00a0\u180e\u2028\u3000x\u200b", "▁already▁there ▁ ▁", "<0x41> <unk>", "x" * 300,
    "abcdefghij" * 40, " " * 100, "?!...:;--((]]{}~^`|@#$%&*", "\ufeffmark \ufffd \U0010ffff\ue000",
]
ALPHABET = list("abcdefghilmnorstu   '.,!?\n\n\t0123456789AEIST") + list("éüñßþΩжя中日の한ئहि้\u0301\u00a0\u3000ſ½٣🙂❤️▁") + [
    " the", "'s", "'RE", "\r\n", "   ", "kingdom", "<s>", "</s>", "<|a|>", "<|b|>", "<|end|>", "<unk>", "\x07"]
SPECIAL = ["<|begin_of_text|>", "<|end|>", "<|a|>", "<|b|>", "<|a|><|b|>"]


def byte_level(pattern, normalizer=None, prefix=False, ignore_merges=False, normalized=False):
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        made.normalizer = normalizer
    if pattern:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
                                                      pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(s, normalized=normalized, special=True) for s in SPECIAL]))
    made.add_tokens([AddedToken("kingdom", normalized=normalized)])
    return made


def characters(**how):
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, **how))
    bytes_ = [f"<0x{b:02X}>" for b in range(256)] if how else []
    spaced = TEXT.replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", AddedToken("</s>", normalized=True, special=True)] + bytes_,
                                  show_progress=False)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([spaced], trainer)
    if bytes_:  # tokens of the model that occur in no text
        file = json.loads(made.to_str())
        file["added_tokens"] = [t for t in file["added_tokens"] if t["content"] not in bytes_]
        made = Tokenizer.from_str(json.dumps(file))
    return made


def llama2():
    made = characters(byte_fallback=True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    file = json.loads(made.to_str())
    file["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(file))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return made


def metaspace():
    made = characters()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.Metaspace(prepend_scheme="first")])
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return made


def llama3():
    made = byte_level(LLAMA3, ignore_merges=True)
    begin = made.token_to_id(SPECIAL[0])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", pair=f"{SPECIAL[0]} $A {SPECIAL[0]} $B", special_tokens=[(SPECIAL[0], begin)])])
    return made


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / "tokenizers"
    folder.mkdir(exist_ok=True)
    rng = random.Random(5)
    cases, prefix = {}, {}
    all_of = {"gpt2": byte_level(None, prefix=True, normalized=True), "llama3": llama3(), "llama2": llama2(),
              "qwen2": byte_level(QWEN2, normalizer=normalizers.NFC()), "metaspace": metaspace()}
    for name, made in all_of.items():
        (folder / f"{name}.json").write_text(made.to_str(pretty=False))
        made = Tokenizer.from_file(str(folder / f"{name}.json"))
        texts = CHOSEN + ["".join(rng.choices(ALPHABET, k=rng.randint(1, 24))) for _ in range(60)]
        cases[name] = []
        for text in texts:
            ids = made.encode(text, add_special_tokens=False).ids
            cases[name].append([text, ids, made.decode(ids, skip_special_tokens=False)])
        prefix[name] = made.encode("", add_special_tokens=True).ids
    (folder / "texts.json").write_text(json.dumps({"prefix": prefix, **cases}, separators=(",", ":")))


if __name__ == "__main__":
    main()
