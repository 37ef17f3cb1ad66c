"""Speculation by prompt lookup: what followed the last few tokens where they came before (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.request import Request

_LONGEST_MATCH = 4
_SHORTEST_MATCH = 2
"""In tokens. One alone is followed by anything."""


class PromptLookup:
    """Proposes the next tokens of one request, to be checked in one step.

    A proposed token is kept only where the model's own draw at that place is the same, so the output never changes.
    What can be lost is the time for tokens that were computed in vain: after a wrong proposal the next ones are
    shorter, and as they come true longer again.

    Args:
        max_tokens: longest proposal.
    """

    __slots__ = ("_ends", "_limit", "_max_tokens", "_num_indexed")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._limit = max_tokens
        self._ends: dict[tuple[int, ...], int] = {}
        """Run of tokens -> position behind its last occurrence that anything follows."""
        self._num_indexed = 0

    def propose(self, request: "Request", limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the request's known ones; none where nothing is known to follow."""
        self._index(request)
        limit = min(limit, self._limit)
        count = request.num_tokens
        tail = request.tokens(max(count - _LONGEST_MATCH, 0), count)
        for length in range(len(tail), _SHORTEST_MATCH - 1, -1):
            end = self._ends.get(tuple(tail[-length:]))
            if end is not None:
                return request.tokens(end, min(end + limit, count))
        return []

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Take in how many of a proposal's tokens came true."""
        limit = 2 * num_proposed if num_accepted == num_proposed else num_accepted + 1
        self._limit = min(limit, self._max_tokens)

    def _index(self, request: "Request") -> None:
        """Note all runs but those that end with the last known token, which nothing follows yet."""
        count = request.num_tokens
        first = max(self._num_indexed - _LONGEST_MATCH + 1, 0)
        tokens: Sequence[int] = request.tokens(first, count)
        for end in range(self._num_indexed + 1 - first, count - first):
            for length in range(_SHORTEST_MATCH, min(_LONGEST_MATCH, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = first + end
        self._num_indexed = count - 1
