"""The address that a server listens on; apart from the server, which takes long to import."""

import errno
import socket

from paceline.errors import InputError


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
        raise address_error(host, port, error) from None
    return listener


def address_error(host: str, port: int, error: OSError) -> InputError:
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
