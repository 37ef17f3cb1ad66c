"""What one request computes in a step."""

from typing import NamedTuple

from paceline.engine.request import Request


class Chunk(NamedTuple):
    """A request's share of a step: its next ``num_tokens`` tokens from ``request.num_computed_tokens`` on."""

    request: Request
    num_tokens: int
    samples: bool
    """It reaches the last known token, so that the next one is sampled behind it."""
    draft: tuple[int, ...] = ()
    """The last of its tokens that are only proposed; behind each another one is sampled."""
