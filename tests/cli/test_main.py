"""The command line as a whole: help, exit codes, and the demo."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.commands import app

COMMANDS = ["serve", "chat", "run-batch", "pull", "models", "demo", "inspect", "bench", "bench load", "bench engine"]


def paceline(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | environment,
    )


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path}{name}", command
        yield from commands(command, f"{path}{name} ")


def test_every_command_explains_itself_and_every_option() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert set(found) == set(COMMANDS)
    for path, command in found.items():
        assert len(command.help or "") > 20, path
        for parameter in command.params:
            if parameter.name != "help":
                assert len(getattr(parameter, "help", None) or "") > 8, f"{path}: {parameter.name}"


def test_help_is_printed_for_every_command() -> None:
    for command in COMMANDS:
        run = paceline(*command.split(), "--help")
        assert run.returncode == 0
        assert "Usage: " in run.stdout


def test_help_loads_neither_numpy_nor_the_native_module() -> None:
    """0.3 s are the target, and a test must not assert on time: what would cost it must not be imported."""
    code = (
        "import sys\n"
        "sys.argv = ['paceline', '--help']\n"
        "from paceline.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'numpy', 'paceline._native', 'fastapi', 'tokenizers', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_version() -> None:
    from paceline import __version__

    assert paceline("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull", "smollm2-153m"], 2, r"smollm2-153m.*smollm2-135m"),
        (["serve", "no-such-model"], 2, r"no-such-model"),
        (["bench", "engine", "/no/such/file.gguf"], 2, r"/no/such/file\.gguf"),
        (["bench", "load", "http://127.0.0.1:9"], 3, r"127\.0\.0\.1:9"),
        (["chat", "http://127.0.0.1:9", "--question", "hi"], 3, r"127\.0\.0\.1:9"),
        (["no-such-command"], 2, r"no-such-command"),
        (["serve", "--port", "70000"], 2, r"--port.*65535"),
    ],
)
def test_exit_codes_and_messages(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    run = paceline(*arguments)
    assert run.returncode == code
    assert re.search(message, run.stderr), run.stderr
    assert "Traceback" not in run.stderr


def test_a_file_that_is_no_gguf_is_exit_code_2(tmp_path: Path) -> None:
    wrong = tmp_path / "notes.gguf"
    wrong.write_text("not a model")
    run = paceline("serve", str(wrong), "--port", "0")
    assert run.returncode == 2
    assert f"{wrong}: not a GGUF file" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_demo_does_everything_once(smollm2_path: Path, tmp_path: Path) -> None:
    run = paceline("demo", "--output", str(tmp_path / "run"), timeout=280, PACELINE_API_KEY="secret")
    assert run.returncode == 0, run.stderr
    for sign in (
        "1. Fetching",
        "2. Serving",
        "3. Asking",
        "4. Measuring",
        "5. Going on",
        "concurrency 1",
        "concurrency 8",
    ):
        assert sign in run.stdout
    assert str(smollm2_path) in run.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"run.json", "requests.jsonl", "summary.json"}
    port = re.search(r"ready: http://127\.0\.0\.1:(\d+)", run.stdout)
    assert port
    still_there = paceline("bench", "load", f"http://127.0.0.1:{port[1]}")
    assert still_there.returncode == 3, "the demo left its server running"
