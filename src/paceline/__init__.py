"""Paceline serves a language model and measures any server that does."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.request import SamplingParams
    from paceline.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `paceline --help` does not pay for numpy and the native module.
    if name == "LLM":
        from paceline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from paceline.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
