"""What is refused: always OpenAI's error shape, the field and the numbers."""

import json
import logging

import pytest

from paceline.errors import InputError
from paceline.server.body import parse_body
from paceline.server.protocol import UNSUPPORTED, ChatRequest
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import tiny_model

HELLO = [{"role": "user", "content": "Hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        (COMPLETIONS, {}, "prompt", "required"),
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "all strings"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "non-empty lists"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "token ids"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [259]}, "prompt", "259, the vocabulary has ids 0 to 258"),
        (COMPLETIONS, {"prompt": "x" * 4096}, "prompt", "4096 tokens, the context holds 4096"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -5}, "max_tokens", "at least 0, got -5"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", 'valid integer, got "5"'),
        (COMPLETIONS, {"prompt": "x", "temperature": -0.5}, "temperature", "a finite number of at least 0, got -0.5"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "above 0"),
        (COMPLETIONS, {"prompt": "x", "stop": 3}, "stop", "got 3"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop", "empty string"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias", "300"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "at most 100, got 101"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias", 'not "abc", got {"abc": 1}'),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", 'not "-1"'),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": None}}, "logit_bias", "numbers, not null"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": 5}, "logit_bias", "got 5"),
        (COMPLETIONS, {"prompt": ["x"] * 2049}, "prompt", "2049 prompts are more than the 2048"),
        (COMPLETIONS, {"prompt": None}, "prompt", "got null"),
        (
            COMPLETIONS,
            {"prompt": "x", "stop": [None, None]},
            "stop[0]",
            "stop[0]: Input should be a valid string, got null",
        ),
        (COMPLETIONS, {"prompt": "x", "seed": "한"}, "seed", 'got "한"'),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "at most 20, got 21"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"messages": "Hello"}, "messages", "valid array"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'assistant', got \"wizard\""),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got null"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content", 'not "audio"'),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content", "not null"),
        (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "parts must be objects"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", 'string "text"'),
        (CHAT, {"messages": []}, "messages", "at least one message, got []"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -5}, "max_completion_tokens", "equal to 1, got -5"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 50}, "top_logprobs", "equal to 20, got 50"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "the context holds 4096"),
        (CHAT, {"messages": [HELLO[0] | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "not supported"),
    ],
)
def test_a_wrong_value_is_named_with_its_numbers(
    server: LiveServer, path: str, body: dict[str, object], param: str, told: str
) -> None:
    response = server.post(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert told in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_logit_bias_is_taken(server: LiveServer) -> None:
    assert server.post(COMPLETIONS, prompt="x", max_tokens=1, logit_bias={"5": 1, "258": -0.5}).status_code == 200


@pytest.mark.parametrize("field", ["messages", "stop", "stop_token_ids"])
def test_of_many_wrong_items_only_the_first_is_described(field: str) -> None:
    body = {"messages": HELLO, field: [None] * 3}
    with pytest.raises(InputError, match=rf"^{field}\[0\][^;]*$"):
        parse_body(ChatRequest, json.dumps(body).encode())


def test_a_refused_stream_is_an_error_and_no_stream(server: LiveServer) -> None:
    response = server.post(COMPLETIONS, prompt="x", stream=True, max_tokens=0)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")


def test_one_bad_prompt_of_several_refuses_all_and_frees_the_others(start_server: StartServer) -> None:
    server = start_server(tiny_model())
    response = server.post(COMPLETIONS, prompt=[[1], [2], [999]], max_tokens=4000)
    assert response.status_code == 400
    assert server.post(COMPLETIONS, prompt=[1], max_tokens=1).status_code == 200
    assert server.engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [(b"{", "not valid JSON"), (b"[]", "object"), (b"", "not valid JSON"), (b"\xff", "not valid JSON")],
)
def test_a_body_that_is_no_json_object(server: LiveServer, body: bytes, told: str) -> None:
    response = server.http.post(COMPLETIONS, content=body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_a_long_wrong_value_is_not_repeated_in_full(server: LiveServer) -> None:
    assert len(server.post(COMPLETIONS, prompt="x", max_tokens="9" * 10_000).json()["error"]["message"]) < 300


def test_json_is_read_whatever_the_content_type_says(server: LiveServer) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        response = server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": content_type})
        assert response.status_code == 200


@pytest.mark.parametrize("field", sorted(set(UNSUPPORTED) - {"continuous_usage_stats"}))
def test_a_known_field_that_is_not_supported_is_refused_unless_it_asks_for_nothing(
    server: LiveServer, field: str
) -> None:
    for neutral in (None, *UNSUPPORTED[field]):
        assert server.post(COMPLETIONS, prompt="x", max_tokens=1, **{field: neutral}).status_code == 200
    error = server.post(COMPLETIONS, prompt="x", max_tokens=1, **{field: "something"}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_an_unknown_field_is_ignored_and_named_once(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline.server"):
        for _ in range(2):
            assert server.post(COMPLETIONS, prompt="x", max_token=1).status_code == 200
    warnings = [record.message for record in caplog.records if "max_token" in record.message]
    told = "A request has the unknown field 'max_token', which is ignored; did the client mean 'max_tokens'?"
    assert warnings == [told]


def test_labels_are_no_reason_for_a_warning(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline.server"):
        assert server.post(COMPLETIONS, prompt="x", user="me", metadata={"a": "b"}).status_code == 200
    assert not caplog.records


def test_routes_and_methods_that_do_not_exist(server: LiveServer) -> None:
    missing = server.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "/v1/nothing" in missing.json()["error"]["message"]
    wrong = server.http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "use POST" in wrong.json()["error"]["message"]


def test_a_bug_is_a_500_with_the_request_id_and_a_traceback_in_the_log(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    server = start_server(model)
    model.tokenizer.encode = None  # what no input should be able to do
    response = server.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "abc"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "abc" in response.json()["error"]["message"]
    assert "Request abc failed" in caplog.text
    assert "TypeError" in caplog.text
    assert server.http.get("/health").status_code == 200
