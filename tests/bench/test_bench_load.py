"""``paceline bench load`` from the command line to the files."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from paceline.bench.record import RequestRecord, RunDirectory
from paceline.bench.report.summary import Summary, summarize
from paceline.bench.sampler import read_samples
from paceline.cli.commands import app
from paceline.errors import PacelineError
from tests.bench.schedule_server import Schedule, ScheduleServer

TIMEOUT_S = 60
SCHEDULE = Schedule(ttft_s=0.002, itl_s=0.0001, template_tokens=9)
COMMAND = [sys.executable, "-m", "paceline.cli.main", "bench", "load"]
FAST = ["--input-tokens", "24", "--output-tokens", "16", "--requests", "3", "--warmup", "1"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "PACELINE_URL"))}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=clean | environment
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScheduleServer, RunDirectory, Any]]:
    """One run of two cells with a key, as several tests look at it."""
    path = tmp_path_factory.mktemp("bench") / "run"
    with ScheduleServer(Schedule(ttft_s=0.002, itl_s=0.0001, template_tokens=9, api_key="sk-very-secret")) as server:
        options = ["--input-tokens", "24", "--output-tokens", "16", "--concurrency", "1,2", "--output", str(path)]
        done = run(server.url, *options, PACELINE_API_KEY="sk-very-secret")
        assert done.returncode == 0, done.stderr
        yield server, RunDirectory(path), done


def test_prints_a_table_per_cell_the_command_and_the_files(measured: Any) -> None:
    _, directory, done = measured
    for words in ("concurrency 1 ·", "concurrency 2 ·", "8 requests ok, 0 failed", "10 requests ok", "TTFT (ms)"):
        assert words in done.stdout
    assert "calibrated from the server's usage.prompt_tokens" in done.stdout
    for path in directory.files():
        assert str(path) in done.stdout
        assert path.exists()
    # Not a terminal: dated plain lines on stderr, nothing of them on stdout.
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"^\d{4}-\d\d-\d\d .* 10/10 requests, 0 failed$", done.stderr, re.MULTILINE)


def test_the_records_are_complete(measured: Any) -> None:
    _, directory, _ = measured
    records = directory.records()
    assert [record.cell for record in records] == [0] * 8 + [1] * 10
    assert len({record.id for record in records}) == 18
    assert {(record.status, record.tokens, record.prompt_tokens) for record in records} == {("ok", 16, 24)}


def test_the_summary_is_recomputed_from_the_records(measured: Any) -> None:
    _, directory, _ = measured
    stored = msgspec.json.decode(directory.summary_json.read_bytes(), type=Summary)
    assert summarize(directory.path) == stored
    assert [cell.params["concurrency"] for cell in stored.cells] == [1, 2]
    assert read_samples(directory.samples_csv)["server_rss_bytes"]


def test_no_two_prompts_of_the_run_begin_alike(measured: Any) -> None:
    server, _, _ = measured
    prompts = [each.body["messages"][0]["content"] for each in server.generations]
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts) > 18


def test_run_json_repeats_the_run_and_names_the_machine(measured: Any, tmp_path: Path) -> None:
    server, directory, _ = measured
    info = directory.info()
    assert info.plan["model"] == "scheduled"
    assert info.plan["api"] == "openai-chat"
    assert info.environment["server"]["kind"] == "schedule"
    assert {"cpu", "memory_bytes", "python", "paceline"} <= set(info.environment)
    assert info.argv[:3] == ["paceline", "bench", "load"]
    before = len(server.generations)
    again = run(*info.argv[3:], "--output", str(tmp_path / "again"), "--api-key", "sk-very-secret")
    assert again.returncode == 0, again.stderr
    first, second = (
        [each.body["messages"][0]["content"] for each in part]
        for part in (server.generations[:before], server.generations[before:])
    )
    assert sorted(first) == sorted(second)
    changed = msgspec.structs.replace(RunDirectory(tmp_path / "again").info(), started="", started_ns=0)
    assert changed == msgspec.structs.replace(info, started="", started_ns=0)


def test_the_key_is_in_no_file_and_no_output(measured: Any) -> None:
    _, directory, done = measured
    assert "sk-very-secret" not in done.stdout + done.stderr
    for path in directory.path.iterdir():
        assert b"sk-very-secret" not in path.read_bytes()


def test_parallel_is_concurrency_and_sync_has_no_ttft(tmp_path: Path) -> None:
    with ScheduleServer(SCHEDULE) as server:
        done = run(server.url, *FAST, "--parallel", "3", "--mode", "sync", "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "concurrency 3 ·" in done.stdout
    assert "not measurable (sync)" in done.stdout
    assert all(not each.body["stream"] for each in server.generations)


def test_a_tokenizer_at_hand_makes_exact_prompts_and_counts_what_the_server_does_not(
    tmp_path: Path, smollm2_path: Path
) -> None:
    with ScheduleServer(Schedule(usage=False)) as server:
        output = tmp_path / "run"
        done = run(server.url, *FAST, "--tokenizer", str(smollm2_path), "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "what the server's chat template adds not included" in " ".join(done.stdout.split())
    records = RunDirectory(output).records()
    assert {record.token_source for record in records} == {"tokenizer"}
    # The server's 16 "word " end in a space, which is a token of its own.
    assert {record.tokens for record in records} == {17}


def test_lengths_that_cannot_be_forced_are_marked(tmp_path: Path) -> None:
    with ScheduleServer(Schedule(forced_length=False)) as server:
        done = run(server.url, *FAST, "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "output lengths not forced" in done.stderr
    assert "lengths not forced: 3 of 3 answers have other than 16 tokens (8 to 8)" in done.stdout
    assert RunDirectory(tmp_path / "run").info().plan["ignore_eos"] is False


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_the_table_fits_80_columns(measured: Any, tmp_path: Path, terminal: bool) -> None:
    server, _, _ = measured
    command = [*COMMAND, server.url, *FAST, "--output", str(tmp_path / "run"), "--api-key", "sk-very-secret"]
    text = in_terminal(command, columns=80) if terminal else run(*command[5:]).stdout
    lines = text[text.index("concurrency 1 ·") : text.index("Input lengths")].splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert all(re.search(r" \d+$", line) for line in lines if "(ms)" in line)


def in_terminal(command: list[str], columns: int) -> str:
    """What a command writes where all its standard streams are a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=clean)
    os.close(theirs)
    written = b""
    try:
        while select.select([ours], [], [], TIMEOUT_S)[0] and (read := os.read(ours, 65536)):
            written += read
    except OSError:  # Linux's way to say that the other side has been closed
        pass
    finally:
        os.close(ours)
    assert process.wait(TIMEOUT_S) == 0, written
    return written.decode()


