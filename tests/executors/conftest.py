"""Fixtures of the executor tests."""

from pathlib import Path

import pytest

from tests.executors.tiny_models import VARIANTS, TinyModel, make_tiny_models


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, llama_cpp: Path) -> dict[str, TinyModel]:
    """Every architecture's tiny random models, with transformers' logits."""
    return make_tiny_models(VARIANTS, tmp_path_factory.mktemp("tiny-models"), llama_cpp)
