"""Who answers in ``paceline chat``: a server, or a model in this process."""

import json
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import msgspec

from paceline.bench.answer import error_message
from paceline.bench.client import Endpoint, tls_context
from paceline.bench.sse import Event, SSEParser
from paceline.cli.chat import DEFAULT_MODEL, DEFAULT_URL
from paceline.errors import ExecutorError, InputError, PacelineError, TargetUnreachableError

if TYPE_CHECKING:
    from paceline.engine.outputs import RequestOutput
    from paceline.engine.request import Request
    from paceline.executors.quantize import Quantize
    from paceline.loading import LoadedModel

_CONNECT_SECONDS = 2.0
_MODELS_SECONDS = 10.0
_QUIET_SECONDS = 600.0
"""Longest silence of a server that an answer survives."""
_UNAVAILABLE = ("server_stopping", 502, 503, 504)
"""Statuses, and codes of error events (ours, llama.cpp's), of a server that is not there for anybody."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What is asked of the model with every question."""

    system: str | None
    temperature: float
    max_tokens: int | None
    seed: int | None


class Partner(Protocol):
    """Who answers."""

    name: str

    def answer(self, messages: Messages) -> Generator[str | int]:
        """Pieces of the answer's text, and the number of its tokens as soon as it is known.

        Closing the iterator early stops the answer.

        Raises:
            PacelineError: the question cannot be answered, the answer is broken, or the partner is gone.
        """
        ...

    def close(self) -> None: ...


