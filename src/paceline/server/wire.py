"""What we answer: the JSON of OpenAI's two endpoints, choice by choice.

Beside OpenAI's fields a finished choice tells vLLM's ``stop_reason`` (the stop string or token that ended it) and the
``seed`` that repeats it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.engine.outputs import RequestOutput, Timings, TokenLogprobs, Usage
from paceline.models.vocabulary import Vocabulary

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM and OpenAI send this."""

Payload = dict[str, Any]


class Choice(Protocol):
    """One answer to a prompt, in the shape of one endpoint."""

    def opening(self) -> Payload | None:
        """What a stream sends at once, if anything."""
        ...

    def beginning(self) -> Payload | None:
        """What a stream sends when the prompt is computed, before the first token, if anything."""
        ...

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        """Text in a stream."""
        ...

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        """The end of a stream: no text, but the reason."""
        ...

    def whole(self, text: str, tokens: Sequence[TokenLogprobs], output: RequestOutput, seed: int) -> Payload:
        """The choice of an answer that is not streamed; ``tokens`` if it has log-probabilities."""
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

    def beginning(self) -> None:
        return None

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        return self._choice(delta={"content": text}, logprobs=logprobs)

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        return self._choice(delta={}) | _ending(output, seed)

    def whole(self, text: str, tokens: Sequence[TokenLogprobs], output: RequestOutput, seed: int) -> Payload:
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = self.logprobs(tokens) if tokens else None
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

    def __init__(self, index: int, vocabulary: Vocabulary, echo: "Echo | None" = None) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._echo = echo
        self._offset = 0

    def opening(self) -> None:
        return None

    def beginning(self) -> Payload | None:
        return None if self._echo is None else self.piece(self._echo.text, self._echo_logprobs(self._echo))

    def piece(self, text: str, logprobs: Payload | None) -> Payload:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def finish(self, output: RequestOutput, seed: int) -> Payload:
        return self.piece("", None) | _ending(output, seed)

    def whole(self, text: str, tokens: Sequence[TokenLogprobs], output: RequestOutput, seed: int) -> Payload:
        beginning = self.beginning()
        if beginning is None:
            return self.piece(text, self.logprobs(tokens) if tokens else None) | _ending(output, seed)
        reports = [beginning["logprobs"], self.logprobs(tokens)]
        logprobs = None if reports[0] is None else {key: reports[0][key] + reports[1][key] for key in reports[0]}
        return self.piece(beginning["text"] + text, logprobs) | _ending(output, seed)

    def _echo_logprobs(self, echo: "Echo") -> Payload | None:
        if not echo.has_logprobs:
            return None
        first = self._text(echo.token_ids[0])
        self._offset += len(first)
        rest = self.logprobs(echo.logprobs)
        nothing = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {key: [value, *rest[key]] for key, value in nothing.items()}

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


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answer."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    """Of all tokens but the first, as far as they are computed."""
    has_logprobs: bool


def prompt_logprobs_payload(tokens: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> list[Payload | None]:
    """vLLM's: for each token of the prompt its own and the likeliest ones by id; null for the first."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Payload:
        text = vocabulary.token_text_bytes(token_id).decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def entries(token: TokenLogprobs) -> Payload:
        top = {str(each): entry(each, logprob, rank) for rank, (each, logprob) in enumerate(token.top, 1)}
        return {str(token.token_id): entry(token.token_id, token.logprob, None)} | top

    return [None, *map(entries, tokens)]


def usage_payload(usages: Sequence[Usage], num_choices: int) -> Payload:
    """The sum over a request's prompts, with ``num_choices`` answers each, in order."""
    firsts = usages[::num_choices]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
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
