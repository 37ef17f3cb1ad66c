"""``paceline chat``: a conversation in the terminal, with a server or with a model of its own."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    import httpx

    from paceline.engine.request import Request, RequestOutput
    from paceline.llm import LoadedModel

DEFAULT_URL = "http://localhost:8000"
_PROBE_SECONDS = 2.0
_QUIET_SECONDS = 600.0
"""Longest silence of a server that an answer survives."""

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
        """Pieces of the answer's text, then the number of its tokens.

        Closing the iterator early stops the answer.

        Raises:
            PacelineError: the question cannot be answered, or the partner is gone.
        """
        ...


def chat(
    model_or_url: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL_OR_URL]",
            help="A model to load, or the URL of a server. Default: the server at PACELINE_URL or "
            f"{DEFAULT_URL} if one answers, else smollm2-135m.",
        ),
    ] = None,
    question: Annotated[str | None, typer.Option(help="Ask this one question and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: the rest of the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key that the server asks for.")
    ] = None,
) -> None:
    """Talk to a model. /clear forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer.

    Without a terminal, the whole standard input is one question: git diff | paceline chat --system "Review this"
    """
    import sys

    options = ChatOptions(system, temperature, max_tokens, seed)
    with _find_partner(model_or_url, options, api_key) as partner:
        if question is None and sys.stdin.isatty():
            _converse(partner, options)
        else:
            content = sys.stdin.read() if question is None else question
            _say(partner, [*_opening(options), {"role": "user", "content": content}])


def _opening(options: ChatOptions) -> Messages:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _converse(partner: Partner, options: ChatOptions) -> None:
    import readline  # noqa: F401 - gives input() its history and line editing
    import sys

    from paceline.errors import InputError

    print(f"{partner.name} · /clear forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    messages = _opening(options)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question == "/exit":
            return
        if question == "/clear":
            messages = _opening(options)
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                messages = [*asked, {"role": "assistant", "content": _say(partner, asked)}]
            except InputError as error:
                print(f"error: {error} (/clear starts anew)", file=sys.stderr)


def _say(partner: Partner, messages: Messages) -> str:
    """Print an answer as it comes, and its speed on stderr; Ctrl-C keeps what there is of it."""
    import sys

    began = time.perf_counter()
    first: float | None = None
    tokens: int | None = None
    pieces: list[str] = []
    answer = partner.answer(messages)
    with suppress(KeyboardInterrupt):
        for piece in answer:
            if isinstance(piece, int):
                tokens = piece
                continue
            first = first or time.perf_counter()
            pieces.append(piece)
            print(piece, end="", flush=True)
    ended = time.perf_counter()
    with suppress(KeyboardInterrupt):
        answer.close()
    print()
    print(_speed(began, first, ended, tokens), file=sys.stderr)
    return "".join(pieces)


def _speed(began: float, first: float | None, ended: float, tokens: int | None) -> str:
    """TTFT, tokens, and decode speed as (n - 1) tokens over the time after the first."""
    if first is None:
        return "[no text]"
    ttft = f"first token after {(first - began) * 1e3:.0f} ms"
    if tokens is None:
        return f"[{ttft}, stopped]"
    speed = f", {(tokens - 1) / (ended - first):.1f} tok/s" if tokens > 1 else ""
    return f"[{ttft}, {tokens} tokens{speed}]"


@contextmanager
def _find_partner(model_or_url: str | None, options: ChatOptions, api_key: str | None) -> Iterator[Partner]:
    import os

    import httpx

    if model_or_url is None:
        url = os.environ.get("PACELINE_URL", DEFAULT_URL)
    elif model_or_url.startswith(("http://", "https://")):
        url = model_or_url
    else:
        url = None
    if url is not None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(_QUIET_SECONDS, connect=_PROBE_SECONDS)
        with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout) as client:
            if model_or_url is not None or _answers(client):
                yield RemotePartner(client, options)
                return
    with _load(model_or_url or "smollm2-135m") as loaded:
        yield LocalPartner(loaded, options)


def _answers(client: "httpx.Client") -> bool:
    import httpx

    try:
        return client.get("/v1/models", timeout=_PROBE_SECONDS).status_code in (200, 401)
    except httpx.HTTPError:
        return False


@contextmanager
def _load(model: str) -> Iterator["LoadedModel"]:
    from paceline.cli.pull import pull_progress
    from paceline.llm import EngineOptions, load_model

    with pull_progress() as progress:
        loaded = load_model(model, options=EngineOptions(max_num_seqs=1), progress=progress)
    try:
        yield loaded
    finally:
        loaded.close()


class RemotePartner:
    """The first model of an OpenAI-compatible server."""

    def __init__(self, client: "httpx.Client", options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._model = self._first_model()
        self.name = f"{self._model} at {client.base_url}"

    def answer(self, messages: Messages) -> Generator[str | int]:
        import json

        import httpx

        payload = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
            "seed": self._options.seed,
        }
        wanted = {name: value for name, value in payload.items() if value is not None}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=wanted) as response:
                if response.status_code != 200:
                    response.read()
                    self._checked(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from self._news(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _news(self, chunk: dict[str, Any]) -> Generator[str | int]:
        if "error" in chunk:
            raise _server_refused(chunk)
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]
        if chunk.get("usage"):
            yield int(chunk["usage"]["completion_tokens"])

    def _first_model(self) -> str:
        import httpx

        try:
            models = self._checked(self._client.get("/v1/models"))["data"]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return str(models[0]["id"])

    def _unreachable(self, error: Exception) -> Exception:
        from paceline.errors import TargetUnreachableError

        return TargetUnreachableError(f"{self._client.base_url} does not answer: {error}; is the server running?")

    @staticmethod
    def _checked(response: "httpx.Response") -> Any:
        from paceline.errors import TargetUnreachableError

        try:
            body = response.json()
        except ValueError:
            raise TargetUnreachableError(
                f"{response.url} answered {response.status_code} without JSON; is it an OpenAI-compatible server?"
            ) from None
        if response.status_code != 200:
            raise _server_refused(body)
        return body


def _server_refused(body: Any) -> Exception:
    from paceline.errors import InputError

    error = body.get("error") if isinstance(body, dict) else None
    return InputError(f"the server says: {error.get('message') if isinstance(error, dict) else body}")


class LocalPartner:
    """A model in this process."""

    def __init__(self, loaded: "LoadedModel", options: ChatOptions) -> None:
        from paceline.models.chat import no_template_error

        if loaded.chat_template is None:
            raise no_template_error()
        self.name = loaded.name
        self._template = loaded.chat_template
        self._options = options
        self._engine = loaded.engine
        # On a thread of its own, so that Ctrl-C interrupts this one's waiting and never a step.
        self._outputs: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self._engine.start(self._outputs.put)

    def answer(self, messages: Messages) -> Generator[str | int]:
        from paceline.engine.request import SamplingParams
        from paceline.errors import ExecutorError

        params = SamplingParams(
            max_tokens=self._options.max_tokens, temperature=self._options.temperature, seed=self._options.seed
        )
        request = self._engine.submit(self._template.encode(messages), params)
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
