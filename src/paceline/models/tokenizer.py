"""Text to token ids and back, through the ``tokenizers`` library."""

from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

from paceline.errors import ModelFileError
from paceline.models.gguf import MetadataValue
from paceline.models.pretokenizers import Splitting, splitting
from paceline.models.sentencepiece import sentencepiece_bpe, sentencepiece_splitting
from paceline.models.vocabulary import Vocabulary, read_merges, read_vocabulary


class Tokenizer:
    """A BPE tokenizer, of bytes or of SentencePiece's kind; safe to use from several threads.

    Bytes that a byte-level vocabulary has no token for are dropped, as transformers and llama.cpp drop them too:
    SmolLM2 has no token for some bytes that only rare characters contain.
    """

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> None:
        """``merges``: see ``read_merges``; SentencePiece has none.

        Raises:
            ModelFileError: the pre-tokenizer is not known, or the merges do not fit the tokens.
        """
        self.vocabulary = vocabulary
        self.special_tokens: Mapping[str, int] = vocabulary.special_tokens
        """Ids of the control tokens by their text."""
        if vocabulary.kind == "llama":
            split, model = sentencepiece_splitting(vocabulary), sentencepiece_bpe(vocabulary)
        else:
            split = splitting(vocabulary.pre)
            model = _byte_level_bpe(vocabulary, merges, split)
        self._add_bos = split.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self._parsing = _pipeline(vocabulary, split, model)
        self._plain = _pipeline(vocabulary, split, model)
        self._plain.encode_special_tokens = True

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, MetadataValue]) -> "Tokenizer":
        """Raises ModelFileError: the metadata holds no tokenizer of a known kind, or a damaged one."""
        vocabulary = read_vocabulary(metadata)
        return cls(vocabulary, read_merges(metadata) if vocabulary.kind == "gpt2" else [])

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

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text; the GIL is released meanwhile.

        Args:
            text: lone surrogates, which JSON can spell but UTF-8 cannot, count as U+FFFD.
            parse_special: control tokens spelled out in the text become those tokens; otherwise they are plain text.
            add_special: put BOS in front and EOS at the end if the model wants them (``tokenizer.ggml.add_bos_token``,
                ``add_eos_token``). A text that spells BOS itself has it twice then, as in transformers and llama.cpp.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        pipeline = self._parsing if parse_special else self._plain
        # encode() would hold the GIL, for a second per megabyte
        ids: list[int] = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_special and self._add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.vocabulary.add_eos and self.vocabulary.eos_id is not None:
            ids.append(self.vocabulary.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """A whole text's tokens as text, without the space that SentencePiece puts in front.

        Bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing.
        """
        piece = self.vocabulary.token_bytes if skip_special else self.vocabulary.token_text_bytes
        text = b"".join(map(piece, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.vocabulary.add_space_prefix else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text before it: none for control tokens and for ids outside the vocabulary."""
        return self.vocabulary.token_bytes(token_id)

    def spellings(self, word: str) -> list[list[int]]:
        """Token ids of a word where it begins a text, and behind a space; the latter without the space's own token."""
        bare = self.encode(word.strip(), parse_special=False, add_special=False)
        spaced = self.encode(" " + word.strip(), parse_special=False, add_special=False)
        return [bare] if spaced[-len(bare) :] == bare else [bare, spaced]


def _byte_level_bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], split: Splitting) -> BPE:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(ids, merges, ignore_merges=split.ignore_merges)
    except Exception as error:  # the library has no class of its own for "token out of vocabulary"
        raise ModelFileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _pipeline(vocabulary: Vocabulary, split: Splitting, model: BPE) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)  # shares the model, whose tables are the memory
    if split.pre_tokenizer is not None:
        pipeline.pre_tokenizer = split.pre_tokenizer
    if split.normalizer is not None:
        pipeline.normalizer = split.normalizer
    pipeline.add_special_tokens([AddedToken(text, normalized=False) for text in vocabulary.special_tokens])
    # SentencePiece looks for them in the normalized text, where a literal U+2581 is a space (Gemma: runs of spaces).
    # With a space in front of every stretch of text that cannot be had: the tokens would get one, too.
    normalized = vocabulary.kind == "llama" and not vocabulary.add_space_prefix
    pipeline.add_tokens([AddedToken(text, normalized=normalized) for text in vocabulary.user_defined])
    return pipeline
