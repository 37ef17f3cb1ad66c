"""Which tokens a request has seen, for the penalties."""

from array import array
from collections.abc import Iterable


class TokenHistory:
    """Distinct tokens of prompt and output, and how often each was generated.

    Kept as packed int32, so that a step copies them instead of counting again.
    """

    __slots__ = ("_index", "ids", "output_count")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._index = {token_id: index for index, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self.ids = array("i", self._index)
        self.output_count = array("i", bytes(self.ids.itemsize * len(self.ids)))

    def add_output(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self.ids))
        if index == len(self.ids):
            self.ids.append(token_id)
            self.output_count.append(0)
        self.output_count[index] += 1
