"""A request as the engine sees it: token ids, parameters, and how far it has come."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from paceline.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop, under vLLM's names and defaults.

    Raises:
        InputError: a value is out of its range; ``param`` names the field.
    """

    max_tokens: int | None = 16
    """None: until the context is full."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """None: a random seed is drawn when the request is made."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token, 0 to 20; None: no log-probabilities at all."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
