"""How fast requests come to an end, to tell those that are refused when to come again."""

import math
from time import perf_counter_ns

_SHARE_OF_NEW = 0.1
_LONGEST_ADVICE = 60
"""Seconds."""


class Pace:
    """A running mean of the time between the ends of requests."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        self._last_ns: int | None = None

    def count_end(self) -> None:
        now_ns = perf_counter_ns()
        if self._last_ns is not None:
            self._gap_s += _SHARE_OF_NEW * ((now_ns - self._last_ns) / 1e9 - self._gap_s)
        self._last_ns = now_ns

    def seconds_until_done(self, num_requests: int) -> int:
        """About how long so many take, 1 to 60 s."""
        return min(max(math.ceil(num_requests * self._gap_s), 1), _LONGEST_ADVICE)
