"""``paceline serve``: a model behind HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.engine_options import (
    ChatTemplateFile,
    Device,
    KVDType,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelName,
    PrefixCaching,
    PromptLookup,
    Quantize,
    ServedModelName,
    SystemPrompt,
    TemplateDate,
    Threads,
)

if TYPE_CHECKING:
    from paceline.loading import LoadedModel
    from paceline.server.listen import HttpServer


def serve(
    model: ModelName = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    served_model_name: ServedModelName = None,
    system: SystemPrompt = None,
    chat_template: ChatTemplateFile = None,
    template_date: TemplateDate = None,
    device: Device = "cpu",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    kv_memory: KVMemory = None,
    kv_dtype: KVDType = "f16",
    quantize: Quantize = None,
    threads: Threads = None,
    prefix_caching: PrefixCaching = True,
    prompt_lookup: PromptLookup = 0,
    max_waiting: Annotated[
        int | None,
        typer.Option(min=0, help="Most requests that may wait; more get 503 and Retry-After. Default: any number."),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a request is given up that does not say itself (timeout). Default: never."),
    ] = None,
    target_itl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest pause that other requests' prompts should cause within an answer, such as 50ms: each step "
            "computes no more of them than fits. Default: prompts go first.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="PACELINE_API_KEY", help="Key that requests must bring; repeatable. /health needs none."),
    ] = None,
) -> None:
    """Serve MODEL over OpenAI's HTTP API, until Ctrl-C.

    Example: paceline serve smollm2-135m --port 8000
    """
    from paceline.cli.pull import pull_progress
    from paceline.cli.size import parse_context, parse_milliseconds, parse_size
    from paceline.loading import load_model
    from paceline.options import EngineOptions
    from paceline.server.address import bind

    _configure_logging()
    keys = _usable_keys(api_key)
    options = EngineOptions(
        device=device,
        max_model_len=parse_context(max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=None if kv_memory is None else parse_size(kv_memory),
        kv_dtype=kv_dtype,
        quantize=quantize,
        threads=threads,
        chat_template=chat_template,
        template_date=None if template_date is None else template_date.date(),
        enable_prefix_caching=prefix_caching,
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        target_itl=None if target_itl is None else parse_milliseconds(target_itl),
        prompt_lookup_tokens=prompt_lookup,
    )
    # Before the model is loaded: a port that is taken is told at once.
    with bind(host, port) as listener:
        with _made_to_stay(), pull_progress() as progress:
            _import_meanwhile("paceline.server.app", "paceline.server.listen")
            loaded = load_model(model, options=options, progress=progress)
            from paceline.server.app import create_app
            from paceline.server.listen import HttpServer
        try:
            names = served_model_name or [loaded.name]
            app = create_app(
                loaded,
                served_names=names,
                system_prompt=loaded.source.system if system is None else system,
                default_sampling=loaded.source.sampling,
                api_keys=keys,
            )
            bound = listener.getsockname()
            key = _as_typed(keys)

            def when_ready() -> None:
                announce(loaded, names[0], bound[0], bound[1], key=key)
                _touch_kv(loaded, server)

            server = HttpServer(app, on_ready=when_ready)
            _handle_hangup(server)
            server.run_on(listener)
        finally:
            loaded.close()
    if server.failure is not None:
        raise server.failure
    _tell_end(server)


_BUSY_SHARE = 0.05
"""Of a core, for the memory of the KV cache while requests run: it takes seconds per GiB."""


def _touch_kv(loaded: "LoadedModel", server: "HttpServer") -> None:
    """Take the KV cache's memory beside the first requests: if there is too little, the server is to fail now, and not
    when traffic has grown to need it."""
    from threading import Thread
    from time import perf_counter, sleep

    from paceline.errors import PacelineError

    def touch() -> None:
        try:
            began = perf_counter()
            for _ in loaded.executor.touch_kv():
                if server.should_exit:
                    return
                if loaded.engine.has_work:
                    sleep((perf_counter() - began) * (1 / _BUSY_SHARE - 1))
                began = perf_counter()
        except PacelineError as error:
            if server.should_exit:
                return  # the executor is closed by now
            server.failure = PacelineError(f"{error}; give it less with --kv-memory")
            server.should_exit = True

    # No daemon: the interpreter must not end under it.
    Thread(target=touch, name="paceline-kv").start()


@contextmanager
def _made_to_stay() -> Iterator[None]:
    """Exempt what is made in the block from garbage collection, now and for good: a search through all of the server's
    modules and the vocabulary finds nothing, and halts every stream meanwhile."""
    import gc

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_meanwhile(*modules: str) -> None:
    """Import on another thread: the weights are packed without the interpreter's lock."""
    from importlib import import_module
    from threading import Thread

    def import_all() -> None:
        for module in modules:
            import_module(module)

    Thread(target=import_all, name="paceline-imports", daemon=True).start()


