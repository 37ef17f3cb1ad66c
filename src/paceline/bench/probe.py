"""Asking a server, before anything is measured, what it is and how it wants to be asked."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
import msgspec

from paceline.bench.answer import error_message, read_body, read_stream
from paceline.bench.api import Api, Dialect, Mode
from paceline.bench.client import Endpoint, tls_context
from paceline.errors import InputError, TargetUnreachableError

_QUOTED_CHARACTERS = 100
_REFUSED = (400, 404, 405, 415, 422, 501)
"""Answers that mean "not like this", after which another way of asking is tried."""


@dataclass(frozen=True, slots=True)
class Server:
    """What was found at a URL."""

    models: tuple[str, ...]
    unlisted: str | None
    """Why there are no models: what is wrong with the answer to ``GET /v1/models``."""
    contexts: dict[str, int]
    """Longest prompt plus answer in tokens, by model, as far as ``max_model_len`` tells (vLLM, Paceline)."""
    kind: str
    """``vllm``, ``llama.cpp``, ``paceline``, …: what ``owned_by`` of its first model says, else ``unknown``."""
    version: str | None
    """What ``/version``, ``/api/version``, ``/props`` or else the ``Server`` header says."""


class Probe:
    """An unmeasured HTTP client to one server. Environment proxies are not used."""

    def __init__(self, endpoint: Endpoint, api_key: str | None, timeout_s: float) -> None:
        self.endpoint = endpoint
        tls = tls_context(endpoint)
        self._client = httpx.Client(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            verify=tls if tls is not None else False,
            trust_env=False,
            # llama-server closes after a stream without saying so; a kept connection would fail at random.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def identify(self) -> Server:
        """Asks for the models and the version.

        Raises TargetUnreachableError if nothing answers, InputError if the key is refused.
        """
        response = self._request("GET", "/v1/models")
        if response.status_code in (401, 403):
            raise InputError(
                f"{self.endpoint.url} refuses the request with HTTP {response.status_code}: "
                f"{error_message(response.content)}. Give the key with --api-key or PACELINE_API_KEY"
            )
        listed = _json(response).get("data") if response.status_code == 200 else None
        entries = listed if isinstance(listed, list) else []
        models = [model for model in entries if isinstance(model, dict) and "id" in model]
        kind = str(models[0].get("owned_by") or "unknown") if models else "unknown"
        contexts = {str(model["id"]): model.get("max_model_len") for model in models}
        return Server(
            models=tuple(str(model["id"]) for model in models),
            unlisted=None if models else _why_unlisted(response),
            contexts={model: context for model, context in contexts.items() if isinstance(context, int)},
            kind={"llamacpp": "llama.cpp"}.get(kind, kind),
            version=self._version() or response.headers.get("server"),
        )

    def _version(self) -> str | None:
        # vLLM and Ollama answer the first (Ollama under /api), llama-server the last.
        for path, name in (("/version", "version"), ("/api/version", "version"), ("/props", "build_info")):
            response = self._request("GET", path)
            if response.status_code == 200 and (stated := _json(response).get(name)):
                return str(stated)
        return None

    def find_dialect(
        self, api: Api | Literal["auto"], model: str, mode: Mode, temperature: float, prompt: str
    ) -> Dialect:
        """The first way of asking that the server accepts, tried with two tokens of output.

        Chat comes before completions, and forced lengths and usage in streams before doing without. Raises
        InputError with the server's words if it accepts none.
        """
        refusals = []
        for dialect in _dialects(api, model, mode, temperature):
            response = self._post(dialect, prompt, max_tokens=2)
            if response.status_code == 200:
                self._check_readable(dialect, response.content)
                return dialect
            refusals.append(f"POST {dialect.path}: HTTP {response.status_code}: {error_message(response.content)}")
            if response.status_code not in _REFUSED:
                break
        raise InputError(
            f"{self.endpoint.url} accepts no request for model {model!r}:\n  " + "\n  ".join(dict.fromkeys(refusals))
        )

    def count_prompt_tokens(self, dialect: Dialect, prompt: str, about: int) -> int | None:
        """The server's own count of `prompt` inside its template; None if it does not tell.

        Raises InputError if the prompt, which has `about` so many tokens, is refused.
        """
        response = self._post(replace(dialect, mode="sync"), prompt, max_tokens=1)
        if response.status_code != 200:
            raise InputError(
                f"{self.endpoint.url} refuses a prompt of about {about} tokens: "
                f"HTTP {response.status_code}: {error_message(response.content)}"
            )
        return read_body(response.content, end_ns=0).prompt_tokens

    def _post(self, dialect: Dialect, prompt: str, max_tokens: int) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return self._request("POST", dialect.path, content=dialect.body(prompt, max_tokens), headers=headers)

    def _check_readable(self, dialect: Dialect, body: bytes) -> None:
        answer = read_stream([(0, body)]) if dialect.mode == "stream" else read_body(body, end_ns=0)
        if answer.status != "ok":
            hint = "; try --mode sync" if dialect.mode == "stream" else ""
            raise InputError(f"{self.endpoint.url}{dialect.path} answers {answer.status}: {answer.error}{hint}")

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, **content)
        except httpx.HTTPError as error:
            raise TargetUnreachableError(
                f"no server answers at {self.endpoint.url}: {method} {path}: {error or type(error).__name__}\n"
                "Start one with `paceline serve`, or give the URL of a running one as argument or in PACELINE_URL"
            ) from None


def choose_model(server: Server, model: str | None, url: str) -> str:
    """`model`, else the only one the server lists. Raises InputError listing them if that is not one."""
    if model is not None:
        return model
    if len(server.models) == 1:
        return server.models[0]
    if not server.models:
        raise InputError(f"{url}: {server.unlisted}; name a model with --model, or give the URL in front of /v1")
    raise InputError(f"{url} serves {len(server.models)} models; choose one with --model: {', '.join(server.models)}")


def _why_unlisted(response: httpx.Response) -> str:
    what = "GET /v1/models"
    if response.status_code != 200:
        target = f" to {response.headers['location']}" if response.has_redirect_location else ""
        return f"{what} answers HTTP {response.status_code}{target}: {error_message(response.content)}"
    listed = _json(response).get("data")
    if isinstance(listed, list):
        return f"{what} lists no model"
    return f"{what} answers no JSON list of models, but {response.text[:_QUOTED_CHARACTERS]!r}"


def _dialects(api: Api | Literal["auto"], model: str, mode: Mode, temperature: float) -> Iterator[Dialect]:
    apis: tuple[Api, ...] = ("openai-chat", "openai-completions") if api == "auto" else (api,)
    for each in apis:
        for ignore_eos, stream_usage in ((True, True), (False, True), (True, False), (False, False)):
            if stream_usage or mode == "stream":
                yield Dialect(each, model, mode, temperature, ignore_eos, stream_usage)


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
