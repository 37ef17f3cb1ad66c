"""A request as the engine sees it: token ids, parameters, how far it has come, and what its owner is told."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paceline.engine.history import TokenHistory
from paceline.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]

BlockKey = tuple[bytes, bytes]
"""What names a full KV block: digest of the chain that leads to it, and its own token ids as packed int32."""

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop, under vLLM's names and defaults.

    Raises:
        InputError: a value is out of its range; ``param`` names the field.
    """

    max_tokens: int | None = 16
    """None: until the context is full."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """Any integer, taken modulo 2**64. None: a random seed is drawn when the request is made."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, -100 to 100."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token, 0 to 20; None: no log-probabilities at all."""
    stop: Sequence[str] = ()
    """Strings that end the text, 16 at most; a lone string counts as one."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the output."""

    def __post_init__(self) -> None:
        # The caller's lists and dicts may change later; ours may not.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, None, None)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("top_k", self.top_k, -1, INT32_MAX)
        _check_number("temperature", self.temperature, 0, FLOAT32_MAX)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0, INT32_MAX)
            _check_number("logit_bias", bias, -100, 100)
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, INT32_MAX)
        self._check_stop_strings()

    def _check_stop_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are taken", param="stop")
        for text in self.stop:
            if not isinstance(text, str):
                raise InputError(f"stop holds {text!r}, which is not a string", param="stop")
            if not text:
                raise InputError("stop holds an empty string, which would end every text at once", param="stop")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. The submitter reads it; only the engine's thread writes it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """0 to 2**64 - 1; with the index of the generated token the counter of its random number."""
    max_output_tokens: int
    """``params.max_tokens`` clamped to the room there is."""
    arrival: int
    """Position in the order of arrival over all requests of the engine."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    cache_salt: str = ""
    """Only requests with equal salts share prefix cache blocks."""
    adapter: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had when the request was first scheduled."""
    num_preemptions: int = 0
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """KV blocks as int32, in the order of positions; empty unless the request is running."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Names of the full blocks, as far as anybody needed them; they outlive a preemption."""
    arrived_ns: int = 0
    """``perf_counter_ns``, as are the next three."""
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    history: TokenHistory | None = field(init=False)
    """Which tokens were seen, where a penalty needs it."""

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.prompt_ids) if self.params.has_penalties else None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known but not computed; 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end), prompt and output alike."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[: end - split]

    def append_output(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        if self.history is not None:
            self.history.add_output(token_id)


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
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the request; None for EOS."""
    error: str | None = None
    usage: Usage | None = None
    """On the last output only, as are the timings."""
    timings: Timings | None = None


def _check_integer(param: str, value: object, low: int | None, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{param} must be an integer, got {value!r}", param=param)
    if low is not None and value < low:
        raise InputError(f"{param} must be at least {low}, got {value}", param=param)
    if high is not None and value > high:
        raise InputError(f"{param} must be at most {high}, got {value}", param=param)


def _check_number(param: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{param} must be a number, got {value!r}", param=param)
    # Comparing first: an int too large for a float overflows in isfinite.
    if not low <= value <= high or not math.isfinite(value) or (above and value == low):
        if high == FLOAT32_MAX:
            bounds = f"a finite number of at least {low:g}"
        else:
            bounds = f"{'above' if above else 'at least'} {low:g} and at most {high:g}"
        raise InputError(f"{param} must be {bounds}, got {value}", param=param)
