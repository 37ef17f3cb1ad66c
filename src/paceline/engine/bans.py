"""Tokens that may not come next, where that depends on what came before: ``min_tokens`` and ``bad_words``."""

from collections.abc import Iterable, Sequence


class Bans:
    """What is banned at each step of one request.

    Args:
        end_ids: tokens that end the text; they are banned among the first ``min_tokens``.
        bad_sequences: token ids, one sequence for each spelling; the last of one is banned where the output ends with
            those before it, as in vLLM. The prompt does not count.
    """

    __slots__ = ("_bad_sequences", "_end_ids", "_min_tokens")

    def __init__(self, end_ids: Iterable[int], min_tokens: int, bad_sequences: Iterable[Sequence[int]]) -> None:
        self._end_ids = tuple(end_ids)
        self._min_tokens = min_tokens
        self._bad_sequences = [(list(sequence[:-1]), sequence[-1]) for sequence in bad_sequences]

    def token_ids(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that may not follow ``output_ids``, perhaps with repetitions."""
        banned = list(self._end_ids) if len(output_ids) < self._min_tokens else []
        for beginning, last in self._bad_sequences:
            if not beginning or output_ids[-len(beginning) :] == beginning:
                banned.append(last)
        return banned

    def active(self, num_output: int) -> bool:
        """Whether any token may be banned behind so many."""
        return bool(self._bad_sequences) or num_output < self._min_tokens
