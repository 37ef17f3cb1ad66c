"""The two endpoints over a real socket, most of it through OpenAI's own client."""

import json
from collections.abc import Iterator

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import IM_END, IM_START, POISON, SCRIPT, ScriptedExecutor, tiny_model, wait_until

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(server: LiveServer, path: str, **body: object) -> list[dict]:
    """The parsed events of a stream; the last one must be [DONE]."""
    response = server.post(path, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(chunk.startswith("data: ") and "\n" not in chunk for chunk in chunks)
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def script(tokens: int) -> str:
    return (SCRIPT * (tokens // len(SCRIPT) + 1))[:tokens].decode(errors="replace")


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 40, 101])
def test_a_streamed_chat_gives_the_text_of_the_unstreamed_one(client: openai.OpenAI, max_tokens: int) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_completion_tokens": max_tokens}
    whole = client.chat.completions.create(**asked)
    text, reasons = "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == whole.choices[0].message.content == script(min(max_tokens, 100))
    assert whole.choices[0].finish_reason == reasons[-1] == ("stop" if max_tokens == 101 else "length")
    assert set(reasons[:-1]) == {None}


def test_a_streamed_completion_gives_the_text_of_the_unstreamed_one(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "stop": ["👋"]}
    whole = client.completions.create(**asked, max_tokens=60)
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**asked, max_tokens=60, stream=True)
    )
    assert streamed == whole.choices[0].text == "Grüße, 안녕 "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "👋"


def test_the_order_of_a_chat_stream(server: LiveServer) -> None:
    first, *middle, finish = events(server, "/v1/chat/completions", messages=HELLO, max_tokens=8)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in middle] == [{"content": text} for text in "Grüße,"]
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert finish["timings"]["completion_tokens"] == 8
    assert {chunk["object"] for chunk in (first, *middle, finish)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, *middle, finish)}) == 1
    assert all("usage" not in chunk for chunk in (first, *middle, finish))


def test_usage_comes_last_and_only_when_asked_for(server: LiveServer) -> None:
    *chunks, last = events(
        server, "/v1/completions", prompt="Hello", max_tokens=3, stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(chunk["usage"] is None for chunk in chunks)


def test_text_that_waits_for_the_rest_of_a_character_makes_no_event(server: LiveServer) -> None:
    *pieces, _finish = events(server, "/v1/completions", prompt="Hello", max_tokens=12)
    assert [piece["choices"][0]["text"] for piece in pieces] == ["G", "r", "ü", "ß", "e", ",", " ", "안"]


def test_a_character_cut_by_max_tokens_ends_as_replacement(server: LiveServer) -> None:
    *pieces, _finish = events(server, "/v1/completions", prompt="Hello", max_tokens=3)
    assert [piece["choices"][0]["text"] for piece in pieces] == ["G", "r", "\ufffd"]


def test_times_and_seed_come_with_the_whole_answer_too(server: LiveServer) -> None:
    body = server.post("/v1/completions", prompt="Hello", max_tokens=3, seed=7).json()
    assert body["choices"][0]["seed"] == 7
    timings = body["timings"]
    assert {"queue_ms", "prefill_ms", "decode_ms"} <= set(timings)
    assert timings["tokens_per_second"] == pytest.approx(2 / timings["decode_ms"] * 1e3, rel=0.05)
    drawn = server.post("/v1/completions", prompt="Hello").json()["choices"][0]["seed"]
    assert isinstance(drawn, int)


@pytest.mark.parametrize(
    ("prompt", "fed"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("a<|im_end|>", [[97, IM_END]]),
    ],
)
def test_the_four_forms_of_a_prompt(start_server: StartServer, prompt: object, fed: list[list[int]]) -> None:
    server = start_server(tiny_model())
    body = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(fed)))
    assert server.executor.token_ids == [token for prompt_ids in fed for token in prompt_ids]
    assert body["usage"]["prompt_tokens"] == sum(map(len, fed))


def test_several_prompts_stream_side_by_side(server: LiveServer) -> None:
    chunks = events(server, "/v1/completions", prompt=["a", "b", "c"], max_tokens=8)
    texts = ["", "", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [script(8)] * 3
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 3


def test_parse_special_false_keeps_control_tokens_text(start_server: StartServer) -> None:
    server = start_server(tiny_model())
    server.post("/v1/completions", prompt="<|im_end|>", parse_special=False, max_tokens=1)
    assert bytes(server.executor.token_ids) == b"<|im_end|>"


def test_a_chat_message_cannot_spell_a_control_token(start_server: StartServer) -> None:
    server = start_server(tiny_model())
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)
    fed = server.executor.token_ids
    assert (fed.count(IM_START), fed.count(IM_END)) == (2, 1)


def test_developer_is_the_system_role_and_parts_are_joined(start_server: StartServer) -> None:
    server = start_server(tiny_model(), system_prompt="never used")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    server.post("/v1/chat/completions", messages=messages, max_tokens=1)
    expected = server.model.chat_template.encode(
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]
    )
    assert server.executor.token_ids == expected


def test_the_system_prompt_opens_conversations_that_have_none(start_server: StartServer) -> None:
    server = start_server(tiny_model(), system_prompt="Be brief")
    server.post("/v1/chat/completions", messages=HELLO, max_tokens=1)
    expected = server.model.chat_template.encode([{"role": "system", "content": "Be brief"}, *HELLO])
    assert server.executor.token_ids == expected


