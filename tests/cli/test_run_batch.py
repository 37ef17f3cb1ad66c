"""``paceline run-batch``: what its files say, what is kept and what is tried again, and how it ends."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from paceline import loading
from paceline.cli import batch_progress
from paceline.cli.batch_file import ResultFile
from paceline.cli.run_batch import run_batch
from paceline.errors import InputError
from tests.server import fakes
from tests.server.conftest import live_server
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until
from tests.server.serve_process import ROOT

FAKE = [sys.executable, "-m", "tests.server.fake_cli", "run-batch"]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def line(custom_id: object, prompt: str = "x", *, url: str = "/v1/completions", **body: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Iterable[object]) -> None:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))


class Batch:
    """A file of requests, the file of its results, and the models that were loaded for it."""

    def __init__(self, folder: Path) -> None:
        self.requests = folder / "requests.jsonl"
        self.output = folder / "results.jsonl"
        self.make_model: Callable[[], Any] = tiny_model
        self.models: list[Any] = []
        self.options: list[loading.EngineOptions] = []

    def load_model(self, model: str, *, options: loading.EngineOptions, progress: object) -> Any:
        self.models.append(self.make_model())
        self.options.append(options)
        return self.models[-1]

    def run(self, *lines: object, arguments: Iterable[str] = ()) -> Result:
        write(self.requests, lines)
        app = typer.Typer()
        app.command()(run_batch)
        return CliRunner().invoke(app, [str(self.requests), "--output", str(self.output), "tiny", *arguments])

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.output.read_text().splitlines()]

    def statuses(self) -> dict[str, int | None]:
        """By custom_id; None for a line that could not be sent."""
        return {
            result["custom_id"]: result["response"] and result["response"]["status_code"] for result in self.results()
        }


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = Batch(tmp_path)
    monkeypatch.setattr(loading, "load_model", batch.load_model)
    return batch


def test_results_are_in_openais_shape_and_say_what_the_server_says(batch: Batch) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    chat = line("chat", url="/v1/chat/completions", messages=messages, prompt=None, seed=7)
    text = line("text", "Grüße", max_tokens=20, seed=7, logprobs=2, model="tiny")
    wrong = line("wrong", temperature=-1)
    other = line("other", model="gpt-5")
    done = batch.run(chat, text, wrong, other)
    assert done.exit_code == 1
    results = {result["custom_id"]: result for result in batch.results()}
    assert set(results) == {"chat", "text", "wrong", "other"}
    with live_server(tiny_model()) as server:
        for request in (chat, text, wrong, other):
            result = results[str(request["custom_id"])]
            assert list(result) == ["id", "custom_id", "response", "error"]
            assert result["id"].startswith("batch_req_")
            assert result["error"] is None
            answer = server.http.post(str(request["url"]), json=request["body"])
            response = result["response"]
            assert list(response) == ["status_code", "request_id", "body"]
            assert len(response["request_id"]) == 32
            assert response["status_code"] == answer.status_code
            for body in (response["body"], expected := answer.json()):
                for field in ("id", "created", "timings"):
                    body.pop(field, None)
            assert response["body"] == expected
    assert len({result["id"] for result in results.values()}) == 4


def test_a_bad_line_has_an_error_and_the_others_go_on(batch: Batch) -> None:
    lines = [
        line("good"),
        '{"custom_id": "cut',
        "[1]",
        '{"custom_id": ' + "[" * 100_000,
        "",
        {"method": "POST", "url": "/v1/completions", "body": {}},
        line(7),
        line("good"),
        line("method") | {"method": "GET"},
        line("url", url="/v1/embeddings"),
        {"custom_id": "bodiless", "method": "POST", "url": "/v1/completions"},
        line("list") | {"body": [1]},
        line("stream", stream=True),
        line("whole", stream=False),
    ]
    done = batch.run(*lines)
    assert done.exit_code == 1
    errors = {
        int(re.match(r"line (\d+): ", result["error"]["message"])[1]): result  # type: ignore[index]
        for result in batch.results()
        if result["error"]
    }
    assert all(list(result["error"]) == ["code", "message"] for result in errors.values())
    assert all(result["response"] is None for result in errors.values())
    assert {number: (result["custom_id"], result["error"]["code"]) for number, result in errors.items()} == {
        2: (None, "invalid_json_line"),
        3: (None, "invalid_json_line"),
        4: (None, "invalid_json_line"),
        6: (None, "invalid_custom_id"),
        7: (None, "invalid_custom_id"),
        8: ("good", "duplicate_custom_id"),
        9: ("method", "invalid_method"),
        10: ("url", "invalid_url"),
        11: ("bodiless", "invalid_body"),
        12: ("list", "invalid_body"),
        13: ("stream", "stream_unsupported"),
    }
    sent = {result["custom_id"]: result["response"]["status_code"] for result in batch.results() if result["response"]}
    assert sent == {"good": 200, "whole": 200}
    assert "error: 11 of 13 requests failed" in done.stderr
    assert "the first of this run: line 2: not a JSON object" in done.stderr


def test_bytes_that_are_no_text_harm_their_own_line_alone(batch: Batch) -> None:
    batch.run(line("good"))
    batch.output.unlink()
    good = batch.requests.read_bytes()
    batch.requests.write_bytes(good.replace(b"good", b"\xff\xfe") + good.replace(b"good", b"\\ud800") + good)
    app = typer.Typer()
    app.command()(run_batch)
    done = CliRunner().invoke(app, [str(batch.requests), "--output", str(batch.output)])
    assert done.exit_code == 1
    assert batch.statuses() == {None: None, "good": 200}


def test_a_batch_without_a_line_to_send_needs_no_model(batch: Batch) -> None:
    assert batch.run().exit_code == 0
    assert batch.run("nonsense").exit_code == 1
    assert batch.run(line("a")).exit_code == 0
    assert batch.run(line("a")).exit_code == 0
    assert len(batch.models) == 1


def test_what_has_a_result_is_not_run_again(batch: Batch) -> None:
    assert batch.run(line("a"), line("refused", temperature=-1)).exit_code == 1
    before = batch.output.read_bytes()
    done = batch.run(line("a"), line("refused", temperature=-1), line("b"), line("c"))
    assert done.exit_code == 1  # for what was refused the first time
    assert "skipping 2 of 4 requests" in done.stderr
    assert batch.output.read_bytes().startswith(before)
    assert batch.statuses() == {"a": 200, "refused": 400, "b": 200, "c": 200}
    assert len(batch.results()) == 4
    assert done.stdout.startswith("4 requests (2 skipped), 1 failed, 2 prompt + 8 output tokens in ")


def test_what_failed_in_the_server_and_bad_lines_are_tried_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = line("poisoned", "\0")
    assert batch.run(line("a"), poisoned, line("b", stream=True), "nonsense").exit_code == 1
    assert batch.statuses() == {"a": 200, "poisoned": 500, "b": None, None: None}
    monkeypatch.setattr(fakes, "POISON", -1)
    done = batch.run(line("a"), poisoned, line("b"), "nonsense")
    assert done.exit_code == 1
    assert "skipping 1 of 4" in done.stderr
    assert batch.statuses() == {"a": 200, "poisoned": 200, "b": 200, None: None}
    assert len(batch.results()) == 4
    assert batch.run(line("a"), poisoned, line("b"), line("c")).exit_code == 0
    assert {path.name for path in batch.output.parent.iterdir()} == {"requests.jsonl", "results.jsonl"}


def test_taking_results_out_keeps_the_link_and_the_mode_of_the_file(batch: Batch, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    batch.output.symlink_to(elsewhere)
    assert batch.run(line("poisoned", "\0"), line("a")).exit_code == 1
    elsewhere.chmod(0o600)
    assert batch.run(line("poisoned"), line("a")).exit_code == 0
    assert batch.output.readlink() == elsewhere
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert batch.statuses() == {"poisoned": 200, "a": 200}


def test_a_last_line_that_was_cut_off_is_run_again_wherever_it_was_cut(batch: Batch) -> None:
    lines = [line("a"), line("b")]
    assert batch.run(*lines).exit_code == 0
    whole = batch.output.read_bytes()
    second = whole.index(b"\n") + 1
    for length in (second + 1, second + 20, len(whole) - 2):
        batch.output.write_bytes(whole[:length])
        assert "skipping 1 of 2" in batch.run(*lines).stderr
        assert batch.statuses() == {"a": 200, "b": 200}
        assert batch.output.read_bytes().startswith(whole[:second])
    batch.output.write_bytes(whole[:-1])  # all but the end of the line
    assert "skipping 2 of 3" in batch.run(*lines, line("c")).stderr
    assert batch.statuses() == {"a": 200, "b": 200, "c": 200}


@pytest.mark.parametrize(
    "text",
    ["notes\n", "notes", '{"id": "1"}\n', '{"custom_id": "a", "method": "POST"}\n', '{"id":"batch_req_1"\n', "\n"],
)
def test_a_file_that_is_no_result_of_a_batch_is_left_alone(batch: Batch, text: str) -> None:
    batch.output.write_text(text)
    done = batch.run(line("a"))
    assert isinstance(done.exception, InputError)
    assert f"{batch.output} is there already and is not the output of a batch (line 1: " in str(done.exception)
    assert batch.output.read_text() == text
    assert batch.models == []


def test_files_that_cannot_be_used_are_refused_before_the_model_is_loaded(batch: Batch) -> None:
    for output, told in (
        (batch.requests, "is the file of requests itself"),
        (batch.requests.parent, "is not a file"),
        (Path("/dev/null"), "is not a file"),
        (Path("/no/such/folder/results.jsonl"), "cannot be written: No such file or directory"),
    ):
        batch.output = output
        done = batch.run(line("a"))
        assert isinstance(done.exception, InputError)
        assert told in str(done.exception)
    batch.requests, batch.output = Path("/dev/null"), batch.requests
    done = batch.run()
    assert "has to be a file" in str(done.exception)
    assert batch.models == []


def test_a_full_disk_is_told() -> None:
    with ResultFile(Path("/dev/full")) as results, pytest.raises(InputError, match="No space left"):
        results.write_response("a", status=200, request_id="r", body=b"{}")


def test_a_result_that_cannot_be_written_ends_the_batch(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise InputError("full")

    monkeypatch.setattr(ResultFile, "write_response", refuse)
    done = batch.run(*(line(str(number)) for number in range(10)))
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "full"


def test_twice_as_many_lines_are_in_flight_as_can_run(batch: Batch) -> None:
    """No fewer, or the model would wait for lines; no more, or a long file would fill the memory."""
    most = 0

    def gated_model() -> Any:
        model = tiny_model(max_num_seqs=3)
        model.executor.open.clear()
        submit, submitted = model.engine.submit, 0

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal most, submitted
            submitted += 1
            most = max(most, submitted - batch.output.read_bytes().count(b"\n"))
            if submitted == 6:
                model.executor.open.set()
            return submit(*arguments, **keywords)

        model.engine.submit = counted
        return model

    batch.make_model = gated_model
    assert batch.run(*(line(str(number)) for number in range(40)), arguments=["--max-num-seqs=3"]).exit_code == 0
    assert len(batch.statuses()) == 40
    assert most == 6


def test_options_reach_the_model_and_its_names(batch: Batch, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(fakes.TEMPLATE)
    limits = "--max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 64 --kv-memory 1MiB --kv-dtype f32"
    arguments = [*limits.split(), "--threads=1", "--no-prefix-caching", f"--chat-template={template}"]
    arguments += ["--template-date=2024-07-26", "--quantize=q4", "--served-model-name=gpt-5", "--system=Be brief"]
    hello = [{"role": "user", "content": "Hello"}]
    chat = line("a", url="/v1/chat/completions", messages=hello, prompt=None, model="gpt-5")
    assert batch.run(chat, arguments=arguments).exit_code == 0
    (options,) = batch.options
    assert (options.max_model_len, options.max_num_seqs, options.max_num_batched_tokens) == (100, 3, 64)
    assert (options.kv_memory, options.kv_dtype, options.quantize, options.threads) == (1 << 20, "f32", "q4", 1)
    assert (options.chat_template, str(options.template_date)) == (template, "2024-07-26")
    assert not options.enable_prefix_caching
    assert batch.results()[0]["response"]["body"]["model"] == "gpt-5"
    prompted = bytes(token for token in batch.models[0].executor.token_ids if token < 256)
    assert prompted.startswith(b"system\nBe brief\nuser\nHello\n")


def test_the_summary_counts_what_was_run(batch: Batch) -> None:
    done = batch.run(*(line(str(number), "four", max_tokens=3) for number in range(5)))
    assert done.exit_code == 0
    summary = r"5 requests, 0 failed, 20 prompt \+ 15 output tokens in \d+\.\d s, \d+\.\d output tok/s\n"
    assert re.fullmatch(summary, done.stdout)


def test_without_a_terminal_progress_is_dated_lines(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    done = batch.run(line("a"), line("b"), line("c", temperature=-1))
    dated = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    progress = [text for text in done.stderr.splitlines() if "tok/s" in text]
    assert len(progress) == 5
    assert re.fullmatch(dated + r"0/3 requests, 0 failed, 0\.0 tok/s", progress[0])
    assert re.fullmatch(dated + r"3/3 requests, 1 failed, \d+\.\d tok/s", progress[-1])
    assert "\x1b" not in done.stderr


def test_a_terminal_gets_a_bar(batch: Batch) -> None:
    write(batch.requests, [line("a"), line("b")])
    ours, theirs = pty.openpty()
    command = [*FAKE, str(batch.requests), "--output", str(batch.output), "tiny"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs, timeout=60
    )
    os.close(theirs)
    screen = b""
    with suppress(OSError):  # EIO is a terminal's end of file
        while piece := os.read(ours, 65536):
            screen += piece
    os.close(ours)
    assert done.returncode == 0, screen
    assert "━".encode() in screen
    assert re.search(rb"2/2\b.* 0 failed, \d+\.\d tok/s", screen)
    assert done.stdout.startswith(b"2 requests, 0 failed")


def test_ctrl_c_keeps_what_is_done_and_the_next_run_does_the_rest(batch: Batch) -> None:
    endless = line("endless", max_tokens=100_000)
    command = [*FAKE, str(batch.requests), "--output", str(batch.output)]
    write(batch.requests, [endless, *(line(str(number)) for number in range(5))])
    process = subprocess.Popen(
        [*command, "endless"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: batch.output.exists() and batch.output.read_bytes().count(b"\n") == 5, "5 results", 60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stdout == b""
    assert b"interrupted: 5 of 6 are in " in stderr
    assert b"Traceback" not in stderr
    assert set(batch.statuses()) == set("01234")
    done = batch.run(line("endless"), *(line(str(number)) for number in range(5)))
    assert done.exit_code == 0
    assert "skipping 5 of 6" in done.stderr
    assert len(batch.results()) == 6


def test_the_engine_is_stopped_and_the_model_closed_however_it_ends(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def watched_model() -> Any:
        model = tiny_model(executor=ScriptedExecutor())
        close = model.close
        model.close = lambda: (closed.append("closed"), close())
        return model

    batch.make_model = watched_model
    assert batch.run(line("a")).exit_code == 0

    def interrupt(*_arguments: object, **_keywords: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ResultFile, "write_response", interrupt)
    assert batch.run(line("b")).exit_code == 130
    assert closed == ["closed", "closed"]


def test_the_real_model_answers_as_llm_does(smollm2_path: Path, tmp_path: Path) -> None:
    from paceline import LLM, SamplingParams

    prompts = ["The capital of France is", "1, 2, 3, 4,", "def add(a, b):"]
    requests, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    write(requests, (line(prompt, prompt, temperature=0, max_tokens=8) for prompt in prompts))
    command = [sys.executable, "-m", "paceline.cli.main", "run-batch", str(requests), f"--output={output}"]
    done = subprocess.run([*command, str(smollm2_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = map(json.loads, output.read_text().splitlines())
    texts = {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results}
    with LLM(str(smollm2_path)) as llm:
        expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert texts == {prompt: result.outputs[0].text for prompt, result in zip(prompts, expected, strict=True)}