def find_partner(
    model_or_url: str | None, options: ChatOptions, api_key: str | None, quantize: "Quantize | None"
) -> Partner:
    """The server or model that was named; else the server at PACELINE_URL or the default URL, else the default model.

    To be quantized, a model must be loaded here: with ``quantize`` no server is looked for.

    Raises:
        InputError, ModelFileError: there is no such model or it cannot chat, the server refuses the key, or it is to
            be quantized.
        TargetUnreachableError: no server answers at the URL that was named.
    """
    if model_or_url is None and quantize is None:
        named = os.environ.get("PACELINE_URL")
        if named:
            return RemotePartner(named, options, api_key)
        try:
            return RemotePartner(DEFAULT_URL, options, api_key)
        except TargetUnreachableError:
            print(f"[no server at {DEFAULT_URL}: loading {DEFAULT_MODEL}]", file=sys.stderr)
            return _load(DEFAULT_MODEL, options, quantize)
    model_or_url = model_or_url or DEFAULT_MODEL
    if model_or_url.startswith(("http://", "https://")):
        if quantize is not None:
            raise InputError(
                f"--quantize {quantize} is for a model that is loaded here, but {model_or_url} is a server: start that "
                f"with paceline serve --quantize {quantize}",
                param="quantize",
            )
        return RemotePartner(model_or_url, options, api_key)
    return _load(model_or_url, options, quantize)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_models = msgspec.json.Decoder(_Models).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class RemotePartner:
    """The first model of an OpenAI-compatible server."""

    def __init__(self, url: str, options: ChatOptions, api_key: str | None) -> None:
        """Raises TargetUnreachableError: no such server; InputError: the URL is none, or the key is refused."""
        endpoint = Endpoint.from_url(url)
        tls = tls_context(endpoint)
        self._url = endpoint.url
        self._options = options
        self._client = httpx.Client(
            base_url=endpoint.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(_QUIET_SECONDS, connect=_CONNECT_SECONDS),
            verify=tls if tls is not None else False,
            # No proxies from the environment, as in `bench`: HTTP_PROXY without NO_PROXY would catch loopback too.
            trust_env=False,
        )
        try:
            self._model = self._first_model()
        except BaseException:
            self.close()
            raise
        self.name = f"{self._model} at {self._url}"

    def close(self) -> None:
        self._client.close()

    def answer(self, messages: Messages) -> Generator[str | int]:
        payload = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
            "seed": self._options.seed,
        }
        wanted = json.dumps({name: value for name, value in payload.items() if value is not None})
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream("POST", "/v1/chat/completions", content=wanted, headers=headers) as response:
                if response.status_code != 200:
                    raise _refusal(response.read(), response.status_code)
                yield from self._pieces(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _pieces(self, response: httpx.Response) -> Generator[str | int]:
        parser, finished = SSEParser(), False
        for data in response.iter_bytes():
            for event in parser.feed(0, data):
                if event.data == "[DONE]":
                    return
                chunk = self._chunk(event)
                for choice in chunk.choices or ():
                    finished = finished or choice.finish_reason is not None
                    if choice.delta is not None and choice.delta.content:
                        yield choice.delta.content
                if chunk.usage is not None and chunk.usage.completion_tokens is not None:
                    yield chunk.usage.completion_tokens
        if not finished:
            kind = response.headers.get("content-type", "none")
            raise TargetUnreachableError(
                f"{self._url} broke off the answer: its stream (content type {kind}) ended without a finish reason "
                "and without [DONE]"
            )

    def _chunk(self, event: Event) -> _Chunk:
        try:
            chunk = _decode_chunk(event.data)
        except msgspec.MsgspecError as error:
            raise PacelineError(
                f"{self._url} sent an event that is no chunk of a chat completion: {error}: {event.data[:200]}"
            ) from None
        if chunk.error is not None or event.name == "error":
            code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
            raise _refusal(event.data.encode(), code)
        return chunk

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models", timeout=httpx.Timeout(_MODELS_SECONDS, connect=_CONNECT_SECONDS))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code in (401, 403):
            raise InputError(f"{self._url} says: {error_message(response.content)}; see --api-key and PACELINE_API_KEY")
        try:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {error_message(response.content)}")
            models = _decode_models(response.content).data
        except (ValueError, msgspec.MsgspecError) as error:
            raise TargetUnreachableError(
                f"{self._url}/v1/models is no list of models ({error}); is it an OpenAI-compatible server?"
            ) from None
        if not models:
            raise TargetUnreachableError(f"{self._url}/v1/models lists no model, so nobody can answer there")
        return models[0].id

    def _unreachable(self, error: httpx.HTTPError) -> TargetUnreachableError:
        reason = str(error) or type(error).__name__
        return TargetUnreachableError(f"{self._url} does not answer: {reason}; is the server running?")


def _refusal(body: bytes, code: object) -> PacelineError:
    """What a server's refusal amounts to; ``code`` is an HTTP status, or what an error event has in its place."""
    message = f"the server says: {error_message(body) or code}"
    return TargetUnreachableError(message) if code in _UNAVAILABLE else InputError(message)


def _load(model: str, options: ChatOptions, quantize: "Quantize | None") -> "LocalPartner":
    from paceline.cli.pull import pull_progress
    from paceline.loading import load_model
    from paceline.options import EngineOptions

    with pull_progress() as progress:
        loaded = load_model(model, options=EngineOptions(max_num_seqs=1, quantize=quantize), progress=progress)
    try:
        return LocalPartner(loaded, options)
    except BaseException:
        loaded.close()
        raise


class LocalPartner:
    """A model in this process."""

    def __init__(self, loaded: "LoadedModel", options: ChatOptions) -> None:
        """``close`` closes the model, too. Raises InputError: it has no chat template."""
        from paceline.models.chat import no_template_error

        if loaded.chat_template is None:
            raise no_template_error()
        self.name = f"{loaded.name} in this process"
        self._loaded = loaded
        self._template = loaded.chat_template
        self._options = options
        self._engine = loaded.engine
        # On a thread of its own, so that Ctrl-C interrupts this one's waiting and never a step.
        self._outputs: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self._engine.start(self._outputs.put)

    def close(self) -> None:
        self._loaded.close()

    def answer(self, messages: Messages) -> Generator[str | int]:
        from paceline.engine.sampling import SamplingParams
        from paceline.models.conversation import with_default_system

        asked = {
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
            "seed": self._options.seed,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        source = self._loaded.source
        # Without max_tokens: to the end of the context, unless the model says otherwise.
        params = SamplingParams(**{"max_tokens": None, **source.sampling, **given})
        request = self._engine.submit(self._template.encode(with_default_system(messages, source.system)), params)
        try:
            while True:
                for output in self._outputs_of(request):
                    yield output.text
                    if output.error is not None:
                        raise ExecutorError(output.error)
                    if output.usage is not None:
                        yield output.usage.completion_tokens
                        return
        finally:
            self._engine.abort(request.request_id)

    def _outputs_of(self, request: "Request") -> "list[RequestOutput]":
        """The next news; a stopped answer may have left some of its own in the queue."""
        return [output for output in self._outputs.get() if output.request_id == request.request_id]
