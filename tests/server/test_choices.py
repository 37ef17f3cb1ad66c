"""Several answers, the prompt's own log-probabilities, and requests that are refused or given up for lack of time."""

import openai
import pytest

from paceline.engine.sampling import SamplingParams
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until
from tests.server.test_openai import HELLO, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_choices_of_several_prompts_come_in_order_and_count_each_prompt_once(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, prompt=["ab", "c"], n=2, max_tokens=3, seed=5).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12
    seeds = [choice["seed"] for choice in body["choices"]]
    assert seeds[0] == seeds[2] == 5
    assert seeds[1] == seeds[3] != 5
    assert "timings" not in body


def test_a_stream_has_every_choice(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts, ends = {0: "", 1: "", 2: ""}, []
    for chunk in client.chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert set(texts.values()) == {"Grü\ufffd"}
    assert sorted(ends) == [0, 1, 2]


def test_too_many_answers_are_refused(server: LiveServer) -> None:
    response = server.post(COMPLETIONS, prompt=["a"] * 17, n=128)
    assert response.status_code == 400
    assert "17 prompts with n 128 are more than the 2048 answers" in response.json()["error"]["message"]


def test_an_echo_begins_the_text(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, prompt=["x<|im_end|>", "yz"], echo=True, max_tokens=2, n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["x<|im_end|>Gr"] * 2 + ["yzGr"] * 2
    ids = server.post(COMPLETIONS, prompt=[120, 257], echo=True, max_tokens=2).json()
    assert ids["choices"][0]["text"] == "x<|im_end|>Gr"


def test_an_echo_is_streamed_before_the_first_token(server: LiveServer) -> None:
    *pieces, end = events(server, COMPLETIONS, prompt="xyz", echo=True, max_tokens=2, logprobs=1)
    assert [piece["choices"][0]["text"] for piece in pieces] == ["xyz", "G", "r"]
    assert pieces[0]["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert end["choices"][0]["finish_reason"] == "length"


def test_echo_with_logprobs_scores_the_prompt(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, prompt="xyz", echo=True, max_tokens=2, logprobs=1).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "z", "G", "r"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][1]) == {"\x00", "y"}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_a_prompt_can_be_scored_alone(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, prompt="xyz", echo=True, max_tokens=0, logprobs=0).json()
    assert body["choices"][0]["text"] == "xyz"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    pieces = events(server, COMPLETIONS, prompt="xyz", echo=True, max_tokens=0, logprobs=0)
    assert [piece["choices"][0]["text"] for piece in pieces] == ["xyz", ""]


def test_prompt_logprobs_are_reported_as_in_vllm(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, prompt="xy", max_tokens=1, prompt_logprobs=1, n=2).json()
    for choice in body["choices"]:
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second == {
            "121": {"logprob": -0.5, "rank": None, "decoded_token": "y"},
            "0": {"logprob": -1.5, "rank": 1, "decoded_token": "\x00"},
        }
    chat = server.post(CHAT, messages=HELLO, max_tokens=1, prompt_logprobs=0).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_cannot_be_is_refused(server: LiveServer, body: dict[str, object], param: str) -> None:
    response = server.post(COMPLETIONS, prompt="x", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_request_that_takes_too_long_is_given_up(start_server: StartServer) -> None:
    server = start_server(tiny_model(executor=ScriptedExecutor(seconds_per_step=0.01)))
    response = server.post(COMPLETIONS, prompt="x", max_tokens=4000, timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    assert response.headers["x-should-retry"] == "false"
    *_, last = events(server, COMPLETIONS, prompt="x", max_tokens=4000, timeout=0.05)
    assert last["error"]["code"] == "request_timeout"
    wait_until(lambda: server.engine.stats().kv_blocks_used == 0, "the blocks are free")


def test_a_full_queue_is_told_with_a_time_to_come_again(start_server: StartServer) -> None:
    executor = ScriptedExecutor()
    server = start_server(tiny_model(executor=executor, max_num_seqs=1, max_waiting=1))
    executor.open.clear()
    for _ in range(2):
        server.engine.submit([65], SamplingParams(max_tokens=2))
    response = server.post(COMPLETIONS, prompt="x")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "server_overloaded"
    executor.open.set()
    wait_until(lambda: not server.engine.has_work, "the others are done")
    assert server.post(COMPLETIONS, prompt="x").status_code == 200


def test_the_prefix_cache_can_be_reset(start_server: StartServer) -> None:
    server = start_server(tiny_model())

    def cached() -> int:
        usage = server.post(COMPLETIONS, prompt="x" * 70, max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached()) == (0, 64)
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
