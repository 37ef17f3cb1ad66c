"""What the shapes of answers, seen in the wild, are read as."""

import json
from typing import Any

import pytest

from paceline.bench.answer import error_message, read_body, read_stream

FINISH = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def stream(*chunks: Any) -> list[tuple[int, bytes]]:
    """One read per chunk, stamped 10, 20, …"""
    texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return [(10 * number, f"data: {text}\n\n".encode()) for number, text in enumerate(texts, 1)]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


def test_role_only_and_empty_events_are_not_content() -> None:
    role = delta(role="assistant", content="")
    answer = read_stream(stream(role, delta(), delta(content=None), delta(content="Hi"), FINISH, "[DONE]"))
    assert answer.events == [(40, 2)]
    assert (answer.answer_ns, answer.last_ns, answer.finish_reason) == (40, 50, "stop")
    assert (answer.status, answer.text) == ("ok", "Hi")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_content_but_not_the_answer(name: str) -> None:
    answer = read_stream(stream(delta(**{name: "Let me"}), delta(**{name: " see"}), delta(content="4"), FINISH))
    assert answer.events == [(10, 6), (20, 4), (30, 1)]
    assert answer.answer_ns == 30
    assert answer.text == "Let me see4"


def test_think_tags_in_content_are_reasoning() -> None:
    parts = ["<th", "ink>", "2+2", " is", "</think>", "\n\n", "4"]
    answer = read_stream(stream(*(delta(content=part) for part in parts), FINISH))
    assert len(answer.events) == 7
    assert answer.answer_ns == 70


def test_content_that_only_begins_like_a_think_tag_is_the_answer() -> None:
    answer = read_stream(stream(delta(content="<"), delta(content="table>"), FINISH))
    assert answer.answer_ns == 20


def test_a_tool_call_is_content() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a":1}'}}
    answer = read_stream(stream(delta(tool_calls=[{"index": 0}]), delta(tool_calls=[call]), FINISH))
    assert answer.events == [(20, 10)]
    assert answer.answer_ns == 20


def test_completions_chunks() -> None:
    chunks = [{"choices": [{"text": "a b"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}]
    answer = read_stream(stream(*chunks))
    assert (answer.events, answer.last_ns, answer.finish_reason) == ([(10, 3)], 20, "length")


def test_content_and_finish_reason_in_one_event() -> None:
    answer = read_stream(stream({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}))
    assert (answer.events, answer.last_ns) == ([(10, 1)], 10)


def test_usage_with_empty_choices_does_not_move_last() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = read_stream(stream(delta(content="x"), FINISH, {"choices": [], "usage": usage}, "[DONE]"))
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 3, 4)
    assert answer.last_ns == 20


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ({"queue_ms": 1.5, "prefill_ms": 2, "decode_ms": 3}, {"queue": 1.5, "prefill": 2.0, "decode": 3.0}),
        ({"prompt_ms": 20.5, "predicted_ms": 9, "prompt_n": 7, "cache_n": None}, {"prefill": 20.5, "decode": 9.0}),
    ],
    ids=["paceline", "llama.cpp"],
)
def test_server_times(timings: dict[str, Any], expected: dict[str, float]) -> None:
    assert read_stream(stream(delta(content="x"), FINISH | {"timings": timings})).server_times == expected
    assert read_body(json.dumps({"choices": [{}], "timings": timings}).encode(), 5).server_times == expected


def test_a_missing_done_is_tolerated_after_a_finish_reason_only() -> None:
    assert read_stream(stream(delta(content="x"), FINISH)).status == "ok"
    assert read_stream(stream(delta(content="x"), "[DONE]")).status == "ok"
    assert read_stream(stream(delta(content="x"))).status == "incomplete"
    assert read_stream([]).status == "incomplete"


def test_error_events() -> None:
    answer = read_stream(stream(delta(content="x"), {"error": {"message": "out of memory", "code": 500}}))
    assert (answer.status, answer.error, answer.events) == ("server_error", "out of memory", [(10, 1)])
    for data in ('{"message": "overloaded"}', "plain words"):
        answer = read_stream([(1, f"event: error\ndata: {data}\n\n".encode())])
        assert answer.status == "server_error"
        assert answer.error is not None
        assert data in answer.error


def test_what_is_not_json_of_this_shape_is_malformed_and_quoted() -> None:
    for data in ("{broken", '{"choices": 7}'):
        answer = read_stream(stream(data))
        assert answer.status == "malformed"
        assert data in (answer.error or "")
    assert read_body(b"<html>", 5).status == "malformed"
    assert read_body(b'{"object": "list"}', 5).status == "malformed"


def test_an_unstreamed_body() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 6}}
    answer = read_body(json.dumps(body).encode(), end_ns=77)
    assert (answer.text, answer.output_tokens, answer.finish_reason) == ("2+24", 6, "stop")
    assert (answer.events, answer.answer_ns, answer.last_ns) == ([], 0, 77)
    assert read_body(b'{"choices": [{"text": "four"}]}', 1).text == "four"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"error": "model not found"}', "model not found"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b"Bad Gateway\n", "Bad Gateway"),
        (b"[1]", "[1]"),
    ],
)
def test_error_messages(body: bytes, message: str) -> None:
    assert error_message(body) == message
