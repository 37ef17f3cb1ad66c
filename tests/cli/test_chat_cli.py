"""``paceline chat``: with a server, with a model of its own, in a terminal and without one."""

import io
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from paceline import llm
from paceline.cli import chat as chat_module
from paceline.cli.chat import ChatOptions, RemotePartner, chat
from paceline.errors import InputError, PacelineError, TargetUnreachableError
from tests.server.conftest import LiveServer, live_server
from tests.server.fakes import SCRIPT, ScriptedExecutor, tiny_model, wait_until

ANSWER = (SCRIPT * 5)[:100].decode(errors="replace")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tiny_model(executor=ScriptedExecutor(end_after=100))) as live:
        yield live


@pytest.fixture(autouse=True)
def no_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine's port 8000 is none of our business."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        monkeypatch.setenv("PACELINE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that ``chat`` loads, if it loads one."""
    model = tiny_model(executor=ScriptedExecutor(end_after=100))
    model.requested = []

    def load_model(name: str, **_options: object) -> Any:
        model.requested.append(name)
        return model

    monkeypatch.setattr(llm, "load_model", load_model)
    return model


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines typed at the prompt; an exception is the key that raises it. After the last one comes Ctrl-D."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def type_lines(*lines: str | type[BaseException]) -> None:
        rest = iter([*lines, EOFError])

        def answer(_prompt: str) -> str:
            line = next(rest)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", answer)

    return type_lines


def test_piped_input_is_one_question_to_the_server(
    server: LiveServer, piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    begin = len(server.executor.token_ids)
    piped("two\nlines")
    chat(server.url + "/v1/", system="Be brief")
    printed = capsys.readouterr()
    assert printed.out == ANSWER + "\n"
    assert "101 tokens" in printed.err
    assert " tok/s]" in printed.err
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "two\nlines"}]
    expected = server.model.chat_template.encode(messages)
    assert server.executor.token_ids[begin : begin + len(expected)] == expected


def test_a_question_on_the_command_line_needs_no_input(
    local: Any, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("never asked")
    chat("tiny", question="Hello", max_tokens=1)
    assert capsys.readouterr().out == "G\n"


def test_the_same_from_a_model_of_its_own(
    local: Any, piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped("Hello")
    chat("tiny")
    assert local.requested == ["tiny"]
    printed = capsys.readouterr()
    assert printed.out == ANSWER + "\n"
    assert "101 tokens" in printed.err


def test_without_a_name_a_running_server_is_used(
    server: LiveServer, local: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("Hello")
    monkeypatch.setenv("PACELINE_URL", server.url)
    chat()
    assert local.requested == []


def test_without_a_name_and_a_server_the_default_model_is_loaded(local: Any, piped: Callable[[str], None]) -> None:
    piped("Hello")
    chat()
    assert local.requested == ["smollm2-135m"]


def test_options_reach_the_model(local: Any, piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    submit = local.engine.submit
    local.engine.submit = lambda ids, params: seen.append(params) or submit(ids, params)
    piped("Hello")
    chat("tiny", temperature=0.25, max_tokens=3, seed=5)
    assert (seen[0].temperature, seen[0].max_tokens, seen[0].seed) == (0.25, 3, 5)
    assert capsys.readouterr().out == "Gr\ufffd\n"


def test_options_reach_the_server(
    server: LiveServer, piped: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    piped("Hello")
    with pytest.raises(InputError, match="the server says: temperature must be at least 0"):
        chat(server.url, temperature=-1.0)
    with pytest.raises(InputError, match="max_tokens must be at least 1, got 0"):
        chat(server.url, max_tokens=0)


def test_a_conversation_remembers_and_forgets(
    local: Any, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    encode = local.chat_template.encode

    class Recorder:
        def encode(self, messages: list[dict[str, str]]) -> list[int]:
            asked.append([message["content"] for message in messages])
            return encode(messages)

    local.chat_template = Recorder()
    typed("one", "", "two", "/clear", "three", "/exit", "never")
    chat("tiny", system="S", max_tokens=1)
    assert asked == [["S", "one"], ["S", "one", "G", "two"], ["S", "three"]]


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_ctrl_d_and_ctrl_c_at_the_prompt_end(local: Any, typed: Callable[..., None], key: type[BaseException]) -> None:
    typed(key)
    chat("tiny")
    assert not local.engine.has_work


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    typed: Callable[..., None], local: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is pressed while the second piece is awaited."""
    answer = chat_module.LocalPartner.answer

    def interrupted(self: Any, messages: list[dict[str, str]]) -> Generator[str | int]:
        pieces = answer(self, messages)
        try:
            yield next(pieces)
            raise KeyboardInterrupt
        finally:
            pieces.close()

    monkeypatch.setattr(chat_module.LocalPartner, "answer", interrupted)
    typed("one", "two")
    chat("tiny")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == ["G", "G"]
    assert printed.err.count(", stopped]") == 2
    assert local.engine.stats().kv_blocks_used == 0


def test_a_stopped_answer_frees_the_server(start_endless: LiveServer) -> None:
    import httpx

    with httpx.Client(base_url=start_endless.url) as client:
        partner = RemotePartner(client, ChatOptions(None, 0.7, None, None))
        answer = partner.answer([{"role": "user", "content": "x"}])
        assert next(answer) == "G"
        answer.close()
        wait_until(lambda: start_endless.engine.stats().running == 0, "aborted")


@pytest.fixture
def start_endless() -> Iterator[LiveServer]:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    with live_server(tiny_model(executor=executor, max_model_len=200_000)) as live:
        yield live


def test_a_question_too_long_does_not_end_the_conversation(
    local: Any, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("x" * 5000, "short")
    chat("tiny", max_tokens=1)
    printed = capsys.readouterr()
    assert "the context holds 4096" in printed.err
    assert "/clear" in printed.err
    assert printed.out == "G\n\n"


def test_a_failing_model_is_an_error(local: Any, piped: Callable[[str], None]) -> None:
    piped("\x00")
    with pytest.raises(PacelineError, match="poisoned prompt"):
        chat("tiny")


def test_a_failing_server_is_an_error(server: LiveServer, piped: Callable[[str], None]) -> None:
    piped("\x00")
    with pytest.raises(InputError, match=r"the server says: .*poisoned prompt"):
        chat(server.url)


def test_a_url_that_does_not_answer_has_exit_code_3(
    piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("Hello")
    with pytest.raises(TargetUnreachableError, match="does not answer") as error:
        chat("http://127.0.0.1:1")
    assert error.value.exit_code == 3


def test_the_key_is_sent(piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(tiny_model(), api_keys=["secret"]) as guarded:
        piped("Hello")
        chat(guarded.url, api_key="secret", max_tokens=1)
        assert capsys.readouterr().out == "G\n"
        with pytest.raises(InputError, match="wrong API key"):
            chat(guarded.url)


def test_a_base_model_says_what_to_do(local: Any, piped: Callable[[str], None]) -> None:
    local.chat_template = None
    piped("Hello")
    with pytest.raises(InputError, match="--chat-template FILE"):
        chat("tiny")
