"""The executors that must agree: each with a KV cache of float32 for one sequence."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from paceline.executors.base import Batch, Float32
from paceline.executors.native import NativeExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.models.spec import ModelWeights
from tests.executors.batches import Row, Sequence, make_batch

BLOCKS = 16


class LogitsExecutor(Protocol):
    def logits(self, batch: Batch) -> Float32: ...

    def close(self) -> None: ...


def native(weights: ModelWeights) -> LogitsExecutor:
    return NativeExecutor(weights, num_blocks=BLOCKS, max_model_len=512, kv_dtype="f32", threads=2)


def torch(weights: ModelWeights) -> LogitsExecutor:
    return TorchExecutor(weights, num_blocks=BLOCKS, max_model_len=512, kv_dtype="f32")


EXECUTORS: dict[str, Callable[[ModelWeights], LogitsExecutor]] = {"native": native, "torch": torch}


def all_logits(executor: LogitsExecutor, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every position, in one chunk; the executor is closed."""
    table = list(range(BLOCKS))
    logits = executor.logits(make_batch([Sequence(token_ids, table)], [Row(0, i) for i in range(len(token_ids))]))
    executor.close()
    return logits
