"""What a MODEL can be; each kind has a test file of its own."""

from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.models import catalog
from paceline.models.resolve import pull, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.touch()
    assert resolve(str(path)).path == resolve("~/m.bin").path == path
    assert resolve("m.bin").path == Path("m.bin")
    assert resolve("m.bin").name == "m"


def test_a_split_models_name_is_without_the_part(tmp_path: Path) -> None:
    path = tmp_path / "big-00002-of-00003.gguf"
    path.touch()
    assert resolve(str(path)).name == "big"


def test_a_catalog_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "pull", lambda name, progress: tmp_path / "pulled")
    (tmp_path / "smollm2-135m").touch()
    assert resolve("smollm2-135m").path == tmp_path / "pulled"
    assert resolve("smollm2-135m").name == "smollm2-135m"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", r"^unknown model 'smolm2'; did you mean smollm2-135m\? Known models: gemma3.*, or hf:owner/repo"),
        ("Qwen", r"^unknown model 'Qwen'; did you mean qwen2.5-coder-1.5b\? Known"),
        (
            "llama3.2:1b",
            r"^unknown model 'llama3.2:1b'; known models: .*, or hf:owner/repo\[:file\], ollama:name\[:tag\], or the",
        ),
        ("", "^MODEL is empty"),
        ("folder/model", r"^folder/model: no such file; from the Hugging Face hub it would be hf:folder/model$"),
        ("hf.co/me/m-GGUF:Q4_K_M", r"it would be hf:me/m-GGUF:Q4_K_M$"),
        ("https://huggingface.co/me/m-GGUF", r"it would be hf:me/m-GGUF$"),
        ("./model", r"^\./model: no such file; known models"),
        ("folder/model.gguf", r"^folder/model.gguf: no such file; known models"),
        ("x" * 5000, "^x{200}: File name too long$"),
        ("model.gguf", "model.gguf: no such file"),
        ("/", "/ is a directory; a GGUF file is needed"),
        ("hf:", "is no hf:owner/repo"),
        ("ollama:", "is no ollama:"),
    ],
)
def test_what_cannot_be_found(model: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        resolve(model)
    assert raised.value.param == "model"


def test_pull_refuses_paths(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(InputError, match=r"^unknown model '\./x\.gguf'"):
        pull("./x.gguf")
