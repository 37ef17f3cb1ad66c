"""What to send: synthetic prompts of a wanted length, no two of which begin alike.

A prefix cache reuses what prompts have in common at their start. So every prompt of a run (warm-up, calibration and
measured, in all cells) starts with a pair of words of its own.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from itertools import islice
from random import Random
from typing import Protocol

from paceline.errors import InputError

MIN_INPUT_TOKENS = 4
"""Shorter prompts cannot all begin differently."""
_MAX_ROUNDS = 100
_MAX_TEXTS = 10
_CALIBRATION_WORDS = 8


@cache
def word_list() -> tuple[str, ...]:
    """Common English words; each is one token, at the start of a text and after a space, in the byte-level BPE
    vocabularies of GPT-2, Llama 3, Qwen 2, Falcon, Command R, DeepSeek and SmolLM2."""
    return tuple((files("paceline.bench") / "words.txt").read_text(encoding="ascii").split())


class PromptSource:
    """Hands out endless texts, word by word; the same seed gives the same texts."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._handed_out = 0
        self._openings = list(word_list())
        Random(f"{seed}/openings").shuffle(self._openings)

    def new_text(self) -> Iterator[str]:
        """Words of a text whose first two words no earlier text began with."""
        index = self._handed_out
        self._handed_out += 1
        second, first = divmod(index, len(self._openings))
        if second >= len(self._openings):
            raise InputError(f"a run can have at most {len(self._openings) ** 2} prompts that all begin differently")
        return self._words(index, self._openings[first], self._openings[second])

    def _words(self, index: int, first: str, second: str) -> Iterator[str]:
        yield first
        yield second
        random = Random(f"{self._seed}/{index}")
        while True:
            yield random.choice(word_list())


class Prompts(Protocol):
    """Makes prompts of a wanted number of tokens."""

    description: str
    """How the length is known, for the report."""

    def make(self, tokens: int) -> str:
        """A prompt of `tokens` tokens that begins like no other. Raises InputError if there is none."""


class ExactPrompts:
    """Prompts that have exactly the wanted length in a tokenizer at hand, verified by encoding the whole text."""

    def __init__(self, source: PromptSource, count_tokens: Callable[[str], int], tokenizer: str) -> None:
        self._source = source
        self._count_tokens = count_tokens
        self.description = f"exact in the tokenizer {tokenizer}, the server's chat template not included"

    def make(self, tokens: int) -> str:
        for _ in range(_MAX_TEXTS):
            text = self._fit(self._source.new_text(), tokens)
            if text is not None:
                return text
        raise InputError(f"found no text of exactly {tokens} tokens in this tokenizer; try another --input-tokens")

    def _fit(self, words: Iterator[str], tokens: int) -> str | None:
        chosen = list(islice(words, tokens))
        for round_ in range(_MAX_ROUNDS):
            text = " ".join(chosen)
            count = self._count_tokens(text)
            if count == tokens:
                return text
            # Rounded down, towards single words, so that the last steps land on the length instead of around it.
            step = max(1, int(abs(tokens - count) / (count / len(chosen))))
            if count < tokens:
                chosen += islice(words, step)
            else:
                # Going back by one or two words in turn tries other sums than the same gap again and again.
                del chosen[max(2, len(chosen) - step - round_ % 2) :]
        return None


class CalibratedPrompts:
    """Prompts whose number of words is fitted to the server's own counts, its chat template included.

    Costs two or three unmeasured requests per length. Single prompts may be a few tokens off where the server's
    tokenizer splits some words; the report has the lengths achieved.
    """

    description = "calibrated from the server's usage.prompt_tokens, its chat template included"

    def __init__(self, source: PromptSource, count_on_server: Callable[[str], int | None]) -> None:
        self._source = source
        self._count_on_server = count_on_server
        self._words: dict[int, int] = {}
        self._calibration: int | None = None

    def make(self, tokens: int) -> str:
        if tokens not in self._words:
            self._words[tokens] = self._fit(tokens)
        return self._text(self._words[tokens])

    def _fit(self, tokens: int) -> int:
        if self._calibration is None:
            self._calibration = self._ask(_CALIBRATION_WORDS)
        short = self._calibration
        words = self._check(tokens, _CALIBRATION_WORDS + tokens - short)
        count = self._ask(words)
        if count == tokens or words == _CALIBRATION_WORDS:
            return words
        tokens_per_word = (count - short) / (words - _CALIBRATION_WORDS)
        if tokens_per_word <= 0:
            raise InputError(
                f"the server counts {short} tokens for {_CALIBRATION_WORDS} words and {count} for {words}; its counts "
                "cannot be used. Give --tokenizer PATH or NAME"
            )
        return self._check(tokens, round(_CALIBRATION_WORDS + (tokens - short) / tokens_per_word))

    def _check(self, tokens: int, words: int) -> int:
        if words < 2:
            assert self._calibration is not None
            raise InputError(
                f"--input-tokens {tokens} is too short: the server counts {self._calibration} tokens for "
                f"{_CALIBRATION_WORDS} words, its chat template included. Ask for at least "
                f"{self._calibration - _CALIBRATION_WORDS + MIN_INPUT_TOKENS}, or use --api openai-completions"
            )
        return words

    def _ask(self, words: int) -> int:
        count = self._count_on_server(self._text(words))
        if count is None:
            raise InputError("the server does not count prompt tokens (no usage); give --tokenizer PATH or NAME")
        return count

    def _text(self, words: int) -> str:
        return " ".join(islice(self._source.new_text(), words))