def test_every_request_failing_is_exit_code_1_with_the_first_error(tmp_path: Path) -> None:
    # One request of the probe, two of the calibration and one warm-up go well; those measured do not.
    with ScheduleServer(Schedule(fault="http_error", faulty=(4, 5, 6))) as server:
        done = run(server.url, *FAST, "--api-key", "sk-quoted", "--output", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "error: 3 of 3 requests failed; the first: http_error: HTTP 503: no room, ***" in done.stderr
    assert "0 requests ok, 3 failed" in done.stdout
    assert len(RunDirectory(tmp_path / "run").records()) == 3


def test_one_request_failing_is_exit_code_1_and_the_files_are_there(tmp_path: Path) -> None:
    with ScheduleServer(Schedule(fault="reset", faulty=(5,))) as server:
        done = run(server.url, *FAST, "--output", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "2 requests ok, 1 failed" in done.stdout
    assert "error: 1 of 3 requests failed; the first: disconnected: connection closed" in done.stderr
    assert all(path.exists() for path in RunDirectory(tmp_path / "run").files())


def test_a_server_that_goes_away_is_exit_code_3_and_ends_the_run(tmp_path: Path) -> None:
    # Probe, two for calibration, one warm-up, one measured; then nobody listens.
    schedule = Schedule(fault="gone", faulty=(5,))
    with ScheduleServer(schedule) as server:
        done = run(server.url, *FAST, "--output-tokens", "16,17", "--output", str(tmp_path / "run"))
    assert done.returncode == 3, done.stderr
    assert "1 requests ok, 2 failed" in done.stdout
    assert "error: 2 of 3 requests failed; the first: connect_error: cannot connect to" in done.stderr
    assert f"error: nobody answers at {server.url} any more" in done.stderr
    assert {record.cell for record in RunDirectory(tmp_path / "run").records()} == {0}


def test_a_url_from_a_curl_line_is_taken_with_a_note(tmp_path: Path) -> None:
    with ScheduleServer(SCHEDULE) as server:
        done = run(f"{server.url}/v1/chat/completions", *FAST, "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert f"/v1/chat/completions: measuring the server at {server.url}; " in done.stderr
    assert {each.path for each in server.generations} == {"/v1/chat/completions"}


def test_a_length_beyond_the_context_is_refused_before_the_first_request(tmp_path: Path) -> None:
    with ScheduleServer(Schedule(max_model_len=100)) as server:
        done = run(server.url, "--input-tokens", "24,90", "--output-tokens", "16", "--output", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--input-tokens 90 + --output-tokens 16 = 106 tokens, more than the server's context of 100" in done.stderr
    assert server.generations == []
    assert not (tmp_path / "run").exists()


def test_the_chat_template_counts_where_a_tokenizer_at_hand_does_not_know_it(
    tmp_path: Path, smollm2_path: Path
) -> None:
    options = [*FAST, "--tokenizer", str(smollm2_path)]
    with ScheduleServer(Schedule(template_tokens=9, max_model_len=45)) as server:
        done = run(server.url, *options, "--output", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "24 + 9 of the chat template + --output-tokens 16 = 49 tokens" in done.stderr
    with ScheduleServer(Schedule(template_tokens=9, max_model_len=49)) as server:
        done = run(server.url, *options, "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "the server's chat template adds 9 tokens to each" in " ".join(done.stdout.split())


def test_finding_prompts_is_told_while_it_goes_on(measured: Any) -> None:
    _, _, done = measured
    assert re.search(r"^\d{4}-.* finding prompts: the server counts one of about 24 tokens$", done.stderr, re.MULTILINE)


def test_nobody_there_is_exit_code_3_and_leaves_no_directory(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path / "run"), PACELINE_URL="http://127.0.0.1:1")
    assert done.returncode == 3
    assert "no server answers at http://127.0.0.1:1: GET /v1/models" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--input-tokens", "3"], "at least 4"),
        (["--output-tokens", "0"], "--output-tokens is 0"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--concurrency", "1,8", "--requests", "3"], "--requests is 3, fewer than --concurrency 8"),
        (["--concurrency", "1,1"], "--concurrency 1,1 has a number twice"),
        (["--input-tokens", "64,8,64"], "--input-tokens 64,8,64 has a number twice"),
        (["--parallel", "2", "--concurrency", "1"], "--concurrency and --parallel are the same option"),
        (["--parallel", ""], "--concurrency is ''"),
        (["--tokenizer", "smollm3"], "unknown model 'smollm3'"),
        (["--output", "."], "not empty"),
        (["--api", "grpc"], "grpc"),
        (["not-a-url"], "not-a-url"),
    ],
)
def test_bad_input_is_exit_code_2_before_anything_is_sent(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "load", *arguments], env={"PACELINE_URL": "http://127.0.0.1:1"})
    # main() prints a PacelineError and exits with its code.
    code = done.exception.exit_code if isinstance(done.exception, PacelineError) else done.exit_code
    assert code == 2
    assert words in f"{done.exception} {done.output}"


def test_ctrl_c_keeps_and_writes_what_is_there(tmp_path: Path) -> None:
    # Serial numbers from 6 on stall: probe, two for calibration, one warm-up, two measured.
    schedule = Schedule(fault="stall", faulty=tuple(range(6, 60)))
    with ScheduleServer(schedule) as server:
        options = [*FAST, "--requests", "40", "--output", str(tmp_path / "run")]
        process = subprocess.Popen(
            [*COMMAND, server.url, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not any(each.serial == 6 and len(each.content_ns) == 2 for each in server.generations):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted; what was measured until then is kept" in stderr
    assert "2 requests ok, 0 failed" in stdout
    statuses = [record.status for record in RunDirectory(tmp_path / "run").records()]
    assert statuses == ["ok", "ok", "interrupted"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["cells"][0]["requests"]["interrupted"] == 1


def test_help_teaches_with_an_example() -> None:
    done = run("--help", COLUMNS="100", TERM="dumb")
    assert done.returncode == 0
    narrow = run("--help", COLUMNS="80", TERM="dumb").stdout
    for words in ("paceline bench load --input-tokens 256 --output-tokens 64 --concurrency 1,8", "--parallel ", "130"):
        assert words in done.stdout
        assert words in narrow
    assert "1 a measured request failed" in narrow


def test_a_record_knows_when_the_server_never_sent_anything() -> None:
    line = b'{"cell":0,"id":1,"scheduled":5,"sent":null,"end":9,"status":"connect_error"}'
    assert msgspec.json.decode(line, type=RequestRecord).sent is None
