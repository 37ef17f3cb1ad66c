"""Server-sent events: stamped bytes to stamped events.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import Iterable
from dataclasses import dataclass

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event."""

    ns: int
    """Stamp of the read that completed the event, that is, brought the end of its blank line."""
    name: str
    """Event type; ``message`` where the stream names none."""
    data: str


class SSEParser:
    """Incremental parser: the events do not depend on how the stream was cut into reads.

    An event that the end of the stream cuts short is discarded, as the standard says.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        self._after_cr = False
        self._at_start = True
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, ns: int, chunk: bytes) -> list[Event]:
        """Takes the bytes of one read, stamped `ns`; returns the events that they complete."""
        if self._after_cr and chunk.startswith(b"\n"):
            # The CR that ended the last read was the first half of a CRLF.
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        events = []
        # bytes.splitlines knows CR, LF and CRLF only, which are exactly the standard's line ends.
        for piece in chunk.splitlines(keepends=True):
            self._line.append(piece)
            if piece.endswith((b"\r", b"\n")):
                line = b"".join(self._line).rstrip(b"\r\n")
                self._line.clear()
                event = self._end_line(ns, line)
                if event is not None:
                    events.append(event)
        return events

    def _end_line(self, ns: int, line: bytes) -> Event | None:
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._dispatch(ns)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None

    def _dispatch(self, ns: int) -> Event | None:
        name, data = self._name, self._data
        self._name, self._data = b"", []
        if not data:
            return None
        # Decoding waits for the whole event, so a code point may be split across reads.
        return Event(ns, name.decode(errors="replace") or "message", b"\n".join(data).decode(errors="replace"))


def parse_events(reads: Iterable[tuple[int, bytes]]) -> list[Event]:
    """Events of a whole recorded stream, `reads` being its (stamp in ns, bytes) in order."""
    parser = SSEParser()
    return [event for ns, chunk in reads for event in parser.feed(ns, chunk)]
