"""The engine's limits, under vLLM's names."""

from dataclasses import dataclass

from paceline.errors import InputError

MAX_TIMEOUT = 1e6
"""Seconds; more would be a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of scheduling and length.

    Raises:
        InputError: a limit is not positive, or two contradict each other.
    """

    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    max_num_batched_tokens: int = 512
    """Token budget of a step."""
    enable_prefix_caching: bool = True
    max_waiting: int | None = None
    """Requests that may wait to be scheduled; more are refused. None: any number."""
    request_timeout: float | None = None
    """Seconds after which a request is given up, if it does not say itself."""
    target_itl_ms: float | None = None
    """Longest time between two tokens of a request that prompts of others should cause, in milliseconds: each step
    takes on no more of them than are expected to fit. None: as much as ``max_num_batched_tokens`` allows."""
    prompt_lookup_tokens: int = 0
    """Longest proposal of prompt lookup for a step, in tokens; 0: no speculation."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text by themselves."""

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise InputError(
                f"max_model_len is {self.max_model_len}, at least 2 are needed: one prompt token and one generated",
                param="max_model_len",
            )
        if self.max_num_seqs < 1:
            raise InputError(f"max_num_seqs is {self.max_num_seqs}, at least 1 is needed", param="max_num_seqs")
        # Every running request is then sure of a token in every step, whatever the others take.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                f"a step could not give each running request a token; raise the first or lower the second",
                param="max_num_batched_tokens",
            )


def check_timeout(param: str, timeout: object) -> None:
    """
    Raises:
        InputError: it is no number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_TIMEOUT:
        raise InputError(
            f"{param} is {timeout!r}; seconds are needed, above 0 and at most {MAX_TIMEOUT:g}", param=param
        )