def test_omitted_max_tokens(start_server: StartServer) -> None:
    server = start_server(tiny_model(max_model_len=100))
    completion = server.post("/v1/completions", prompt="Hello").json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = server.post("/v1/chat/completions", messages=HELLO).json()
    assert chat["usage"]["total_tokens"] == 100
    clamped = server.post("/v1/completions", prompt="Hello", max_tokens=10**9).json()
    assert clamped["usage"]["total_tokens"] == 100
    assert clamped["choices"][0]["finish_reason"] == "length"


def test_what_the_models_owner_set_is_for_requests_that_do_not_say(start_server: StartServer) -> None:
    server = start_server(tiny_model(max_model_len=100), default_sampling={"stop": ["안"], "max_tokens": 40})
    for path, asked in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        assert server.post(path, **asked).json()["choices"][0]["stop_reason"] == "안"
        to_the_limit = server.post(path, stop=[], **asked).json()
        assert to_the_limit["usage"]["completion_tokens"] == 40
        assert server.post(path, stop=[], max_tokens=5, **asked).json()["usage"]["completion_tokens"] == 5


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 101, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [bytes(token.bytes) for token in whole[:3]] == [b"G", b"r", b"\xc3"]
    assert [top.logprob for top in whole[0].top_logprobs] == [-1.5, -1.5]
    assert (whole[-1].token, whole[-1].logprob) == ("<|im_end|>", -9999.0)
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole


def test_completion_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole.tokens == ["G", "r", "\ufffd", "\ufffd"]
    assert whole.text_offset == [0, 1, 2, 3]
    assert whole.top_logprobs[0] == {"\x00": -1.5, "G": -0.5}
    offsets = [
        offset
        for chunk in client.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == whole.text_offset


def test_cached_tokens_are_told(server: LiveServer) -> None:
    prompt = "x" * 100
    server.post("/v1/completions", prompt=prompt, max_tokens=1)
    usage = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96
    salted = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="mine").json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_models_and_their_names(client: openai.OpenAI, server: LiveServer) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").max_model_len == 4096
    assert client.completions.create(model="alias", prompt="x").model == "alias"
    assert server.post("/v1/completions", prompt="x").json()["model"] == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="x")
    assert error.value.code == "model_not_found"
    assert "tiny, alias" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_failing_request_gets_an_error_and_harms_no_other(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="poisoned prompt"):
        client.completions.create(model="tiny", prompt=[1, POISON], max_tokens=3)
    with pytest.raises(openai.APIError, match="poisoned prompt"):
        list(client.completions.create(model="tiny", prompt=[1, POISON], max_tokens=3, stream=True))
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].text == "G"
    assert server.engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_failing_prompt_takes_the_others_of_its_request_with_it(start_server: StartServer, stream: bool) -> None:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    server = start_server(tiny_model(executor=executor, max_model_len=200_000))
    prompts = [[1], [1, POISON], [2]]
    response = server.post("/v1/completions", prompt=prompts, max_tokens=100_000, stream=stream)
    assert "poisoned prompt" in response.text
    wait_until(lambda: server.engine.stats().running == 0, "aborted")


def test_a_model_without_template_refuses_chat_and_says_what_to_do(start_server: StartServer) -> None:
    server = start_server(tiny_model(template=None))
    response = server.post("/v1/chat/completions", messages=HELLO)
    assert response.status_code == 400
    assert "--chat-template FILE" in response.json()["error"]["message"]
    assert "/v1/completions" in response.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="x").status_code == 200


@settings(deadline=None, max_examples=20)
@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_reaches_the_model_unchanged(server: LiveServer, text: str) -> None:
    begin = len(server.executor.token_ids)
    # A salt of its own keeps the prefix cache from swallowing tokens.
    asked = {"prompt": text, "parse_special": False, "max_tokens": 1, "cache_salt": text}
    assert server.post("/v1/completions", **asked).status_code == 200
    assert server.model.tokenizer.decode(server.executor.token_ids[begin:]) == text


def test_stop_strings_inside_one_stream_do_not_leak(start_server: StartServer) -> None:
    server = start_server(tiny_model(executor=ScriptedExecutor()))
    *pieces, finish = events(server, "/v1/completions", prompt="x", max_tokens=60, stop=["녕 👋", "never"])
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "Grüße, 안"
    assert finish["choices"][0]["stop_reason"] == "녕 👋"


def test_variables_of_the_chat_template(start_server: StartServer) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    server = start_server(tiny_model(template=template, max_model_len=64))
    messages = [{"role": "user", "content": "ab"}]

    def prompt_tokens(**body: object) -> int:
        response = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **body)
        assert response.status_code == 200, response.text
        count: int = response.json()["usage"]["prompt_tokens"]
        return count

    assert prompt_tokens() == prompt_tokens(chat_template_kwargs=None) == prompt_tokens(chat_template_kwargs={}) == 2
    assert prompt_tokens(chat_template_kwargs={"enable_thinking": False}) == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ([1], "chat_template_kwargs: "),
        ("thinking", "chat_template_kwargs: "),
        ({"messages": []}, "chat_template_kwargs may not set messages: "),
        ({"add_generation_prompt": False}, "chat_template_kwargs may not set add_generation_prompt: "),
        ({"a": "x" * 100_000}, "chat_template_kwargs has 100001 bytes, the context holds "),
    ],
)
def test_what_no_variables_are(server: LiveServer, kwargs: object, message: str) -> None:
    messages = [{"role": "user", "content": "ab"}]
    response = server.post("/v1/chat/completions", messages=messages, chat_template_kwargs=kwargs)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "chat_template_kwargs"
    assert error["message"].startswith(message)
