"""Sizes and times as options write them."""

import re
from typing import Literal

from paceline.errors import InputError


def parse_size(text: str) -> int:
    """Bytes of a size such as ``2GiB``, ``512MiB`` or ``1.5G`` (units are powers of 1024).

    Raises:
        InputError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(f"--kv-memory {text!r} is not a size; write it like 2GiB or 512MiB", param="kv_memory")
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))


def parse_context(text: str | None) -> int | Literal["auto"] | None:
    """Tokens of ``--max-model-len``: a number, ``auto``, or None where it is not given.

    Raises:
        InputError: it is neither.
    """
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 2:
        raise InputError(f"--max-model-len {text!r} is no number of tokens from 2 on, nor auto", param="max_model_len")
    return int(text)


def parse_milliseconds(text: str) -> float:
    """Milliseconds of ``--target-itl``: ``50ms``, ``0.05s``, or a number of milliseconds.

    Raises:
        InputError: it is no such time, or zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)?", text.strip())
    milliseconds = float(match[1]) * (1000 if match[2] == "s" else 1) if match else 0.0
    if not milliseconds:
        raise InputError(f"--target-itl {text!r} is not a time; write it like 50ms or 0.05s", param="target_itl")
    return milliseconds
