"""What OpenAI's two text endpoints want to be asked."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Api = Literal["openai-chat", "openai-completions"]
Mode = Literal["stream", "sync"]

PATHS: dict[Api, str] = {"openai-chat": "/v1/chat/completions", "openai-completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one server wants to be asked, as found out by asking it."""

    api: Api
    model: str
    mode: Mode
    temperature: float
    ignore_eos: bool
    """Whether the server takes ``ignore_eos`` (vLLM, llama.cpp, Paceline do), which forces the output length."""
    stream_usage: bool
    """Whether the server takes ``stream_options.include_usage``."""

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """The JSON body that asks for `max_tokens` tokens after `prompt`."""
        fields: dict[str, Any] = {"model": self.model}
        if self.api == "openai-chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        fields |= {"max_tokens": max_tokens, "temperature": self.temperature, "stream": self.mode == "stream"}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.mode == "stream" and self.stream_usage:
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)
