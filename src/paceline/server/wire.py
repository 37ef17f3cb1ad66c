"""What we answer: the JSON of OpenAI's two endpoints, choice by choice.

Beside OpenAI's fields a finished choice tells vLLM's ``stop_reason`` (the stop string or token that ended it) and the
``seed`` that repeats it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.engine.request import RequestOutput, Timings, TokenLogprobs, Usage
from paceline.models.vocabulary import Vocabulary

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM and OpenAI send this."""

Payload = dict[str, Any]


class Choice(Protocol):
    """One prompt's answer in the shape of one endpoint."""

    def opening(self) -> Payload | None:
        """What a stream sends before any text, if anything."""
        ...

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        """Text in a stream."""
        ...

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        """The end of a stream: no text, but the reason."""
        ...

    def whole(self, text: str, logprobs: Payload | None, output: RequestOutput, seed: int) -> Payload:
        """The choice of an answer that is not streamed."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> Payload:
        """The report of tokens that follow those of the call before."""
        ...


class ChatChoice:
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, index: int, vocabulary: Vocabulary) -> None:
        self._index = index
        self._vocabulary = vocabulary

    def opening(self) -> Payload:
        return self._choice(delta={"role": "assistant", "content": ""})

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        return self._choice(delta={"content": text}, logprobs=logprobs)

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        return self._choice(delta={}) | _ending(output, seed)

    def whole(self, text: str, logprobs: Payload | None, output: RequestOutput, seed: int) -> Payload:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(message=message, logprobs=logprobs) | _ending(output, seed)

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> Payload:
        content = [
            self._token(token.token_id, token.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _choice(self, *, logprobs: Payload | None = None, **fields: Payload) -> Payload:
        return {"index": self._index, **fields, "logprobs": logprobs, "finish_reason": None}

    def _token(self, token_id: int, logprob: float) -> Payload:
        raw = self._vocabulary.token_text_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionChoice:
    """``/v1/completions``, which streams the same objects as it answers with."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"

    def __init__(self, index: int, vocabulary: Vocabulary) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._offset = 0

    def opening(self) -> None:
        return None

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        return self.piece("", None) | _ending(output, seed)

    def whole(self, text: str, logprobs: Payload | None, output: RequestOutput, seed: int) -> Payload:
        return self.piece(text, logprobs) | _ending(output, seed)

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> Payload:
        texts = [self._text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._text(token_id): _finite(logprob) for token_id, logprob in token.top}
                | {text: _finite(token.logprob)}
                for text, token in zip(texts, tokens, strict=True)
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._vocabulary.token_text_bytes(token_id).decode(errors="replace")


def usage_payload(usages: Sequence[Usage]) -> Payload:
    """The sum over a request's prompts."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def timings_payload(timings: Timings, usage: Usage) -> Payload:
    """Where one prompt's time went; the decode speed is (n - 1) tokens over the time after the first."""
    decoded = usage.completion_tokens - 1
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "prefill_ms": round(timings.prefill_ms, 3),
        "decode_ms": round(timings.decode_ms, 3),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "tokens_per_second": round(decoded / timings.decode_ms * 1e3, 2) if decoded > 0 and timings.decode_ms else None,
    }


def _ending(output: RequestOutput, seed: int) -> Payload:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason, "seed": seed}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
