"""The bytes of the events."""

import json

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.outputs import RequestOutput, Timings, TokenLogprobs, Usage
from paceline.server.sse import ChunkEncoder, event
from paceline.server.wire import ChatChoice, CompletionChoice, timings_payload, usage_payload
from tests.server.fakes import tiny_tokenizer

VOCABULARY = tiny_tokenizer().vocabulary
ENVELOPE = {"id": "x", "object": "chunk", "created": 1, "model": 'a "quoted" name\u2028'}


@given(st.text(min_size=1))
def test_the_fast_way_gives_what_plain_encoding_gives(text: str) -> None:
    for choice in (ChatChoice(3, VOCABULARY), CompletionChoice(3, VOCABULARY)):
        fast = ChunkEncoder(choice, ENVELOPE).output(RequestOutput("x", text))
        assert fast == event(ENVELOPE | {"choices": [choice.piece(text, None)]})
        assert fast.endswith(b"\n\n")
        assert b"\n" not in fast[:-2]
        assert b"\r" not in fast


def test_no_text_is_no_event_unless_there_are_logprobs() -> None:
    encoder = ChunkEncoder(ChatChoice(0, VOCABULARY), ENVELOPE)
    assert encoder.output(RequestOutput("x", "", token_ids=(195,))) == b""
    logprobs = (TokenLogprobs(195, -0.5, ()),)
    chunk = json.loads(encoder.output(RequestOutput("x", "", (195,), logprobs)).removeprefix(b"data: "))
    assert chunk["choices"][0]["delta"] == {"content": ""}
    assert chunk["choices"][0]["logprobs"]["content"][0]["bytes"] == [195]


def test_speed_is_told_only_where_there_is_one() -> None:
    assert timings_payload(Timings(1, 2, 500), Usage(3, 11, 0))["tokens_per_second"] == 20
    assert timings_payload(Timings(1, 2, 0), Usage(3, 1, 0))["tokens_per_second"] is None


def test_usage_is_the_sum_over_the_prompts() -> None:
    assert usage_payload([Usage(3, 4, 1), Usage(5, 6, 2)], 1) == {
        "prompt_tokens": 8,
        "completion_tokens": 10,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
