"""``paceline pull`` and ``paceline models``, without a download: the catalog's answer is stood in for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paceline.cli.models import models
from paceline.cli.pull import pull, pull_progress
from paceline.models import catalog, ollama_store
from paceline.models.partial_file import Progress
from tests.models.ollama_fixture import OllamaStore


@pytest.fixture(autouse=True)
def no_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(ollama_store, "SYSTEM_STORES", ())


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
    assert out == "/cache/tiny\n"
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    lines = [rf"{stamp} downloading: 0 of 2 MB", rf"{stamp} checking: 2 of 2 MB"]
    assert re.fullmatch("\n".join(lines) + "\n", err), "dated, plain, and not one line per call"


def test_pull_says_what_ollamas_model_brings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = OllamaStore(tmp_path / "home" / ".ollama" / "models")
    parameters = b'{"temperature": 0.5, "stop": ["<end>"], "num_ctx": 2048}'
    store.add("m", model=b"GGUF", params=parameters, system=b"Be brief", template=b"{{ .Prompt }}")
    pull("ollama:m")
    out, err = capsys.readouterr()
    assert Path(out.strip()).read_bytes() == b"GGUF"
    assert err.splitlines() == [
        "temperature: 0.5",
        "stop: ['<end>']",
        "context: 2048 tokens",
        "system prompt: 'Be brief'",
        "chat template: Ollama's is in Go's language and is not used; the file's own is, if it has one",
    ]


def test_pull_without_a_model_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised:
        pull()
    assert raised.value.exit_code == 2
    out, err = capsys.readouterr()
    assert out == "", "a script that reads the path gets none"
    for example in (*(f"paceline pull {name}" for name in catalog.CATALOG), "pull hf:owner/repo:Q4_K_M", "ollama:"):
        assert example in err


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
    assert lines[:3] == [
        "smollm2-135m  98 MB  Apache-2.0",
        "  SmolLM2-135M-Instruct, Q4_1: fast, not wise",
        "  not cached; `paceline pull smollm2-135m` fetches it",
    ]
    assert "gemma3-270m  253 MB  Gemma terms of use, https://ai.google.dev/gemma/terms" in lines
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
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"smollm2-135m\t98 MB\tApache-2.0\t\t{entry.description}"
    assert len(lines) == len(catalog.CATALOG)
    cache(entry)
    models()
    assert capsys.readouterr().out.split("\t")[3] == str(entry.path)


def test_models_lists_what_ollama_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(catalog, "CATALOG", {})
    store = OllamaStore(tmp_path / "home" / ".ollama" / "models")
    store.add("b", "7b", model=b"GGUF", params=b'{"temperature": 0.5}')
    store.add("broken", model=b"other").write_text("{")
    models()
    good, broken = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert (good[0], good[1], good[4]) == ("ollama:b:7b", "0 MB", "in Ollama's store; temperature 0.5")
    assert Path(good[3]).read_bytes() == b"GGUF"
    assert broken[0] == "ollama:broken:latest"
    assert broken[4].startswith("cannot be used: ")


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
