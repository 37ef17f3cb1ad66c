"""The token table in a GGUF file's metadata, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError
from paceline.models.gguf import MetadataValue


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type`` (llama.cpp, ``enum llama_token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
     "</s>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"}
)  # fmt: skip
"""Control tokens that end a turn whatever the metadata says, as in llama.cpp (``special_eog_ids``): a chat model's
``eos_token_id`` often names only one of the two that it uses."""

_TURN_TOKENS = TURN_ENDS - {"</s>"} | {"<start_of_turn>"}
"""Control tokens even where a file's converter took them for text, as in llama.cpp (but for ``<start_of_turn>``, which
is text in the files that Google quantized). In Gemma ``</s>`` is HTML."""

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


VocabularyKind = Literal["gpt2", "llama"]
"""``tokenizer.ggml.model``: byte-level BPE, or SentencePiece BPE."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a BPE model, their types and the ids with a meaning."""

    kind: VocabularyKind
    pre: str
    """Name of the pre-tokenizer, such as ``smollm``; SentencePiece has none."""
    tokens: list[str]
    types: list[int]
    scores: NDArray[np.float32] | None = field(repr=False)
    """f32[V] for SentencePiece: of several possible merges, the one into the token of the highest score is next."""
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends a turn."""
    add_bos: bool | None
    """Whether a prompt starts with BOS; None where the file does not say."""
    add_eos: bool
    """Whether a prompt ends with EOS."""
    add_space_prefix: bool
    """Whether SentencePiece reads a text as if a space stood before it."""
    special_tokens: Mapping[str, int]
    """Ids of the control tokens by their text."""
    user_defined: list[str]
    """Tokens that are found in any text before it is split, without being control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: none for control and unused tokens and for ids outside the vocabulary."""
        kind = self.types[token_id] if 0 <= token_id < len(self.tokens) else TokenType.UNUSED
        if kind == TokenType.NORMAL:
            return _SPELLINGS[self.kind](self.tokens[token_id])
        if kind == TokenType.BYTE:
            return bytes.fromhex(self.tokens[token_id][3:5])
        return self.tokens[token_id].encode() if kind == TokenType.USER_DEFINED else b""

    def longest_token(self) -> int:
        """In bytes."""
        longest = max(range(len(self.tokens)), key=lambda token_id: len(self.tokens[token_id]))
        found = len(self.token_text_bytes(longest))
        # A character is at most 4 bytes: few others can have more.
        others = [token_id for token_id, token in enumerate(self.tokens) if 4 * len(token) > found]
        return max((len(self.token_text_bytes(token_id)) for token_id in others), default=found)

    def token_text_bytes(self, token_id: int) -> bytes:
        """As ``token_bytes``, but a control token gives its text."""
        if 0 <= token_id < len(self.tokens) and self.types[token_id] in _SPECIAL:
            return self.tokens[token_id].encode()
        return self.token_bytes(token_id)


_SPECIAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})  # llama.cpp treats both as special

_NO_ID = (-1, 2**32 - 1)
"""What llama.cpp's converter of llama2.c's models writes for a padding token that there is not."""

_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {"gpt2": {}, "llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Those of a file that names none (llama-vocab.cpp); there gpt2 means Falcon's, which would be wrong for any other."""


def read_vocabulary(metadata: Mapping[str, MetadataValue]) -> Vocabulary:
    """Raises ModelFileError: the metadata has no tokenizer of a known kind, or one that contradicts itself."""
    kind = _kind(metadata)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, tokens)
    special = {tokens[i]: i for i, type_ in enumerate(types) if type_ in _SPECIAL and tokens[i]}
    prefixed = not str(metadata.get("general.architecture")).startswith("gemma")  # some files of Gemma do not say

    def named(name: str) -> int | None:
        return _token_id(metadata, name, len(tokens), _DEFAULT_IDS[kind].get(name))

    ends = [named("eos"), named("eot"), named("eom")]
    return Vocabulary(
        kind=kind,
        pre=_pre(metadata, tokens) if kind == "gpt2" else "",
        tokens=tokens,
        types=types,
        scores=_scores(metadata, len(tokens)) if kind == "llama" else None,
        bos_id=named("bos"),
        eos_id=ends[0],
        unk_id=named("unknown"),
        pad_id=named("padding"),
        eos_ids=frozenset(i for i in ends if i is not None) | {i for text, i in special.items() if text in TURN_ENDS},
        add_bos=_flag(metadata, "add_bos_token", None),
        add_eos=bool(_flag(metadata, "add_eos_token", False)),
        add_space_prefix=kind == "llama" and bool(_flag(metadata, "add_space_prefix", prefixed)),
        special_tokens=special,
        user_defined=[tokens[i] for i, type_ in enumerate(types) if type_ == TokenType.USER_DEFINED and tokens[i]],
    )


