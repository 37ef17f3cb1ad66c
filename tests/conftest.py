"""Fixtures that several test folders share."""

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Under nohup, children would ignore a hangup, and tests send them some."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF file, pulled on first use."""
    from paceline.models import catalog

    return catalog.pull("smollm2-135m")


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """llama.cpp's source folder: oracles only, nothing of it is in the repository."""
    from tests.oracles import llama_cpp_source

    return llama_cpp_source()
