"""The HTTP server process: uvicorn on a socket that is bound already, and an end that lets no stream hang."""

import errno
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline import __version__
from paceline.errors import InputError
from paceline.server.service import Service

_BACKLOG = 2048
_INTERRUPTED = 130


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address before the model is loaded; connections are refused until the server listens.

    Raises:
        InputError: the port is taken, or the host is not an address of this machine.
    """
    if not host:  # to the system that is every network, which is not what --host "$UNSET" should open
        raise InputError("--host is empty; use 127.0.0.1, or 0.0.0.0 for every network", param="host")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        # A server that was stopped a moment ago leaves connections in TIME_WAIT; they are no reason to refuse.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _address_error(host, port, error) from None
    return listener


def _address_error(host: str, port: int, error: OSError) -> InputError:
    if isinstance(error, socket.gaierror):
        return InputError(f"--host {host} is not an address or a known name: {error.strerror}", param="host")
    if error.errno == errno.EADDRNOTAVAIL:
        return InputError(
            f"--host {host} is not an address of this machine: {error.strerror}. "
            "Use 127.0.0.1, one of its own addresses, or 0.0.0.0 for every network",
            param="host",
        )
    advice = "Choose another port with --port (0 takes any free one)"
    if error.errno == errno.EADDRINUSE:
        advice = "Stop the program that uses it, or choose another port with --port (0 takes any free one)"
    return InputError(f"Cannot serve on {host} port {port}: {error.strerror}. {advice}", param="port")


class HttpServer(uvicorn.Server):
    """Serves an app of ``create_app`` until SIGINT, SIGTERM or ``should_exit``.

    The first signal ends every stream with an error event, frees the blocks and returns from ``run``; a second SIGINT
    ends the process at once.
    """

    def __init__(self, app: FastAPI, *, on_ready: Callable[[], None]) -> None:
        # Logs go to the root logger's handlers, in our format; requests are logged by RequestLog.
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                log_config=None,
                access_log=False,
                backlog=_BACKLOG,
                lifespan="on",
                server_header=False,
                headers=[("Server", f"paceline/{__version__}")],
            )
        )
        self._service: Service = app.state.service
        self._on_ready = on_ready
        self.stopped_by: str | None = None
        """Name of the signal that ended it, such as ``SIGTERM``."""

    def run_on(self, listener: socket.socket) -> None:
        """
        Raises:
            InputError: another program began to listen on the same address since ``bind``.
        """
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise _address_error(host, port, error) from None
        self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits until every connection is done, and a stream is only done when its request ends.
        await self._service.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(_INTERRUPTED)
        # Not uvicorn's own: it would raise the signal again after an orderly end, and that is not a failure.
        self.should_exit = True
        self.stopped_by = self.stopped_by or signal.Signals(sig).name
