"""Text to token ids and back, through the ``tokenizers`` library."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from paceline.errors import ModelFileError
from paceline.models.gguf import MetadataValue
from paceline.models.vocabulary import Vocabulary, read_vocabulary


class Tokenizer:
    """A byte-level BPE tokenizer; safe to use from several threads.

    Bytes that the vocabulary has no token for are dropped, as transformers and llama.cpp drop them too: SmolLM2 has no
    token for some bytes that only rare characters contain.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ModelFileError: the pre-tokenizer is not known, or the merges do not fit the tokens."""
        self.vocabulary = vocabulary
        self.special_tokens: Mapping[str, int] = vocabulary.special_tokens
        """Ids of the control tokens by their text."""
        splitting = _splitting(vocabulary.pre)
        self._add_bos = splitting.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        model = _bpe(vocabulary, splitting)
        self._parsing = _pipeline(vocabulary, splitting, model)
        self._plain = _pipeline(vocabulary, splitting, model)
        self._plain.encode_special_tokens = True

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, MetadataValue]) -> "Tokenizer":
        """Raises ModelFileError: the metadata holds no byte-level BPE tokenizer of a known kind, or a damaged one."""
        return cls(read_vocabulary(metadata))

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return self.vocabulary.eos_ids

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Token ids of a text; the GIL is released meanwhile.

        Args:
            text: lone surrogates, which JSON can spell but UTF-8 cannot, count as U+FFFD.
            parse_special: control tokens spelled out in the text become those tokens; otherwise they are plain text.
            add_bos: put the BOS token in front if the model wants one (``tokenizer.ggml.add_bos_token``).
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        pipeline = self._parsing if parse_special else self._plain
        # encode() would hold the GIL, for a second per megabyte
        ids: list[int] = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_bos and self._add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        piece = self.vocabulary.token_bytes if skip_special else self.vocabulary.token_text_bytes
        return b"".join(map(piece, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the output: none for control tokens and for ids outside the vocabulary."""
        return self.vocabulary.token_bytes(token_id)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """What happens to text before BPE, and the two choices that llama.cpp ties to it (llama-vocab.cpp)."""

    pre_tokenizer: PreTokenizer
    normalizer: Normalizer | None = None
    ignore_merges: bool = False
    """A word that is a token is taken whole, without looking for merges."""
    add_bos: bool = False


def _digits_apart() -> _Splitting:
    return _Splitting(Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]))


def _gpt2() -> _Splitting:
    return _Splitting(ByteLevel(add_prefix_space=False, use_regex=True))


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The regular expression of Llama 3's and Qwen 2's tokenizer.json; they differ in how many digits make a word."""


def _by_regex(digits: str) -> PreTokenizer:
    split = Split(Regex(_WORDS.format(digits=digits)), "isolated", invert=False)
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> _Splitting:
    return _Splitting(_by_regex(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)


def _qwen2() -> _Splitting:
    return _Splitting(_by_regex(r"\p{N}"), normalizer=NFC())


_SPLITTINGS = {
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
}
"""By ``tokenizer.ggml.pre``."""


def _splitting(pre: str) -> _Splitting:
    if pre not in _SPLITTINGS:
        known = ", ".join(sorted(_SPLITTINGS))
        raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {known}")
    return _SPLITTINGS[pre]()


def _bpe(vocabulary: Vocabulary, splitting: _Splitting) -> BPE:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(ids, vocabulary.merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library has no class of its own for "token out of vocabulary"
        raise ModelFileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _pipeline(vocabulary: Vocabulary, splitting: _Splitting, model: BPE) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)  # shares the model, whose tables are the memory
    pipeline.pre_tokenizer = splitting.pre_tokenizer
    if splitting.normalizer is not None:
        pipeline.normalizer = splitting.normalizer
    pipeline.add_special_tokens([AddedToken(text, normalized=False) for text in vocabulary.special_tokens])
    pipeline.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.user_defined])
    return pipeline
