"""What a load run is to do, in numbers, before any server was asked."""

import math
from dataclasses import dataclass, fields
from itertools import product
from typing import Literal

from paceline.bench.api import Api, Mode
from paceline.bench.record import CellPlan
from paceline.bench.workload import MIN_INPUT_TOKENS
from paceline.errors import InputError

MIN_REQUESTS = 8
REQUESTS_PER_SLOT = 5
"""Default requests per cell and slot: with fewer the steady window is often shorter than 3 median latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A closed-loop load run: one cell for each combination of lengths and concurrency."""

    url: str
    model: str | None = None
    """None: the only one the server lists."""
    api: Api | Literal["auto"] = "auto"
    mode: Mode = "stream"
    input_tokens: tuple[int, ...] = (128,)
    output_tokens: tuple[int, ...] = (64,)
    concurrency: tuple[int, ...] = (1,)
    requests: int | None = None
    """Per cell; None: `MIN_REQUESTS` or `REQUESTS_PER_SLOT` × concurrency, whichever is more."""
    warmup: int | None = None
    """Unmeasured requests before each cell; None: one per slot."""
    timeout_s: float = 600.0
    temperature: float = 0.0
    tokenizer: str = "server"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError for numbers that make no sense."""
        for name, values, least in (
            ("--input-tokens", self.input_tokens, MIN_INPUT_TOKENS),
            ("--output-tokens", self.output_tokens, 1),
            ("--concurrency", self.concurrency, 1),
            ("--requests", (self.requests,), 1),
            ("--warmup", (self.warmup,), 0),
            ("--seed", (self.seed,), 0),
        ):
            for value in values:
                if value is not None and value < least:
                    raise InputError(f"{name} is {value}; it must be at least {least}")
            if len(set(values)) < len(values):
                raise InputError(f"{name} {','.join(map(str, values))} has a number twice; each makes cells of its own")
        if self.requests is not None and self.requests < max(self.concurrency):
            raise InputError(
                f"--requests is {self.requests}, fewer than --concurrency {max(self.concurrency)}: so many would never "
                f"be in flight at once. Give at least {max(self.concurrency)}, better {REQUESTS_PER_SLOT} per slot"
            )
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InputError(f"--timeout is {self.timeout_s:g} s; it must be more than 0")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"--temperature is {self.temperature:g}; it must be at least 0")

    def check_context(self, context: int, added_tokens: int = 0) -> None:
        """Raises InputError if the longest prompt and answer exceed a context of `context` tokens, where the server
        would refuse them or cut the answer. `added_tokens` come to each prompt from the server's chat template."""
        longest_input, longest_output = max(self.input_tokens), max(self.output_tokens)
        needed = longest_input + added_tokens + longest_output
        if needed > context:
            template = f" + {added_tokens} of the chat template" if added_tokens else ""
            raise InputError(
                f"--input-tokens {longest_input}{template} + --output-tokens {longest_output} = {needed} tokens, more "
                f"than the server's context of {context}; lower one of them by {needed - context}"
            )

    def cells(self) -> list[CellPlan]:
        """The cells in the order in which they are measured."""
        combinations = product(self.input_tokens, self.output_tokens, self.concurrency)
        return [
            CellPlan(
                number,
                {
                    "concurrency": concurrency,
                    "input_tokens": input_tokens,
                    "output_tokens": output_tokens,
                    "requests": self.requests or max(MIN_REQUESTS, REQUESTS_PER_SLOT * concurrency),
                    "warmup": concurrency if self.warmup is None else self.warmup,
                    "mode": self.mode,
                },
            )
            for number, (input_tokens, output_tokens, concurrency) in enumerate(combinations)
        ]

    def command(self) -> list[str]:
        """The command line that repeats this plan; the API key is never part of it."""
        command = ["paceline", "bench", "load", self.url]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "url" and value is not None:
                option = field.name.removesuffix("_s").replace("_", "-")
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                command += [f"--{option}", text]
        return command
