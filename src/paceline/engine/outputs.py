"""What the owner of a request is told."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities, natural, of the raw distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """Every sampled token: EOS, stop tokens and those whose text was cut included."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in milliseconds; a part that the request never reached is 0."""

    queue_ms: float
    """Arrived to first scheduled."""
    prefill_ms: float
    """First scheduled to first token."""
    decode_ms: float
    """First token to the end."""


class RequestOutput(NamedTuple):
    """News of one request from one step."""

    request_id: str
    text: str
    """What to append to the text so far."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if the request asked."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens, if the request asked, as the prompt gets computed."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the request; None for EOS."""
    error: str | None = None
    usage: Usage | None = None
    """On the last output only, as are the timings."""
    timings: Timings | None = None
