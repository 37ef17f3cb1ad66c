"""LLM: the engine without HTTP, for one program that has all its prompts at hand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from threading import Lock
from typing import Any, Self

import numpy as np

from paceline.engine.engine import Engine
from paceline.engine.outputs import FinishReason, RequestOutput, TokenLogprobs, Usage
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
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
    """``SamplingParams.n`` of them."""
    usage: Usage
    """The prompt counts once."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of the prompt's tokens from ``SamplingParams.prompt_logprobs_from`` (1) on, if ``prompt_logprobs`` asked."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural, one per token."""
    is_greedy: bool
    """Each token is the likeliest at its place."""

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum."""
        return sum(self.logprobs)


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
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Continue prompts, all in one go; results in their order.

        Args:
            prompts: a text, texts, token ids, or lists of token ids.
            sampling_params: for all prompts, or one each; by default what the model brings, else SamplingParams().
            priority: for all prompts, or one each; lower goes first.
            timeout: seconds after which what is not finished ends as it is, with finish reason "timeout".
            use_tqdm: show a progress bar on stderr (vLLM's name for it).

        Raises:
            InputError: a prompt or parameter cannot be run; nothing has been computed then.
            PacelineError: a request failed while running.
        """
        listed = _listed_prompts(prompts)
        encoded = [self.model.tokenizer.encode(p) if isinstance(p, str) else p for p in listed]
        texts = [p if isinstance(p, str) else None for p in listed]
        return self._run(texts, encoded, sampling_params, use_tqdm, priority, timeout)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Answer a conversation, or several.

        Args:
            system: opens the conversations that have no system message; by default what the model brings.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
            sampling_params, priority, timeout: as for ``generate``.

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
        return self._run(texts, encoded, sampling_params, use_tqdm, priority, timeout)

    def score(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        *,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """How likely each continuation is after its prompt. What prompts share is computed once.

        A text is tokenized together with its prompt, and its tokens begin where those of the prompt alone end, or
        differ: " Paris" after "The capital is" is one token, "Paris" after "The capital is " may take the space with
        it.

        Args:
            prompts: one for all continuations, or one each; texts or token ids.
            continuations: texts or lists of token ids, none of them empty.

        Raises:
            InputError: as ``generate``, or a prompt or continuation has no tokens.
        """
        answers = _listed_prompts(continuations)
        listed = _listed_prompts(prompts)
        if len(listed) == 1:
            listed *= len(answers)
        if len(listed) != len(answers):
            raise InputError(f"{len(listed)} prompts for {len(answers)} continuations: one each, or one for all")
        pairs = [self._joined(prompt, answer) for prompt, answer in zip(listed, answers, strict=True)]
        parameters = [SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=start) for _, start in pairs]
        encoded = [ids for ids, _ in pairs]
        results = self._run([None] * len(encoded), encoded, parameters, use_tqdm)
        return [_score(result) for result in results]

    def _joined(self, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[list[int], int]:
        """Token ids of both, and where those of the continuation begin."""
        encode = self.model.tokenizer.encode
        if isinstance(prompt, str) and isinstance(continuation, str):
            alone, ids = encode(prompt), encode(prompt + continuation)
            start = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), len(alone))
        else:
            alone = encode(prompt) if isinstance(prompt, str) else list(prompt)
            more = encode(continuation, add_special=False) if isinstance(continuation, str) else list(continuation)
            ids, start = alone + more, len(alone)
        if not 0 < start < len(ids):
            what = "prompt" if start == 0 else "continuation"
            raise InputError(f"a {what} has no tokens: {prompt!r:.100}, {continuation!r:.100}", param=f"{what}s")
        return ids, start

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
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[GenerationResult]:
        if sampling_params is None:
            sampling_params = SamplingParams(**self.model.source.sampling)
        parameters = _one_each(sampling_params, len(encoded))
        priorities = [priority] * len(encoded) if isinstance(priority, int) else priority
        if len(priorities) != len(encoded):
            raise InputError(f"{len(priorities)} priorities for {len(encoded)} prompts: one each, or one for all")
        with self._turn:
            news = self._news(encoded, parameters, priorities, timeout, use_tqdm)
        return [_result(*each) for each in zip(texts, encoded, news, strict=True)]

    def _news(
        self,
        encoded: Sequence[Sequence[int]],
        parameters: Sequence[SamplingParams],
        priorities: Sequence[int],
        timeout: float | None,
        use_tqdm: bool,
    ) -> list[list[list[RequestOutput]]]:
        """For each prompt, for each of its choices, all outputs."""
        engine = self.model.engine
        requests: list[Request] = []
        try:
            for ids, params, priority in zip(encoded, parameters, priorities, strict=True):
                requests.append(engine.submit(ids, params, priority=priority, timeout=timeout))
            news: dict[str, list[RequestOutput]] = {
                choice.request_id: [] for request in requests for choice in request.choices
            }
            with _progress(len(news), shown=use_tqdm) as advance:
                _run_to_end(engine, news, advance)
        except BaseException:  # Ctrl-C too: the engine must be empty for the next call
            for request in requests:
                for choice in request.choices:
                    engine.abort(choice.request_id)
            while engine.has_work:
                engine.step()
            raise
        return [[news[choice.request_id] for choice in request.choices] for request in requests]


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


def _run_to_end(engine: Engine, news: Mapping[str, list[RequestOutput]], advance: Callable[[int], None]) -> None:
    while engine.has_work:
        for output in engine.step():
            news[output.request_id].append(output)
            if output.finish_reason == "error":
                raise PacelineError(f"request {output.request_id} failed: {output.error}")
            if output.usage is not None:
                advance(output.usage.completion_tokens)


def _result(text: str | None, prompt_ids: Sequence[int], news: Sequence[Sequence[RequestOutput]]) -> GenerationResult:
    usages = [outputs[-1].usage for outputs in news]
    first = usages[0]
    assert first is not None
    completion_tokens = sum(usage.completion_tokens for usage in usages if usage is not None)
    return GenerationResult(
        text,
        tuple(prompt_ids),
        tuple(map(_completion, news)),
        Usage(first.prompt_tokens, completion_tokens, first.cached_tokens),
        tuple(entry for outputs in news for output in outputs for entry in output.prompt_logprobs),
    )


def _completion(outputs: Sequence[RequestOutput]) -> CompletionOutput:
    last = outputs[-1]
    assert last.finish_reason is not None
    return CompletionOutput(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )


def _score(result: GenerationResult) -> Score:
    entries = result.prompt_logprobs
    return Score(
        tuple(entry.token_id for entry in entries),
        tuple(entry.logprob for entry in entries),
        all(entry.token_id == entry.top[0][0] for entry in entries),
    )


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
