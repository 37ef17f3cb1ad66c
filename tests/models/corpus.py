"""Texts that tokenizers disagree on: many scripts, white space, digits, emoji, look-alikes of tokens, Korean, code."""

import random

FRAGMENTS = [
    "Hello", "world", " the", " The", "don't", "I'LL", "'s", "'S", "123", "4567", " 42", "3.14", " ", "  ", "    ",
    "\n", "\n\n", "\t", "\r\n", " \n ", "=====", "-----", "aaaaaaaa", "!!!", "...", "안녕하세요", " 한국어",
    " 값이 없습니다.",
    "日本語", "中文", "нещо", "हिन्दी", "ไทย", "Ünïcödé", "é", "ﬁ", "½", "٣٤", "ǅ", "👩‍👩‍👧‍👦", "🇰🇷", "👍🏽",
    "\u200b", "\u3000",
    "\u00a0", "\ufeff", "\0", "\x7f", "▁", "Ġ", "<s>", "<|im_end|>", "<unk>", "<0x0A>", "<table>", "[INST]", "<|",
    "camelCaseWord", "HTTPServer", "x_y_z", "def f(x):\n    return x", "http://a.b/c?d=e&f", "{\"a\": [1, 2]}",
    "// 주석",
]  # fmt: skip

SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
    (0x1100, 0x11FF), (0x2000, 0x21FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1D400, 0x1D7FF),
    (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF),
]  # fmt: skip
"""First and last code point."""


def fuzzed_texts(count: int, seed: int = 1) -> list[str]:
    chance = random.Random(seed)
    return ["".join(_piece(chance) for _ in range(chance.randint(1, 14))) for _ in range(count)]


def _piece(chance: random.Random) -> str:
    if chance.random() < 0.6:
        return chance.choice(FRAGMENTS)
    first, last = chance.choice(SCRIPTS)
    return "".join(chr(chance.randint(first, last)) for _ in range(chance.randint(1, 6)))