def _usable_keys(given: list[str] | None) -> list[str]:
    """
    Raises:
        InputError: a key is empty or cannot be sent; a server that was meant to be guarded must not open.
    """
    import os

    from paceline.cli.api_key import check_api_key

    if not given and "PACELINE_API_KEY" in os.environ:
        given = [""]  # to typer an empty variable is none at all
    return [check_api_key(key) for key in given or ()]


def _as_typed(keys: list[str]) -> str | None:
    """How the curl line spells a key without telling it: as its variable, or as a word to replace."""
    import os

    if not keys:
        return None
    return "$PACELINE_API_KEY" if os.environ.get("PACELINE_API_KEY") == keys[0] else "YOUR_KEY"


def start_screen(loaded: "LoadedModel", name: str, url: str, *, key: str | None) -> list[tuple[str, str]]:
    """What the operator should know when the server is ready: (label, text) in reading order.

    ``key`` is how a shell spells the API key, None without one.
    """
    from paceline.machine import gpu_names

    facts = loaded.describe()
    rows = [*facts.items()]
    gpus = [name for name in gpu_names() if name not in facts["device"]]
    if gpus:
        rows.append(("GPU", f"{', '.join(gpus)}: not used; --device cuda computes there, with PyTorch"))
    rows.append(("ready", f"{url}  (interactive reference: {url}/docs)"))
    rows.append(("try", _curl(url, name, chat=loaded.chat_template is not None, key=key)))
    return rows


def _curl(url: str, name: str, *, chat: bool, key: str | None) -> str:
    import json
    import shlex

    authorization = "" if key is None else f' -H "Authorization: Bearer {key}"'
    body: dict[str, object] = {"model": name}
    if chat:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is a KV cache?"}]
    else:
        path = "completions"
        body["prompt"] = "The capital of France is"
    return f"curl {url}/v1/{path}{authorization} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def announce(loaded: "LoadedModel", name: str, host: str, port: int, *, key: str | None) -> None:
    """Print the start screen, or log it where there is no terminal; warn if anybody can use the model."""
    import logging
    import sys

    from paceline import __version__

    logger = logging.getLogger("paceline.serve")
    # A wildcard address is no address to connect to.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    rows = start_screen(loaded, name, url, key=key)
    if sys.stdout.isatty():
        # The terminal may be closed by now; the server is there all the same.
        with suppress(OSError):
            print(f"\nPaceline {__version__}\n", *(f"  {label:<9}{text}" for label, text in rows), sep="\n")
            print("\n  Ctrl-C stops it.\n", flush=True)
    else:
        logger.info("Paceline %s", __version__)
        for label, text in rows:
            logger.info("%s: %s", label, text)
    if key is None and not _is_loopback(host):
        logger.warning(
            "Listening on %s without a key: everybody who reaches this machine can use the model; see --api-key", host
        )


def _tell_end(server: "HttpServer") -> None:
    import logging

    logging.getLogger("paceline.serve").info("stopped (%s)", server.stopped_by)


def _is_loopback(host: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(host).is_loopback


def _configure_logging() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # uvicorn tells each step of its start and end; ours says it in one line.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _handle_hangup(server: "HttpServer") -> None:
    """A closed terminal ends a server that runs in it, like Ctrl-C; one without a terminal runs on."""
    import signal
    import sys

    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return  # nohup
    signal.signal(signal.SIGHUP, server.handle_exit if sys.stdout.isatty() else signal.SIG_IGN)
