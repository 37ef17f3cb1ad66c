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
_SHORT_WORDS, _MEDIUM_WORDS = 8, 128


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
        self.description = f"exact in the tokenizer {tokenizer}"
        self.added_tokens = 0
        """What the server's chat template adds, as far as `compare_with_server` has found out."""

    def compare_with_server(self, count_on_server: Callable[[str, int], int | None], *, chat: bool) -> None:
        """Counts one prompt on both sides, so that `description` says what the server adds to each."""
        text = self.make(_SHORT_WORDS)
        count = count_on_server(text, _SHORT_WORDS)
        what = "the server's chat template" if chat else "the server"
        if count is None:
            self.description += f", what {what} adds not included"
        elif count < _SHORT_WORDS:
            self.description += f", which is not the server's: it counts {count} tokens where this has {_SHORT_WORDS}"
        elif count > _SHORT_WORDS:
            self.added_tokens = count - _SHORT_WORDS
            self.description += f"; {what} adds {self.added_tokens} tokens to each"

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

    A short prompt tells what the template takes, a medium one the tokens per word, so that the one request that each
    length costs comes close at once and does not run over the context. Single prompts may be a few tokens off where
    the server's tokenizer splits some words; the report has the lengths achieved.
    """

    description = "calibrated from the server's usage.prompt_tokens, its chat template included"

    def __init__(self, source: PromptSource, count_on_server: Callable[[str, int], int | None]) -> None:
        """`count_on_server` gets a text and about how many tokens it has; None means that the server does not tell."""
        self._source = source
        self._count_on_server = count_on_server
        self._words: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        """Tokens by number of words, as counted by the server."""

    def make(self, tokens: int) -> str:
        if tokens not in self._words:
            self._words[tokens] = self._fit(tokens)
        return self._text(self._words[tokens])

    def _fit(self, tokens: int) -> int:
        self._count(_SHORT_WORDS, about=_SHORT_WORDS)
        if tokens > 2 * _MEDIUM_WORDS:
            self._count(_MEDIUM_WORDS, about=_MEDIUM_WORDS)
        words = self._words_for(tokens)
        self._count(words, about=tokens)
        return words if self._counts[words] == tokens else self._words_for(tokens)

    def _words_for(self, tokens: int) -> int:
        """On the secant through the shortest text and the one nearest to `tokens`."""
        short = self._counts[_SHORT_WORDS]
        near = min(self._counts, key=lambda words: abs(self._counts[words] - tokens))
        far = max(self._counts) if near == _SHORT_WORDS else near
        per_word = (self._counts[far] - short) / (far - _SHORT_WORDS) if far != _SHORT_WORDS else 1.0
        if per_word <= 0:
            raise InputError(
                f"the server counts {short} tokens for {_SHORT_WORDS} words and {self._counts[far]} for {far}; its "
                "counts cannot be used. Give --tokenizer PATH or NAME"
            )
        words = round(near + (tokens - self._counts[near]) / per_word)
        if words < 2:
            raise InputError(
                f"--input-tokens {tokens} is too short: the server counts {short} tokens for {_SHORT_WORDS} words, its "
                f"chat template included. Ask for at least {short - _SHORT_WORDS + MIN_INPUT_TOKENS}, or use "
                "--api openai-completions"
            )
        return words

    def _count(self, words: int, about: int) -> None:
        if words in self._counts:
            return
        count = self._count_on_server(self._text(words), about)
        if count is None:
            raise InputError("the server does not count prompt tokens (no usage); give --tokenizer PATH or NAME")
        self._counts[words] = count

    def _text(self, words: int) -> str:
        return " ".join(islice(self._source.new_text(), words))
