"""How a request's tokens are drawn and when they end, under vLLM's names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from paceline.errors import InputError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BAD_WORDS = 1024
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop, under vLLM's names and defaults.

    Raises:
        InputError: a value is out of its range; ``param`` names the field.
    """

    max_tokens: int | None = 16
    """None: until the context is full. 0: compute the prompt alone, for its log-probabilities."""
    n: int = 1
    """How many answers to draw, 1 to 128. The prompt is computed once; choice i draws with ``choice_seed(seed, i)``."""
    min_tokens: int = 0
    """So many tokens come before any end: by EOS, a stop token or a stop string."""
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
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, except the first, which nothing comes before."""
    prompt_logprobs_from: int = 1
    """First position of the prompt that ``prompt_logprobs`` reports. What lies before may come from the prefix cache;
    what is reported is computed."""
    bad_words: Sequence[str] = ()
    """Texts that never come about: the token that would complete one is banned. Two spellings are, at the beginning of
    a text and behind a space; a tokenizer may have yet others."""
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
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, None)
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_integer("min_tokens", self.min_tokens, 0, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, None, None)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_integer("prompt_logprobs_from", self.prompt_logprobs_from, 1, None)
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
        self._check_bad_words()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens")
        if self.max_tokens == 0 and self.n > 1:
            raise InputError(f"n is {self.n}, but with max_tokens 0 nothing is drawn", param="n")

    def _check_stop_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are taken", param="stop")
        for text in self.stop:
            if not isinstance(text, str):
                raise InputError(f"stop holds {text!r}, which is not a string", param="stop")
            if not text:
                raise InputError("stop holds an empty string, which would end every text at once", param="stop")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InputError(
                f"bad_words has {len(self.bad_words)} texts, at most {MAX_BAD_WORDS} are taken", param="bad_words"
            )
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"bad_words holds {text!r}, which is no word", param="bad_words")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices: that of the request for the first, a hash of both for the others.

    53 bits, so that it can be returned in JSON and sent again from any language.
    """
    if choice == 0:
        return seed
    digest = blake2b(choice.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 11


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
