"""The SSE parser against the standard."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.sse import Event, SSEParser, parse_events

STREAM = (
    "\ufeffdata: first\n\n"
    ": a comment\r\n"
    "data: two\r\ndata: lines\r\n\r\n"
    "event: error\rdata:no space\rid: 7\rretry: 5\r\r"
    "data:  two spaces\n\n"
    "event: empty\n\n"
    "data: 한국어 🚴\r\n\n"
    "data\n\n"
    "data: [DONE]\n\n"
    "data: cut off"
).encode()
EVENTS = [
    ("message", "first"),
    ("message", "two\nlines"),
    ("error", "no space"),
    ("message", " two spaces"),
    ("message", "한국어 🚴"),
    ("message", ""),
    ("message", "[DONE]"),
]


def contents(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.data) for event in events]


def test_reads_the_standards_cases_from_one_read() -> None:
    assert contents(parse_events([(1, STREAM)])) == EVENTS


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_split_gives_the_same_events_stamped_by_the_read_that_completed_them(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    reads = [(number, STREAM[start:end]) for number, (start, end) in enumerate(pairwise(bounds))]
    events = parse_events(reads)
    assert contents(events) == EVENTS
    # Byte by byte, the stamp is the position of the byte that completes the event.
    by_byte = parse_events((position, STREAM[position : position + 1]) for position in range(len(STREAM)))
    for event, exact in zip(events, by_byte, strict=True):
        assert bounds[event.ns] <= exact.ns < bounds[event.ns + 1]


@given(
    datas=st.lists(st.text().filter(lambda text: not set(text) & {"\r", "\n"}), max_size=5),
    line_end=st.sampled_from(["\r", "\n", "\r\n"]),
    size=st.integers(1, 7),
)
def test_what_is_written_is_read(datas: list[str], line_end: str, size: int) -> None:
    stream = "".join(f"data: {data}{line_end}{line_end}" for data in datas).encode("utf-8", "replace")
    reads = [(start, stream[start : start + size]) for start in range(0, len(stream), size)]
    expected = [data.encode("utf-8", "replace").decode() for data in datas]
    assert [event.data for event in parse_events(reads)] == expected


def test_several_events_of_one_read_have_one_stamp() -> None:
    parser = SSEParser()
    assert [event.ns for event in parser.feed(5, b"data: a\n\ndata: b\n\ndata: c")] == [5, 5]
    assert [event.ns for event in parser.feed(9, b"\n\n")] == [9]


@pytest.mark.parametrize("second", [b"\n", b""])
def test_a_carriage_return_completes_the_event_at_once(second: bytes) -> None:
    parser = SSEParser()
    assert [event.data for event in parser.feed(1, b"data: a\r\n\r")] == ["a"]
    assert parser.feed(2, second) == []
    assert [event.data for event in parser.feed(3, b"data: b\n\n")] == ["b"]


def test_bytes_that_are_not_utf8_do_not_end_the_stream() -> None:
    assert parse_events([(1, b"data: \xff!\n\n")]) == [Event(1, "message", "\ufffd!")]
