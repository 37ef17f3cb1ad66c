"""API keys as options give them."""

import re

from paceline.errors import InputError


def check_api_key(key: str) -> str:
    """The key itself, which no message repeats.

    Raises:
        InputError: it is empty, as ``--api-key "$UNSET"`` is, or has characters that ``Authorization: Bearer`` cannot
            carry.
    """
    if not key.strip():
        raise InputError(
            'the API key is empty: is the variable in --api-key "$KEY" set? Give a key, or leave out --api-key and '
            "unset PACELINE_API_KEY to do without one",
            param="api_key",
        )
    if not re.fullmatch("[!-~]+", key):
        raise InputError(
            "the API key has characters that an HTTP header cannot carry; use visible ASCII ones without spaces",
            param="api_key",
        )
    return key
