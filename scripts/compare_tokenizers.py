#!/usr/bin/env python3
"""Compare tokens with llama.cpp's, on texts made at random, and shorten those that differ.

``scripts/compare_tokenizers.py [--texts N] [--seed N] [--pre NAME] GGUF...`` needs llama-cpp-python
(``pip install llama-cpp-python``), which loads the vocabulary alone and runs in a process of its
own, because one process holds one libggml. docs/tokenizers.md lists the differences that are meant.

Exit code: 0 if there is no difference, 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

UNITS = (
    *("hello", "World", "the", "don't", "WE'RE", "HelloWorld", "camelCase", "I", "x", "'s", "'"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\v", "\f", "\u00a0", "\u3000", "\u2003"),
    *("1", "12", "1234", "1234567", "½", "²", "\u0663\u0664", "Ⅷ", "①", "\x85", "\x1c", "\x00"),
    *(
        "日本語",
        "你好",
        "한국어",
        "ก็ไทย",
        "ខ្មែរ",
        "हिन्दी",
        "العربية",
        "עברית",
        "жук",
        "Ω",
        "ß",
        "İ",
        "ǅ",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "ﬁ",
        "🙂",
        "👩\u200d👧",
        "🇩🇪",
        "\u200b",
        "\ufeff",
        "\ufffd",
        "“",
        "—",
    ),
    *("!", "?!", "...", "$", "+", "<", "|", "`", '"', "//", "\\", "_", "##", "@", "▁", "<0x0A>"),
)
"""What texts are made of, besides special tokens and single characters."""

RANGES = ((0x20, 0x7F), (0x80, 0x600), (0x900, 0x2000), (0x2000, 0xD7FF), (0xE000, 0x1FFFF))

Encode = Callable[[str, bool, bool], list[int]]


def main() -> int:
    """Parse the command line and compare file by file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, metavar="GGUF")
    parser.add_argument("--texts", type=int, default=2000, help="how many texts a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pre", help="the pre-tokenizer to use in place of the file's, in ours")
    parser.add_argument("--show", type=int, default=20, help="how many differences to print")
    options = parser.parse_args()
    n_different = sum(compare(path, options) for path in options.files)
    return int(n_different > 0)


def compare(path: Path, options: argparse.Namespace) -> int:
    """Compare the two on a file; print what differs, and return how many texts do."""
    from kvcellar.backends.ggml.gguf import GgufFile
    from kvcellar.errors import KVCellarError
    from kvcellar.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(GgufFile(path).metadata, pre=options.pre)

    def ours(text: str, add_special: bool, parse_special: bool) -> list[int]:
        try:
            return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        except KVCellarError:
            return [-1]

    special = [text for i, text in enumerate(tokenizer.vocab.tokens) if tokenizer.is_special(i)]
    rng = random.Random(options.seed)
    n_different, shown = 0, set[str]()
    with Reference(path) as reference:
        for _ in range(options.texts):
            text = random_text(rng, special[:40])
            add_special, parse_special = rng.random() < 0.5, rng.random() < 0.5
            if differ(ours, reference.encode, text, add_special, parse_special):
                n_different += 1
                if len(shown) < options.show:
                    shown.add(shorten(ours, reference.encode, text, add_special, parse_special))
    print(f"{path.name}: {n_different} of {options.texts} texts differ", flush=True)
    for text in sorted(shown, key=len):
        print("   ", repr(text), *map(describe, text[:4]))
    return n_different


def random_text(rng: random.Random, special: list[str]) -> str:
    """A text of a few units, special tokens and characters from everywhere."""
    parts = rng.choices(UNITS, k=rng.randrange(1, 14))
    for i in range(len(parts)):
        if rng.random() < 0.15:
            parts[i] = chr(rng.randrange(*rng.choice(RANGES)))
        elif special and rng.random() < 0.1:
            parts[i] = rng.choice(special)
    return "".join(parts).encode("utf-8", "ignore").decode()


def differ(ours: Encode, theirs: Encode, text: str, add_special: bool, parse_special: bool) -> bool:
    """Whether the two give other tokens."""
    return ours(text, add_special, parse_special) != theirs(text, add_special, parse_special)


def shorten(ours: Encode, theirs: Encode, text: str, add_special: bool, parse_special: bool) -> str:
    """Leave characters out as long as the tokens differ."""
    at = 0
    while at < len(text):
        shorter = text[:at] + text[at + 1 :]
        if differ(ours, theirs, shorter, add_special, parse_special):
            text, at = shorter, 0
        else:
            at += 1
    return text


def describe(letter: str) -> str:
    """A character's code and name."""
    return f"U+{ord(letter):04X} {unicodedata.name(letter, '')}".rstrip()


class Reference:
    """llama.cpp's tokenizer of a file, in a process of its own."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of a text.

        Raises:
            SystemExit: the process has ended.
        """
        streams: tuple[IO[bytes] | None, ...] = (self._process.stdin, self._process.stdout)
        stdin, stdout = streams
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([text, add_special, parse_special]).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended while it tokenized {text!r}")
        ids: list[int] = json.loads(line)
        return ids

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def serve(path: str) -> None:
    """Answer each line of stdin, a text and two flags, with tokens."""
    import llama_cpp

    model: Any = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    for line in sys.stdin:
        text, add_special, parse_special = json.loads(line)
        ids = model.tokenize(text.encode(), add_bos=add_special, special=parse_special)
        print(json.dumps(ids), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