def _kind(metadata: Mapping[str, MetadataValue]) -> VocabularyKind:
    model = metadata.get("tokenizer.ggml.model")
    if isinstance(model, str) and model == "gpt2":
        return "gpt2"
    if isinstance(model, str) and model == "llama":
        return "llama"
    raise ModelFileError(
        f"tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
    )


_PRE_OF_OLD_FILES: Mapping[str, str] = {
    "gpt2": "gpt-2",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "starcoder2": "starcoder",
}
"""By architecture, where all models of one split alike: files from before May 2024 do not say. llama.cpp takes a
default for them that is none of theirs."""


def _pre(metadata: Mapping[str, MetadataValue], tokens: list[str]) -> str:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}; a name is needed")
    if pre != "default":
        return pre
    architecture = str(metadata.get("general.architecture"))
    if architecture == "llama" and "<|begin_of_text|>" in tokens:
        return "llama-bpe"
    if architecture not in _PRE_OF_OLD_FILES:
        raise ModelFileError("the metadata has no tokenizer.ggml.pre, so it is unknown how text is split")
    return _PRE_OF_OLD_FILES[architecture]


def _flag(metadata: Mapping[str, MetadataValue], name: str, default: bool | None) -> bool | None:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is not default and not isinstance(value, bool):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r}; it must be true or false")
    return value


def _strings(metadata: Mapping[str, MetadataValue], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelFileError(f"{key} is missing or no list of strings: the file has no usable tokenizer")
    return value


def _token_types(metadata: Mapping[str, MetadataValue], tokens: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer) or len(value) != len(tokens):
        raise ModelFileError(f"{key} is missing or not an integer for each of the {len(tokens)} tokens")
    unknown = np.setdiff1d(value, list(TokenType))
    if unknown.size:
        raise ModelFileError(f"{key} holds {unknown[0]}; token types are 1 to {max(TokenType)}")
    for token_id in np.flatnonzero(value == TokenType.BYTE).tolist():
        if not _BYTE_TOKEN.fullmatch(tokens[token_id]):
            raise ModelFileError(f"{key} calls {tokens[token_id]!r} a byte; bytes are written <0x00> to <0xFF>")
    types: list[int] = value.tolist()
    control = int(TokenType.CONTROL)
    return [control if token in _TURN_TOKENS else type_ for token, type_ in zip(tokens, types, strict=True)]


def _scores(metadata: Mapping[str, MetadataValue], num_tokens: int) -> NDArray[np.float32]:
    key = "tokenizer.ggml.scores"
    value = metadata.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or len(value) != num_tokens:
        raise ModelFileError(f"{key} is missing or not a number for each of the {num_tokens} tokens")
    return value.astype(np.float32)


def _token_id(metadata: Mapping[str, MetadataValue], name: str, num_tokens: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is None or default < num_tokens else None
    if name == "padding" and isinstance(value, int) and value in _NO_ID:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ModelFileError(f"{key} is {value!r}; the vocabulary has the ids 0 to {num_tokens - 1}")
    return value


def read_merges(metadata: Mapping[str, MetadataValue]) -> list[tuple[str, str]]:
    """Those of byte-level BPE in the order of their ranks; no part of the vocabulary, as only encoding needs them.

    Raises:
        ModelFileError: the metadata has none, or one that is not of two tokens.
    """
    lines = _strings(metadata, "tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    for line, (left, right) in zip(lines, merges, strict=True):
        if not (left and right):
            raise ModelFileError(f"tokenizer.ggml.merges holds {line!r}, which is not two tokens with a space between")
    return merges


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes (``bytes_to_unicode`` in openai/gpt-2, src/encoder.py), as a translation
    of each to the character of the byte's own number; the characters below 256 that stand for nothing become ones that
    no byte has."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, "\uffff")
    return table | {256 + i: chr(byte) for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a token in plain text, such as an added one without a type of its own
        return token.encode()


SPACE = "\u2581"
"""SentencePiece's stand-in for a space."""


def _sentencepiece_bytes(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


_SPELLINGS: Mapping[VocabularyKind, Callable[[str], bytes]] = {
    "gpt2": _byte_level_bytes,
    "llama": _sentencepiece_bytes,
}
