"""Ollama's names for models."""

import re
from dataclasses import dataclass, field

from paceline.errors import InputError

_DEFAULT_HOST = "registry.ollama.ai"
_DEFAULT_NAMESPACE = "library"
_DEFAULT_TAG = "latest"
_PART = r"[0-9A-Za-z_][0-9A-Za-z_.-]*"
_NAME = re.compile(
    rf"((?:(?P<host>{_PART}(?::[0-9]+)?)/)?(?P<namespace>{_PART})/)?(?P<model>{_PART})(?::(?P<tag>{_PART}))?"
)


@dataclass(frozen=True, slots=True)
class OllamaName:
    """``[[host/]namespace/]model[:tag]`` (ollama/ollama: types/model/name.go); equal whatever the case."""

    host: str = field(compare=False)
    namespace: str = field(compare=False)
    model: str = field(compare=False)
    tag: str = field(compare=False)
    _key: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = tuple(part.lower() for part in (self.host, self.namespace, self.model, self.tag))
        object.__setattr__(self, "_key", key)

    @classmethod
    def parse(cls, text: str) -> "OllamaName":
        """A name whose parts may be left out from the left, and the tag, as on Ollama's command line.

        Raises:
            InputError: it is none.
        """
        found = _NAME.fullmatch(text)
        if found is None:
            raise InputError(f"ollama:{text} is no ollama:[[host/]namespace/]name[:tag]", param="model")
        return cls(
            found["host"] or _DEFAULT_HOST,
            found["namespace"] or _DEFAULT_NAMESPACE,
            found["model"],
            found["tag"] or _DEFAULT_TAG,
        )

    def __str__(self) -> str:
        """As `ollama list` shows it: without the parts that are understood, but with the tag."""
        parts = [self.host, self.namespace, self.model]
        if self.host == _DEFAULT_HOST:
            parts = parts[2:] if self.namespace == _DEFAULT_NAMESPACE else parts[1:]
        return f"{'/'.join(parts)}:{self.tag}"
