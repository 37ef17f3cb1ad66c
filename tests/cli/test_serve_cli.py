"""``paceline serve`` as a process: its screen, its log, its signals, its terminal."""

import errno
import fcntl
import gc
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path

import httpx
import pynvml
import pytest
import typer
from typer.testing import CliRunner

from paceline import loading, machine
from paceline.cli.serve import _made_to_stay, announce, serve, start_screen
from paceline.cli.size import parse_milliseconds, parse_size
from paceline.errors import InputError
from paceline.machine import gpu_names
from tests.server.fakes import tiny_model, wait_until
from tests.server.serve_process import ROOT, ServeProcess

COMMAND = [sys.executable, "-m", "tests.server.fake_cli", "serve"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PACELINE_API_KEY"}
ENVIRONMENT["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
DATED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) ")


Start = Callable[..., ServeProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``paceline serve MODEL --port 0 …`` with pipes, or on a terminal of its own."""
    servers: list[ServeProcess] = []

    def start_process(
        *arguments: str, terminal: bool = False, ignore_hangup: bool = False, **variables: str
    ) -> ServeProcess:
        def prepare_child() -> None:
            if terminal:
                fcntl.ioctl(1, termios.TIOCSCTTY, 0)
            if ignore_hangup:  # what nohup does
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        ours, theirs = pty.openpty() if terminal else os.pipe()
        process = subprocess.Popen(
            [*COMMAND, "--port=0", *arguments],
            cwd=ROOT,
            env=ENVIRONMENT | variables,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=prepare_child,
        )
        os.close(theirs)
        servers.append(ServeProcess(process, ours))
        return servers[-1]

    yield start_process
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(timeout=20)
        with suppress(OSError):
            os.close(server.output)


def test_without_a_terminal_all_lines_are_dated_and_plain(start: Start) -> None:
    server = start("tiny")
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    server.read_until(r"POST /v1/completions 200 .*\n")
    server.process.send_signal(signal.SIGHUP)  # the terminal that it was started from is closed
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.end(signal.SIGTERM) == 0
    with pytest.raises(AssertionError, match="ended"):
        server.read_until("Traceback")
    assert server.text.endswith(" INFO stopped (SIGTERM)\n")
    lines = server.text.removeprefix("loading\n").splitlines()
    assert len(lines) > 5
    assert [line for line in lines if not DATED.match(line)] == []
    assert "\x1b" not in server.text
    assert "device: CPU" in server.text
    assert "curl http://127.0.0.1" in server.text


@pytest.mark.parametrize(
    ("options", "system"), [((), "Be brief"), (("--system", "Be long"), "Be long")], ids=["owner", "operator"]
)
def test_what_the_models_owner_set_is_the_default(start: Start, options: tuple[str, ...], system: str) -> None:
    server = start("owned", *options)
    hello = {"role": "user", "content": "Hello"}
    with httpx.Client(base_url=server.url) as http:

        def prompt_tokens(*messages: dict[str, str]) -> int:
            answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            return int(answer.json()["usage"]["prompt_tokens"])

        stopped = http.post("/v1/completions", json={"prompt": "x"}).json()
        assert stopped["choices"][0]["stop_reason"] == "안"
        assert prompt_tokens(hello) == prompt_tokens({"role": "system", "content": system}, hello)


def test_a_cache_without_memory_ends_the_server_at_its_start(start: Start) -> None:
    server = start("greedy")
    server.read_until("the machine has 2 MiB of memory for the KV cache, not 4000; give it less with --kv-memory")
    assert server.process.wait(timeout=20) == 2


def test_the_curl_line_can_be_copied(start: Start) -> None:
    server = start("tiny")
    command = server.read_until(r"(curl .*)\n")[1]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, timeout=20, check=False)
    assert b'"chat.completion"' in answer.stdout


def test_a_terminal_gets_one_screen_and_closing_it_ends_the_server(start: Start) -> None:
    server = start("tiny", terminal=True)
    screen = server.read_until(r"Paceline [\s\S]*Ctrl-C stops it")[0]
    assert "device" in screen
    assert not DATED.search(screen)
    os.close(server.output)
    assert server.process.wait(timeout=20) == 0


def test_nohup_survives_the_closed_terminal(start: Start) -> None:
    server = start("tiny", terminal=True, ignore_hangup=True)
    url = server.url
    os.close(server.output)
    for _ in range(3):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "Gr"
    assert server.end(signal.SIGTERM) == 0


def test_a_terminal_closed_as_the_screen_is_printed_does_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", ClosedTerminal())
    announce(tiny_model(), "tiny", "127.0.0.1", 8000, key=None)


def test_a_closed_pipe_does_not_end_the_server(start: Start) -> None:
    server = start("tiny")
    url = server.url
    os.close(server.output)
    for _ in range(3):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert server.end(signal.SIGTERM) == 0


def test_ctrl_c_ends_streams_in_order(start: Start) -> None:
    server = start("endless")
    asked = {"prompt": "x", "max_tokens": 100_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=20) as response:
        pieces = response.iter_text()
        text = next(pieces)
        server.process.send_signal(signal.SIGINT)
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n")
    assert server.process.wait(timeout=20) == 0
    with pytest.raises(AssertionError, match="ended"):
        server.read_until("Traceback")
    assert server.text.endswith(" INFO stopped (SIGINT)\n")


def test_ctrl_c_while_the_model_is_loaded_ends_quietly(start: Start) -> None:
    server = start("loading")
    server.read_until("loading\n")
    assert server.end(signal.SIGINT) == 130
    with pytest.raises(AssertionError, match="ended"):
        server.read_until("Traceback")
    assert server.text == "loading\n"


def test_a_second_ctrl_c_does_not_wait_for_a_stuck_step(start: Start) -> None:
    server = start("stuck")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        body = b'{"prompt": "x"}'
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: "running 1.0" in _running(server.url), "the step has begun")

        def interrupted() -> bool:
            server.process.send_signal(signal.SIGINT)
            return server.process.poll() is not None

        wait_until(interrupted, "ended")
    assert server.process.returncode == 130


def _running(url: str) -> str:
    metrics = httpx.get(f"{url}/metrics").text
    return re.sub(r"\{.*?\}", "", metrics.replace("vllm:num_requests_", ""))


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = subprocess.run(
            [*COMMAND, "tiny", f"--port={port}"],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert process.returncode == 2
    assert f"port {port}: Address already in use" in process.stderr
    assert "loading" not in process.stderr
    assert "Traceback" not in process.stderr


def test_every_network_without_a_key_is_a_warning(start: Start) -> None:
    server = start("tiny", "--host=0.0.0.0")
    assert "--api-key" in server.read_until(r"WARNING (.*)\n")[1]
    guarded = start("tiny", "--host=0.0.0.0", "--api-key=secret", "--served-model-name=a", "--served-model-name=b")
    url = guarded.url
    assert httpx.get(f"{url}/v1/models").status_code == 401
    models = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).json()
    assert [model["id"] for model in models["data"]] == ["a", "b"]
    guarded.end(signal.SIGTERM)
    with pytest.raises(AssertionError, match="ended"):
        guarded.read_until("WARNING")
    assert "secret" not in guarded.text


def test_every_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    loads = []

    def load_model(model: str, *, options: loading.EngineOptions, progress: object) -> None:
        loads.append((model, options))
        raise InputError("enough")

    monkeypatch.setattr(loading, "load_model", load_model)
    app = typer.Typer()
    app.command()(serve)
    limits = "--max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 64 --kv-memory 1MiB --kv-dtype f32"
    arguments = ["m", "--port=0", *limits.split(), "--threads=1", "--no-prefix-caching", f"--chat-template={template}"]
    arguments += ["--template-date=2024-07-26", "--quantize=q4", "--target-itl=50ms"]
    result = CliRunner().invoke(app, arguments)
    assert str(result.exception) == "enough"
    options = loading.EngineOptions(
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        kv_memory=1 << 20,
        kv_dtype="f32",
        quantize="q4",
        threads=1,
        chat_template=template,
        template_date=date(2024, 7, 26),
        enable_prefix_caching=False,
        target_itl=50.0,
    )
    assert loads == [("m", options)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("64 KB", 64 << 10), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2", "GiB", "-1GiB", "2PiB", "2GiBs", "1e3M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="--kv-memory"):
        parse_size(text)


@pytest.mark.parametrize(("text", "ms"), [("50ms", 50), ("0.05s", 50), ("2 s", 2000), ("12.5", 12.5)])
def test_milliseconds(text: str, ms: float) -> None:
    assert parse_milliseconds(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "0", "0ms", "-5ms", "ms", "5min", "inf", "1e3ms"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(InputError, match="--target-itl"):
        parse_milliseconds(text)


def test_a_gpu_that_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_NVIDIA_DEVICES", (tmp_path,))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA H200")
    loaded = tiny_model()
    rows = dict(start_screen(loaded, "tiny", "http://x", key=None))
    assert rows["GPU"] == "NVIDIA H200: not used; --device cuda computes there, with PyTorch"
    loaded.describe = lambda: {"device": "PyTorch on cuda:0 (NVIDIA H200)"}
    assert "GPU" not in dict(start_screen(loaded, "tiny", "http://x", key=None))


@pytest.mark.parametrize("device", ["", "missing"])
def test_a_machine_without_a_driver_says_nothing_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(machine, "_NVIDIA_DEVICES", (tmp_path / device,))
    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu_names() == []
    assert "GPU" not in dict(start_screen(tiny_model(), "tiny", "http://x", key=None))


def test_a_base_model_is_tried_with_completions() -> None:
    rows = dict(start_screen(tiny_model(template=None), "tiny", "http://x", key=None))
    assert "/v1/completions" in rows["try"]


def test_the_curl_line_of_a_guarded_server_lacks_only_the_secret(start: Start) -> None:
    """Where the key is in the environment not even that, in the same shell."""
    for arguments, variables, secret in (
        (["--api-key=secret"], {}, ("YOUR_KEY", "secret")),
        ([], {"PACELINE_API_KEY": "secret"}, ("", "")),
        (["--api-key=secret"], {"PACELINE_API_KEY": "other"}, ("YOUR_KEY", "secret")),
    ):
        server = start("tiny", *arguments, **variables)
        command = server.read_until(r"(curl .*)\n")[1].replace(*secret)
        shell = ENVIRONMENT | variables
        answer = subprocess.run(["bash", "-c", command], env=shell, capture_output=True, timeout=20, check=False)
        assert b'"chat.completion"' in answer.stdout
        assert "secret" not in server.text


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (["--api-key="], {}, "the API key is empty"),
        (["--api-key=good", "--api-key="], {}, "the API key is empty"),
        (["--api-key= "], {}, "the API key is empty"),
        ([], {"PACELINE_API_KEY": ""}, "the API key is empty"),
        ([], {"PACELINE_API_KEY": " "}, "the API key is empty"),
        (["--api-key=schlüssel"], {}, "visible ASCII"),
    ],
)
def test_a_key_that_guards_nothing_is_refused(
    arguments: list[str], variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["m", "--port=0", *arguments])
    assert isinstance(result.exception, InputError)
    assert told in str(result.exception)
    assert result.exception.exit_code == 2


def test_the_help_states_the_defaults() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(serve)
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "Default: the model's own context" in text
    assert "a quarter of the free memory, at most what --max-num-seqs full contexts need" in text


def test_the_port_is_bound_before_the_server_is_imported() -> None:
    """So that a port that is taken is told at once."""
    code = (
        "import sys, paceline.server.address\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_what_is_loaded_is_never_searched_for_garbage() -> None:
    frozen = gc.get_freeze_count()
    with _made_to_stay():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)
    gc.unfreeze()
