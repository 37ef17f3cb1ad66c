"""Control tokens come from the chat template alone: what spells one inside a message stays text."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.errors import InputError


class ControlTokens:
    """Finds control tokens in text, and breaks up what looks like them."""

    def __init__(self, texts: Iterable[str]) -> None:
        tokens = [text for text in texts if text]
        any_token = _any_of(tokens) if tokens else "(?!)"
        self._pattern = re.compile(f"({any_token})")
        # Tokens may overlap: in ``<<<`` both ``<<`` have to be broken.
        self._first_character = re.compile(f"(?={any_token}).", re.DOTALL)
        parts = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
        # Of single characters only brackets and the like count: a role called ``user`` must stay what it is.
        self._beginnings = frozenset(left for left, _ in parts if len(left) > 1 or not left.isalnum())
        self._endings = frozenset(right for _, right in parts if len(right) > 1 or not right.isalnum())
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> list[str]:
        """Text and control tokens in turn; of several tokens that begin at one place the longest."""
        return self._pattern.split(text)

    def break_up(self, value: Any, marker: str) -> Any:
        """``value`` with every look-alike broken by the marker, in all strings at any depth.

        The ends of a string are guarded as well where they could complete a token with the text beside it.
        """
        if isinstance(value, str):
            return self._guarded(self._first_character.sub(lambda found: found[0] + marker, value), marker)
        if isinstance(value, Mapping):
            return {self.break_up(key, marker): self.break_up(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_up(item, marker) for item in value]
        return value

    def _guarded(self, text: str, marker: str) -> str:
        lengths = range(1, min(self._longest, len(text) + 1))
        front = marker if any(text[:length] in self._endings for length in lengths) else ""
        back = marker if any(text[-length:] in self._beginnings for length in lengths) else ""
        return front + text + back


def unused_character(value: Any) -> str:
    """A private-use character that no string in ``value``, at any depth, contains.

    Raises:
        InputError: there is none.
    """
    used = set().union(*strings(value))
    for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            return chr(code)
    raise InputError("the messages use all 71 934 private-use characters of Unicode's first planes", param="messages")


def strings(value: Any) -> Iterator[str]:
    """Every string in ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of the texts that is found, as a tree of their beginnings.

    Gemma has 6 249 control tokens that begin alike: trying one after the other takes 0.1 ms at each ``<`` of a text.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _branches(child) for char, child in node.items() if char]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")
