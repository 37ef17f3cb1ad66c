"""LLM: the engine without HTTP, for one program that has all its prompts at hand."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from threading import Lock
from typing import Any, Self

import numpy as np

from paceline.engine.engine import Engine
from paceline.engine.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, Usage
from paceline.errors import InputError, PacelineError
from paceline.loading import load_model
from paceline.models.chat import no_template_error
from paceline.models.conversation import Message, checked_messages, with_default_system
from paceline.options import EngineOptions


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text, as in vLLM."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    """One per token if ``SamplingParams.logprobs`` asked, else empty."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A prompt and what came of it, in the shape of vLLM's RequestOutput."""

    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """One, so far."""
    usage: Usage


class LLM:
    """A model to call from Python: the serving engine without HTTP. Calls from several threads take turns.

    Example:
        >>> llm = LLM("smollm2-135m")
        >>> llm.generate(["The sky is"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Args:
        model: catalog name, path of a GGUF file, ``hf:owner/repo[:file]`` or ``ollama:name[:tag]``.
        options: fields of EngineOptions, such as ``max_model_len`` or ``threads``.

    Raises:
        InputError, ModelFileError: as ``load_model``.
    """

    def __init__(self, model: str, **options: Any) -> None:
        unknown = options.keys() - EngineOptions.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(EngineOptions.__dataclass_fields__)
            raise InputError(f"LLM has no option {', '.join(sorted(unknown))}; there are: {known}")
        self.model = load_model(model, options=EngineOptions(**options))
        self._turn = Lock()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Continue prompts, all in one go; results in their order.

        Args:
            prompts: a text, texts, token ids, or lists of token ids.
            sampling_params: for all prompts, or one each; by default what the model brings, else SamplingParams().
            use_tqdm: show a progress bar on stderr (vLLM's name for it).

        Raises:
            InputError: a prompt or parameter cannot be run; nothing has been computed then.
            PacelineError: a request failed while running.
        """
        listed = _listed_prompts(prompts)
        encoded = [self.model.tokenizer.encode(p) if isinstance(p, str) else p for p in listed]
        texts = [p if isinstance(p, str) else None for p in listed]
        return self._run(texts, encoded, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Answer a conversation, or several.

        Args:
            system: opens the conversations that have no system message; by default what the model brings.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.

        Raises:
            InputError: the model has no chat template, or the template refuses the conversation or its variables, or
                as ``generate``.
        """
        template = self.model.chat_template
        if template is None:
            raise no_template_error()
        several = bool(messages) and isinstance(messages[0], list | tuple)
        conversations: list[Any] = list(messages) if several else [messages]
        if system is None:
            system = self.model.source.system
        opened = [with_default_system(checked_messages(conversation), system) for conversation in conversations]
        texts = [template.render(each, chat_template_kwargs=chat_template_kwargs) for each in opened]
        encoded = [template.encode(each, chat_template_kwargs=chat_template_kwargs) for each in opened]
        return self._run(texts, encoded, sampling_params, use_tqdm)

    def close(self) -> None:
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        texts: Sequence[str | None],
        encoded: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[GenerationResult]:
        if sampling_params is None:
            sampling_params = SamplingParams(**self.model.source.sampling)
        parameters = _one_each(sampling_params, len(encoded))
        with self._turn:
            news = self._news(encoded, parameters, use_tqdm)
        return [_result(*each) for each in zip(texts, encoded, news, strict=True)]

    def _news(
        self, encoded: Sequence[Sequence[int]], parameters: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[list[RequestOutput]]:
        engine = self.model.engine
        request_ids: list[str] = []
        try:
            for ids, params in zip(encoded, parameters, strict=True):
                request_ids.append(engine.submit(ids, params).request_id)
            with _progress(len(request_ids), shown=use_tqdm) as advance:
                news = _run_to_end(engine, request_ids, advance)
        except BaseException:  # Ctrl-C too: the engine must be empty for the next call
            for request_id in request_ids:
                engine.abort(request_id)
            while engine.has_work:
                engine.step()
            raise
        return [news[request_id] for request_id in request_ids]


def _listed_prompts(prompts: Any) -> list[str | list[int]]:
    """The prompts as a list of texts and lists of token ids; a text or a list of ids is one prompt."""
    if isinstance(prompts, str) or any(isinstance(prompt, Integral) for prompt in prompts):
        prompts = [prompts]
    return [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, Sequence | np.ndarray) or not all(isinstance(token, Integral) for token in prompt):
        raise InputError(f"a prompt is a string or a list of token ids, not {prompt!r:.200}", param="prompts")
    return [int(token) for token in prompt]


def _one_each(sampling_params: Any, count: int) -> Sequence[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        raise InputError(
            f"sampling_params is a SamplingParams or a list of them, not {sampling_params!r:.200}",
            param="sampling_params",
        )
    if len(sampling_params) != count:
        raise InputError(f"{len(sampling_params)} sampling_params for {count} prompts: one each, or one for all")
    return sampling_params


def _run_to_end(
    engine: Engine, request_ids: Iterable[str], advance: Callable[[int], None]
) -> dict[str, list[RequestOutput]]:
    news: dict[str, list[RequestOutput]] = {request_id: [] for request_id in request_ids}
    while engine.has_work:
        for output in engine.step():
            news[output.request_id].append(output)
            if output.finish_reason == "error":
                raise PacelineError(f"request {output.request_id} failed: {output.error}")
            if output.usage is not None:
                advance(output.usage.completion_tokens)
    return news


def _result(text: str | None, prompt_ids: Sequence[int], news: Sequence[RequestOutput]) -> GenerationResult:
    last = news[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    completion = CompletionOutput(
        text="".join(output.text for output in news),
        token_ids=tuple(token_id for output in news for token_id in output.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for output in news for entry in output.logprobs),
    )
    return GenerationResult(text, tuple(prompt_ids), (completion,), last.usage)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar that moves by one request and tells the tokens per second so far."""
    if not shown:
        yield lambda _tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("Generating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, speed="")
        tokens = 0

        def advance(new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=1, speed=f"{tokens / elapsed:.0f} tok/s" if elapsed else "")

        yield advance
