"""Fixtures of the executor tests: every executor there is, and a tiny model of every architecture."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.executors.native import NativeExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.models.spec import ModelWeights
from tests.executors.test_kernels import ISAS
from tests.executors.tiny_models import VARIANTS, TinyModel, make_tiny_models

AnyExecutor = NativeExecutor | TorchExecutor
Build = Callable[..., AnyExecutor]


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For matrices so small that a second thread only makes the first wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["torch", *(f"native-{isa}" for isa in ISAS)])
def build(request: pytest.FixtureRequest, one_torch_thread: None) -> Build:
    """Makes an executor of weights: PyTorch's, or the native one with each instruction set of this machine."""
    kind, _, isa = str(request.param).partition("-")

    def native(weights: ModelWeights, **options: object) -> AnyExecutor:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PACELINE_ISA", isa)
            return NativeExecutor(weights, **(small() | {"threads": 2} | options))  # type: ignore[arg-type]

    def plain_torch(weights: ModelWeights, **options: object) -> AnyExecutor:
        return TorchExecutor(weights, **(small() | options))  # type: ignore[arg-type]

    return native if kind == "native" else plain_torch


def small() -> dict[str, object]:
    return {"num_blocks": 64, "max_model_len": 1024, "kv_dtype": "f32"}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, llama_cpp: Path) -> dict[str, TinyModel]:
    """Every architecture's tiny random models, with transformers' logits."""
    return make_tiny_models(VARIANTS, tmp_path_factory.mktemp("tiny-models"), llama_cpp)
