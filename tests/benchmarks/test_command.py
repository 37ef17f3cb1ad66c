import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.command import BenchmarkError, json_lines, output


def test_only_lines_that_are_objects_are_figures() -> None:
    script = "print('loading'); print('{\"tps\": 1}'); print('[]'); print('{\"tps\": 2}')"
    assert json_lines([sys.executable, "-c", script]) == [{"tps": 1}, {"tps": 2}]


def test_a_program_without_figures_failed() -> None:
    with pytest.raises(BenchmarkError, match="printed no figures"):
        json_lines([sys.executable, "-c", "print('ready')"])


def test_a_failure_has_the_programs_last_words() -> None:
    script = "import sys; print('why\\nit failed', file=sys.stderr); sys.exit(3)"
    with pytest.raises(BenchmarkError, match="failed with code 3: why / it failed"):
        output([sys.executable, "-c", script])


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchmarkError, match=r"llama-bench: .*No such file"):
        output(["/nowhere/llama-bench"])


def test_variables_are_added() -> None:
    assert output(["sh", "-c", "echo $PEERS_PROMPT $HOME"], {"PEERS_PROMPT": "128", "HOME": "h"}) == "128 h\n"


def test_who_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(BenchmarkError, match="longer than 1 s"):
        output(["sh", "-c", f"sleep 60 & echo $! >{pid}; wait"], timeout=1)
    # The kernel ends what it was told to end in its own time.
    deadline = time.monotonic() + 10
    while _is_alive(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
