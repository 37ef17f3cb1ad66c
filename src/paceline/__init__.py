"""Paceline serves a language model and measures any server that does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.sampling import SamplingParams
    from paceline.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

# Loaded on first use, so that `paceline --help` does not pay for numpy and the native module.
_HOMES = {"LLM": "paceline.llm", "SamplingParams": "paceline.engine.sampling"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
