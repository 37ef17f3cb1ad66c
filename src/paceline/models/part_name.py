"""File names of the parts of a split GGUF model."""

import re
from dataclasses import dataclass
from typing import Self

_PATTERN = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
"""llama.cpp's ``llama_split_path``: ``"%s-%05d-of-%05d.gguf"``, counted from 1."""


@dataclass(frozen=True, slots=True)
class PartName:
    """``<prefix>-00001-of-00003.gguf``."""

    prefix: str
    number: int
    """From 1."""
    count: int

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for a name of another form, or one that contradicts itself."""
        found = _PATTERN.fullmatch(name)
        if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
            return None
        return cls(found["prefix"], int(found["number"]), int(found["count"]))

    def all_parts(self) -> list[str]:
        """The names of all parts of this part's model, in order."""
        return [f"{self.prefix}-{number:05}-of-{self.count:05}.gguf" for number in range(1, self.count + 1)]
