"""Sizes as options write them."""

import re

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
