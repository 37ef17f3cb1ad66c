"""How long a step takes, learned from the steps so far, and how much of a prompt therefore fits into the next one."""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from paceline.engine.chunk import Chunk

_FORGET = 0.9
"""Weight of what was known, when another step is seen: after ten steps a change of the machine has come through."""
_FARTHEST = 4.0
"""A step that took more times as long as predicted, or as much shorter, counts as one that did so many times: a process
that lost its core once is no news, a slower machine is after a few steps."""
_FIRST = 10
"""Steps that are believed whatever they took, as nothing is known yet."""
_RECENT = 3
"""Steps that tell whether the machine has just become slower: two of them must agree, as one may have been held up."""
_UNKNOWN_TOKEN_MS = 1.0
"""Cost of a prompt's token before the first one was seen, on the high side."""


class _Line:
    """Least squares for y = a·u + b·v with a, b >= 0, older observations fading."""

    def __init__(self, a: float, b: float) -> None:
        self.a, self.b = a, b
        self._num_seen = 0
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def at(self, u: float, v: float) -> float:
        return self.a * u + self.b * v

    def learn(self, u: float, v: float, y: float) -> None:
        expected = self.at(u, v)
        if self._num_seen >= _FIRST and expected > 0:
            y = min(max(y, expected / _FARTHEST), expected * _FARTHEST)
        self._num_seen += 1
        self._uu = _FORGET * self._uu + u * u
        self._uv = _FORGET * self._uv + u * v
        self._vv = _FORGET * self._vv + v * v
        self._uy = _FORGET * self._uy + u * y
        self._vy = _FORGET * self._vy + v * y
        determinant = self._uu * self._vv - self._uv**2
        if determinant > 1e-6 * self._uu * self._vv:
            self.a = (self._uy * self._vv - self._vy * self._uv) / determinant
            self.b = (self._vy * self._uu - self._uy * self._uv) / determinant
            if self.a >= 0 and self.b >= 0:
                return
        # One of them explains it all: where both cannot be told apart, the first.
        if self.b < 0 or determinant <= 1e-6 * self._uu * self._vv:
            self.a, self.b = max(self._uy / self._uu, 0.0), 0.0
        else:
            self.a, self.b = 0.0, max(self._vy / self._vv, 0.0)


class StepWork(NamedTuple):
    """What a step computes."""

    num_decoding: int
    """Tokens behind the prompts, proposed ones included."""
    num_prefill: int
    """Tokens of prompts."""
    num_attended: float
    """Sum over them of the tokens before each."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "StepWork":
        num_decoding = num_prefill = 0
        num_attended = 0.0
        for chunk in chunks:
            length = chunk.num_tokens - len(chunk.draft)
            if length == 1:
                num_decoding += chunk.num_tokens
            else:
                num_prefill += length
                num_attended += attended(length, chunk.request.num_computed_tokens)
        return cls(num_decoding, num_prefill, num_attended)


def attended(num_tokens: int, context: int) -> float:
    """Sum of the tokens before each of ``num_tokens`` that come behind ``context``."""
    return num_tokens * (context + num_tokens / 2)


class StepCost:
    """Predicts a step's milliseconds: a fixed part and one per decoding request, from the steps without prompts; and
    for prompts one part per token and one per token and token of context (attention), from what comes on top.

    All of it times ``slowdown``, so that a machine that became slower is noticed before the parts are learned anew.
    """

    def __init__(self) -> None:
        self._decoding = _Line(0.0, 0.0)
        self._prefill = _Line(_UNKNOWN_TOKEN_MS, 0.0)
        self._ratios = deque([1.0] * _RECENT, _RECENT)
        """Of the last steps, what they took ÷ what was expected."""
        self._slowdown = 1.0

    @property
    def fixed_ms(self) -> float:
        """Cost of any step."""
        return self._decoding.a

    @property
    def decoding_ms(self) -> float:
        """Cost of each decoding request."""
        return self._decoding.b

    @property
    def token_ms(self) -> float:
        """Cost of a prompt's token, without attention."""
        return self._prefill.a

    @property
    def slowdown(self) -> float:
        """How many times longer than expected the last steps took, at least 1."""
        return self._slowdown

    def decode_ms(self, num_decoding: int) -> float:
        """A step of so many decoding requests."""
        return self._slowdown * self._decoding.at(1.0, num_decoding)

    def prefill_ms(self, num_tokens: int, context: int) -> float:
        """What a chunk of a prompt adds, of which ``context`` tokens are computed before it."""
        return self._slowdown * self._prefill.at(num_tokens, attended(num_tokens, context))

    def affordable_tokens(self, ms: float, context: int) -> int:
        """Tokens of the longest chunk that adds no more than ``ms``."""
        if ms <= 0:
            return 0
        ms /= self._slowdown
        # b/2 n² + (a + b·context) n = ms
        square, linear = self._prefill.b / 2, self._prefill.a + self._prefill.b * context
        if square == linear == 0:
            return 2**31
        # The form of the root that is exact where the square vanishes.
        return int(2 * ms / (linear + math.sqrt(linear**2 + 4 * square * ms)))

    def observe(self, work: StepWork, ms: float) -> None:
        """Take in how long a step took."""
        decoding = self._decoding.at(1.0, work.num_decoding)
        if expected := decoding + self._prefill.at(work.num_prefill, work.num_attended):
            self._ratios.append(ms / expected)
            self._slowdown = max(sorted(self._ratios)[_RECENT // 2], 1.0)
        if work.num_prefill:
            # Errors grow with a chunk: one of few tokens must not count as much as one of hundreds, nor nothing.
            size = math.sqrt(work.num_prefill)
            self._prefill.learn(size, work.num_attended / size, max(ms - decoding, 0.0) / size)
        else:
            self._decoding.learn(1.0, work.num_decoding, ms)
