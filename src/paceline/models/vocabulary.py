"""The token table in a GGUF file's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a byte-level BPE model, their types and the ids with a meaning."""

    pre: str
    """Name of the pre-tokenizer, such as ``smollm``."""
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]] = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends a turn."""
    add_bos: bool | None
    """Whether a prompt starts with BOS; None where the file does not say."""
    special_tokens: Mapping[str, int]
    """Ids of the control tokens by their text."""
    user_defined: list[str]
    """Tokens that are found in any text before it is split, without being control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: none for control and unused tokens and for ids outside the vocabulary."""
        kind = self.types[token_id] if 0 <= token_id < len(self.tokens) else TokenType.UNUSED
        if kind == TokenType.NORMAL:
            return _byte_level_bytes(self.tokens[token_id])
        return self.tokens[token_id].encode() if kind == TokenType.USER_DEFINED else b""

    def token_text_bytes(self, token_id: int) -> bytes:
        """As ``token_bytes``, but a control token gives its text."""
        if 0 <= token_id < len(self.tokens) and self.types[token_id] in _SPECIAL:
            return self.tokens[token_id].encode()
        return self.token_bytes(token_id)


_SPECIAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})  # llama.cpp treats both as special


def read_vocabulary(metadata: Mapping[str, MetadataValue]) -> Vocabulary:
    """Raises ModelFileError: the metadata has no ``gpt2`` tokenizer, or one that contradicts itself."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported")
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str):
        raise ModelFileError("the metadata has no tokenizer.ggml.pre, so it is unknown how text is split")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, len(tokens))
    special = {tokens[i]: i for i, kind in enumerate(types) if kind in _SPECIAL and tokens[i]}
    ends = [_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[_merge(line) for line in _strings(metadata, "tokenizer.ggml.merges")],
        bos_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens)),
        eos_id=ends[0],
        unk_id=_token_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens)),
        pad_id=_token_id(metadata, "tokenizer.ggml.padding_token_id", len(tokens)),
        eos_ids=frozenset(i for i in ends if i is not None) | {i for text, i in special.items() if text in TURN_ENDS},
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        special_tokens=special,
        user_defined=[tokens[i] for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED and tokens[i]],
    )


def _strings(metadata: Mapping[str, MetadataValue], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelFileError(f"{key} is missing or no list of strings: the file has no usable tokenizer")
    return value


def _token_types(metadata: Mapping[str, MetadataValue], num_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer) or len(value) != num_tokens:
        raise ModelFileError(f"{key} is missing or not an integer for each of the {num_tokens} tokens")
    unknown = np.setdiff1d(value, list(TokenType))
    if unknown.size:
        raise ModelFileError(f"{key} holds {unknown[0]}; token types are 1 to {max(TokenType)}")
    types: list[int] = value.tolist()
    return types


def _token_id(metadata: Mapping[str, MetadataValue], key: str, num_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ModelFileError(f"{key} is {value!r}; the vocabulary has the ids 0 to {num_tokens - 1}")
    return value


def _merge(line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not (left and space and right):
        raise ModelFileError(f"tokenizer.ggml.merges holds {line!r}, which is not two tokens with a space between")
    return left, right


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
