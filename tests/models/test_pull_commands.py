"""``paceline pull`` and ``paceline models``, without a download: the catalog's answer is stood in for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.models import models
from paceline.cli.pull import pull, pull_progress
from paceline.models import catalog
from paceline.models.download import Progress


def test_pull_prints_the_path_last_and_progress_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pulled(name: str, progress: Progress) -> Path:
        progress(0, 2_000_000, "downloading")
        progress(1_000_000, 2_000_000, "downloading")
        progress(2_000_000, 2_000_000, "checking")
        return Path("/cache") / name

    monkeypatch.setattr(catalog, "pull", pulled)
    pull("tiny")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "/cache/tiny"
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    lines = [rf"{stamp} downloading: 0 of 2 MB", rf"{stamp} checking: 2 of 2 MB"]
    assert re.fullmatch("\n".join(lines) + "\n", err), "dated, plain, and not one line per call"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pull_progress() as progress:
        progress(0, 10, "downloading")
        progress(10, 10, "downloading")
    out, err = capsys.readouterr()
    assert out == ""
    assert "downloading" in err
    assert "━" in err
    assert "10/10" in err


def test_models_lists_what_is_known_and_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    models()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "smollm2-135m  98 MB  Apache-2.0",
        "  SmolLM2-135M-Instruct, Q4_1: fast, not wise",
        "  not cached; `paceline pull smollm2-135m` fetches it",
    ]
    cache(catalog.CATALOG["smollm2-135m"])
    models()
    assert f"  {catalog.CATALOG['smollm2-135m'].path}" in capsys.readouterr().out.splitlines()


def test_models_in_a_pipe_are_a_line_each_with_tabs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)
    monkeypatch.setenv("PACELINE_HOME", str(folder))
    entry = catalog.CATALOG["smollm2-135m"]
    models()
    assert capsys.readouterr().out == f"smollm2-135m\t98 MB\tApache-2.0\t\t{entry.description}\n"
    cache(entry)
    models()
    assert capsys.readouterr().out.split("\t")[3] == str(entry.path)


def cache(entry: catalog.CatalogEntry) -> None:
    """A file that looks like the model's."""
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    with entry.path.open("wb") as file:
        file.truncate(entry.size)


def test_the_commands_import_nothing_heavy() -> None:
    """``paceline --help`` imports every command's file and has to answer in 0.3 s."""
    heavy = {"numpy", "tokenizers", "jinja2", "rich.table", "rich.progress"}
    code = f"import sys, paceline.cli.pull, paceline.cli.models; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
