"""What the records mean: every metric is one function with its formula (DESIGN section 5).

Times go in as ns stamps and come out in ms; rates are per second. A function returns None where its metric does not
exist for that request, never 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paceline.bench.record import RequestRecord

MIN_TOKENS_FOR_RATE = 16
"""A rate over fewer tokens says more about rounding than about the server."""
MIN_WINDOW_IN_E2E = 3
"""A steady window shorter than this many median E2E latencies is none."""
_NS_PER_MS = 1e6
_NS_PER_S = 1e9


def ttft(record: RequestRecord) -> float | None:
    """Time to first token (= P2FT), ms: ``first − sent``."""
    return _ms(record.sent, record.first)


def ttfa(record: RequestRecord) -> float | None:
    """Time to first answer, ms: first content that is not reasoning ``− sent``."""
    return _ms(record.sent, record.answer)


def e2e(record: RequestRecord) -> float | None:
    """Total latency, ms: ``last − sent``."""
    return _ms(record.sent, record.last)


def itl(record: RequestRecord) -> list[float]:
    """Inter-token latencies, ms: every gap between consecutive content events."""
    stamps = [ns for ns, _ in record.events]
    return [(after - before) / _NS_PER_MS for before, after in pairwise(stamps)]


def tpot(record: RequestRecord) -> float | None:
    """Time per output token after the first, ms: ``(last − first) / (n − 1)``; none for n = 1."""
    duration = _ms(record.first, record.last)
    if duration is None or record.tokens is None or record.tokens < 2:
        return None
    return duration / (record.tokens - 1)


def output_tps(record: RequestRecord) -> float | None:
    """Token generation speed, tokens/s: ``n / E2E``. Too short below `MIN_TOKENS_FOR_RATE`."""
    duration = e2e(record)
    if not duration or is_too_short(record):
        return None
    assert record.tokens is not None
    return record.tokens / (duration / 1e3)


def decode_tps(record: RequestRecord) -> float | None:
    """Decode speed of a stream, tokens/s: ``(n − 1) / (last − first)``. Too short below `MIN_TOKENS_FOR_RATE`."""
    duration = _ms(record.first, record.last)
    if not duration or is_too_short(record):
        return None
    assert record.tokens is not None
    return (record.tokens - 1) / (duration / 1e3)


def is_too_short(record: RequestRecord) -> bool:
    """Whether a rate of this request is left out of summaries."""
    return record.tokens is None or record.tokens < MIN_TOKENS_FOR_RATE


def tokens_per_event(record: RequestRecord) -> float | None:
    """``n ÷ content events``: how many tokens one ITL gap stands for."""
    return record.tokens / len(record.events) if record.tokens and record.events else None


def is_coalesced(record: RequestRecord) -> bool:
    """Whether a proxy or a buffer joined the stream so that ITL cannot be measured.

    True where the events arrived in fewer distinct reads than a quarter of the tokens: more tokens in one step
    than four is beyond what speculative decoding gives.
    """
    count = record.tokens if record.tokens is not None else len(record.events)
    return count > 4 and len({ns for ns, _ in record.events}) * 4 < count


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the run, ns; its start is outside, its end inside."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / _NS_PER_S

    def __contains__(self, ns: int) -> bool:
        return self.start < ns <= self.end


def steady_window(records: Sequence[RequestRecord], concurrency: int) -> Window | None:
    """Closed loop: from the moment all slots are busy to the moment a slot first finds no more work.

    The first is when `concurrency` requests are first in flight; the second is the first end of a request after the
    last one was sent. None where the slots were never all busy or the window is shorter than
    `MIN_WINDOW_IN_E2E` median E2E latencies.
    """
    sent = [record for record in records if record.sent is not None]
    start = _all_busy(sent, concurrency)
    latencies = [value for record in finished(records) if (value := e2e(record)) is not None]
    if start is None or not latencies:
        return None
    last_sent = max(record.sent or 0 for record in sent)
    window = Window(start, min((record.end for record in sent if record.end > last_sent), default=last_sent))
    return window if window.seconds * 1e3 >= MIN_WINDOW_IN_E2E * median(latencies) else None


def _all_busy(records: Iterable[RequestRecord], concurrency: int) -> int | None:
    changes = [(record.sent or 0, 1) for record in records] + [(record.end, -1) for record in records]
    in_flight = 0
    for ns, change in sorted(changes):
        in_flight += change
        if in_flight >= concurrency:
            return ns
    return None


def finished(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that got a complete answer; all metrics but the error rate are over these."""
    return [record for record in records if record.status == "ok"]


def server_is_gone(records: Sequence[RequestRecord]) -> bool:
    """Whether nobody listens any more: every failure since the last complete answer is one of the connection, and the
    last request could not even connect. A server that closes single connections, or comes back, is not gone."""
    by_end = sorted(records, key=lambda record: record.end)
    last_ok = max((number for number, record in enumerate(by_end) if record.status == "ok"), default=-1)
    since = [record.status for record in by_end[last_ok + 1 :]]
    return bool(since) and since[-1] == "connect_error" and set(since) <= {"connect_error", "disconnected"}


def whole_run(records: Sequence[RequestRecord]) -> Window | None:
    """First sent → last finished, which is what vLLM's figures are over. A failed request may be the first sent."""
    starts = [record.sent for record in records if record.sent is not None]
    ends = [record.last for record in finished(records) if record.last is not None]
    return Window(min(starts), max(ends)) if starts and ends else None


def tokens_inside(record: RequestRecord, window: Window) -> float:
    """Tokens that arrived inside the window; an event's share is ``n ÷ content events``, unstreamed: at completion."""
    if record.tokens is None or record.last is None:
        return 0.0
    if not record.events:
        return float(record.tokens) if record.last in window else 0.0
    inside = sum(1 for ns, _ in record.events if ns in window)
    return record.tokens * inside / len(record.events)


def throughput_output(records: Iterable[RequestRecord], window: Window) -> float:
    """Output tokens/s: tokens of events stamped inside the window ÷ its length."""
    return sum(tokens_inside(record, window) for record in finished(records)) / window.seconds


def throughput_requests(records: Iterable[RequestRecord], window: Window) -> float:
    """Requests/s: requests completed inside the window ÷ its length."""
    completed = sum(1 for record in finished(records) if record.last is not None and record.last in window)
    return completed / window.seconds


def _ms(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / _NS_PER_MS
