"""What clients may send: OpenAI's fields and vLLM's extensions, and what becomes of the fields that we do not know."""

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from paceline.engine.sampling import MAX_LOGPROBS, SamplingParams
from paceline.errors import InputError
from paceline.models.conversation import joined_text_parts
from paceline.server.body import as_json

logger = logging.getLogger("paceline.server")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for ``/v1/completions``; chat runs to the end of the context."""

MAX_PROMPTS = 2048
"""OpenAI's own limit for the inputs of one request (embeddings); it names none for completions."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that would change the answer, with the values that ask for nothing (null always does)."""

LABELS = frozenset(
    {
        "annotations",
        "include_obfuscation",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_content",
        "refusal",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Known fields that do not change the answer of a server like this one."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompt_list(prompt: object) -> object:
    """Bring the four forms of ``prompt`` to one: a list whose items are strings or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of those, and not empty")
    if len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
        raise ValueError(f"{len(prompt)} prompts are more than the {MAX_PROMPTS} that one request may have")
    if _all_of(prompt, int):
        return [prompt]
    if _all_of(prompt, str):
        return prompt
    if _all_of(prompt, list) and all(item and _all_of(item, int) for item in prompt):
        return prompt
    raise ValueError("must be all strings, all token ids (integers) or all non-empty lists of token ids")


def _all_of(items: list[Any], kind: type) -> bool:
    """By exact type, as true is no token id; in C, as there may be millions of items."""
    return set(map(type, items)) == {kind}


def _keyed_by_token_id(bias: object) -> object:
    """JSON's keys are strings, also where they are token ids."""
    if not isinstance(bias, dict):
        return bias
    for key, value in bias.items():
        if not re.fullmatch("[0-9]{1,10}", key):
            raise ValueError(f'its keys must be token ids such as "50256", not {as_json(key)}')
        if type(value) not in (int, float):
            raise ValueError(f"its values must be numbers, not {as_json(value)}")
    return {int(key): value for key, value in bias.items()}


def _not_empty(messages: "list[Message]") -> "list[Message]":
    if not messages:
        raise ValueError("must hold at least one message")
    return messages


class WireModel(BaseModel):
    # Strict: a number in quotes is a mistake that OpenAI refuses too. Unknown fields go to ExtraFields.
    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(WireModel):
    include_usage: bool | None = None


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(joined_text_parts)]

    def for_template(self) -> dict[str, str]:
        """The message as templates know it; they have no ``developer``, OpenAI's newer name for ``system``."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class GenerationRequest(WireModel):
    """The fields that both endpoints share, under OpenAI's and vLLM's names; null means the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    # FailFast: to describe each of a million wrong items would take a minute.
    stop: Annotated[list[str] | None, FailFast(), BeforeValidator(_as_list)] = None
    stop_token_ids: Annotated[list[int] | None, FailFast()] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_keyed_by_token_id)] = None
    n: int | None = None
    min_tokens: int | None = None
    bad_words: Annotated[list[str] | None, FailFast()] = None
    prompt_logprobs: int | None = None
    timeout: float | None = None
    """Seconds until the request is given up."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """``defaults`` are the model's own, for what the request does not say.

        Raises:
            InputError: a value is out of its range.
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": None if self.stop is None else tuple(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "n": self.n,
            "min_tokens": self.min_tokens,
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            "prompt_logprobs": self.prompt_logprobs,
        }
        set_fields = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, **set_fields, "max_tokens": max_tokens, "logprobs": logprobs})


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompt_list)]
    logprobs: int | None = None
    echo: bool | None = None
    """Begin the answer with the prompt."""
    parse_special: bool | None = None
    """False: text that spells a special token stays text (llama.cpp's name)."""

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        default_tokens = defaults.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
        max_tokens = default_tokens if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InputError(
                "max_tokens is 0, which is for echo and prompt_logprobs: nothing is asked", param="max_tokens"
            )
        params = self.sampling_params(max_tokens, self.logprobs, defaults)
        if self.echo and params.prompt_logprobs is None:
            return replace(params, prompt_logprobs=params.logprobs)
        return params


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], FailFast(), AfterValidator(_not_empty)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    """OpenAI's newer name for ``max_tokens``; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``enable_thinking`` (vLLM's name)."""

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens is None:
            max_tokens = defaults.get("max_tokens")
        if max_tokens == 0:
            raise InputError("max_tokens must be at least 1, got 0", param="max_tokens")
        return self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None, defaults)


class ExtraFields:
    """Judges the fields that a request has beyond its model; warns once for each unknown name."""

    _REMEMBERED = 1000

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, request: CompletionRequest | ChatRequest) -> None:
        """
        Raises:
            InputError: a known field that we do not support asks for something; ``param`` names it.
        """
        self._check(request, "")
        if request.stream_options is not None:
            if not request.stream:
                raise InputError("stream_options needs stream: true", param="stream_options")
            self._check(request.stream_options, "stream_options.")
        if request.stream and request.prompt_logprobs is not None:
            raise InputError(
                "prompt_logprobs come with whole answers alone; leave stream out, or use echo with logprobs",
                param="prompt_logprobs",
            )
        if isinstance(request, ChatRequest):
            for index, message in enumerate(request.messages):
                self._check(message, f"messages[{index}].")

    def _check(self, part: WireModel, where: str) -> None:
        known = type(part).model_fields
        for name, value in (part.model_extra or {}).items():
            if value is None or name in LABELS:
                continue
            if name not in UNSUPPORTED:
                self._warn_unknown(name, [*known, *UNSUPPORTED])
            elif value not in UNSUPPORTED[name]:
                raise InputError(
                    f"{where}{name} is not supported by this server; leave it out",
                    param=where + name,
                    code="unsupported_parameter",
                )

    def _warn_unknown(self, name: str, known: list[str]) -> None:
        # Names come from outside: what is remembered and logged of them is bounded.
        shown = repr(name[:64])
        if shown in self._warned or len(self._warned) >= self._REMEMBERED:
            return
        self._warned.add(shown)
        nearest = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did the client mean {nearest[0]!r}?" if nearest else ""
        logger.warning("A request has the unknown field %s, which is ignored%s", shown, hint)
