"""Servers on real sockets, in a thread of the test process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from paceline.engine.engine import Engine
from paceline.server.address import bind
from paceline.server.app import create_app
from paceline.server.listen import HttpServer
from tests.server.fakes import ScriptedExecutor, tiny_model


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that answers at ``url``."""

    url: str
    port: int
    model: Any
    http: httpx.Client
    process: HttpServer
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.model.engine

    @property
    def executor(self) -> ScriptedExecutor:
        return self.model.executor

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def stop(self) -> None:
        self.process.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive(), "the server does not stop"


StartServer = Callable[..., LiveServer]


@contextmanager
def live_server(model: Any, **options: Any) -> Iterator[LiveServer]:
    options = {"served_names": ["tiny"]} | options
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        process = HttpServer(create_app(model, **options), on_ready=ready.set)
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        thread = threading.Thread(target=process.run_on, args=(listener,))
        thread.start()
        assert ready.wait(timeout=20), "the server does not start"
        with httpx.Client(base_url=url, timeout=30) as http:
            server = LiveServer(url, port, model, http, process, thread)
            yield server
        model.executor.open.set()
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """One for the whole module, with logs, a template and the model names tiny and alias."""
    with live_server(tiny_model(executor=ScriptedExecutor(end_after=100)), served_names=["tiny", "alias"]) as live:
        yield live


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers of the test's own: ``start_server(model, **create_app_options)``."""
    with ExitStack() as servers:
        yield lambda model, **options: servers.enter_context(live_server(model, **options))
