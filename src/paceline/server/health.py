"""Whether the engine is alive, and a word in the log when it is not."""

import asyncio
import logging

from paceline.engine.engine import Engine

logger = logging.getLogger("paceline.server")

STALL_SECONDS = 60.0
_STALL_TOKENS = 512
"""No step of 512 tokens of a model that anybody would wait for takes a minute."""


def stall_limit(max_num_batched_tokens: int) -> float:
    """Seconds that no step of so many tokens takes, so that a slow machine is not taken for a stuck engine."""
    return STALL_SECONDS * max(max_num_batched_tokens / _STALL_TOKENS, 1.0)


class Health:
    """Watches the engine's heartbeat. A step that does not end cannot be ended; what is left is to say so."""

    def __init__(self, engine: Engine, stall_seconds: float | None = None) -> None:
        """``stall_seconds`` None: what ``stall_limit`` says of the engine's token budget."""
        limit = stall_limit(engine.config.max_num_batched_tokens)
        self._engine = engine
        self._stall_seconds = limit if stall_seconds is None else stall_seconds
        self._was_stalled = False

    def problem(self) -> str | None:
        """Why requests get no answers; None if all is well. Each change is logged, once."""
        seconds = self._engine.stalled_seconds()
        stalled = seconds > self._stall_seconds
        if stalled and not self._was_stalled:
            logger.error("%s", self._words(seconds))
        elif self._was_stalled and not stalled:
            logger.warning("the engine goes on")
        self._was_stalled = stalled
        return self._words(seconds) if stalled else None

    async def watch(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._stall_seconds / 4)
            self.problem()

    @staticmethod
    def _words(seconds: float) -> str:
        if seconds == float("inf"):
            return "the engine's thread has died; restart the server"
        return f"the engine has been in one step for {seconds:.0f} s; requests get no answers"
