"""The engine without HTTP, measured in rounds: B prompts at once, all of the same lengths, as llama-bench does."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import msgspec

from paceline.bench.report.summary import Statistic, distribution
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError, PacelineError
from paceline.loading import LoadedModel

_NS_PER_S = 1e9
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Shape:
    """One cell: how many prompts at once, and their lengths in tokens."""

    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """What happened to one batch: stamps of the same clock, ns, one list per request."""

    submitted: int
    token_stamps: tuple[tuple[int, ...], ...]
    """End of the step that produced each output token."""

    @property
    def all_prefilled(self) -> int:
        return max(stamps[0] for stamps in self.token_stamps)

    @property
    def first_finished(self) -> int:
        return min(stamps[-1] for stamps in self.token_stamps)


class EngineCell(msgspec.Struct, frozen=True):
    """One line of the result."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    metrics: dict[str, Statistic]


def prefill_tps(one: Round, shape: Shape) -> float:
    """Prompt tokens/s: ``B · P / (all first tokens there − submitted)``."""
    return shape.batch * shape.prompt_tokens / ((one.all_prefilled - one.submitted) / _NS_PER_S)


def decode_tps(one: Round) -> float | None:
    """Output tokens/s of all requests together while all B decode: from the last first token to the first end.

    None where the first request ends before the last one is prefilled.
    """
    start, end = one.all_prefilled, one.first_finished
    tokens = sum(start < stamp <= end for stamps in one.token_stamps for stamp in stamps)
    return tokens / ((end - start) / _NS_PER_S) if end > start else None


def ttft_ms(one: Round) -> list[float]:
    """Per request: ``first token − submitted``."""
    return [(stamps[0] - one.submitted) / _NS_PER_MS for stamps in one.token_stamps]


def total_ms(one: Round) -> list[float]:
    """Per request: ``last token − submitted``."""
    return [(stamps[-1] - one.submitted) / _NS_PER_MS for stamps in one.token_stamps]


def check_fits(model: LoadedModel, shapes: Sequence[Shape]) -> None:
    """
    Raises:
        InputError: a batch would not fit the context or the KV pool, so that preemptions would be measured.
    """
    kv = model.executor.kv_geometry
    for shape in shapes:
        tokens = shape.prompt_tokens + shape.new_tokens
        if tokens > model.engine.config.max_model_len:
            raise InputError(
                f"{shape.prompt_tokens} prompt + {shape.new_tokens} new tokens are more than the context of "
                f"{model.engine.config.max_model_len}"
            )
        needed = shape.batch * -(-tokens // kv.block_size)
        if needed > kv.num_blocks:
            raise InputError(
                f"batch {shape.batch} of {tokens} tokens needs {needed} KV blocks, the pool has {kv.num_blocks}: "
                "take a smaller batch, or set --kv-memory higher"
            )


def measure(model: LoadedModel, shape: Shape, repeat: int, seed: int, on_round: Callable[[int], None]) -> EngineCell:
    """One warm-up round and ``repeat`` measured ones; ``on_round`` gets the number of each one that is done."""
    rng = random.Random(f"{seed} {shape}")
    rounds = []
    for number in range(repeat + 1):
        rounds.append(_run_round(model.engine, shape, rng, model.spec.vocab_size))
        on_round(number)
    return summarize(shape, rounds[1:])


def summarize(shape: Shape, rounds: Sequence[Round]) -> EngineCell:
    decode = [value for one in rounds if (value := decode_tps(one)) is not None]
    return EngineCell(
        shape.batch,
        shape.prompt_tokens,
        shape.new_tokens,
        {
            "prefill_tps": distribution("tok/s", [prefill_tps(one, shape) for one in rounds]),
            "decode_tps": distribution(
                "tok/s", decode, None if decode else "no moment at which all requests were decoding"
            ),
            "ttft": distribution("ms", [value for one in rounds for value in ttft_ms(one)]),
            "total": distribution("ms", [value for one in rounds for value in total_ms(one)]),
        },
    )


def _run_round(engine: Engine, shape: Shape, rng: random.Random, vocab_size: int) -> Round:
    params = SamplingParams(max_tokens=shape.new_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[rng.randrange(vocab_size) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)]
    submitted = perf_counter_ns()
    stamps: dict[str, list[int]] = {engine.submit(prompt, params).request_id: [] for prompt in prompts}
    while engine.has_work:
        outputs = engine.step()
        now = perf_counter_ns()
        for output in outputs:
            if output.error is not None:
                raise PacelineError(f"the engine failed on a request: {output.error}")
            stamps[output.request_id] += [now] * len(output.token_ids)
    return Round(submitted, tuple(tuple(each) for each in stamps.values()))
