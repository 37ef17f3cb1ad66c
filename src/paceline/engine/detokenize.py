"""Token ids to text, piece by piece: whole code points only, and never a part of a stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenDecoder(Protocol):
    """What the engine needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's part of the text as UTF-8, perhaps half a code point; b"" for control tokens."""
        ...

    def spellings(self, word: str) -> list[list[int]]:
        """Token ids of a word where it begins a text, and behind a space."""
        ...


class Detokenizer:
    """Text of one request.

    ``add`` and ``finish`` return what may be shown. What could still become a stop string is held back: the longest
    such suffix and nothing more. The stop string that is complete first ends the text; of several that end at the same
    character it is the longest, so that none leaks its beginning.
    """

    def __init__(
        self, decoder: TokenDecoder, stop: Sequence[str] = (), include_stop_str_in_output: bool = False
    ) -> None:
        self._decoder = decoder
        self._utf8 = _new_utf8_decoder(errors="replace")
        self._stops = [_StopString(text) for text in stop]
        self._include_stop = include_stop_str_in_output
        self._held = ""
        self.stop_string: str | None = None
        """The stop string that ended the text; nothing is returned after it."""

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """Append a token; without ``may_stop`` no stop string ends with it."""
        return self._scan(self._utf8.decode(self._decoder.token_bytes(token_id)), may_stop)

    def finish(self) -> str:
        """The rest: what was held back, with U+FFFD for a code point that never got complete."""
        shown = self._scan(self._utf8.decode(b"", final=True), may_stop=True)
        rest, self._held = self._held, ""
        return shown + rest

    def _scan(self, text: str, may_stop: bool) -> str:
        if not self._stops:
            return text
        if self.stop_string is not None:
            return ""
        end = len(self._held)
        self._held += text
        for char in text:
            end += 1
            completed = [stop.text for stop in self._stops if stop.advance(char)]
            if completed and may_stop:
                return self._end_at(end, max(completed, key=len))
        return self._release(len(self._held) - max(stop.matched for stop in self._stops))

    def _end_at(self, end: int, stop_string: str) -> str:
        self.stop_string = stop_string
        shown = self._release(end if self._include_stop else end - len(stop_string))
        self._held = ""
        return shown

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown


class _StopString:
    """How much of one stop string the text ends with (Knuth, Morris, Pratt 1977): O(1) per character, amortised."""

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failure = [0] * (len(text) + 1)
        for index in range(1, len(text)):
            self._failure[index + 1] = self._extend(self._failure[index], text[index])

    def advance(self, char: str) -> bool:
        """Take the next character; True once the stop string is complete."""
        self.matched = self._extend(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._failure[self.matched]
        return True

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._failure[matched]
        return matched + 1 if self.text[matched] == char else 0
