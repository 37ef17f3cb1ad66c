"""What a step may still take on."""

from paceline.engine.request import Request
from paceline.engine.step_cost import StepCost

_LEAST_TOKENS = 16
"""A prompt gets so many in every step, whatever they cost, or it would never come to its first token. Few rows take a
processor hardly longer than one."""
_SHARE_OF_TARGET = 0.95
"""What a prediction may use up; the rest is for the way of the tokens to their readers. Predictions err both ways, by a
tenth or two: a smaller share would make prompts wait for longer than anybody asked for."""


class StepBudget:
    """Hands out the tokens of one step, and lives as long as it.

    Args:
        num_tokens: at most so many.
        ms: and, if given, as many as ``cost`` expects to take no longer.
    """

    def __init__(self, num_tokens: int, cost: StepCost, ms: float | None = None) -> None:
        self._num_tokens = num_tokens
        self._cost = cost
        self._ms = ms
        self._granted = False

    @classmethod
    def beside(cls, num_decoding: int, num_tokens: int, cost: StepCost, target_ms: float | None) -> "StepBudget":
        """For prompts in a step with so many decoding requests, whose next tokens shall come within ``target_ms``."""
        if target_ms is None or num_decoding == 0:
            return cls(num_tokens, cost)
        return cls(num_tokens, cost, _SHARE_OF_TARGET * target_ms - cost.decode_ms(num_decoding))

    def __bool__(self) -> bool:
        """Whether there is anything left."""
        return self.num_tokens > 0

    @property
    def num_tokens(self) -> int:
        """What is left for a prompt's beginning."""
        return self._affordable(0)

    def grant(self, request: Request) -> int:
        """Tokens of the request's next chunk."""
        num_tokens = min(request.num_pending_tokens, self._affordable(request.num_computed_tokens))
        self.spend(num_tokens, request.num_computed_tokens)
        if num_tokens < request.num_pending_tokens:
            # Nothing is left for others, even if a token without context would still fit: one prompt at a time.
            self._num_tokens = 0
        return num_tokens

    def spend(self, num_tokens: int, context: int = 0) -> None:
        self._num_tokens -= num_tokens
        self._granted = True
        if self._ms is not None:
            self._ms -= self._cost.prefill_ms(num_tokens, context)

    def _affordable(self, context: int) -> int:
        if self._ms is None:
            return self._num_tokens
        affordable = self._cost.affordable_tokens(self._ms, context)
        if not self._granted:
            affordable = max(affordable, _LEAST_TOKENS)
        return min(self._num_tokens, affordable)
