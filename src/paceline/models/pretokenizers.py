"""How text is cut into words before byte-level BPE: by ``tokenizer.ggml.pre``.

The expressions are those of the models' own ``tokenizer.json``; llama.cpp's (llama-vocab.cpp) mean the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from paceline.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Splitting:
    """What happens to text before BPE, and the two choices that llama.cpp ties to it."""

    pre_tokenizer: PreTokenizer | None
    """None: the text is one word."""
    normalizer: Normalizer | None = None
    ignore_merges: bool = False
    """A word that is a token is taken whole, without looking for merges."""
    add_bos: bool = False
    """For a file that does not say."""


def splitting(pre: str) -> Splitting:
    """Raises ModelFileError: the name is not known; a wrong guess would only make the model a little dull."""
    if pre not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {known}")
    return SUPPORTED[pre]()


def _gpt2(normalizer: Normalizer | None = None) -> Splitting:
    return Splitting(ByteLevel(add_prefix_space=False, use_regex=True), normalizer)


def _digits_apart(normalizer: Normalizer | None = None) -> Splitting:
    digits, words = Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)
    return Splitting(Sequence([digits, words]), normalizer)


def _by_regex(*expressions: str) -> PreTokenizer:
    """Each expression cuts what the ones before it left in one piece."""
    splits = [Split(Regex(expression), "isolated", invert=False) for expression in expressions]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """Of GPT-4; Llama 3's and Qwen 2's differ in how many digits make a word."""
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}"


def _dbrx() -> Splitting:
    return Splitting(_by_regex(_cl100k(r"\p{N}{1,3}")))


def _llama3() -> Splitting:
    return Splitting(_by_regex(_cl100k(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)


def _qwen2(normalizer: Normalizer | None = None) -> Splitting:
    return Splitting(_by_regex(_cl100k(r"\p{N}")), normalizer)


def _tekken() -> Splitting:
    """Of Mistral Nemo: a word does not go from small letters to capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{upper}*{lower}+|{upper}+{lower}*)"
    words = rf"{letters}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITE_SPACE}"
    return Splitting(_by_regex(words), ignore_merges=True, add_bos=True)


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _falcon() -> Splitting:
    return Splitting(_by_regex(r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"))


def _deepseek_coder() -> Splitting:
    return Splitting(_by_regex(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))


SUPPORTED: Mapping[str, Callable[[], Splitting]] = {
    "command-r": lambda: _digits_apart(NFC()),
    "dbrx": _dbrx,  # OLMo 2 as well
    "deepseek-coder": _deepseek_coder,
    "deepseek-r1-qwen": _qwen2,
    "falcon": _falcon,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "mpt": lambda: _gpt2(NFC()),
    "phi-2": _gpt2,
    "qwen2": lambda: _qwen2(NFC()),
    "refact": _digits_apart,  # Granite as well
    "smaug-bpe": _dbrx,
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
    "tekken": _tekken,
}
"""By ``tokenizer.ggml.pre``; tests prove each against llama.cpp or transformers."""
