"""What is found out about a server before measuring it."""

import re
import socket
from typing import Any, Literal

import pytest

from paceline.bench.api import Api, Dialect
from paceline.bench.client import Endpoint
from paceline.bench.probe import Probe, choose_model
from paceline.errors import InputError, TargetUnreachableError
from tests.bench.schedule_server import Schedule, ScheduleServer

TIMEOUT_S = 20.0


def probe(server: ScheduleServer, key: str | None = None) -> Probe:
    return Probe(Endpoint.from_url(server.url), key, TIMEOUT_S)


def dialect(options: dict[str, Any], api: Api | Literal["auto"] = "auto", mode: Any = "stream") -> Dialect:
    with ScheduleServer(Schedule(ttft_s=0, **options)) as server, probe(server) as asking:
        return asking.find_dialect(api, "scheduled", mode, 0.5, "a prompt")


def test_models_and_kind() -> None:
    with ScheduleServer(Schedule(models=("a", "b"))) as server, probe(server) as asking:
        found = asking.identify()
    assert (found.models, found.kind) == (("a", "b"), "schedule")


@pytest.mark.parametrize(
    ("path", "version"), [("/version", "1.2.3"), ("/api/version", "1.2.3"), ("/props", "b1-abc"), ("/none", None)]
)
def test_versions(path: str, version: str | None) -> None:
    with ScheduleServer(Schedule(version_path=path)) as server, probe(server) as asking:
        assert asking.identify().version == version


def test_the_only_model_is_the_default() -> None:
    with ScheduleServer(Schedule()) as server, probe(server) as asking:
        found = asking.identify()
    assert choose_model(found, None, "http://x") == "scheduled"
    assert choose_model(found, "other", "http://x") == "other"


def test_several_models_or_none_need_a_choice() -> None:
    with ScheduleServer(Schedule(models=("a", "b"))) as server, probe(server) as asking:
        several = asking.identify()
    with pytest.raises(InputError, match=r"2 models.*--model: a, b"):
        choose_model(several, None, "http://x")
    with ScheduleServer(Schedule(models=())) as server, probe(server) as asking:
        none = asking.identify()
    with pytest.raises(InputError, match="lists no model"):
        choose_model(none, None, "http://x")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "no such page"), "GET /v1/models answers HTTP 404: no such page"),
        ((200, "<html>hello</html>"), "GET /v1/models answers no JSON list of models, but '<html>hello</html>'"),
        ((200, '{"status": "ok"}'), "GET /v1/models answers no JSON list of models"),
    ],
)
def test_what_is_wrong_with_the_list_of_models_is_told(answer: tuple[int, str], words: str) -> None:
    with ScheduleServer(Schedule(models_answer=answer)) as server, probe(server) as asking:
        found = asking.identify()
    with pytest.raises(InputError, match=re.escape(words)) as error:
        choose_model(found, None, server.url)
    assert "lists no model" not in str(error.value)
    assert choose_model(found, "named", server.url) == "named"


def test_the_context_of_each_model_that_tells_it() -> None:
    with ScheduleServer(Schedule(max_model_len=512)) as server, probe(server) as asking:
        assert asking.identify().contexts == {"scheduled": 512}
    with ScheduleServer(Schedule()) as server, probe(server) as asking:
        assert asking.identify().contexts == {}


def test_a_prompt_that_is_refused_is_told_in_tokens() -> None:
    with ScheduleServer(Schedule(fault="http_error")) as server, probe(server) as asking:
        chat = Dialect("openai-chat", "scheduled", "stream", 0.0, True, True)
        with pytest.raises(InputError, match="refuses a prompt of about 9000 tokens: HTTP 503: no room"):
            asking.count_prompt_tokens(chat, "some words", 9000)


def test_chat_comes_first_with_everything() -> None:
    assert dialect({}) == Dialect("openai-chat", "scheduled", "stream", 0.5, True, True)


def test_completions_where_there_is_no_chat() -> None:
    assert dialect({"chat": False}).api == "openai-completions"


@pytest.mark.parametrize(
    ("options", "forced", "usage"),
    [
        ({"forced_length": False}, False, True),
        ({"stream_options": False}, True, False),
        ({"forced_length": False, "stream_options": False}, False, False),
    ],
)
def test_what_a_server_refuses_is_left_out(options: dict[str, Any], forced: bool, usage: bool) -> None:
    found = dialect(options)
    assert (found.api, found.ignore_eos, found.stream_usage) == ("openai-chat", forced, usage)


def test_sync_asks_for_no_stream_options() -> None:
    found = dialect({"stream_options": False}, mode="sync")
    assert (found.mode, found.ignore_eos) == ("sync", True)
    assert b"stream_options" not in found.body("p", 3)


def test_an_api_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(InputError, match="no chat template"):
        dialect({"chat": False}, api="openai-chat")


def test_a_server_error_is_told_in_its_own_words() -> None:
    with pytest.raises(InputError, match="HTTP 503: no room"):
        dialect({"fault": "http_error"})


def test_a_stream_that_is_none_suggests_sync() -> None:
    with pytest.raises(InputError, match="--mode sync"):
        dialect({"fault": "json_instead"})


def test_the_key_is_sent_and_a_wrong_one_is_a_clear_error() -> None:
    with ScheduleServer(Schedule(api_key="sk-1")) as server:
        with probe(server, "sk-1") as asking:
            assert asking.identify().models == ("scheduled",)
        with probe(server) as asking, pytest.raises(InputError, match="--api-key"):
            asking.identify()


def test_counts_prompt_tokens_also_in_a_stream_dialect() -> None:
    with ScheduleServer(Schedule(template_tokens=5)) as server, probe(server) as asking:
        chat = Dialect("openai-chat", "scheduled", "stream", 0.0, True, True)
        assert asking.count_prompt_tokens(chat, "three words here", 3) == 8


@pytest.mark.parametrize("listening", [False, True], ids=["nobody", "not http"])
def test_nobody_there_is_unreachable_and_says_how_to_start_one(listening: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen(0)
        endpoint = Endpoint("http", "127.0.0.1", other.getsockname()[1], "")
        with Probe(endpoint, None, 0.5) as asking, pytest.raises(TargetUnreachableError) as error:
            asking.identify()
    assert error.value.exit_code == 3
    for words in (endpoint.url, "GET /v1/models", "paceline serve", "PACELINE_URL"):
        assert words in str(error.value)


def test_no_connection_is_kept_that_the_server_might_close() -> None:
    with ScheduleServer(Schedule(announce_close=False)) as server, probe(server) as asking:
        asking.identify()
        for _ in range(3):
            asking.find_dialect("auto", "scheduled", "stream", 0.0, "a prompt")
        assert server.connections == len(server.served)


def test_environment_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with ScheduleServer(Schedule()) as server, probe(server) as asking:
        assert asking.identify().models == ("scheduled",)
