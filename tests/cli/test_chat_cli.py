"""``paceline chat``: with a server, with a model of its own, in a terminal and without one."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline import loading
from paceline.cli import partners
from paceline.cli.chat import chat
from paceline.cli.partners import ChatOptions, RemotePartner
from paceline.errors import InputError, PacelineError, TargetUnreachableError
from paceline.options import EngineOptions
from tests.server.conftest import LiveServer, live_server
from tests.server.fakes import SCRIPT, ScriptedExecutor, tiny_model, wait_until
from tests.server.serve_process import ROOT

ANSWER = (SCRIPT * 5)[:100].decode(errors="replace")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tiny_model(executor=ScriptedExecutor(end_after=100))) as live:
        yield live


@pytest.fixture(autouse=True)
def no_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine's port 8000 is none of our business; nothing listens on port 1."""
    monkeypatch.setattr(partners, "DEFAULT_URL", "http://127.0.0.1:1")
    for name in ("PACELINE_URL", "PACELINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that ``chat`` loads, if it loads one."""
    model = tiny_model(executor=ScriptedExecutor(end_after=100))
    model.requested = []

    def load_model(name: str, *, options: EngineOptions, progress: object) -> Any:
        model.requested.append(name)
        model.options = options
        return model

    monkeypatch.setattr(loading, "load_model", load_model)
    return model


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


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
    assert f"[tiny at {server.url}]" in printed.err
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
    assert "[tiny in this process]" in printed.err
    assert "101 tokens" in printed.err


def test_what_the_models_owner_set_is_the_default(
    local: Any, piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    local.source = replace(local.source, sampling={"stop": [", 안"], "temperature": 0.1}, system="Be brief")
    piped("Hello")
    chat("tiny")
    assert capsys.readouterr().out == "Grüße\n"
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    expected = local.chat_template.encode(messages)
    assert local.executor.token_ids[: len(expected)] == expected


def test_without_a_name_a_running_server_is_used(
    server: LiveServer, local: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("Hello")
    monkeypatch.setenv("PACELINE_URL", server.url)
    chat()
    assert local.requested == []


def test_without_a_name_and_a_server_the_default_model_is_loaded(
    local: Any, piped: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped("Hello")
    chat()
    assert local.requested == ["smollm2-135m"]
    assert "[no server at http://127.0.0.1:1: loading smollm2-135m]" in capsys.readouterr().err


def test_a_model_that_is_to_be_quantized_is_loaded_whatever_server_there_is(
    server: LiveServer, local: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_URL", server.url)
    for model in ("tiny", None):
        piped("Hello")
        chat(model, quantize="q4")
        assert local.options.quantize == "q4"
    assert local.requested == ["tiny", "smollm2-135m"]


def test_a_server_cannot_be_told_to_quantize(server: LiveServer, local: Any, piped: Callable[[str], None]) -> None:
    piped("Hello")
    with pytest.raises(InputError, match=f"{server.url} is a server: start that with paceline serve --quantize q8"):
        chat(server.url, quantize="q8")


def test_a_server_that_was_named_is_never_replaced_by_a_model(
    local: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("Hello")
    monkeypatch.setenv("PACELINE_URL", "http://127.0.0.1:1")
    with pytest.raises(TargetUnreachableError, match=r"http://127\.0\.0\.1:1 does not answer") as error:
        chat()
    assert error.value.exit_code == 3
    assert local.requested == []


def test_an_empty_variable_names_no_server(
    local: Any, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("Hello")
    monkeypatch.setenv("PACELINE_URL", "")
    chat()
    assert local.requested == ["smollm2-135m"]


def test_a_proxy_of_the_environment_is_not_asked(
    server: LiveServer, piped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    piped("Hello")
    chat(server.url, max_tokens=1)


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_a_usage_error(local: Any, piped: Callable[[str], None], question: str) -> None:
    piped(question)
    for given in (question, None):
        with pytest.raises(InputError, match="the question is empty") as error:
            chat("tiny", question=given)
        assert error.value.exit_code == 2
    assert local.requested == []


def test_a_closed_input_is_an_empty_question(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="the question is empty"):
        chat("tiny")


def test_bytes_that_are_no_text_are_no_reason_to_fail(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    begin = len(server.executor.token_ids)
    chat(server.url, max_tokens=1)
    expected = server.model.chat_template.encode([{"role": "user", "content": "caf\ufffd"}])
    assert server.executor.token_ids[begin : begin + len(expected)] == expected


def test_an_empty_key_is_refused(local: Any) -> None:
    with pytest.raises(InputError, match="API key is empty"):
        chat("tiny", question="x", api_key="")
    with pytest.raises(InputError, match="visible ASCII"):
        chat("tiny", question="x", api_key="schlüssel")


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
    with pytest.raises(InputError, match="the server says: temperature must be a finite number of at least 0"):
        chat(server.url, temperature=-1.0)
    with pytest.raises(InputError, match="max_tokens must be at least 1, got 0"):
        chat(server.url, question="Hello", max_tokens=0)


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


def test_ctrl_d_ends(local: Any, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    typed(EOFError, "never asked")
    chat("tiny")
    assert not local.engine.has_work
    assert capsys.readouterr().out == "\n"


def test_only_a_second_ctrl_c_at_the_prompt_ends(
    local: Any, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("one", KeyboardInterrupt, "two", KeyboardInterrupt, KeyboardInterrupt, "never asked")
    chat("tiny", max_tokens=1)
    printed = capsys.readouterr()
    assert printed.out == "G\n\nG\n\n\n"
    assert printed.err.count("Ctrl-C again or Ctrl-D ends\n") == 2


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    typed: Callable[..., None], local: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is pressed while the second piece is awaited."""
    answer = partners.LocalPartner.answer

    def interrupted(self: Any, messages: list[dict[str, str]]) -> Generator[str | int]:
        pieces = answer(self, messages)
        try:
            yield next(pieces)
            raise KeyboardInterrupt
        finally:
            pieces.close()

    monkeypatch.setattr(partners.LocalPartner, "answer", interrupted)
    typed("one", "two")
    chat("tiny")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == ["G", "G"]
    assert printed.err.count(", stopped]") == 2
    assert local.engine.stats().kv_blocks_used == 0


def test_ctrl_c_in_the_one_answer_has_exit_code_130(start_endless: LiveServer) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "chat", start_endless.url, "--question", "x"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "G"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert ", stopped]" in errors
    assert "Traceback" not in errors
    wait_until(lambda: start_endless.engine.stats().running == 0, "aborted")


def test_a_stopped_answer_frees_the_server(start_endless: LiveServer) -> None:
    with closing(RemotePartner(start_endless.url, ChatOptions(None, 0.7, None, None), None)) as partner:
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
        with pytest.raises(InputError, match=r"wrong API key.*see --api-key"):
            chat(guarded.url, question="Hello")


def test_a_base_model_says_what_to_do(local: Any, piped: Callable[[str], None]) -> None:
    local.chat_template = None
    piped("Hello")
    with pytest.raises(InputError, match="--chat-template FILE"):
        chat("tiny")


MODELS = b'{"object": "list", "data": [{"id": "m"}]}'
CONTENT = b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def canned_server(
    events: bytes = b"", models: bytes = MODELS, status: int = 200, chat_status: int = 200, cut: int = 0
) -> Iterator[str]:
    """Says the same whatever it is asked; the last ``cut`` bytes that it announces never come."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(status, models, 0)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(chat_status, events, cut)

        def answer(self, code: int, body: bytes, missing: int) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join(timeout=20)


@pytest.mark.parametrize(
    "events",
    [
        CONTENT + FINISH + DONE,
        CONTENT + FINISH,
        CONTENT + DONE,
        (CONTENT + FINISH + DONE).replace(b"data: ", b"data:"),
        (CONTENT + FINISH + DONE).replace(b"\n", b"\r\n"),
        b": comment\n\n" + CONTENT + FINISH + DONE,
        b'data: {"choices": [{"delta": null}]}\n\n' + CONTENT + FINISH + DONE,
        b'data: {"choices": [{}]}\n\n' + CONTENT + FINISH + DONE,
        CONTENT + b'data: {"id": "x", "usage": null}\n\ndata: {"choices": null}\n\n' + FINISH + DONE,
        CONTENT + FINISH + b'data: {"choices": [], "usage": {"completion_tokens": null}}\n\n' + DONE,
        CONTENT + FINISH + DONE + b"data: what comes after is nobody's business\n\n",
    ],
)
def test_servers_may_differ_a_little(events: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server(events) as url:
        chat(url, question="x")
    printed = capsys.readouterr()
    assert printed.out == "Half\n"
    assert re.search(r"\[first token after \d+ ms\]", printed.err)


@pytest.mark.parametrize(
    ("events", "kind", "told"),
    [
        (b"", TargetUnreachableError, "broke off the answer"),
        (CONTENT, TargetUnreachableError, "broke off the answer"),
        (CONTENT + FINISH.rstrip(b"\n"), TargetUnreachableError, "broke off the answer"),
        (b'{"choices": [{"message": {"content": "Half"}}]}', TargetUnreachableError, "broke off the answer"),
        (CONTENT + b"data: {nope}\n\n" + DONE, PacelineError, "no chunk of a chat completion.*nope"),
        (CONTENT + b"data: []\n\n" + DONE, PacelineError, "no chunk of a chat completion"),
        (CONTENT + b'data: {"choices": 5}\n\n' + DONE, PacelineError, "no chunk of a chat completion"),
        (
            CONTENT + b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
            PacelineError,
            "no chunk of a chat completion",
        ),
        (CONTENT + b'data: {"error": {"message": "out of luck"}}\n\n' + DONE, InputError, "says: out of luck"),
        (CONTENT + b'data: {"error": "out of luck"}\n\n' + DONE, InputError, "says: out of luck"),
        (CONTENT + b'event: error\ndata: {"message": "luck"}\n\n' + DONE, InputError, "says: .*luck"),
        (b'data: {"error": {"message": "loading", "code": 503}}\n\n', TargetUnreachableError, "says: loading"),
        (b'data: {"error": {"message": "odd", "code": [1]}}\n\n', InputError, "says: odd"),
    ],
)
def test_a_broken_answer_is_an_error(
    events: bytes, kind: type[PacelineError], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_server(events) as url, pytest.raises(kind, match=told) as error:
        chat(url, question="x")
    assert type(error.value) is kind
    assert capsys.readouterr().out == ("Half\n" if events.startswith(CONTENT) else "")


@pytest.mark.parametrize("models", [b"", b"<html>", b"[]", b'{"data": {}}', b'{"data": [{}]}', b"{}", b'{"data": []}'])
def test_what_lists_no_models_is_no_target(
    local: Any, models: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_server(models=models) as url:
        with pytest.raises(TargetUnreachableError, match=r"list of models|lists no model"):
            chat(url, question="x")
        # Some other program may have the default port.
        monkeypatch.setattr(partners, "DEFAULT_URL", url)
        chat(question="x", max_tokens=1)
    assert capsys.readouterr().out == "G\n"


def test_refusals_of_the_server_in_any_shape() -> None:
    with (
        canned_server(models=b'{"detail": "Not Found"}', status=404) as url,
        pytest.raises(TargetUnreachableError, match="HTTP 404: Not Found"),
    ):
        chat(url, question="x")
    with canned_server(b"", chat_status=500) as url, pytest.raises(InputError, match="the server says: 500"):
        chat(url, question="x")
    with canned_server(b"starting", chat_status=503) as url, pytest.raises(TargetUnreachableError, match="starting"):
        chat(url, question="x")


def test_what_is_no_url() -> None:
    with pytest.raises(InputError, match="not a URL"):
        chat("http://localhost:port", question="x")


def test_a_server_that_vanishes_in_one_answer_has_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server(CONTENT, cut=100) as url, pytest.raises(TargetUnreachableError, match="does not answer"):
        chat(url, question="x")
    assert capsys.readouterr().out == "Half\n"


def test_a_server_that_vanishes_does_not_end_a_conversation(
    typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("one", "two")
    with canned_server(CONTENT, cut=100) as url:
        chat(url)
    printed = capsys.readouterr()
    assert printed.out == "Half\nHalf\n\n"
    assert printed.err.count("error: http://127.0.0.1:") == 2


def test_a_failing_model_does_not_end_a_conversation(
    local: Any, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("\x00", "two")
    chat("tiny", max_tokens=1)
    printed = capsys.readouterr()
    assert "error: " in printed.err
    assert printed.out == "G\n\n"


def test_a_server_that_stops_in_mid_answer_has_exit_code_3(start_endless: LiveServer) -> None:
    with closing(RemotePartner(start_endless.url, ChatOptions(None, 0.7, None, None), None)) as partner:
        answer = partner.answer([{"role": "user", "content": "x"}])
        assert next(answer) == "G"
        start_endless.process.should_exit = True
        with pytest.raises(TargetUnreachableError, match="The server is stopping"):
            list(answer)
