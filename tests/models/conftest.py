"""The real model, opened once, and transformers' reading of it; a cache folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.models.gguf import GGUFFile, read_gguf
from paceline.models.tokenizer import Tokenizer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not there yet."""
    home = tmp_path / "home"
    monkeypatch.setenv("PACELINE_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[GGUFFile]:
    with read_gguf(smollm2_path) as file:
        yield file


@pytest.fixture(scope="session")
def tokenizer(smollm2: GGUFFile) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2.metadata)


@pytest.fixture(scope="session")
def oracle(smollm2_path: Path) -> Any:
    """transformers' own conversion of the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
